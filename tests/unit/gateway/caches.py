"""Workers of the tests' world that publish caches by HTTP, as movers do, and what shows that a gateway read them."""

import asyncio
import hashlib
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from tests.waiting import eventually_async

from prfaas.kvindex.bytes import byte_hashes
from prfaas.kvindex.canonical import canonical_completion
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

from .conftest import Seen, Worker

CONTENT_TYPE = "application/x-prfaas-events"
QUICK = {"fixed_seconds": 0.0, "token_seconds": 0.01, "squared_seconds": 0.0, "samples": 9, "max_tokens": 99}


def body_of(seed: str, length: int = 4096) -> bytes:
    """A completion of so many bytes; one byte is a token to the workers here."""
    text = "".join(hashlib.sha256(f"{seed}{n}".encode()).hexdigest() for n in range(length // 64 + 1))[:length]
    return json.dumps({"model": "m", "prompt": text}).encode()


def leg_of(one: Seen) -> dict[str, Any]:
    """Return what a request says of a transfer."""
    return json.loads(one.body).get("kv_transfer_params", {}).get("prfaas", {})


def served(*workers: Worker) -> list[Seen]:
    """Return the requests that workers answer to clients: all but those for a prefix."""
    return [one for worker in workers for one in worker.seen if leg_of(one).get("role") != "source"]


def frame(topic: str, seq: int, payload: bytes) -> bytes:
    body = msgspec.msgpack.encode([topic, seq, payload])
    return struct.pack("!I", len(body)) + body


def hello(epoch: str = "e1") -> bytes:
    return frame("prfaas.hello", 0, msgspec.msgpack.encode({"epoch": epoch}))


def holding(*bodies: bytes) -> bytes:
    """Frames of an instance that has these prompts cached, with a state at the end of each."""
    frames = [hello()]
    for number, body in enumerate(bodies):
        canonical = canonical_completion(json.loads(body))
        data = canonical.data
        names = [hashlib.sha256(data[:end]).digest() for end in range(64, len(data) + 1, 64)]
        events = [attention_stored(names, None, 64, "mla_attention")]
        events.append(state_stored(names[-1], names[-2], 64))
        frames.append(frame("kv", 2 * number, encode_events(EventBatch(0.0, events))))
        pairs = [
            ByteBlock(one, names[4 * at + 2], 64 * (4 * at + 3)) for at, one in enumerate(byte_hashes(*canonical[:2]))
        ]
        frames.append(frame("bytes", 2 * number + 1, encode_byte_map(ByteMapBatch(0.0, pairs))))
    return b"".join(frames)


def telling(
    sent: bytes, *, profile: dict | None = None, requests: list[str] | None = None
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A worker's cache: these frames, then silence; `requests` gets each request for events."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/profile":
            if profile is None:
                return web.Response(status=404)
            figures = {"state_bytes": 100, "token_bytes": 10, "prefill": profile}
            return web.json_response({"model": "m", "fingerprint": "f"} | figures)
        if requests is not None:
            requests.append(request.query_string)
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await response.prepare(request)
        await response.write(sent)
        await asyncio.Event().wait()
        return response

    return answer


async def until_metric(world, line: str, value: float) -> None:
    shown = None

    async def is_reached() -> bool:
        nonlocal shown
        shown = await world.metric(line)
        return shown == value

    await eventually_async(is_reached, lambda: f"{line} is {value:g}, not {shown}")


async def served_by(world, body: bytes, times: int = 8) -> set[str]:
    """Return who served this prompt, sent so often with different request ids."""
    answers = [
        await world.post(body, "/v1/completions", headers={headers.REQUEST_ID: hashlib.sha256(bytes([n])).hexdigest()})
        for n in range(times)
    ]
    assert {one.status for one in answers} == {200}
    return {one.headers[headers.DECODE_INSTANCE] for one in answers}


async def start(world, caches: dict[str, Callable], **more) -> None:
    """Start a gateway before workers with these caches."""
    original = world.write_table

    def write_table(*args, **kwargs):
        for name, cache in caches.items():
            world.workers[name].cache = cache
        return original(*args, **kwargs)

    world.write_table = write_table
    await world.start(*caches, **more)
