"""Proves that the gateway learns over HTTP what instances have cached and routes by it, names where a prefix is worth
fetching from, and that no peer's stream, however broken, reaches further than what is believed of that peer.
"""

import asyncio
import hashlib
import json
import struct
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from aiohttp import web

from prfaas.kvindex.bytes import byte_hashes
from prfaas.kvindex.canonical import canonical_completion
from prfaas.names import HUB
from prfaas.wire import headers
from prfaas.wire.kvevents import (
    ByteBlock,
    ByteMapBatch,
    EventBatch,
    attention_stored,
    encode_byte_map,
    encode_events,
    state_stored,
)
from prfaas_gateway.kv import follower

PATIENCE_SECONDS = 60
CONTENT_TYPE = "application/x-prfaas-events"
QUICK = {"fixed_seconds": 0.0, "token_seconds": 0.01, "squared_seconds": 0.0, "samples": 9, "max_tokens": 99}


def body_of(seed: str, length: int = 4096) -> bytes:
    """A completion of so many bytes; one byte is a token to the workers here."""
    text = "".join(hashlib.sha256(f"{seed}{n}".encode()).hexdigest() for n in range(length // 64 + 1))[:length]
    return json.dumps({"model": "m", "prompt": text}).encode()


def frame(topic: str, seq: int, payload: bytes) -> bytes:
    body = msgspec.msgpack.encode([topic, seq, payload])
    return struct.pack("!I", len(body)) + body


def hello(epoch: str = "e1") -> bytes:
    return frame("prfaas.hello", 0, msgspec.msgpack.encode({"epoch": epoch}))


def holding(*bodies: bytes) -> bytes:
    """Frames of an instance that has these prompts cached, with a state at the end of each."""
    frames = [hello()]
    for seq, body in enumerate(bodies):
        canonical = canonical_completion(body)
        data = canonical.data
        names = [hashlib.sha256(data[:end]).digest() for end in range(64, len(data) + 1, 64)]
        events = [attention_stored(names, None, [0] * 64 * len(names), "mla_attention", "GPU")]
        events.append(state_stored(names[-1], names[-2], [0] * 64, "GPU"))
        frames.append(frame("kv@x@m", seq, encode_events(EventBatch(0.0, events))))
        pairs = [
            ByteBlock(one, names[4 * at + 2], 64 * (4 * at + 3)) for at, one in enumerate(byte_hashes(*canonical[:2]))
        ]
        frames.append(frame("bytes@x@m", seq, encode_byte_map(ByteMapBatch(0.0, pairs))))
    return b"".join(frames)


def telling(
    sent: bytes, *, profile: dict | None = None, asked: list[str] | None = None
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A worker's cache: these frames, then silence; `asked` gets each question for events."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/profile":
            if profile is None:
                return web.Response(status=404)
            figures = {"state_bytes": 100, "token_bytes": 10, "prefill": profile}
            return web.json_response({"model": "m", "fingerprint": "f"} | figures)
        if asked is not None:
            asked.append(request.query_string)
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await response.prepare(request)
        await response.write(sent)
        await asyncio.Event().wait()
        return response

    return answer


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def until_metric(world, line: str, value: float) -> None:
    async def reached() -> bool:
        return await world.metric(line) == value

    await until(reached)


async def served_by(world, body: bytes, times: int = 8) -> set[str]:
    """Return who served this prompt, asked so often with request ids of all kinds."""
    answers = [
        await world.post(body, "/v1/completions", headers={headers.REQUEST_ID: hashlib.sha256(bytes([n])).hexdigest()})
        for n in range(times)
    ]
    assert {one.status for one in answers} == {200}
    return {one.headers[headers.DECODE_INSTANCE] for one in answers}


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
    monkeypatch.setattr(follower, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(follower, "LONGEST_PAUSE_SECONDS", 0.05)


async def start(world, caches: dict[str, Callable], **more) -> None:
    """Start a gateway before workers with these caches."""
    original = world.write_table

    def write_table(*args, **kwargs):
        for name, cache in caches.items():
            world.workers[name].cache = cache
        return original(*args, **kwargs)

    world.write_table = write_table
    await world.start(*caches, **more)


async def test_a_prompt_goes_where_its_beginning_is_cached_and_others_spread(world):
    mine, theirs, nobodys = (body_of(seed) for seed in ("mine", "theirs", "nobody's"))
    caches = {"d0": telling(holding(mine)), "d1": telling(holding(theirs)), "d2": telling(hello())}
    await start(world, caches, tokens=5000)
    await until_metric(world, "prfaas_gateway_kv_batches_total", 4)
    assert await world.metric("prfaas_gateway_kv_blocks") == 2 * 4096 // 64
    assert await world.metric("prfaas_gateway_kv_byte_blocks") == 2 * 4096 // 256
    assert await served_by(world, mine) == {"d0"}
    assert await served_by(world, theirs) == {"d1"}
    assert await served_by(world, nobodys) == {"d0", "d1", "d2"}


async def test_an_instance_that_leaves_is_forgotten_and_one_that_comes_is_followed(world):
    mine = body_of("mine")
    await start(world, {"d0": telling(holding(mine)), "d1": telling(hello())}, tokens=5000)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 16)
    gone = [one for one in world.table.instances if one.name != "d0"]
    world.write_table(tokens=5000, instances=tuple(gone), generation=2)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 0)
    await until_metric(world, 'prfaas_gateway_kv_instances{state="followed"}', 1)
    world.write_table(tokens=5000, generation=3)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 16)


async def test_a_lost_connection_is_made_again_and_goes_on_where_it_was(world):
    asked, mine = [], body_of("mine")

    async def cache(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/kv-events" and asked:
            return await telling(hello(), asked=asked)(request)
        if request.path == "/v1/profile":
            return web.Response(status=404)
        asked.append(request.query_string)
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await response.prepare(request)
        await response.write(holding(mine))
        return response

    await start(world, {"d0": cache, "d1": telling(hello())}, tokens=5000)

    async def again() -> bool:
        return len(asked) > 1

    await until(again)
    assert asked == ["", "from=1&bytes_from=1&epoch=e1"]
    assert await served_by(world, mine) == {"d0"}


def status(code: int) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=code)

    return answer


async def test_instances_that_tell_nothing_are_judged_by_what_was_sent_to_them(world):
    await start(world, {"d0": status(404), "d1": status(404)}, tokens=5000)
    await until_metric(world, 'prfaas_gateway_kv_instances{state="silent"}', 2)
    (first,) = await served_by(world, body_of("one"), 1)
    assert await served_by(world, body_of("one")) == {first}
    assert await served_by(world, body_of("one", 8000)) == {first}
    assert await world.metric("prfaas_gateway_kv_matched_tokens_total") > 0


async def test_instances_that_cannot_tell_now_are_not_judged(world):
    await start(world, {"d0": status(503), "d1": status(503)}, tokens=5000)
    await until_metric(world, 'prfaas_gateway_kv_instances{state="lost"}', 2)
    assert await served_by(world, body_of("one")) == {"d0", "d1"}


@pytest.mark.parametrize("profile", [QUICK, None])
async def test_who_prefills_is_told_of_an_instance_that_has_more_where_that_is_known_to_pay(world, profile):
    mine, gate = body_of("mine"), asyncio.Event()
    await start(world, {"d0": telling(holding(mine)), "d1": telling(hello(), profile=profile)}, tokens=5000)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 16)
    await until_metric(world, 'prfaas_gateway_kv_instances{state="followed"}', 2)
    owner, other = (world.workers[name] for name in ("d0", "d1"))
    quick = owner.reply

    async def held(request: web.Request, body: bytes) -> web.StreamResponse:
        await gate.wait()
        return await quick(request, body)

    owner.reply = other.reply = held
    asking = [asyncio.create_task(world.post(mine, "/v1/completions")) for _ in range(20)]

    async def all_came() -> bool:
        return len(owner.seen) + len(other.seen) == 20

    await until(all_came)
    gate.set()
    assert {(await one).status for one in asking} == {200}
    assert owner.seen, "the first ones went where the prompt is"
    told = [one.headers.get(headers.PREFIX_URL) for one in other.seen]
    assert told == [owner.url if profile else None] * len(told) != []
    assert not any(headers.PREFIX_URL in one.headers for one in owner.seen)
    assert await world.metric("prfaas_gateway_kv_prefixes_total") == (len(told) if profile else 0)
    if profile:
        assert other.seen[0].headers[headers.PREFIX_CLUSTER] == HUB


HOSTILE = {
    "an endless frame": struct.pack("!I", 0xFFFFFFFF) + b"x" * 100_000,
    "a frame of nonsense": struct.pack("!I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
    "no greeting": frame("kv@d0@m", 0, b""),
    "a gap": hello() + frame("kv@d0@m", 77, encode_events(EventBatch(0.0, []))),
    "half a frame": hello() + struct.pack("!I", 100) + b"x",
    "deep nesting": hello() + frame("kv@d0@m", 0, b"\x91" * 100_000),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_broken_stream_harms_nobody_else(world, what):
    mine, asked = body_of("mine"), []

    async def cache(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await response.prepare(request)
        await response.write(HOSTILE[what])
        return response

    await start(world, {"d0": cache, "d1": telling(holding(mine))}, tokens=5000)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 16)

    async def tried_again() -> bool:
        return asked.count("/v1/kv-events") >= 3

    await until(tried_again)
    assert await served_by(world, mine) == {"d1"}
