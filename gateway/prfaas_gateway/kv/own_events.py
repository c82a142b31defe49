"""Follows cache events of our workers: GET /v1/kv-events at the API port.

    frames     4 bytes of length, big-endian, then msgpack [topic, seq, payload]
    topics     hello, then of each topic either the requested batches, or a snapshot and later batches

OwnEventStream holds the connection; OwnEventReader applies its frames to the index.
"""

import asyncio
import re
import struct
from collections.abc import AsyncGenerator, Iterator
from typing import Final, TypeVar

import msgspec

from prfaas.errors import ProtocolError, UnreachableError
from prfaas.kvindex.byte_maps import NO_BLOCK
from prfaas.kvindex.index import InstanceIndex
from prfaas.kvindex.keys import key_of
from prfaas.wire.kvevents import decode_byte_map
from prfaas.wire.routes import Instance
from prfaas_gateway.kv.cache_events import PORTION_BLOCKS, CacheEvents, NoStreamError
from prfaas_gateway.upstream import Upstream

CONTENT_TYPE: Final = "application/x-prfaas-events"
MAX_FRAME_BYTES: Final = 8 << 20
"""Bound of one step's events; those of a prompt of a million tokens fit."""
SILENCE_SECONDS: Final = 20.0
"""A worker sends a heartbeat every 5 s."""
_LENGTH: Final = struct.Struct("!I")
_AHEAD: Final = 1 << 62
"""A number that is in no log: a request for it gets a snapshot."""
_EPOCH: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_Kind = TypeVar("_Kind")


class OwnEventStream:
    def __init__(self, instance: Instance, index: InstanceIndex, upstream: Upstream):
        self._instance = instance
        self._reader = OwnEventReader(index)
        self._upstream = upstream

    @property
    def tally(self) -> tuple[int, int, int]:
        return self._reader.batches, self._reader.snapshots, self._reader.gaps

    async def portions(self) -> AsyncGenerator[Iterator[None], None]:
        url = self._instance.url
        async with self._upstream.reading(self._instance, self._reader.path) as answer:
            if answer.status != 200 or answer.content_type != CONTENT_TYPE:
                if answer.status >= 500:
                    raise UnreachableError(f"{url} answers HTTP {answer.status}")
                raise NoStreamError(f"{url} has no event stream (HTTP {answer.status})")
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    (size,) = _LENGTH.unpack(await answer.content.readexactly(_LENGTH.size))
                    if size > MAX_FRAME_BYTES:
                        raise ProtocolError(f"a frame of {size} bytes; {MAX_FRAME_BYTES} are the most")
                    topic, seq, payload = _read(await answer.content.readexactly(size), tuple[str, int, bytes])
                if topic == "prfaas.end":
                    return
                yield self._reader.take(topic, seq, payload)


class OwnEventReader:
    """Applies the frames of one instance's stream to its part of the index. No I/O.

    A gap, a wrong order or an unreadable frame is a ProtocolError. The stream then reconnects with `path`, and the
    instance sends the missing batches from its log, or a snapshot. A faulty instance corrupts only its own part.
    """

    def __init__(self, index: InstanceIndex):
        self.batches = self.snapshots = self.gaps = 0
        self._index = index
        self._epoch = ""
        self._greeted = False
        self._events = CacheEvents(index)
        self._places = {"kv": _Place(), "bytes": _Place()}

    @property
    def path(self) -> str:
        """The path for a new connection."""
        self._greeted = False
        if not self._epoch:
            return "/v1/kv-events"
        kv, byte_map = (place.next_seq for place in self._places.values())
        return f"/v1/kv-events?from={kv}&bytes_from={byte_map}&epoch={self._epoch}"

    def take(self, topic: str, seq: int, payload: bytes) -> Iterator[None]:
        """Apply one frame in portions. Raises ProtocolError if the stream must be reconnected."""
        kind = topic.partition("@")[0]
        if not self._greeted and topic != "prfaas.hello":
            raise ProtocolError(f"{topic[:40]!r} came before prfaas.hello")
        if topic == "prfaas.hello":
            self._hello(payload)
        elif topic == "prfaas.snapshot":
            self._snapshot(payload)
        elif topic == "prfaas.gap":
            self.gaps += 1
            raise ProtocolError("this reader fell behind")
        elif kind in self._places:
            yield from self._batch(kind, seq, payload)

    def _hello(self, payload: bytes) -> None:
        epoch = _read(payload, _Hello).epoch
        if not _EPOCH.fullmatch(epoch):
            raise ProtocolError("the epoch of prfaas.hello is not a name")
        if epoch != self._epoch:
            self._events.forget()
            self._places = {"kv": _Place(), "bytes": _Place()}
        self._epoch, self._greeted = epoch, True

    def _snapshot(self, payload: bytes) -> None:
        snapshot = _read(payload, _Snapshot)
        place = self._places.get(snapshot.topic.partition("@")[0])
        if place is None:
            return
        self.snapshots += 1
        place.begin_snapshot(snapshot)
        if place is self._places["kv"]:
            self._index.tree.clear()
        else:
            self._index.bytes.clear()

    def _batch(self, kind: str, seq: int, payload: bytes) -> Iterator[None]:
        place = self._places[kind]
        try:
            if not place.is_due(seq):
                return
        except ProtocolError:
            self.gaps += 1
            raise
        yield from self._events.take(payload) if kind == "kv" else self._byte_map(payload)
        place.taken(seq)
        self.batches += 1

    def _byte_map(self, payload: bytes) -> Iterator[None]:
        blocks = decode_byte_map(payload).blocks
        for start in range(0, len(blocks), PORTION_BLOCKS):
            part = blocks[start : start + PORTION_BLOCKS]
            keys = [key_of(one.block_hash) if one.tokens else NO_BLOCK for one in part]
            self._index.bytes.learn([one.byte_hash for one in part], keys)
            yield


class _Hello(msgspec.Struct, frozen=True):
    epoch: str


class _Snapshot(msgspec.Struct, frozen=True):
    topic: str
    seq: int
    batches: int


class _Place:
    def __init__(self) -> None:
        self.next_seq = 0
        self._snapshot_seq = 0
        self._snapshot_batches = 0

    def begin_snapshot(self, snapshot: _Snapshot) -> None:
        """Expect a snapshot; an interrupted one must be requested again."""
        self.next_seq, self._snapshot_seq, self._snapshot_batches = _AHEAD, snapshot.seq, snapshot.batches
        if snapshot.batches < 1:
            self.next_seq = snapshot.seq + 1

    def is_due(self, seq: int) -> bool:
        """Return whether to apply a batch; False for a repeated one. Raises ProtocolError for a gap."""
        expected = self._snapshot_seq if self._snapshot_batches else self.next_seq
        if seq > expected or (self._snapshot_batches and seq != expected):
            raise ProtocolError(f"batch {seq} came instead of batch {expected}")
        return seq == expected

    def taken(self, seq: int) -> None:
        self._snapshot_batches = max(0, self._snapshot_batches - 1)
        if not self._snapshot_batches:
            self.next_seq = seq + 1


def _read(payload: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a frame of the event stream cannot be read: {error}") from error
