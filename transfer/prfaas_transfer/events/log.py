"""Numbered batches of an engine's cache events, of which the latest are kept: by the engine for a mover that starts
later, by the mover for its followers.

The engine numbers its batches from 0, and its mover keeps these numbers. A batch of the topic `kv` carries events, one
of `bytes` what a request taught about bytes and tokens (`prfaas.wire.kvevents`). A follower keeps its position and is
served at its own pace: nothing is kept for it, and no other waits for it. One whose position is not in the log begins
with a snapshot: batches that lead to what is known now, all under the number of the last batch that they comprise.

An engine of others names the token ids of its blocks. No follower gets them: a mover tells digests in their place.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from prfaas.errors import ProtocolError
from prfaas.kvindex.bytes import DIGEST_BYTES, pack_tokens, token_digests
from prfaas.kvindex.canonical import TOKEN_BYTES
from prfaas.wire.engine import with_length
from prfaas.wire.kvevents import (
    MAX_EVENTS_FRAME_BYTES,
    MEDIUM_DEVICE,
    STATE_SPEC_KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ByteBlock,
    ByteMapBatch,
    EventHash,
    KvEvent,
    decode_byte_map,
    encode_byte_map,
    encode_event,
    join_events,
    read_events,
)

log = logging.getLogger(__name__)

KEPT_BYTES: Final = 32 << 20
READ_BYTES: Final = 256 << 10
BATCH_BYTES: Final = 200
"""What a batch takes beside its payload: most are of one block."""
EVENTS_PER_BATCH: Final = 256
PART_BYTES: Final = 1 << 20
"""A part of a snapshot, but for its last event."""
MAX_BATCH_BYTES: Final = MAX_EVENTS_FRAME_BYTES - 1024
"""Its topic and number come beside it."""
KNOWN_BYTE_BLOCKS: Final = 1 << 16
"""Byte blocks that are kept for snapshots, and not published again while their batch can still be read: about 16 MB."""
BYTE_BLOCKS_PER_BATCH: Final = 1000
_NEVER: Final = (-1, None)
_Item = TypeVar("_Item")


class LoggedBatch(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    seq: int
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode


def frame(batch: LoggedBatch) -> bytes:
    """Return what a stream carries for a batch, to a mover as to a follower."""
    return with_length(_encode(batch))


class BatchLog:
    """The latest batches, of so many bytes. Any thread may call."""

    def __init__(self, kept_bytes: int = KEPT_BYTES):
        self.first_seq = 0  # The oldest batch in the log; `next_seq` while it is empty.
        self.next_seq = 0
        self._changed = threading.Condition()
        self._kept_bytes = kept_bytes
        self._batches: dict[int, LoggedBatch] = {}
        self._bytes = 0

    def append(self, topic: str, payload: bytes) -> None:
        with self._changed:
            self._batches[self.next_seq] = LoggedBatch(topic, self.next_seq, payload)
            self._bytes += BATCH_BYTES + len(payload)
            self.next_seq += 1
            while self._bytes > self._kept_bytes and len(self._batches) > 1:
                self._bytes -= BATCH_BYTES + len(self._batches.pop(self.first_seq).payload)
                self.first_seq += 1
            self._changed.notify_all()

    def reaches(self, seq: int) -> bool:
        """Return True if a reader that wants `seq` next misses nothing."""
        with self._changed:
            return self.first_seq <= seq <= self.next_seq

    def read(self, seq: int, wait_seconds: float) -> list[LoggedBatch]:
        """Return batches from `seq` on, or from the oldest: at least one, of `READ_BYTES` otherwise. None if nothing
        comes within these seconds."""
        found: list[LoggedBatch] = []
        size = 0
        with self._changed:
            self._changed.wait_for(lambda: self.next_seq > seq, wait_seconds)
            for at in range(max(seq, self.first_seq), self.next_seq):
                found.append(self._batches[at])
                size += len(found[-1].payload)
                if size >= READ_BYTES:
                    break
        return found


class CachedBlock(NamedTuple):
    """One block in one medium, with its own event."""

    parent: EventHash | None
    is_state: bool
    event: bytes


class CachedBlocks:
    """The blocks that are cached after all events of an engine so far. Nothing is asked of the engine: its events name
    every change, in order. A block is known by its group, its medium and its hash. It takes a few hundred bytes."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int | None, str, EventHash], CachedBlock] = {}

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for key in event.block_hashes:
                        self._blocks.pop((event.group_idx, event.medium or MEDIUM_DEVICE, key), None)
                case AllBlocksCleared():
                    self._blocks.clear()

    def copy(self) -> "CachedBlocks":
        copied = CachedBlocks()
        copied._blocks = self._blocks.copy()
        return copied

    def events(self) -> list[bytes]:
        """Return an event for each block: windows before attention, and that before states, as engines number their
        groups; in each group parents first."""
        copies: dict[tuple[int | None, EventHash | None], list[CachedBlock]] = {}
        for (group, _, key), block in self._blocks.items():
            copies.setdefault((group, key), []).append(block)
        for blocks in copies.values():
            blocks.sort(key=lambda block: -len(block.event))  # a name alone means something only after its tokens
        found: list[bytes] = []
        done: set[tuple[int | None, EventHash | None]] = set()
        for group, key in sorted(copies, key=lambda at: (copies[at][0].is_state, -1 if at[0] is None else at[0])):
            path: list[list[CachedBlock]] = []
            above: EventHash | None = key
            while (group, above) in copies and (group, above) not in done:
                done.add((group, above))
                path.append(copies[group, above])
                above = path[-1][0].parent
            found.extend(block.event for blocks in reversed(path) for block in blocks)
        return found

    def _store(self, event: BlockStored) -> None:
        parent, medium = event.parent_block_hash, event.medium or MEDIUM_DEVICE
        is_state = event.kv_cache_spec_kind == STATE_SPEC_KIND
        for number, key in enumerate(event.block_hashes):
            one = replace(
                event,
                block_hashes=[key],
                parent_block_hash=parent,
                token_ids=event.token_ids[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES],
                extra_keys=(event.extra_keys or [])[number : number + 1] or None,
            )
            self._blocks[event.group_idx, medium, key] = CachedBlock(parent, is_state, encode_event(one))
            parent = key


