"""Cache events over ZMQ, frame for frame as vLLM publishes them, for routers inside the cluster.

A PUB socket sends [topic, seq as 8 bytes big-endian, payload]. PUB loses messages of a reader that is slow or away; it
asks the ROUTER socket on the next port, sending the first number that it wants, and gets [seq, payload] for each batch
from there on, or a snapshot and what came after it where those are not all kept, and at last the number -1 with an
empty payload. Only cache events can be asked for again: these answers have no topic.
"""

import asyncio
import logging
from typing import Any, Final, cast

import zmq
import zmq.asyncio

from prfaas.errors import ConfigError
from prfaas_worker.front.events import Entry, Events

log = logging.getLogger(__name__)

UNREAD_MESSAGES: Final = 100_000
"""Batches queued for one subscriber; beyond that it loses them, as PUB sockets do."""
REPLAY_BYTES: Final = 256 << 10
STALL_SECONDS: Final = 2.0
"""A reader that takes nothing of its replay for this long does not get the rest: others wait behind it."""
END_SEQ: Final = (-1).to_bytes(8, "big", signed=True)


class EventSockets:
    """Both sockets, open until `close`.

    Raises:
        ConfigError: a port cannot be opened.

    """

    def __init__(self, events: Events, host: str, port: int):
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
        """End both."""
        self._events.subscribers.remove(self._publish)
        self._task.cancel()
        await asyncio.wait([self._task])
        self._context.destroy(linger=0)

    @staticmethod
    def _bind(socket: zmq.Socket[Any], host: str, port: int) -> None:
        name = f"[{host}]" if ":" in host else host
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(f"tcp://{name}:{port}")
        except zmq.ZMQError as error:
            raise ConfigError(f"events port {host}:{port} cannot be opened: {error.strerror}") from error

    def _publish(self, entry: Entry) -> None:
        self._pub.send_multipart([entry.topic.encode(), entry.seq.to_bytes(8, "big"), entry.payload], zmq.DONTWAIT)

    async def _answer(self) -> None:
        """Answer one request for a replay after the other."""
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
        await asyncio.wait_for(self._replay.send_multipart(frames), STALL_SECONDS)
