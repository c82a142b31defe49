"""A client with a small budget of tokens wants much computed: by a short prompt with many long answers."""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from aiohttp import web
from tests.unit.gateway.conftest import QUICK, Answered, World

from prfaas.wire import headers
from prfaas_gateway import attempts, dispatch
from prfaas_gateway.api import API_ROUTES, MAX_ANSWER_TOKENS, USUAL_ANSWER_TOKENS, Answers, read_answers
from prfaas_gateway.auth import NO_ANSWERS

KEY: Final = "sk-0123456789abcdef"
COMPLETION: Final = {"model": "m", "prompt": "Go on"}
GREEDY: Final = {"model": "m", "prompt": "Go on. " * 1000, "n": 100, "max_tokens": 1000}
"""Its answers are charged as a minute's tokens, and so its prompt is the debt."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "a").write_text(json.dumps({"keys": [KEY], "tokensPerMinute": 10_000}))
    return folder


async def post(world: World, body: dict[str, Any], **sent: str) -> Answered:
    return await world.post(body, "/v1/completions", headers={"Authorization": f"Bearer {KEY}", **sent})


def answers_of(tokens: int, status: int = 200) -> Any:
    async def reply(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.json_response({"usage": {"prompt_tokens": 2, "completion_tokens": tokens}}, status=status)

    return reply


async def during_a_greedy_one(world: World) -> int:
    """Return the status of another request while the engine computes many long answers."""
    here, ends, usual = asyncio.Event(), asyncio.Event(), world.workers["d0"].reply

    async def slow(_request: web.Request, _body: bytes) -> web.StreamResponse:
        world.workers["d0"].reply = usual
        here.set()
        await ends.wait()
        return web.json_response({})

    world.workers["d0"].reply = slow
    greedy = asyncio.create_task(post(world, GREEDY))
    await here.wait()
    status = (await post(world, COMPLETION)).status
    ends.set()
    assert (await greedy).status == 200
    return status


async def test_many_long_answers_are_charged_before_they_are_computed(world, keys):
    await world.start("d0", keys_dir=keys)
    assert await during_a_greedy_one(world) == 429


async def test_control_without_the_charge_the_budget_stays_full(world, keys, monkeypatch):
    monkeypatch.setattr(dispatch, "read_answers", lambda *_: NO_ANSWERS)
    await world.start("d0", keys_dir=keys)
    assert await during_a_greedy_one(world) == 200


@pytest.mark.parametrize(
    ("fields", "tokens", "status"),
    [
        ({"n": 100, "max_tokens": 1000}, 50, 200),
        ({"n": 100, "max_tokens": 1000}, 0, 200),
        ({"n": 100, "max_tokens": 1000}, 20_000, 429),
        ({}, 20_000, 429),
        ({"best_of": 100, "max_tokens": 1000}, 50, 200),
        ({"best_of": 100, "max_tokens": 1000}, 500, 429),
        ({"best_of": 100, "n": 10, "max_tokens": 1000}, 500, 200),
    ],
)
async def test_what_an_answer_had_takes_the_place_of_what_it_might_have(world, keys, fields, tokens, status):
    await world.start("d0", keys_dir=keys)
    world.workers["d0"].reply = answers_of(tokens)
    assert (await post(world, {**COMPLETION, **fields})).status == 200
    assert (await post(world, COMPLETION)).status == status


@pytest.mark.parametrize("status", [400, 503])
async def test_an_answer_that_nobody_computed_costs_nothing(world, keys, status):
    await world.start("d0", keys_dir=keys)
    world.workers["d0"].reply = answers_of(0, status)
    assert (await post(world, GREEDY)).status >= 400
    world.workers["d0"].reply = answers_of(1)
    got = await post(world, COMPLETION)
    assert got.status == 200 or got.json["error"]["code"] == "saturated", "the engine was full a moment ago"


async def hang(_request: web.Request, _body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def fail(*_: Any) -> None:
    raise ZeroDivisionError


FAILURES: Final = {
    "the engine is late": (504, "timeout", QUICK._replace(first_byte_seconds=0.3), {}),
    "the deadline": (504, "deadline_exceeded", QUICK, {headers.DEADLINE_SECONDS: "0.3"}),
    "the gateway": (500, "internal_error", QUICK, {}),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_an_answer_of_which_nothing_came_costs_nothing(world, keys, failure, monkeypatch):
    status, code, limits, sent = FAILURES[failure]
    await world.start("d0", keys_dir=keys, limits=limits)
    usual, world.workers["d0"].reply = world.workers["d0"].reply, hang
    with monkeypatch.context() as patched:
        if status == 500:
            world.workers["d0"].reply = usual
            patched.setattr(attempts, "begin_answer", fail)
        got = await post(world, GREEDY, **sent)
    assert (got.status, got.json["error"]["code"]) == (status, code)
    world.workers["d0"].reply = usual
    assert (await post(world, COMPLETION)).status == 200


async def test_who_leaves_before_the_answer_has_paid_for_it(world, keys):
    await world.start("d0", keys_dir=keys)
    here, usual = asyncio.Event(), world.workers["d0"].reply

    async def never(_request: web.Request, _body: bytes) -> web.StreamResponse:
        here.set()
        await asyncio.Event().wait()
        raise AssertionError

    world.workers["d0"].reply = never
    leaving = asyncio.create_task(post(world, GREEDY))
    await here.wait()
    leaving.cancel()
    await world.workers["d0"].wait_aborted()
    world.workers["d0"].reply = usual
    assert (await post(world, COMPLETION)).status == 429


EVENT: Final = json.dumps({"choices": [{"index": 0, "text": "a"}]}).encode()
USAGE: Final = json.dumps({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 20_000}}).encode()


@pytest.mark.parametrize(
    ("events", "status"),
    [([EVENT] * 100, 200), ([EVENT] * 12_000, 429), ([EVENT, USAGE], 429)],
    ids=["few", "many", "usage"],
)
async def test_a_stream_costs_what_it_says_or_else_its_events(world, keys, events, status):
    await world.start("d0", keys_dir=keys, engine="vllm-nixl")

    async def stream(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(b"data: " + one + b"\n\n" for one in (*events, b"[DONE]")))
        return response

    world.workers["d0"].reply = stream
    # Of two answers vLLM names no ids.
    assert (await post(world, {**GREEDY, "n": 2, "stream": True})).status == 200
    world.workers["d0"].reply = answers_of(1)
    assert (await post(world, COMPLETION)).status == status


# Of what a request asks for


@pytest.mark.parametrize(
    ("path", "fields", "prompts", "wanted"),
    [
        ("/v1/completions", {}, 1, Answers(USUAL_ANSWER_TOKENS)),
        ("/v1/completions", {"max_tokens": None, "n": None}, 1, Answers(USUAL_ANSWER_TOKENS)),
        ("/v1/completions", {"max_tokens": 10, "n": 3}, 4, Answers(120, 12, 12)),
        ("/v1/completions", {"max_tokens": 10, "n": 3, "best_of": 5}, 4, Answers(200, 20, 12)),
        ("/v1/completions", {"max_tokens": "10", "n": 3.0}, 1, Answers(30, 3, 3)),
        ("/v1/completions", {"max_tokens": 10**15, "n": 3}, 1, Answers(3 * MAX_ANSWER_TOKENS, 3, 3)),
        ("/v1/completions", {"max_tokens": -10, "n": "many"}, 1, Answers(USUAL_ANSWER_TOKENS)),
        ("/v1/chat/completions", {"max_completion_tokens": 10}, 1, Answers(10)),
        ("/v1/chat/completions", {"max_completion_tokens": 10, "max_tokens": 20}, 1, Answers(20)),
        ("/v1/responses", {"max_output_tokens": 10, "max_tokens": 20}, 1, Answers(10)),
        ("/v1/messages", {"max_tokens": 20}, 1, Answers(20)),
    ],
)
def test_a_request_asks_for_the_most_that_any_engine_reads_in_it(path, fields, prompts, wanted):
    written = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in fields.items()}
    assert read_answers(API_ROUTES[path], written, prompts) == wanted