class Snapshot(NamedTuple):
    """What is known after all batches up to number `seq`, as `batches` topics and payloads."""

    seq: int
    is_whole: bool
    batches: int
    payloads: Iterator[tuple[str, bytes]]


class EventLog(BatchLog):
    """What a mover heard of its engine, and what is cached after that."""

    def __init__(self, kept_bytes: int = KEPT_BYTES):
        super().__init__(kept_bytes)
        self.epoch = uuid4().hex  # What followers know of another mover is void.
        self._is_whole = True  # Whether the whole cache of the engine is known.
        self._cached = CachedBlocks()
        self._known: OrderedDict[int, tuple[int, ByteBlock]] = OrderedDict()

    def add(self, batch: LoggedBatch) -> None:
        """Publish a batch of the engine. One that is known is skipped; after lost ones all begins anew."""
        with self._changed:
            if batch.seq < self.next_seq:
                return
            if batch.seq > self.next_seq:
                log.warning("cache events %d to %d are lost: older blocks stay unknown", self.next_seq, batch.seq - 1)
                self._begin(batch.seq)
            try:
                self.append(batch.topic, self._apply(batch))
            except ProtocolError as error:  # as if it were lost
                log.error("batch %d of the engine: %s", batch.seq, error)

    def snapshot(self) -> Snapshot:
        """Return what is known; later batches are not in it."""
        with self._changed:
            seq, is_whole, cached = self.next_seq - 1, self._is_whole, self._cached.copy()
            known = [block for _, block in self._known.values()]
        # Without the lock: new batches come while many blocks are sorted.
        stored = _parts(cached.events(), EVENTS_PER_BATCH, len)
        learned = _parts(known, BYTE_BLOCKS_PER_BATCH)

        def payloads() -> Iterator[tuple[str, bytes]]:
            for part in stored:
                yield "kv", join_events(time.time(), part)
            for blocks in learned:
                yield "bytes", encode_byte_map(ByteMapBatch(time.time(), blocks))

        return Snapshot(seq, is_whole, len(stored) + len(learned), payloads())

    def _begin(self, seq: int) -> None:
        self.first_seq = self.next_seq = seq
        self._batches, self._bytes = {}, 0
        self._is_whole, self._cached = False, CachedBlocks()

    def _apply(self, batch: LoggedBatch) -> bytes:
        """Note what a batch says; return its payload without token ids, and without what followers can still find in
        the log. Raises ProtocolError for one that is unreadable, or too long for a follower."""
        if len(batch.payload) > MAX_BATCH_BYTES:
            raise ProtocolError(f"{len(batch.payload)} bytes; followers take {MAX_BATCH_BYTES} at most")
        if batch.topic == "kv":
            events = list(map(_without_tokens, read_events(batch.payload)))
            self._cached.apply(events)
            return join_events(time.time(), list(map(encode_event, events)))
        learned = decode_byte_map(batch.payload)
        new = [block for block in learned.blocks if self._known.get(block.byte_hash, _NEVER)[0] < self.first_seq]
        for block in new:
            self._known.pop(block.byte_hash, None)
            self._known[block.byte_hash] = batch.seq, block
        while len(self._known) > KNOWN_BYTE_BLOCKS:
            self._known.popitem(last=False)
        return encode_byte_map(ByteMapBatch(learned.ts, new))


def _without_tokens(event: KvEvent) -> KvEvent:
    """Return an event with digests in place of token ids, or with nothing if these are not just those of its blocks.
    Raises ProtocolError for an invalid id."""
    if not isinstance(event, BlockStored) or isinstance(event.token_ids, bytes) or not event.token_ids:
        return event
    token_ids, size = event.token_ids, event.block_size
    is_all = len(token_ids) == size * len(event.block_hashes)
    return replace(event, token_ids=token_digests(pack_tokens(token_ids), TOKEN_BYTES * size) if is_all else b"")


def _parts(items: list[_Item], most: int, size: Callable[[_Item], int] = lambda _item: 0) -> list[list[_Item]]:
    """Divide a list into parts of so many items at most, and about PART_BYTES."""
    parts: list[list[_Item]] = []
    left, left_bytes = 0, 0
    for item in items:
        if left <= 0 or left_bytes <= 0:
            parts.append([])
            left, left_bytes = most, PART_BYTES
        parts[-1].append(item)
        left, left_bytes = left - 1, left_bytes - size(item)
    return parts
