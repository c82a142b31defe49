"""Proves that engines of others get what their contracts say, and that a leg that fails takes the other with it.

contracts.json has what each leg must have, must not have, and answers.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from prfaas.errors import RequestError
from prfaas.names import HUB
from prfaas.wire import headers
from prfaas_gateway.engines import sglang, shared
from prfaas_gateway.engines.shared import for_prefill, prompts, with_fields
from prfaas_gateway.openai import read_error
from prfaas_gateway.request import read_fields

CONTRACTS = json.loads((Path(__file__).parent / "contracts.json").read_text())
ENGINES = sorted(name for name, contract in CONTRACTS.items() if "prefill" in contract)
REQUEST = {
    "model": "m",
    "messages": [{"role": "user", "content": "x" * 8000}],
    "max_tokens": 64,
    "min_tokens": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.25,
}


class Pair:
    """A prefill and a decode instance of one engine, and the requests that they got."""

    def __init__(self, world, engine: str):
        self.contract = CONTRACTS[engine]
        self.prefill, self.decode = world.workers["x0"], world.workers["d0"]
        self.prefill.reply = self._answering("prefill")
        self.decode.reply = self._answering("decode")

    def _answering(self, leg: str):
        async def reply(request: web.Request, body: bytes) -> web.Response:
            if request.path == "/query":
                return web.json_response(self.contract["query"])
            self.check(leg, json.loads(body), request)
            return web.json_response(self.contract[leg]["answer"])

        return reply

    def check(self, leg: str, body: dict, request: web.Request) -> None:
        wanted = self.contract[leg]
        for name, value in wanted["must_have"].items():
            if isinstance(value, dict):
                assert {**body[name], **value} == body[name], name
            else:
                assert body[name] == value, name
        assert set(wanted.get("must_name", [])) <= set(body)
        assert not set(wanted.get("must_not_have", [])) & set(body)
        assert set(wanted.get("headers", [])) <= {name.lower() for name in request.headers}
        assert request.headers["x-request-id"]
        assert not [name for name in request.headers if name.lower().startswith("x-prfaas")]

    def bodies(self, side: str) -> list[dict]:
        return [json.loads(one.body) for one in getattr(self, side).seen if one.path != "/query"]


@pytest.fixture
def start(world, monkeypatch) -> Callable[[str], Any]:
    async def started(engine: str, **more) -> Pair:
        await world.start("d0", "x0", **more)
        monkeypatch.setattr(shared, "BOOTSTRAP_PORT", world.workers["x0"].port)
        monkeypatch.setattr(sglang, "BOOTSTRAP_PORT", world.workers["x0"].port)
        world.change_instances(engine=engine)
        return Pair(world, engine)

    return started


@pytest.mark.parametrize("engine", ENGINES)
async def test_both_legs_are_as_the_contract_says_and_the_client_gets_the_decode_answer(world, start, engine):
    pair = await start(engine)
    got = await world.post(json.dumps(REQUEST).encode())
    assert (got.status, got.json) == (200, pair.contract["decode"]["answer"])
    assert (got.headers[headers.DECISION], got.headers[headers.OUTCOME]) == ("offload", "ok")
    (filled,), (decoded,) = pair.bodies("prefill"), pair.bodies("decode")
    assert {name: decoded[name] for name in REQUEST} == REQUEST
    assert (filled["messages"], filled["temperature"]) == (REQUEST["messages"], 0.25)
    ids = {one.headers["x-request-id"] for side in (pair.prefill, pair.decode) for one in side.seen if one.body}
    assert len(ids) == 1


async def test_dynamo_splits_requests_itself_so_it_gets_them_whole(world, start):
    pair = await start("dynamo")
    got = await world.post(json.dumps(REQUEST).encode())
    assert (got.json, pair.prefill.seen) == (pair.contract["decode"]["answer"], [])
    assert (got.headers[headers.DECISION], pair.bodies("decode")) == ("local", [REQUEST])


async def test_a_dynamo_without_workers_is_left_for_another(world):
    await world.start("d0", "d1")
    world.change_instances(engine="dynamo")

    async def unknown(_request: web.Request, _body: bytes) -> web.Response:
        return web.json_response({"message": "Model not found", "type": "Not Found", "code": 404}, status=404)

    world.workers["d0"].reply = unknown
    for _ in range(6):
        assert (await world.post(json.dumps(REQUEST).encode())).status == 200
    world.workers["d1"].reply = unknown
    got = await world.post(json.dumps(REQUEST).encode())
    assert (got.status, got.json["message"]) == (404, "Model not found")


async def test_nixl_forwards_what_prefill_returned_and_nothing_else(world, start):
    pair = await start("vllm-nixl")
    await world.post(json.dumps(REQUEST).encode())
    params = pair.contract["prefill"]["answer"]["kv_transfer_params"]
    assert pair.bodies("decode")[0]["kv_transfer_params"] == params


async def test_mooncake_legs_meet_by_one_transfer_id_and_the_engine_that_the_bootstrap_server_names(world, start):
    pair = await start("vllm-mooncake")
    for letter in "xy":  # the gateway remembers which prompts the hub has
        messages = [{"role": "user", "content": letter * 8000}]
        await world.post(json.dumps(REQUEST | {"messages": messages}).encode())
    filled, decoded = ([body["kv_transfer_params"] for body in pair.bodies(side)] for side in ("prefill", "decode"))
    assert [one["transfer_id"] for one in filled] == [one["transfer_id"] for one in decoded]
    assert len({one["transfer_id"] for one in filled}) == 2
    assert {one["remote_engine_id"] for one in decoded} == {pair.contract["query"]["0"]["engine_id"]}
    assert {one["remote_bootstrap_addr"] for one in decoded} == {world.workers["x0"].url}
    assert sum(one.path == "/query" for one in pair.prefill.seen) == 1
    assert {one.headers["x-data-parallel-rank"] for one in pair.prefill.seen if one.body} == {"0"}


VLLM = ["vllm-mooncake", "vllm-nixl"]


@pytest.mark.parametrize("engine", VLLM)
async def test_a_short_prompt_is_one_leg_and_unchanged(world, start, engine, short):
    pair = await start(engine, clusters=())
    pair.decode.reply = _plain
    assert (await world.post(short)).status == 200
    assert (pair.decode.seen[0].body, pair.prefill.seen) == (short, [])


async def test_sglang_decodes_nothing_without_a_prefill_instance(world, start, short):
    pair = await start("sglang")
    got = await world.post(short)
    assert (got.status, pair.decode.seen) == (503, [])
    assert "local prefill pool" in got.json["error"]["message"]


@pytest.mark.parametrize("engine", VLLM)
@pytest.mark.parametrize("failure", ["dead", "HTTP 500"])
async def test_a_prefill_leg_that_fails_falls_back_to_the_hub(world, start, engine, failure):
    pair = await start(engine)
    pair.decode.reply = _waiting_for_a_cache
    if failure == "dead":
        await pair.prefill.stop()
    else:
        pair.prefill.reply = _broken
    got = await world.post(json.dumps(REQUEST).encode())
    assert (got.status, got.headers[headers.OUTCOME], got.headers[headers.PREFILL_CLUSTER]) == (200, "fallback", HUB)


async def test_nixl_without_the_place_of_the_cache_is_a_failed_prefill_and_never_a_silent_second_one(world, start):
    pair = await start("vllm-nixl")
    pair.prefill.reply = _plain
    pair.decode.reply = _plain
    got = await world.post(json.dumps(REQUEST).encode())
    assert (got.status, got.headers[headers.OUTCOME]) == (200, "fallback")
    assert "kv_transfer_params" not in pair.bodies("decode")[0]


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_request_that_prefill_refuses_is_refused(world, start, engine):
    pair = await start(engine)
    pair.decode.reply = _waiting_for_a_cache
    serve = pair.prefill.reply

    async def too_long(request: web.Request, body: bytes) -> web.Response:
        if request.path == "/query":
            return await serve(request, body)
        return web.json_response({"error": {"message": "too long", "code": "context_length_exceeded"}}, status=400)

    pair.prefill.reply = too_long
    got = await world.post(json.dumps(REQUEST).encode())
    assert (got.status, got.json["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.system
@pytest.mark.parametrize("engine", ["sglang", "vllm-mooncake"])
async def test_a_client_that_leaves_aborts_both_legs(world, start, engine):
    pair = await start(engine)
    pair.decode.reply = _waiting_for_a_cache
    here, serve = asyncio.Event(), pair.prefill.reply

    async def long_prefill(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/query":
            return await serve(request, body)
        here.set()
        return await _waiting_for_a_cache(request, body)

    pair.prefill.reply = long_prefill
    asking = asyncio.create_task(world.post(json.dumps(REQUEST).encode()))
    await here.wait()
    asking.cancel()
    await pair.prefill.wait_aborted()
    await pair.decode.wait_aborted()


@pytest.mark.system
async def test_a_prefill_that_fails_after_the_stream_began_ends_the_stream_with_an_error(world, start):
    pair = await start("sglang")
    begun = asyncio.Event()

    async def begin(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": waiting\n\n")
        begun.set()
        await asyncio.Event().wait()
        return response

    async def fail_late(_request: web.Request, _body: bytes) -> web.Response:
        await begun.wait()
        return web.Response(status=500)

    pair.decode.reply, pair.prefill.reply = begin, fail_late
    got = await asyncio.wait_for(world.post(json.dumps(REQUEST).encode()), 60)
    assert b"[DONE]" not in got.body
    assert got.status != 200 or b'"error"' in got.body
    await pair.decode.wait_aborted()


def test_values_stay_as_the_client_wrote_them():
    body = b'{ "model": "m", "seed": 12345678901234567890123, "temperature": 1.10, "prompt": "\\u00e4" }'
    _, fields = read_fields(body, every=True)
    for changed in (with_fields(fields, {"a": 1}), for_prefill(fields, {"a": 1})):
        assert b'"seed":12345678901234567890123' in changed
        assert b'"temperature":1.10' in changed
        assert b'"\\u00e4"' in changed


@pytest.mark.parametrize(
    ("body", "many"),
    [
        (b'{"prompt":[1,2],"model":"m"}', None),
        (b'{"prompt": [[1],[2],[3]],"model":"m"}', 3),
        (b'{"prompt":["a"],"model":"m"}', 1),
        (b'{"prompt":[],"model":"m"}', None),
    ],
)
def test_prompts_are_counted(body, many):
    assert prompts(read_fields(body, every=True)[1]) == many


def test_a_list_of_prompts_that_nests_deeper_than_can_be_read_is_the_clients_error():
    nested = b'["x",' + b"[" * 3000 + b"]" * 3000 + b"]"
    with pytest.raises(RequestError, match="prompt cannot be read: maximum recursion depth"):
        prompts({"prompt": msgspec.Raw(nested)})
    assert prompts({"prompt": msgspec.Raw(b'["x",[[]]]')}) == 2


def test_an_engines_error_of_any_nesting_can_be_written_into_ours():
    shown = 0
    for levels in range(1, 1200):
        nested = b"[" * levels + b"]" * levels
        words = read_error(b'{"error":{"message":%b,"code":400}}' % nested)
        assert f"{words}" in ("{'code': 400}", "{}")
        shown += bool(words)
    assert 100 < shown < 1100
    assert read_error(b'{"error":{"message":"no","param":null}}') == {"message": "no", "param": None}


async def _plain(_request: web.Request, _body: bytes) -> web.Response:
    return web.json_response({"object": "chat.completion"})


async def _broken(_request: web.Request, _body: bytes) -> web.Response:
    return web.Response(status=500)


async def _waiting_for_a_cache(_request: web.Request, body: bytes) -> web.StreamResponse:
    """Answer like an engine whose cache is to come: not before it has, and so never; at once where none is to come."""
    if {"kv_transfer_params", "bootstrap_room"} & set(json.loads(body)):
        await asyncio.Event().wait()
    return await _plain(_request, body)
