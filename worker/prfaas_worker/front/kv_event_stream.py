"""Serves cache events in two ways: GET /v1/kv-events for routers that reach only this API port, and ZMQ as vLLM has it.

**The stream** is one endless answer. Each frame is a 4-byte big-endian length and a msgpack array [topic, seq,
payload]; the payload is bytes, msgpack again. The stream's own messages have topics that begin with `prfaas.` and maps
as payloads:

    prfaas.hello  first: {epoch, instance, model, topics: {topic: {first_seq, next_seq}}}
    prfaas.snapshot {topic, seq, batches}: the reader's place is not in the log. So many batches follow, all under the
                  number seq: the cached blocks after that batch; they replace all earlier state
    prfaas.gap    {topic, from_seq, to_seq}: these batches are lost to the reader
    prfaas.alive  after seconds without an event
    prfaas.end    last: {reason}, `overrun` for a reader so slow that events were lost, or `shutdown`

`from` and `bytes_from` are the first numbers wanted of the two topics (default 0), `epoch` the hello's from which they
are known. Where the log does not reach back so far, or is another one, a snapshot replaces the missing batches. A
reader is served from the log at its own pace. Nothing is kept for it, and no other reader waits for it.

**The sockets** speak frame for frame as vLLM does. A PUB socket sends [topic, seq as 8 bytes big-endian, payload]. PUB
loses messages of a reader that is slow or away. Such a reader asks the ROUTER socket on the next port with the first
number that it wants. It gets [seq, payload] for each batch from there on. Where not all of those are kept, it gets a
snapshot and the later batches. At last comes the number -1 with an empty payload. Only cache events can be asked for
again: these answers have no topic.
"""

import asyncio
import logging
import struct
from typing import Any, Final, cast

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from prfaas.errors import ConfigError, RequestError
from prfaas.ports import url_host
from prfaas_worker.front.kv_events import KvEventPublisher, PublishedBatch, TopicLog
from prfaas_worker.front.serving import STATE

log = logging.getLogger(__name__)

ALIVE_SECONDS: Final = 5.0
STALL_SECONDS: Final = 30.0  # A reader that takes nothing at all for this long is disconnected.
WRITE_BYTES: Final = 256 << 10
_LENGTH: Final = struct.Struct("!I")
UNREAD_MESSAGES: Final = 100_000  # Batches queued for one subscriber; beyond that it loses them, as PUB sockets do.
REPLAY_BYTES: Final = 256 << 10
REPLAY_STALL_SECONDS: Final = 2.0
"""A reader that takes nothing of its replay for this long does not get the rest. Other readers wait behind it."""
END_SEQ: Final = (-1).to_bytes(8, "big", signed=True)


class Cursor:
    def __init__(self, log: TopicLog, from_seq: int):
        self.log = log
        self.seq = from_seq

    def take_gap(self) -> bytes | None:
        if self.log.reaches(self.seq):
            return None
        return _message("gap", {"topic": self.log.topic, "from_seq": self.seq, "to_seq": self.log.first_seq})

    def take(self) -> list[bytes]:
        entries = self.log.read(self.seq, WRITE_BYTES)
        self.seq += len(entries)
        return [frame(entry) for entry in entries]


def frame(entry: PublishedBatch) -> bytes:
    body = msgspec.msgpack.encode(entry)
    return _LENGTH.pack(len(body)) + body


async def stream(request: web.Request) -> web.StreamResponse:
    events = request.app[STATE].events
    cursors = _cursors(request, events)
    response = web.StreamResponse(headers={"content-type": "application/x-prfaas-events", "cache-control": "no-cache"})
    await response.prepare(request)
    try:
        await _send(response, [_hello(request, events)])
        reason = await _follow(response, events, cursors)
        await _send(response, [_message("end", {"reason": reason})])
        await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    return response


async def _follow(response: web.StreamResponse, events: KvEventPublisher, cursors: list[Cursor]) -> str:
    for cursor in cursors:
        if not cursor.log.reaches(cursor.seq):
            await _send_snapshot(response, events, cursor)
    while not events.closed:
        frames = [frame for cursor in cursors for frame in cursor.take()]
        if frames or not await events.wait(ALIVE_SECONDS):
            await _send(response, frames or [_message("alive", {})])
        lost = [lost for cursor in cursors if (lost := cursor.take_gap())]
        if lost:
            await _send(response, lost)
            return "overrun"
    return "shutdown"


