"""The tiers below the device: what the pool gives up goes to host memory, and what falls out of that goes to disk.

Both are bounded by bytes and least recently used first. An entry may stand in several tiers: what came back from the
disk stays there, so giving it up again costs nothing. Host memory answers at once; the disk is read by a thread, in the
order of requests, so a `Fetch` is done when its entries, and those that earlier ones read for it, are there.

On a CPU device memory is host memory, so the host tier makes sense beside an accelerator alone.

Used from the engine's thread; nothing here waits for a disk.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas_worker.cache.disk import DiskTier, Loaded
from prfaas_worker.cache.entries import About, Entry, Name

Tier = Literal["host", "disk"]
OnChange = Callable[[Name, Tier, About | None], None]
"""Told of an entry that became available in a tier, with what it holds, or that is gone from there."""


@dataclass(slots=True, eq=False)
class Fetch:
    """Entries on their way to the device."""

    ready: list[Entry]
    from_disk: frozenset[Name]
    reading: "Future[Loaded] | None"

    def done(self) -> bool:
        """Tell whether nothing is left to wait for."""
        return self.reading is None or self.reading.done()


class HostTier:
    """Entries in host memory, at most so many bytes of them."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Name, Entry] = OrderedDict()
        self.bytes = 0

    def __contains__(self, name: Name) -> bool:
        return name in self._entries

    def takes(self, size_bytes: int) -> bool:
        """Tell whether an entry of this size would be kept."""
        return size_bytes <= self._max_bytes

    def get(self, name: Name) -> Entry | None:
        """Return an entry, which was of use just now."""
        if name in self._entries:
            self._entries.move_to_end(name)
        return self._entries.get(name)

    def peek(self, name: Name) -> Entry | None:
        """Return an entry, which is not of use by that."""
        return self._entries.get(name)

    def newest(self) -> list[Name]:
        """Return all names, from the last to the first that would have to go."""
        return list(reversed(self._entries))

    def put(self, entry: Entry) -> list[Entry]:
        """Keep an entry that `takes` said yes to; returns those that had to go for it."""
        self._entries[entry.name] = entry
        self.bytes += len(entry.payload)
        gone: list[Entry] = []
        while self.bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= len(oldest.payload)
            gone.append(oldest)
        return gone

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()
        self.bytes = 0


class Tiers:
    """Host memory over a disk, either of which may be absent."""

    def __init__(
        self, fingerprint: str, *, host_bytes: int = 0, disk_directory: Path | None = None, disk_bytes: int = 0
    ):
        """Open the tiers of the model with this fingerprint.

        Raises:
            ConfigError: the directory cannot be used, or another process has it.

        """
        self.on_change: OnChange = lambda *_: None
        self._host = HostTier(host_bytes)
        self._found_on_disk: list[tuple[Name, About]] = []
        self._disk = None
        if disk_directory is not None:
            self._disk = DiskTier(disk_directory, disk_bytes, fingerprint, self._disk_changed)
        self._fetches: list[Fetch] = []

    @property
    def host_bytes(self) -> int:
        """Payload bytes in host memory."""
        return self._host.bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of files."""
        return self._disk.bytes if self._disk else 0

    @property
    def corrupt_entries(self) -> int:
        """Files that were not what they should be, and were removed."""
        return self._disk.corrupt_entries if self._disk else 0

    @property
    def failures(self) -> int:
        """Entries that the disk could not write or read."""
        return self._disk.failures if self._disk else 0

    @property
    def is_paused(self) -> bool:
        """The disk takes no new entries, since it could not be written."""
        return self._disk is not None and self._disk.is_paused

    @property
    def disk(self) -> DiskTier | None:
        """The tier that outlives the process."""
        return self._disk

    def listen(self, on_change: OnChange) -> None:
        """Tell of every change from now on, and first of what the disk kept from before."""
        self.on_change = on_change
        for name, about in self._found_on_disk:
            if name in self:
                on_change(name, "disk", about)
        self._found_on_disk.clear()

    def __contains__(self, name: Name) -> bool:
        return name in self._host or (self._disk is not None and name in self._disk)

    def wants(self, name: Name, size_bytes: int) -> bool:
        """Tell whether an entry that the device gives up should be put here; if it is here, it was just of use."""
        if self._host.get(name) is not None or (self._disk is not None and self._disk.knows(name)):
            return False
        return self._host.takes(size_bytes) or (self._disk is not None and self._disk.takes(size_bytes))

    def put(self, entry: Entry) -> None:
        """Keep an entry that `wants` said yes to."""
        if not self._host.takes(len(entry.payload)):
            self._to_disk(entry)
            return
        self.on_change(entry.name, "host", entry.about)
        for gone in self._host.put(entry):
            self._to_disk(gone)
            self.on_change(gone.name, "host", None)

    def fetch(self, names: Sequence[Name]) -> Fetch:
        """Start bringing entries that are here; `take` hands them out when that is done."""
        under_way = frozenset[Name]().union(*(fetch.from_disk for fetch in self._fetches))
        ready = [entry for name in names if (entry := self._host.get(name)) is not None]
        absent = {name for name in names if name not in self._host}
        wanted = [name for name in names if name in absent and name not in under_way]
        # One that only waits for others' entries still queues behind them, as the reader goes in order.
        reading = self._disk.load(wanted) if self._disk is not None and absent else None
        fetch = Fetch(ready, frozenset(wanted), reading)
        self._fetches.append(fetch)
        return fetch

    def take(self, fetch: Fetch) -> list[Entry]:
        """Hand out, once, what came of a fetch that is done: its whole entries."""
        self._fetches.remove(fetch)
        if fetch.reading is None or self._disk is None:
            return fetch.ready
        loaded = fetch.reading.result()
        self._disk.loaded(loaded)
        return [*fetch.ready, *loaded.entries]

    def poll(self) -> None:
        """Take note of what was written to the disk since."""
        if self._disk is not None:
            self._disk.poll()

    def on_host(self, name: Name) -> Entry | None:
        """Return an entry that stands in host memory."""
        return self._host.peek(name)

    def newest_on_host(self) -> list[Name]:
        """Return what stands in host memory, from the last to the first that would go."""
        return self._host.newest()

    def clear(self) -> None:
        """Forget all entries; what is on its way to the device is not to be taken any more."""
        self._fetches = []
        self._host.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """Finish what is being written, and let go of the disk."""
        if self._disk is not None:
            self._disk.close()

    def _to_disk(self, entry: Entry) -> None:
        if self._disk is not None:
            self._disk.put(entry)

    def _disk_changed(self, name: Name, about: About | None) -> None:
        if about is not None and self._disk is None:  # found while it was opened: nobody listens yet
            self._found_on_disk.append((name, about))
        else:
            self.on_change(name, "disk", about)
