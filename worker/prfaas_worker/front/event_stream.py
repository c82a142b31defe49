"""GET /v1/kv-events: the cache's events as one endless answer, for routers that reach this worker's API port alone.

Each frame is a 4-byte big-endian length and a msgpack array [topic, seq, payload]; the payload is bytes, msgpack again.
What the stream has to say itself comes as topics that begin with `prfaas.`, with maps as payloads:

    prfaas.hello  first: {epoch, instance, model, topics: {topic: {first_seq, next_seq}}}
    prfaas.snapshot {topic, seq, batches}: the reader's place is not in the log. So many batches follow, all under the
                  number seq, that tell what stands after that batch; what was known before is void
    prfaas.gap    {topic, from_seq, to_seq}: these batches are lost to the reader
    prfaas.alive  after seconds without an event
    prfaas.end    last: {reason}, `overrun` for a reader so slow that events were lost, or `shutdown`

`from` and `bytes_from` are the first numbers wanted of the two topics (default 0), `epoch` the hello's from which they
are known. Where the log does not reach back so far, or is another one, a snapshot stands in for what is missing. A
reader is served from the log at its own pace: nothing is kept for it, nobody waits for it.
"""

import asyncio
import struct
from typing import Final

import msgspec
from aiohttp import web

from prfaas.errors import RequestError
from prfaas_worker.front.events import Entry, Events, Log
from prfaas_worker.front.serving import SERVING

ALIVE_SECONDS: Final = 5.0
STALL_SECONDS: Final = 30.0
"""A reader that takes nothing at all for this long is disconnected."""
WRITE_BYTES: Final = 256 << 10
_LENGTH: Final = struct.Struct("!I")


class Cursor:
    """One reader's place in one log."""

    def __init__(self, log: Log, from_seq: int):
        self.log = log
        self.seq = from_seq

    def lost(self) -> bytes | None:
        """Return the frame that tells of batches lost, None when there are none."""
        if self.log.reaches(self.seq):
            return None
        return _told("gap", {"topic": self.log.topic, "from_seq": self.seq, "to_seq": self.log.first_seq})

    def take(self) -> list[bytes]:
        """Return frames of the next batches and go behind them."""
        entries = self.log.read(self.seq, WRITE_BYTES)
        self.seq += len(entries)
        return [frame(entry) for entry in entries]


def frame(entry: Entry) -> bytes:
    """Return one frame."""
    body = msgspec.msgpack.encode(entry)
    return _LENGTH.pack(len(body)) + body


async def stream(request: web.Request) -> web.StreamResponse:
    """Serve GET /v1/kv-events."""
    events = request.app[SERVING].events
    cursors = _cursors(request, events)
    response = web.StreamResponse(headers={"content-type": "application/x-prfaas-events", "cache-control": "no-cache"})
    await response.prepare(request)
    try:
        await _send(response, [_hello(request, events)])
        reason = await _follow(response, events, cursors)
        await _send(response, [_told("end", {"reason": reason})])
        await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    return response


async def _follow(response: web.StreamResponse, events: Events, cursors: list[Cursor]) -> str:
    """Send what there is and what comes; returns why that ended."""
    for cursor in cursors:
        if not cursor.log.reaches(cursor.seq):
            await _send_snapshot(response, events, cursor)
    while not events.closed:
        frames = [frame for cursor in cursors for frame in cursor.take()]
        if frames or not await events.wait(ALIVE_SECONDS):
            await _send(response, frames or [_told("alive", {})])
        lost = [lost for cursor in cursors if (lost := cursor.lost())]
        if lost:
            await _send(response, lost)
            return "overrun"
    return "shutdown"


async def _send_snapshot(response: web.StreamResponse, events: Events, cursor: Cursor) -> None:
    """Send what stands, and put the cursor behind it."""
    topic, seq, batches, payloads = events.snapshot(cursor.log)
    cursor.seq = seq + 1
    await _send(response, [_told("snapshot", {"topic": topic, "seq": seq, "batches": batches})])
    for payload in payloads:
        await _send(response, [frame(Entry(topic, seq, payload))])
        await asyncio.sleep(0)  # a write that the socket takes at once lets nobody else run


async def _send(response: web.StreamResponse, frames: list[bytes]) -> None:
    """Write frames; TimeoutError when the reader takes none of them for too long."""
    if frames:
        await asyncio.wait_for(response.write(b"".join(frames)), STALL_SECONDS)


def _cursors(request: web.Request, events: Events) -> list[Cursor]:
    same_life = request.query.get("epoch", events.epoch) == events.epoch
    cursors = []
    for log, name in ((events.kv, "from"), (events.byte_map, "bytes_from")):
        seq = _number(request, name)
        # Numbers of another life mean nothing here: as if they were ahead of the log.
        cursors.append(Cursor(log, seq if same_life or name not in request.query else log.next_seq + 1))
    return cursors


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not text.isdecimal() or len(text) > len(str(1 << 63)):
        raise RequestError(f"{name} is {text!r}; give the number of the first batch wanted", param=name)
    return int(text)


def _hello(request: web.Request, events: Events) -> bytes:
    options = request.app[SERVING].options
    topics = {log.topic: {"first_seq": log.first_seq, "next_seq": log.next_seq} for log in (events.kv, events.byte_map)}
    return _told(
        "hello",
        {"epoch": events.epoch, "instance": options.instance, "model": options.model_name, "topics": topics},
    )


def _told(kind: str, what: dict[str, object]) -> bytes:
    return frame(Entry(f"prfaas.{kind}", 0, msgspec.msgpack.encode(what)))
