"""Keeps evicted cache entries in host memory, and on disk what host memory evicts.

Both tiers are bounded by bytes and evict the least recently used entry first. An entry may be in several tiers. One
that was loaded from the disk stays there, so evicting it again costs nothing. Host memory answers at once. A thread
reads the disk in the order of requests. So a `TierFetch` is done when its entries, and those that earlier ones read for
it, are there.

On a CPU, device memory is host memory, so the host tier is of use beside an accelerator only.

Used from the engine's thread; nothing here waits for a disk.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas_worker.cache.disk import DiskTier, LoadedEntries
from prfaas_worker.cache.entries import BlockContent, CacheEntry, EntryName

Tier = Literal["host", "disk"]
OnTierChange = Callable[[EntryName, Tier, BlockContent | None], None]
"""Gets an entry that became available in a tier, and its content, or None when the tier lost it."""


@dataclass(slots=True, eq=False)
class TierFetch:
    ready: list[CacheEntry]
    from_disk: frozenset[EntryName]
    reading: "Future[LoadedEntries] | None"

    def done(self) -> bool:
        return self.reading is None or self.reading.done()


class HostTier:
    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[EntryName, CacheEntry] = OrderedDict()
        self.bytes = 0

    def __contains__(self, name: EntryName) -> bool:
        return name in self._entries

    def accepts(self, size_bytes: int) -> bool:
        return size_bytes <= self._max_bytes

    def get(self, name: EntryName) -> CacheEntry | None:
        if name in self._entries:
            self._entries.move_to_end(name)
        return self._entries.get(name)

    def peek(self, name: EntryName) -> CacheEntry | None:
        return self._entries.get(name)

    def newest(self) -> list[EntryName]:
        return list(reversed(self._entries))

    def put(self, entry: CacheEntry) -> list[CacheEntry]:
        """Keep an entry that `accepts` allowed; return the evicted entries."""
        self._entries[entry.name] = entry
        self.bytes += len(entry.payload)
        evicted: list[CacheEntry] = []
        while self.bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= len(oldest.payload)
            evicted.append(oldest)
        return evicted

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0


class Tiers:
    """Host memory over a disk; either may be absent. Raises ConfigError if the directory cannot be used."""

    def __init__(
        self, fingerprint: str, *, host_bytes: int = 0, disk_directory: Path | None = None, disk_bytes: int = 0
    ):
        self.host = HostTier(host_bytes)
        self.disk: DiskTier | None = None
        self._on_change: OnTierChange = lambda *_: None
        self._found_on_disk: list[tuple[EntryName, BlockContent]] = []
        self._fetches: list[TierFetch] = []
        if disk_directory is not None:
            self.disk = DiskTier(disk_directory, disk_bytes, fingerprint, self._report_disk)

    def listen(self, on_change: OnTierChange) -> None:
        """Call `on_change` for each entry already on the disk, then on every change."""
        self._on_change = on_change
        for name, content in self._found_on_disk:
            if name in self:
                on_change(name, "disk", content)
        self._found_on_disk.clear()

    def __contains__(self, name: EntryName) -> bool:
        return name in self.host or (self.disk is not None and name in self.disk)

    def wants(self, name: EntryName, size_bytes: int) -> bool:
        """Return True if an evicted entry should be put here; an entry that is here counts as used."""
        if self.host.get(name) is not None or (self.disk is not None and self.disk.touch(name)):
            return False
        return self.host.accepts(size_bytes) or (self.disk is not None and self.disk.accepts(size_bytes))

    def put(self, entry: CacheEntry) -> None:
        if not self.host.accepts(len(entry.payload)):
            self._put_on_disk(entry)
            return
        self._on_change(entry.name, "host", entry.content)
        for evicted in self.host.put(entry):
            self._put_on_disk(evicted)
            self._on_change(evicted.name, "host", None)

    def fetch(self, names: Sequence[EntryName]) -> TierFetch:
        """Start loading entries that are here; `take` returns them later."""
        under_way = frozenset[EntryName]().union(*(fetch.from_disk for fetch in self._fetches))
        ready = [entry for name in names if (entry := self.host.get(name)) is not None]
        absent = {name for name in names if name not in self.host}
        wanted = [name for name in names if name in absent and name not in under_way]
        # A fetch that only waits for others' entries still queues behind them, as the reader works in order.
        reading = self.disk.load(wanted) if self.disk is not None and absent else None
        fetch = TierFetch(ready, frozenset(wanted), reading)
        self._fetches.append(fetch)
        return fetch

    def take(self, fetch: TierFetch) -> list[CacheEntry]:
        """Return, once, the whole entries of a finished fetch."""
        self._fetches.remove(fetch)
        if fetch.reading is None or self.disk is None:
            return fetch.ready
        loaded = fetch.reading.result()
        self.disk.record_load(loaded)
        return [*fetch.ready, *loaded.entries]

    def poll(self) -> None:
        if self.disk is not None:
            self.disk.poll()

    def clear(self) -> None:
        self._fetches = []
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()

    def _put_on_disk(self, entry: CacheEntry) -> None:
        if self.disk is not None:
            self.disk.put(entry)

    def _report_disk(self, name: EntryName, content: BlockContent | None) -> None:
        if content is not None and self.disk is None:  # found while it was opened: no listener yet
            self._found_on_disk.append((name, content))
        else:
            self._on_change(name, "disk", content)
