"""Follows cache events of engines with our mover: GET /v1/kv-events at the data port, inside the same TLS as caches.

    frames     4 bytes of length, big-endian, then msgpack [topic, seq, payload]
    topics     hello, then either the requested batches, or a snapshot and later batches

MoverEventStream holds the connection; MoverEventReader applies its frames to the index. Our workers' events carry a
byte map. vLLM's carry digests of token ids, and are applied as those of an engine without a mover.
"""

import asyncio
import re
import struct
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from prfaas.errors import UNREADABLE, ProtocolError, UnreachableError
from prfaas.kvindex.byte_maps import NO_BLOCK
from prfaas.kvindex.index import InstanceIndex
from prfaas.kvindex.keys import key_of
from prfaas.ports import url_host
from prfaas.wire.kvevents import EVENTS_CONTENT_TYPE, EVENTS_PATH, MAX_EVENTS_FRAME_BYTES, decode_byte_map
from prfaas.wire.routes import Instance
from prfaas_gateway.kv.cache_events import PORTION_BLOCKS, CacheEvents, NoStreamError
from prfaas_gateway.kv.foreign_events import ForeignEvents
from prfaas_gateway.upstream import Upstream

SILENCE_SECONDS: Final = 20.0
"""A mover sends a heartbeat every 5 s."""
_LENGTH: Final = struct.Struct("!I")
_AHEAD: Final = 1 << 62
"""A number that is in no log: a request for it gets a snapshot."""
_EPOCH: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_Kind = TypeVar("_Kind")


class MoverEventStream:
    """The events of one data-parallel rank of an instance."""

    def __init__(self, instance: Instance, rank: int, index: InstanceIndex, upstream: Upstream):
        self._instance = replace(instance, url=address_of(instance, rank))
        self._events = CacheEvents(index) if instance.record.maps_bytes else ForeignEvents(index)
        self._reader = MoverEventReader(index, self._events)
        self._upstream = upstream

    @property
    def cache_losses(self) -> int:
        return self._reader.lives + self._reader.snapshots + self._events.emptied

    @property
    def is_whole(self) -> bool:
        return self._reader.is_whole and not self._events.left_out

    @property
    def tally(self) -> tuple[int, int, int]:
        return self._reader.batches, self._reader.snapshots, self._reader.gaps

    async def portions(self) -> AsyncGenerator[Iterator[None], None]:
        url = self._instance.url
        async with self._upstream.reading(self._instance, self._reader.path) as answer:
            if answer.status != 200 or answer.content_type != EVENTS_CONTENT_TYPE:
                if answer.status >= 500:
                    raise UnreachableError(f"{url} answers HTTP {answer.status}")
                raise NoStreamError(f"{url} has no event stream (HTTP {answer.status})")
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    (size,) = _LENGTH.unpack(await answer.content.readexactly(_LENGTH.size))
                    if size > MAX_EVENTS_FRAME_BYTES:
                        raise ProtocolError(f"a frame of {size} bytes; {MAX_EVENTS_FRAME_BYTES} are the most")
                    topic, seq, payload = _read(await answer.content.readexactly(size), tuple[str, int, bytes])
                yield self._reader.take(topic, seq, payload)


def address_of(instance: Instance, rank: int) -> str:
    """Return where the first mover of a data-parallel rank listens, which hears the rank's scheduler."""
    url = urlsplit(instance.url)
    return f"{url.scheme}://{url_host(url.hostname or '')}:{instance.data_port + rank * instance.rank_ports}"


class MoverEventReader:
    """Applies the frames of one instance's stream to its part of the index. No I/O.

    A gap, a wrong order or an unreadable frame is a ProtocolError. The stream then reconnects with `path`, and the
    instance sends the missing batches from its log, or a snapshot. A faulty instance corrupts only its own part.
    """

    def __init__(self, index: InstanceIndex, events: CacheEvents):
        self.batches = self.snapshots = self.gaps = self.lives = 0
        self.is_whole = True
        """Whether the mover knows the whole cache of its engine."""
        self._index = index
        self._events = events
        self._epoch = ""
        self._greeted = False
        self._next_seq = 0
        self._unread = 0
        """Batches of a snapshot that have not come yet. They all have the number `_next_seq`."""

    @property
    def path(self) -> str:
        """The path for a new connection."""
        self._greeted = False
        if not self._epoch:
            return EVENTS_PATH
        # Of an interrupted snapshot another one is needed.
        return f"{EVENTS_PATH}?from={_AHEAD if self._unread else self._next_seq}&epoch={self._epoch}"

    def take(self, topic: str, seq: int, payload: bytes) -> Iterator[None]:
        """Apply one frame in portions. Raises ProtocolError if the stream must be reconnected."""
        if not self._greeted and topic != "prfaas.hello":
            raise ProtocolError(f"{topic[:40]!r} came before prfaas.hello")
        match topic:
            case "prfaas.hello":
                self._hello(_read(payload, _Hello).epoch)
            case "prfaas.snapshot":
                self._begin_snapshot(_read(payload, _Snapshot))
            case "kv" | "bytes":
                yield from self._batch(topic, seq, payload)
            case _:
                pass

    def _hello(self, epoch: str) -> None:
        if not _EPOCH.fullmatch(epoch):
            raise ProtocolError("the epoch of prfaas.hello is not a name")
        if epoch != self._epoch:
            self.lives += bool(self._epoch)
            self._events.forget()
            self._next_seq, self._unread, self.is_whole = 0, 0, True
        self._epoch, self._greeted = epoch, True

    def _begin_snapshot(self, snapshot: "_Snapshot") -> None:
        self.snapshots += 1
        self._events.clear()
        self._index.bytes.clear()
        self.is_whole, self._unread = snapshot.is_whole, snapshot.batches
        self._next_seq = snapshot.seq if self._unread else snapshot.seq + 1

    def _batch(self, topic: str, seq: int, payload: bytes) -> Iterator[None]:
        if seq < self._next_seq and not self._unread:
            return  # a repeated one
        if seq != self._next_seq:
            self.gaps += 1
            raise ProtocolError(f"batch {seq} came instead of batch {self._next_seq}")
        yield from self._events.take(payload) if topic == "kv" else self._byte_map(payload)
        self._unread = max(0, self._unread - 1)
        self._next_seq += not self._unread
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
    seq: int
    batches: Annotated[int, msgspec.Meta(ge=0)]
    is_whole: bool


def _read(payload: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except UNREADABLE as error:
        raise ProtocolError(f"a frame of the event stream cannot be read: {error}") from error
