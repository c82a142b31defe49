"""What answers for an engine streams for ever: it wants the gateway's memory, and the client's time and tokens."""

import json
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tests.unit.gateway.conftest import QUICK, Worker

from prfaas_gateway import attempts
from prfaas_gateway.api import API_ROUTES, FRAME_BYTES, MAX_ANSWER_TOKENS, most_bytes
from prfaas_gateway.stream import EVENT_BYTES

PATH = "/v1/chat/completions"
ASKED = {"model": "m", "stream": True, "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
EVENT = b'data: {"created":1,"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null,"token_ids":[7]}]}\n\n'
ENDLESS = {"tokens": EVENT, "empty events": b":\n\n", "one line": b"x" * 100}
MANY = 64 << 10
"""Bytes of each write."""


async def start(world, engine: str, written: bytes) -> None:
    """Start two engines that write this for ever."""
    await world.start("d0", "d1", limits=QUICK._replace(recover_seconds=0.3, eject_seconds=60, eject_max_seconds=60))
    world.change_instances(engine=engine)
    once = written * (MANY // len(written))

    async def endless(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(once)

    for worker in world.workers.values():
        worker.reply = endless


@pytest.mark.parametrize("written", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("engine", ["prfaas", "dynamo"])
async def test_an_answer_without_end_is_cut_off_and_no_other_engine_continues_it(world, engine, written):
    await start(world, engine, written)
    got = await world.post(ASKED, PATH)
    assert json.loads(got.body.rpartition(b"data: ")[2])["error"]["code"] == "stream_broken"
    assert len(got.body) < 2 * FRAME_BYTES
    served = [name for name, worker in world.workers.items() if worker.seen]
    assert len(served) == 1
    assert not world.state.is_ejected(served[0]), "a client may ask for what is not counted"


async def test_control_without_the_bound_it_goes_on(world, monkeypatch):
    monkeypatch.setattr(attempts, "most_bytes", lambda *_: 1 << 40)
    await start(world, "prfaas", EVENT)
    async with world.client.post(world.url + PATH, json=ASKED) as answer:
        assert len(await answer.content.readexactly(4 * FRAME_BYTES)) > 2 * FRAME_BYTES
        answer.close()


async def is_sent_elsewhere(world) -> bool:
    """Ask an engine that sends its caller to another server; return whether that one gets the prompt."""
    await world.start("d0")
    elsewhere = Worker("elsewhere")
    await elsewhere.start()

    async def redirect(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": elsewhere.url + PATH})

    world.workers["d0"].reply = redirect
    got = await world.post(ASKED, PATH, allow_redirects=False)
    await elsewhere.stop()
    assert (got.status, "location" in got.headers) == ((200, False) if elsewhere.seen else (503, False))
    return bool(elsewhere.seen)


async def test_an_engine_sends_neither_gateway_nor_client_elsewhere(world):
    assert not await is_sent_elsewhere(world)


async def test_control_a_gateway_that_follows_redirects_would(world, monkeypatch):
    ask = aiohttp.ClientSession._request

    async def follow(session: aiohttp.ClientSession, *args: Any, **options: Any) -> aiohttp.ClientResponse:
        return await ask(session, *args, **options | {"allow_redirects": True})

    monkeypatch.setattr(aiohttp.ClientSession, "_request", follow)
    assert await is_sent_elsewhere(world)


LONG = "m" * 250
TOP = {"token": " token", "logprob": -12.345678901234567, "bytes": [32, 116, 111, 107, 101, 110]}
IDS = {"logprobs": True, "logprob_token_ids": list(range(128))}
"""As many as vLLM takes."""


@pytest.mark.parametrize(
    ("fields", "scored"),
    [({}, 0), ({"n": 8}, 0), ({"logprobs": True, "top_logprobs": 20}, 20), (IDS, 128)],
    ids=["one", "n", "logprobs", "token ids"],
)
def test_what_was_asked_for_has_room(fields, scored):
    """Twice over, in events with long names and a token each."""
    tokens = 10_000
    asked = {**ASKED, **fields, "max_tokens": tokens}
    scores: Any = {"content": [{**TOP, "top_logprobs": [TOP] * scored}]} if scored else None
    choice = {"index": 0, "delta": {"content": " token"}, "logprobs": scores, "finish_reason": None, "token_ids": [7]}
    usage = {"prompt_tokens": 100_000, "total_tokens": 200_000, "completion_tokens": 100_000}
    event = {"id": LONG[:128], "object": "chat.completion.chunk", "created": 1_795_425_279, "model": LONG}
    event |= {"choices": [choice], "usage": usage, "system_fingerprint": LONG[:32]}
    written = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in asked.items()}
    honest_bytes = tokens * fields.get("n", 1) * (len(json.dumps(event)) + EVENT_BYTES)
    most = most_bytes(API_ROUTES[PATH], written, 1, len(json.dumps(asked)))
    assert 2 * honest_bytes < most < 20 * honest_bytes


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        (PATH, {}, MAX_ANSWER_TOKENS),
        (PATH, {"max_tokens": 10**15}, MAX_ANSWER_TOKENS),
        (PATH, {"max_tokens": "many", "n": -3}, MAX_ANSWER_TOKENS),
        (PATH, {"max_tokens": 5, "max_completion_tokens": 9}, 9),
        ("/v1/responses", {"max_output_tokens": 9}, MAX_ANSWER_TOKENS),
    ],
)
def test_an_answer_has_the_room_of_its_limit_or_of_any_context(path, fields, tokens):
    written = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in fields.items()}
    limited = {"max_tokens": msgspec.Raw(b"%d" % tokens)}
    assert most_bytes(API_ROUTES[path], written, 1, 100) == most_bytes(API_ROUTES[PATH], limited, 1, 100)
