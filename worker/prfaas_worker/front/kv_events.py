"""Cache events for routers: numbered, kept for a while so that readers can catch up, read without slowing the engine.

There are two topics. Each has numbers of its own, so that a reader of one sees a gap only where it lost something.
`kv@INSTANCE@MODEL` carries vLLM's event batches, `bytes@INSTANCE@MODEL` carries what requests taught about bytes and
tokens. Both payloads are defined in `prfaas.wire.kvevents`. The log is the only buffer. A reader keeps a position in
it, and one that falls behind its oldest batch has lost events and is informed. A reader that starts after the log has
moved on begins with a snapshot. The snapshot consists of batches that lead to the blocks cached now, under the number
of the last batch that they comprise.

The engine owns the truth and reports every change in order. So the sum of its events is the truth as well. The snapshot
is kept here from these events, in a few hundred bytes a block. It costs no step of the engine when a reader starts.
"""

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias
from uuid import uuid4

from prfaas.wire.engine import KvEvents, ToEngine, ToFront
from prfaas.wire.kvevents import (
    MEDIUM_DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ByteBlock,
    ByteMapBatch,
    EventBatch,
    EventHash,
    KvEvent,
    encode_byte_map,
    encode_events,
)
from prfaas_worker.options import Options

KEPT_BATCHES: Final = 10_000
KEPT_BYTES: Final = 32 << 20
KNOWN_BYTE_BLOCKS: Final = 1 << 16
"""Byte blocks that are kept for snapshots, and not published again while their batch can still be read: about 16 MB."""
BYTE_BLOCKS_PER_BATCH: Final = 1000
_NEVER: Final = (-1, None)
EVENTS_PER_BATCH: Final = 256  # Writing so many takes about a millisecond, after which the event loop continues.


class PublishedBatch(NamedTuple):
    topic: str
    seq: int
    payload: bytes


class TopicSnapshot(NamedTuple):
    """The state after one topic's batches up to number `seq`, as `batches` payloads."""

    topic: str
    seq: int
    batches: int
    payloads: Iterator[bytes]


class TopicLog:
    def __init__(self, topic: str, *, kept_batches: int = KEPT_BATCHES, kept_bytes: int = KEPT_BYTES):
        self.topic = topic
        self.first_seq = 0  # The oldest batch in the log; `next_seq` while it is empty.
        self.next_seq = 0
        self._kept_batches, self._kept_bytes = kept_batches, kept_bytes
        self._payloads: dict[int, bytes] = {}
        self._bytes = 0

    def append(self, payload: bytes) -> PublishedBatch:
        entry = PublishedBatch(self.topic, self.next_seq, payload)
        self._payloads[self.next_seq] = payload
        self._bytes += len(payload)
        self.next_seq += 1
        while len(self._payloads) > self._kept_batches or (self._bytes > self._kept_bytes and len(self._payloads) > 1):
            self._bytes -= len(self._payloads.pop(self.first_seq))
            self.first_seq += 1
        return entry

    def reaches(self, seq: int) -> bool:
        """Return True if a reader that wants `seq` next misses nothing."""
        return self.first_seq <= seq <= self.next_seq

    def read(self, seq: int, max_bytes: int) -> list[PublishedBatch]:
        """Return batches from `seq` on: at least one if there is any, at most `max_bytes` otherwise."""
        entries: list[PublishedBatch] = []
        size = 0
        while size < max_bytes and (payload := self._payloads.get(seq)) is not None:
            entries.append(PublishedBatch(self.topic, seq, payload))
            size += len(payload)
            seq += 1
        return entries