async def _send_snapshot(response: web.StreamResponse, events: KvEventPublisher, cursor: Cursor) -> None:
    topic, seq, batches, payloads = events.snapshot(cursor.log)
    cursor.seq = seq + 1
    await _send(response, [_message("snapshot", {"topic": topic, "seq": seq, "batches": batches})])
    for payload in payloads:
        await _send(response, [frame(PublishedBatch(topic, seq, payload))])
        await asyncio.sleep(0)  # a write that the socket takes at once lets no other task run


async def _send(response: web.StreamResponse, frames: list[bytes]) -> None:
    """Write frames; TimeoutError if the reader takes none of them for too long."""
    if frames:
        await asyncio.wait_for(response.write(b"".join(frames)), STALL_SECONDS)


def _cursors(request: web.Request, events: KvEventPublisher) -> list[Cursor]:
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


def _hello(request: web.Request, events: KvEventPublisher) -> bytes:
    options = request.app[STATE].options
    topics = {log.topic: {"first_seq": log.first_seq, "next_seq": log.next_seq} for log in (events.kv, events.byte_map)}
    return _message(
        "hello", {"epoch": events.epoch, "instance": options.instance, "model": options.model_name, "topics": topics}
    )


def _message(kind: str, content: dict[str, object]) -> bytes:
    return frame(PublishedBatch(f"prfaas.{kind}", 0, msgspec.msgpack.encode(content)))


class KvEventSockets:
    """Both sockets, open until `close`. Raises ConfigError if a port cannot be opened."""

    def __init__(self, events: KvEventPublisher, host: str, port: int):
        self._events = events
        self._context = zmq.asyncio.Context()
        try:
            # The plain socket: sending never waits, and must not cost a future for each batch.
            self._pub = self._context.socket(zmq.PUB, socket_class=cast(Any, zmq.Socket))
            self._pub.set_hwm(UNREAD_MESSAGES)
            self._bind(self._pub, host, port)
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is waited for, not dropped from
            self._bind(self._replay, host, port + 1)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        events.subscribers.append(self._publish)
        self._task = asyncio.create_task(self._answer())

    async def close(self) -> None:
        self._events.subscribers.remove(self._publish)
        self._task.cancel()
        await asyncio.wait([self._task])
        self._context.destroy(linger=0)

    @staticmethod
    def _bind(socket: zmq.Socket[Any], host: str, port: int) -> None:
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(f"tcp://{url_host(host)}:{port}")
        except zmq.ZMQError as error:
            raise ConfigError(f"events port {host}:{port} cannot be opened: {error.strerror}") from error

    def _publish(self, entry: PublishedBatch) -> None:
        self._pub.send_multipart([entry.topic.encode(), entry.seq.to_bytes(8, "big"), entry.payload], zmq.DONTWAIT)

    async def _answer(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) < 2 or len(frames[-1]) != 8:
                log.warning("a request for a replay of events has %d frames and no number: ignored", len(frames))
                continue
            *route, number = frames
            try:
                await self._send_from(route, int.from_bytes(number, "big"))
            except (TimeoutError, zmq.ZMQError) as error:
                log.info("a replay of events was not taken: %r", error)

    async def _send_from(self, route: list[bytes], seq: int) -> None:
        kv = self._events.kv
        if not kv.reaches(seq):
            snapshot = self._events.snapshot(kv)
            seq = snapshot.seq + 1
            for payload in snapshot.payloads:
                await self._send([*route, snapshot.seq.to_bytes(8, "big"), payload])
        while entries := kv.read(seq, REPLAY_BYTES):
            for entry in entries:
                await self._send([*route, entry.seq.to_bytes(8, "big"), entry.payload])
            seq = entries[-1].seq + 1
        await self._send([*route, END_SEQ, b""])

    async def _send(self, frames: list[bytes]) -> None:
        await asyncio.wait_for(self._replay.send_multipart(frames), REPLAY_STALL_SECONDS)
