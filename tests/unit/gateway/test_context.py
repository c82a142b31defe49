"""The gateway passes on what the engines tell: the longest context, token ids of texts, and whether it can serve."""

import asyncio
import json

import msgspec
import pytest
from aiohttp import web
from tests.waiting import eventually_async

from prfaas.wire import headers
from prfaas_gateway.engines import context

from .vllm_standin import Vllm

KEY = {"x-api-key": "sk-0123456789abcdef"}
CARD = {"id": "m", "object": "model", "max_model_len": 4096}


def listing(*cards: dict, asked: list | None = None):
    async def reply(_request: web.Request, _body: bytes) -> web.StreamResponse:
        if asked is not None:
            asked.append(1)
        return web.json_response({"object": "list", "data": list(cards)})

    return reply


async def cards(world) -> list[dict]:
    return [*(await world.get("/v1/models")).json["data"], (await world.get("/v1/models/m")).json]


@pytest.mark.parametrize("engine", ["prfaas", "vllm-prfaas", "sglang"])
async def test_the_model_list_has_the_context_that_a_decode_instance_tells(world, engine):
    await world.start("d0", "x0")
    world.change_instances(engine=engine)
    world.workers["d0"].reply = listing({"id": "other", "max_model_len": 7}, CARD)
    world.workers["x0"].reply = listing(CARD | {"max_model_len": 9})
    assert [one["max_model_len"] for one in await cards(world)] == [4096, 4096]
    assert world.workers["x0"].seen == []


@pytest.mark.parametrize("reply", [listing({"id": "m"}), listing(), listing({"id": "other", "max_model_len": 7})])
async def test_a_context_that_no_instance_tells_is_left_out(world, reply):
    await world.start("d0")
    world.workers["d0"].reply = reply
    for card in await cards(world):
        assert card == {"id": "m", "object": "model", "created": 0, "owned_by": "prfaas"}


async def test_an_instance_is_asked_once_in_a_while_and_its_answer_outlives_it(world, monkeypatch):
    asked: list[int] = []
    await world.start("d0")
    world.workers["d0"].reply = listing(CARD, asked=asked)
    for _ in range(3):
        await cards(world)
    assert len(asked) == 1
    monkeypatch.setattr(context, "KNOWN_SECONDS", 0.0)
    world.running.parts.state.set_table(msgspec.structs.replace(world.table, model="other"))
    assert (await world.get("/v1/models")).json["data"] == [
        {"id": "other", "object": "model", "created": 0, "owned_by": "prfaas"}
    ], "another model's is not known"
    world.state.set_table(world.table)
    assert [one["max_model_len"] for one in await cards(world)] == [4096, 4096]
    await world.workers["d0"].stop()
    assert [one["max_model_len"] for one in await cards(world)] == [4096, 4096]


async def test_dead_and_silent_instances_hide_no_other(world):
    await world.start("d0", "d1", "d2", "d3")
    world.workers["d1"].reply = listing({"id": "m"})
    world.workers["d2"].reply = listing(CARD | {"max_model_len": -1})
    world.workers["d3"].reply = listing(CARD)
    await world.workers["d0"].stop()
    assert [one["max_model_len"] for one in await cards(world)] == [4096, 4096]


async def test_the_list_has_the_least_context_of_the_decode_instances(world):
    await world.start("d0", "d1")
    world.workers["d0"].reply = listing(CARD | {"max_model_len": 8192})
    world.workers["d1"].reply = listing(CARD)
    assert [one["max_model_len"] for one in await cards(world)] == [4096, 4096]


@pytest.mark.system
async def test_a_known_context_comes_at_once_and_is_renewed_behind_that(world, monkeypatch):
    monkeypatch.setattr(context, "KNOWN_SECONDS", 0.0)
    await world.start("d0")
    world.workers["d0"].reply = listing(CARD)
    assert (await cards(world))[0]["max_model_len"] == 4096
    answers = asyncio.Event()

    async def hang(_request: web.Request, _body: bytes) -> web.StreamResponse:
        await answers.wait()
        return web.json_response({"data": [CARD | {"max_model_len": 2048}]})

    world.workers["d0"].reply = hang
    monkeypatch.setattr(context, "LIST_SECONDS", 60.0)
    monkeypatch.setattr(context, "ANSWER_SECONDS", 60.0)
    async with asyncio.timeout(30):
        assert (await cards(world))[0]["max_model_len"] == 4096, "no answer to wait for"
    answers.set()

    async def is_renewed() -> bool:
        return (await cards(world))[0]["max_model_len"] == 2048

    await eventually_async(is_renewed, "the new number is known")