class KvEventPublisher:
    """Publishes the engine's cache events, and byte blocks of requests. Listens to the engine."""

    def __init__(self, options: Options):
        suffix = f"@{options.instance}@{options.model_name}"
        self.kv = TopicLog(f"kv{suffix}")
        self.byte_map = TopicLog(f"bytes{suffix}")
        self.epoch = uuid4().hex  # Identifies this process: the numbers begin again with the next one.
        self.subscribers: list[Callable[[PublishedBatch], None]] = []  # Called with every batch when it is published.
        self.closed = False
        self._published = asyncio.Event()
        self._cached = CacheSnapshot()
        self._known: OrderedDict[int, tuple[int, ByteBlock]] = OrderedDict()

    def on_sent(self, message: ToEngine) -> None:
        """Do nothing: no message to the engine changes the cache by itself."""

    def on_received(self, message: ToFront) -> None:
        if isinstance(message, KvEvents) and message.events:
            self._publish_events(message.events)

    def snapshot(self, log: TopicLog) -> TopicSnapshot:
        """Return a snapshot of this log's topic; later events are not in it."""
        if log is self.byte_map:
            known = [block for _, block in self._known.values()]
            parts = [known[at : at + BYTE_BLOCKS_PER_BATCH] for at in range(0, len(known), BYTE_BLOCKS_PER_BATCH)]
            payloads = (encode_byte_map(ByteMapBatch(time.time(), part)) for part in parts)
            return TopicSnapshot(log.topic, log.next_seq - 1, len(parts), payloads)
        if not log.next_seq:  # a number is needed that no batch will have
            self._publish_events([AllBlocksCleared()])
        blocks = self._cached.blocks()
        payloads = (encode_events(EventBatch(time.time(), events, 0)) for events in snapshot_batches(blocks))
        return TopicSnapshot(log.topic, log.next_seq - 1, snapshot_batch_count(blocks), payloads)

    def learn(self, blocks: Sequence[ByteBlock]) -> None:
        """Publish the tokens of byte blocks, except those that readers can still find in the log."""
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
        """Wait until something is published or the worker ends; False after `seconds`."""
        try:
            await asyncio.wait_for(self._published.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.closed = True
        self._published.set()

    def _publish_events(self, events: list[KvEvent]) -> None:
        self._cached.apply(events)
        self._publish(self.kv, encode_events(EventBatch(time.time(), events, 0)))

    def _publish(self, log: TopicLog, payload: bytes) -> None:
        entry = log.append(payload)
        for subscriber in self.subscribers:
            subscriber(entry)
        self._published.set()
        self._published = asyncio.Event()


class BlockGroup(NamedTuple):
    number: int | None
    kind: str | None


class CachedBlock(NamedTuple):
    parent: EventHash | None
    token_ids: array
    groups: frozenset[BlockGroup]


CachedBlocks: TypeAlias = Mapping[EventHash, CachedBlock]


class CacheSnapshot:
    """The blocks that are cached after all events so far. A block is kept once for both groups."""

    def __init__(self) -> None:
        self._blocks: dict[EventHash, CachedBlock] = {}
        # There are few sets of groups, and many blocks that have each.
        self._sets: dict[frozenset[BlockGroup], frozenset[BlockGroup]] = {}

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._blocks.clear()

    def blocks(self) -> CachedBlocks:
        """Return the blocks cached now; later events do not change the result."""
        return self._blocks.copy()

    def _store(self, event: BlockStored) -> None:
        group = BlockGroup(event.group_idx, event.kv_cache_spec_kind)
        parent, size = event.parent_block_hash, event.block_size
        for number, key in enumerate(event.block_hashes):
            known = self._blocks.get(key)
            if known is None:
                token_ids = array("I", event.token_ids[number * size : (number + 1) * size])
                self._put(key, CachedBlock(parent, token_ids, frozenset([group])))
            else:
                self._put(key, known._replace(groups=known.groups | {group}))
            parent = key

    def _remove(self, event: BlockRemoved) -> None:
        for key in event.block_hashes:
            known = self._blocks.get(key)
            if known is None:
                continue
            left = frozenset(group for group in known.groups if group.number != event.group_idx)
            if left:
                self._put(key, known._replace(groups=left))
            else:
                del self._blocks[key]

    def _put(self, key: EventHash, block: CachedBlock) -> None:
        self._blocks[key] = block._replace(groups=self._sets.setdefault(block.groups, block.groups))


def snapshot_batch_count(blocks: CachedBlocks) -> int:
    return -(-(1 + sum(len(block.groups) for block in blocks.values())) // EVENTS_PER_BATCH)


def snapshot_batches(blocks: CachedBlocks) -> Iterator[list[KvEvent]]:
    """Yield the events that rebuild these blocks from an empty cache, parents first."""
    batch: list[KvEvent] = [AllBlocksCleared()]
    for key in _parents_first(blocks):
        for event in _stored(key, blocks[key]):
            if len(batch) == EVENTS_PER_BATCH:
                yield batch
                batch = []
            batch.append(event)
    yield batch


def _stored(key: EventHash, block: CachedBlock) -> Iterator[BlockStored]:
    token_ids = block.token_ids.tolist()
    for group in sorted(block.groups, key=lambda group: group.number or 0):
        yield BlockStored(
            block_hashes=[key],
            parent_block_hash=block.parent,
            token_ids=token_ids,
            block_size=len(token_ids),
            medium=MEDIUM_DEVICE,
            group_idx=group.number,
            kv_cache_spec_kind=group.kind,
        )


def _parents_first(blocks: CachedBlocks) -> Iterator[EventHash]:
    done: set[EventHash] = set()
    for key in blocks:
        path: list[EventHash] = []
        above: EventHash | None = key
        while above is not None and above in blocks and above not in done:
            done.add(above)
            path.append(above)
            above = blocks[above].parent
        yield from reversed(path)
