"""Cache events for routers: numbered, kept for a while so that a reader can catch up, and read without slowing anybody.

Two topics, each with numbers of its own, so that a reader of one sees a gap where it lost something and nowhere else:
`kv@INSTANCE@MODEL` carries vLLM's event batches, `bytes@INSTANCE@MODEL` what requests taught about bytes and tokens.
Both payloads are defined in `prfaas.wire.kvevents`. The log is the only buffer: readers keep a position in it, and one
that falls behind its oldest entry has lost events and is told so. Whoever comes after the log has moved on begins with
a snapshot: batches that tell all that stands, under the number of the last batch that they comprise.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple
from uuid import uuid4

from prfaas.wire.engine import KvEvents, ToEngine, ToFront
from prfaas.wire.kvevents import (
    AllBlocksCleared,
    ByteBlock,
    ByteMapBatch,
    EventBatch,
    KvEvent,
    encode_byte_map,
    encode_events,
)
from prfaas_worker.front.standing import Standing, batch_count, batches
from prfaas_worker.options import Options

KEPT_BATCHES: Final = 10_000
KEPT_BYTES: Final = 32 << 20
KNOWN_BYTE_BLOCKS: Final = 1 << 16
"""Byte blocks that are kept for snapshots, and not published again while their batch can still be read: about 16 MB."""
BYTE_BLOCKS_PER_BATCH: Final = 1000
_NEVER: Final = (-1, None)


class Entry(NamedTuple):
    """One published batch."""

    topic: str
    seq: int
    payload: bytes


class Snapshot(NamedTuple):
    """All that one topic's batches up to number `seq` amount to, as so many batches."""

    topic: str
    seq: int
    batches: int
    payloads: Iterator[bytes]


class Log:
    """The latest batches of one topic, numbered from 0."""

    def __init__(self, topic: str, *, kept_batches: int = KEPT_BATCHES, kept_bytes: int = KEPT_BYTES):
        self.topic = topic
        self.first_seq = 0
        """The oldest batch that is still here; `next_seq` while there is none."""
        self.next_seq = 0
        self._limits = kept_batches, kept_bytes
        self._payloads: dict[int, bytes] = {}
        self._bytes = 0

    def append(self, payload: bytes) -> Entry:
        """Publish a batch; the oldest ones make room."""
        entry = Entry(self.topic, self.next_seq, payload)
        self._payloads[self.next_seq] = payload
        self._bytes += len(payload)
        self.next_seq += 1
        kept_batches, kept_bytes = self._limits
        while len(self._payloads) > kept_batches or (self._bytes > kept_bytes and len(self._payloads) > 1):
            self._bytes -= len(self._payloads.pop(self.first_seq))
            self.first_seq += 1
        return entry

    def reaches(self, seq: int) -> bool:
        """Tell whether a reader who wants `seq` next misses nothing."""
        return self.first_seq <= seq <= self.next_seq

    def read(self, seq: int, max_bytes: int) -> list[Entry]:
        """Return batches from `seq` on, at least one if there is any, and no more once they fill `max_bytes`."""
        entries: list[Entry] = []
        size = 0
        while size < max_bytes and (payload := self._payloads.get(seq)) is not None:
            entries.append(Entry(self.topic, seq, payload))
            size += len(payload)
            seq += 1
        return entries


class Events:
    """Publishes what the engine tells of its cache, and what requests teach about bytes. Listens to the engine."""

    def __init__(self, options: Options):
        place = f"@{options.instance}@{options.model_name}"
        self.kv = Log(f"kv{place}")
        self.byte_map = Log(f"bytes{place}")
        self.epoch = uuid4().hex
        """This process's life: numbers begin anew with the next one."""
        self.subscribers: list[Callable[[Entry], None]] = []
        """Called with every batch as it is published."""
        self.closed = False
        self._published = asyncio.Event()
        self._standing = Standing()
        self._known: OrderedDict[int, tuple[int, ByteBlock]] = OrderedDict()

    def sent(self, message: ToEngine) -> None:
        """What goes to the engine changes no cache by itself."""

    def heard(self, message: ToFront) -> None:
        """Publish the engine's cache events."""
        if isinstance(message, KvEvents) and message.events:
            self._tell(message.events)

    def snapshot(self, log: Log) -> Snapshot:
        """Return what a reader of this log has missed; nothing that happens later is in it."""
        if log is self.byte_map:
            known = [block for _, block in self._known.values()]
            parts = [known[at : at + BYTE_BLOCKS_PER_BATCH] for at in range(0, len(known), BYTE_BLOCKS_PER_BATCH)]
            payloads = (encode_byte_map(ByteMapBatch(time.time(), part)) for part in parts)
            return Snapshot(log.topic, log.next_seq - 1, len(parts), payloads)
        if not log.next_seq:  # a number is needed that no batch will have
            self._tell([AllBlocksCleared()])
        blocks = self._standing.blocks()
        payloads = (encode_events(EventBatch(time.time(), events, 0)) for events in batches(blocks))
        return Snapshot(log.topic, log.next_seq - 1, batch_count(blocks), payloads)

    def learn(self, blocks: Sequence[ByteBlock]) -> None:
        """Publish which tokens lie behind byte blocks, but for what can still be read."""
        first_seq = self.byte_map.first_seq
        new = [block for block in blocks if self._known.get(block.byte_hash, _NEVER)[0] < first_seq]
        if not new:
            return
        for block in new:
            self._known.pop(block.byte_hash, None)
            self._known[block.byte_hash] = self.byte_map.next_seq, block
        while len(self._known) > KNOWN_BYTE_BLOCKS:
            self._known.popitem(last=False)
        self._publish(self.byte_map, encode_byte_map(ByteMapBatch(time.time(), new)))

    async def wait(self, seconds: float) -> bool:
        """Wait until something is published or the worker ends; False when neither came within `seconds`."""
        try:
            await asyncio.wait_for(self._published.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Let every reader end."""
        self.closed = True
        self._published.set()

    def _tell(self, events: list[KvEvent]) -> None:
        self._standing.take(events)
        self._publish(self.kv, encode_events(EventBatch(time.time(), events, 0)))

    def _publish(self, log: Log, payload: bytes) -> None:
        entry = log.append(payload)
        for subscriber in self.subscribers:
            subscriber(entry)
        self._published.set()
        self._published = asyncio.Event()