@pytest.mark.system
async def test_a_client_that_leaves_does_not_stop_the_question(world):
    asked: list[int] = []
    await world.start("d0")
    answers = asyncio.Event()

    async def hang(_request: web.Request, _body: bytes) -> web.StreamResponse:
        asked.append(1)
        await answers.wait()
        return web.json_response({"data": [CARD]})

    world.workers["d0"].reply = hang
    leaving = asyncio.create_task(world.get("/v1/models"))
    await eventually_async(lambda: bool(asked), "the instance is asked")
    leaving.cancel()
    await world.get("/healthz")  # so that the gateway has seen it leave
    answers.set()
    assert [one["max_model_len"] for one in await cards(world)] == [4096, 4096]
    assert len(asked) == 1


@pytest.mark.parametrize("engine", ["prfaas", "vllm-prfaas"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"model": "m", "prompt": "x" * 8000}), ("/detokenize", {"model": "m", "tokens": [104, 105]})],
)
async def test_token_questions_go_to_a_decode_instance_as_they_are_and_are_no_demand(world, engine, path, body):
    await world.start("d0", "p0", "x0", tokens=1000)
    world.change_instances(engine=engine)
    raw = json.dumps(body, indent=1).encode()
    got = await world.post(raw, path)
    assert (got.status, got.headers[headers.DECISION]) == (200, "local")
    assert [(one.path, one.body) for one in world.workers["d0"].seen] == [(path, raw)]
    assert world.workers["p0"].seen == world.workers["x0"].seen == []
    counters = world.state.counters
    assert (counters.local, counters.offloaded, sum(counters.lengths)) == (0, 0, 0)


async def test_the_answer_is_the_engines(world):
    await world.start("d0")
    world.change_instances(engine="vllm-prfaas")
    world.workers["d0"].reply = Vllm()
    assert (await world.post({"model": "m", "tokens": [104, 105]}, "/detokenize")).json == {"prompt": "hi"}


async def test_token_questions_need_a_key_and_count_by_its_limits(world, tmp_path):
    (tmp_path / "keys").mkdir()
    limited = {"keys": list(KEY.values()), "requestsPerMinute": 1}
    (tmp_path / "keys" / "a").write_text(json.dumps(limited))
    await world.start("d0", keys_dir=tmp_path / "keys")
    body = {"model": "m", "prompt": "x"}
    got = [(await world.post(body, "/tokenize", headers=sent)).status for sent in ({}, KEY, KEY)]
    assert got == [401, 200, 429]
    assert [(await world.get("/health")).status for _ in range(2)] == [200, 200], "a probe has no key"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_an_engine_without_them_answers_so(world, path):
    await world.start("d0")
    world.change_instances(engine="dynamo")
    got = await world.post({"model": "m", "prompt": "x", "tokens": []}, path)
    assert (got.status, got.json["error"]["code"]) == (404, "unknown_url")
    assert world.workers["d0"].seen == []


async def test_health_is_readiness_by_vllms_name(world):
    await world.start("d0")
    world.state.draining = True
    assert [(await world.get(path)).status for path in ("/health", "/readyz", "/healthz")] == [503, 503, 200]


HISTORY = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": "x" * 8000},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": ""},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("names", [("d0",), ("d0", "x0")])
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, "stop": [","]}])
@pytest.mark.parametrize("streams", [False, True])
async def test_every_leg_gets_a_history_with_calls_as_the_client_wrote_it(world, names, more, streams):
    await world.start(*names)
    world.change_instances(engine="vllm-prfaas")
    body = {"model": "m", "messages": HISTORY, "max_tokens": 9, **more, **({"stream": True} if streams else {})}
    assert (await world.post(body)).status == 200
    for name in names:
        (leg,) = [json.loads(one.body) for one in world.workers[name].seen]
        wanted = body if name == "d0" else body | {"stream": False, "max_tokens": 1}
        assert {field: leg[field] for field in wanted} == wanted
        assert set(leg) - set(body) <= {"cache_salt", "kv_transfer_params", "return_token_ids", "stream"}
