"""Moves evicted entries from the device to host memory and disk, and brings cached prefixes back.

Down: entries are copied when the device evicts them, unless a tier has them already. Up: when a prompt arrives, its
missing blocks and state are loaded. Once all are there they enter the pool, up to the first gap. A damaged entry ends
the prefix, and the engine computes the rest.

A copy between an accelerator and the host delays the step loop, however small it is. So evictions of one moment are one
copy, and so are the entries of one prompt.

At an orderly end `flush` writes to the disk what memory has and the disk lacks. The time for it is short, so the most
valuable prefix comes first. A prefix needs a state at its end and all blocks before that. So each state follows the
blocks that it needs, beginning with the state that was used last.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, NamedTuple

import msgspec

from prfaas.kvindex.blocks import BlockHash
from prfaas.wire.stats import CacheStats
from prfaas.wire.transfer import Buffer
from prfaas_worker.cache.blocks import Blocks, Evicted, Match
from prfaas_worker.cache.entries import CacheEntry, EntryName, header_bytes
from prfaas_worker.cache.kv_events import CacheEventRecorder
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.tiers import TierFetch, Tiers

MAX_COPY_BYTES: Final = 64 << 20
"""Most bytes of one copy. It needs as much again on the device, where memory is short when the pool is full."""
_FILE_TIME_GAP_SECONDS: Final = 0.001
"""Flushed files get modification times this far apart: a restart reads from them which was used last."""


@dataclass(slots=True, eq=False)
class PrefixLoad:
    fetch: TierFetch
    chain: Sequence[BlockHash]
    cached_blocks: int
    names: frozenset[EntryName]

    def done(self) -> bool:
        return self.fetch.done()

    def add_done_callback(self, call: Callable[[], None]) -> None:
        if self.fetch.reading is None:
            call()
        else:
            self.fetch.reading.add_done_callback(lambda _future: call())


class FlushResult(NamedTuple):
    """Counts of a flush: entries on the disk, bytes written, and entries missing."""

    entries: int = 0
    written_bytes: int = 0
    left_out: int = 0


class Tiering:
    """Moves entries between one memory and its tiers. Only the engine's thread uses it."""

    def __init__(self, memory: CacheMemory, blocks: Blocks, tiers: Tiers, events: CacheEventRecorder):
        self.tiers = tiers
        self._memory, self._blocks, self._events = memory, blocks, events
        self._geometry = memory.geometry
        self._loads: list[PrefixLoad] = []
        self._unwritten: dict[EntryName, tuple[tuple[int, ...], Buffer]] = {}  # have pages, not their bytes
        self._host_hit_tokens = self._disk_hit_tokens = 0
        tiers.listen(events.record_tier_change)

    def put(self, evicted: Sequence[Evicted]) -> None:
        """Copy evicted entries to the tiers, while their pages still hold the bytes."""
        self._write_loaded()  # some of it may be among what is evicted
        self.tiers.poll()
        pages = {EntryName(one.key, one.is_state): one.pages for one in evicted if not one.spent}
        for names in self._batches(name for name in pages if self.tiers.wants(name, self._size(name))):
            for entry in self._read({name: pages[name] for name in names}):
                self.tiers.put(entry)

    def prefetch(self, chain: Sequence[BlockHash]) -> PrefixLoad | None:
        """Start loading entries that extend this chain's match; None if there are none, or no room."""
        self.tiers.poll()
        self.adopt_loaded()
        match = self._blocks.match(chain, len(chain))
        names = self._missing(chain, match)
        all_names = frozenset(names).union(*(load.names for load in self._loads))
        pages_under_way = sum(self._geometry.pages_per_state if name.is_state else 1 for name in all_names)
        # Until they enter the pool, entries take host memory, which is bounded too.
        if not names or 2 * pages_under_way > self._memory.num_pages or pages_under_way > self._blocks.free_pages:
            return None
        load = PrefixLoad(self.tiers.fetch(names), chain, match.state_blocks, frozenset(names))
        self._loads.append(load)
        return load

    def adopt_loaded(self) -> None:
        while self._loads and self._loads[0].done():
            load = self._loads.pop(0)
            self._adopt(load, {entry.name: entry for entry in self.tiers.take(load.fetch)})

    def clear(self) -> None:
        self._loads.clear()
        self.tiers.clear()

    def add_stats(self, stats: CacheStats) -> CacheStats:
        disk = self.tiers.disk
        stats = msgspec.structs.replace(
            stats,
            host_bytes=self.tiers.host.bytes,
            host_hit_tokens=self._host_hit_tokens,
            disk_hit_tokens=self._disk_hit_tokens,
        )
        if disk is None:
            return stats
        return msgspec.structs.replace(
            stats,
            disk_bytes=disk.bytes,
            corrupt_entries=disk.corrupt_entries,
            disk_failures=disk.failures,
            disk_paused=disk.health.is_paused,
        )

    def flush(self, seconds_left: Callable[[], float]) -> FlushResult | None:
        """Write to the disk what a restart could use until the time is over; None without a disk. A failed entry costs
        only itself. A flush that is cut short leaves only whole files."""
        disk = self.tiers.disk
        if disk is None:
            return None
        self.tiers.poll()
        states, blocks = self._blocks.newest()
        on_host = self.tiers.host.newest()
        states += [name.key for name in on_host if name.is_state]
        blocks += [name.key for name in on_host if not name.is_state]
        entries = total_bytes = written_bytes = left_out = 0
        now = time.time()
        order = order_by_value(states, blocks, self._parent)
        for names in (batch for prefix in order for batch in self._batches(prefix)):
            sizes = {name: disk.size_of(name) for name in names}
            entries += sum(size > 0 for size in sizes.values())
            total_bytes += sum(sizes.values())
            absent = [name for name, size in sizes.items() if not size]
            left_out += len(absent)
            if not absent or seconds_left() <= 0 or total_bytes >= disk.max_bytes:
                continue
            for entry in self._read_anywhere(absent):
                size = header_bytes(entry.content) + len(entry.payload)
                # An entry beyond the bound would push out what was written before it, and is worth more.
                fits = total_bytes + size <= disk.max_bytes
                if seconds_left() > 0 and fits and disk.write_now(entry, now - entries * _FILE_TIME_GAP_SECONDS):
                    entries, left_out = entries + 1, left_out - 1
                    total_bytes, written_bytes = total_bytes + size, written_bytes + size
        disk.finish(seconds_left())
        return FlushResult(entries, written_bytes, left_out)

    def _parent(self, key: BlockHash) -> BlockHash | None:
        if self._blocks.page(key) is not None:
            return self._events.content_of(key).parent
        entry = self.tiers.host.peek(EntryName(key))
        return entry.content.parent if entry is not None else None

    def _read_anywhere(self, names: Sequence[EntryName]) -> Iterator[CacheEntry]:
        """Read entries from the device and then from host memory; skip missing ones."""
        pages = {name: self._blocks.pages_of(name.key, is_state=name.is_state) for name in names}
        on_device = self._read({name: found for name, found in pages.items() if found})
        for name, found in pages.items():
            entry = next(on_device) if found else self.tiers.host.peek(name)
            if entry is not None:
                yield entry

    def _missing(self, chain: Sequence[BlockHash], match: Match) -> list[EntryName]:
        """Return the entries that the device lacks of the longest match of device and tiers together."""
        blocks, tiers = self._blocks, self.tiers
        absent: list[EntryName] = []
        missing: list[EntryName] = []
        for length, key in enumerate(chain, 1):
            if blocks.page(key) is None:
                if EntryName(key) not in tiers:
                    break
                absent.append(EntryName(key))
            if length <= match.state_blocks:
                continue
            if not self._geometry.pages_per_state or blocks.has_state(key):
                missing = absent[:]
            elif EntryName(key, True) in tiers:
                missing = [*absent, EntryName(key, True)]
        return missing

    def _adopt(self, load: PrefixLoad, entries: dict[EntryName, CacheEntry]) -> None:
        blocks, chain = self._blocks, load.chain
        reached = list(takewhile(lambda key: blocks.page(key) is not None or EntryName(key) in entries, chain))
        here = [page for key in reached if (page := blocks.page(key)) is not None]
        # Held meanwhile, and the tail first: a chain's head must not be evicted for its tail, now or later.
        blocks.hold(here)
        for key in reversed(reached):
            self._allocate(entries.get(EntryName(key)))
        blocks.release(here)
        for key in reached:
            self._allocate(entries.get(EntryName(key, True)))
        self._write_loaded()
        gained_blocks = max(0, blocks.match(chain, len(chain)).state_blocks - load.cached_blocks)
        if load.fetch.reading is None:
            self._host_hit_tokens += gained_blocks * self._geometry.page_tokens
        else:
            self._disk_hit_tokens += gained_blocks * self._geometry.page_tokens

    def _allocate(self, entry: CacheEntry | None) -> None:
        # Pages may have had another size when the entry was written.
        if entry is None or len(entry.payload) != self._size(entry.name):
            return
        key = entry.name.key
        pages = self._blocks.adopt_state(key) if entry.name.is_state else self._blocks.adopt_block(key)
        if pages is None:
            return
        self._events.record_adopted(entry.name, entry.content)
        self._unwritten[entry.name] = pages, entry.payload

    def _write_loaded(self) -> None:
        for names in self._batches(self._unwritten):
            entries = [self._unwritten[name] for name in names]
            self._memory.write_pages([page for pages, _ in entries for page in pages], [piece for _, piece in entries])
        self._unwritten.clear()

    def _read(self, pages: dict[EntryName, tuple[int, ...]]) -> Iterator[CacheEntry]:
        content = self._memory.read_pages([page for own in pages.values() for page in own])
        at = 0
        for name in pages:
            end = at + self._size(name)
            yield CacheEntry(name, self._events.content_of(name.key), bytearray(content[at:end]))
            at = end

    def _batches(self, names: Iterable[EntryName]) -> Iterator[list[EntryName]]:
        batch: list[EntryName] = []
        size = 0
        for name in names:
            if batch and size + self._size(name) > MAX_COPY_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(name)
            size += self._size(name)
        if batch:
            yield batch

    def _size(self, name: EntryName) -> int:
        return self._geometry.page_bytes * (self._geometry.pages_per_state if name.is_state else 1)


def order_by_value(
    states: Iterable[BlockHash], blocks: Iterable[BlockHash], parent: Callable[[BlockHash], BlockHash | None]
) -> Iterator[list[EntryName]]:
    """Yield all entries in lists that complete one prefix each; blocks without a state are last. `states` and `blocks`
    begin with the most recently used; `parent` returns None for a first or unknown block."""
    taken: set[BlockHash] = set()
    for state in dict.fromkeys(states):
        path: list[EntryName] = []
        key: BlockHash | None = state
        while key is not None and key not in taken:
            taken.add(key)
            path.append(EntryName(key))
            key = parent(key)
        yield [*reversed(path), EntryName(state, True)]
    yield [EntryName(key) for key in dict.fromkeys(blocks) if key not in taken]
