"""The lowest tier: cache entries as files, which outlive the process.

A file is written under a temporary name, synced and renamed, so a name stands for a whole file or for none; what is
read is checked against its digests, and what fails is removed, counted and computed anew. An entry that cannot be
written or read costs itself alone; while the whole disk is full or cannot be written the tier is read alone.

Files are written by one thread and read by another, each in the order in which it was asked; the index belongs to the
engine's thread alone, which learns of results in `poll` and never waits. The directory belongs to one process.
"""

import errno
import fcntl
import itertools
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, NamedTuple

from prfaas.errors import ConfigError, ProtocolError
from prfaas_worker.cache.condition import Condition
from prfaas_worker.cache.entries import (
    MAX_HEADER_BYTES,
    About,
    Entry,
    Header,
    Name,
    check_payload,
    decode_header,
    encode_header,
    header_bytes,
)

log = logging.getLogger(__name__)

MAX_UNWRITTEN_BYTES: Final = 256 << 20
"""Entries that wait for the disk; what comes on top is dropped, since a slow disk must not eat the memory."""
_TEMPORARY: Final = ".tmp"
_NO_FAULT_OF_THE_FILE: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}

OnChange = Callable[[Name, About | None], None]
"""Told of an entry that became available, with what it holds, or that is gone."""


class Loaded(NamedTuple):
    """What came of reading entries: those that were whole, those that are gone, and of these the damaged ones.

    `failures` counts those that the disk could not read, whatever is in them.
    """

    entries: list[Entry]
    gone: list[Name]
    damaged: list[Name]
    failures: int = 0


class DiskTier:
    """Files of one model below a directory, at most so many bytes of them."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        fingerprint: str,
        on_change: OnChange = lambda _, __: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._fingerprint = bytes.fromhex(fingerprint)
        self._root = directory / fingerprint[:16]
        self._max_bytes, self._on_change = max_bytes, on_change
        self._sizes: OrderedDict[Name, int] = OrderedDict()  # least recently used first
        self._writes: deque[tuple[Entry, int, Future[OSError | None]]] = deque()
        self._unwritten: dict[Name, int] = {}
        self._serial = itertools.count()
        self.bytes = self.unwritten_bytes = self.corrupt_entries = self.failures = 0
        self._lock = _own(self._root)
        self._condition = Condition(self._root, clock)
        # Daemonic threads are not to be had here: `close` ends both.
        self._writer = ThreadPoolExecutor(1, "cache-write")
        self._reader = ThreadPoolExecutor(1, "cache-read")
        self._scan()

    def __contains__(self, name: Name) -> bool:
        return name in self._sizes

    @property
    def max_bytes(self) -> int:
        """Bytes of files that are kept at most."""
        return self._max_bytes

    @property
    def is_paused(self) -> bool:
        """The disk could not be written, and nothing has been written since."""
        return self._condition.is_paused

    def takes(self, size_bytes: int) -> bool:
        """Tell whether an entry of this size would be written."""
        fits = size_bytes <= self._max_bytes and self.unwritten_bytes < MAX_UNWRITTEN_BYTES
        return fits and self._condition.takes()

    def knows(self, name: Name) -> bool:
        """Tell whether an entry is here or about to be; if so, it was just of use."""
        if name in self._sizes:
            self._sizes.move_to_end(name)
        return name in self._sizes or name in self._unwritten

    def holds(self, name: Name) -> int:
        """Return the bytes of an entry that is here or about to be, 0 for any other; if so, it was just of use."""
        return (self._sizes.get(name) or self._unwritten.get(name, 0)) if self.knows(name) else 0

    def put(self, entry: Entry) -> None:
        """Write an entry in the background, unless it is here already or `takes` says no."""
        size = MAX_HEADER_BYTES + len(entry.payload)  # an upper bound, until it is written
        if self.knows(entry.name) or not self.takes(size):
            return
        self._unwritten[entry.name] = size
        self.unwritten_bytes += size
        self._writes.append((entry, size, self._writer.submit(self._write, entry)))

    def keep(self, entry: Entry, used_at: float) -> bool:
        """Write an entry now, as the process ends: as if it had last been of use then, and not waiting for the disk.

        What the machine loses with its power before it is there is told by the digests. Tells whether it stands here.
        """
        if self.knows(entry.name):
            return True
        if not self._condition.takes():
            return False
        self._wrote(entry, self._write(entry, used_at))
        return entry.name in self._sizes

    def finish(self, seconds: float) -> None:
        """Wait for what is being written, for so long at most."""
        wait([future for _, _, future in self._writes], timeout=max(0.0, seconds))
        self.poll()

    def load(self, names: list[Name]) -> "Future[Loaded]":
        """Read entries in the background; `loaded` is to be told of the outcome."""
        return self._reader.submit(self._read_all, names)

    def loaded(self, result: Loaded) -> None:
        """Take note of what a load found."""
        self.corrupt_entries += len(result.damaged)
        self.failures += result.failures
        for name in result.gone:
            if name in self._sizes:
                self._forget(name)
        for entry in result.entries:
            if entry.name in self._sizes:
                self._sizes.move_to_end(entry.name)

    def poll(self) -> None:
        """Take note of what was written since."""
        while self._writes and self._writes[0][2].done():
            entry, size, future = self._writes.popleft()
            if self._unwritten.pop(entry.name, None) is None:  # forgotten meanwhile
                continue
            self.unwritten_bytes -= size
            self._wrote(entry, future.result())

    def clear(self) -> None:
        """Forget all entries; their files go in the background."""
        paths = [self._path(name) for name in [*self._sizes, *self._unwritten]]
        self._unwritten.clear()
        self.unwritten_bytes = 0
        self._sizes.clear()
        self.bytes = 0
        self._writer.submit(_remove, paths)

    def close(self) -> None:
        """Finish what is being written, and let go of the directory."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.poll()
        os.close(self._lock)

    def _wrote(self, entry: Entry, error: OSError | None) -> None:
        if error is not None:
            self.failures += 1
            self._condition.failed(self._path(entry.name), error)
            return
        self._condition.wrote()
        self._note(entry.name, entry.about, header_bytes(entry.about) + len(entry.payload))

    def _note(self, name: Name, about: About, size: int) -> None:
        """Enter an entry's file into the index, and remove the least recently used while there is too much."""
        self._sizes[name] = size
        self.bytes += size
        self._on_change(name, about)
        while self.bytes > self._max_bytes:
            oldest = next(iter(self._sizes))
            self._forget(oldest)
            self._writer.submit(_remove, [self._path(oldest)])

    def _forget(self, name: Name) -> None:
        self.bytes -= self._sizes.pop(name)
        self._on_change(name, None)

    def _path(self, name: Name) -> Path:
        text = name.key.hex()
        return self._root / text[:2] / f"{text}.{'state' if name.is_state else 'block'}"

    def _scan(self) -> None:
        """Rebuild the index from the files' headers, least recently written first."""
        found: list[tuple[float, Header, int]] = []
        for path in _files(self._root):
            try:
                status = path.stat()
                found.append((status.st_mtime, self._header(path, status.st_size), status.st_size))
            except ProtocolError as error:
                self.corrupt_entries += 1
                log.warning("Cache entry %s is not used: %s", path, error)
                _remove([path])
            except OSError as error:
                log.warning("Cache entry %s cannot be read: %s", path, error)
        for _, header, size in sorted(found, key=lambda one: one[0]):
            self._note(header.name, header.about, size)

    def _header(self, path: Path, size: int) -> Header:
        with path.open("rb") as file:
            header = decode_header(file.read(MAX_HEADER_BYTES), self._fingerprint, size)
        if path != self._path(header.name):
            raise ProtocolError("it has another entry's name")
        return header

    def _write(self, entry: Entry, modified: float | None = None) -> OSError | None:
        """Write a file, in any thread: synced, or with a time of its own."""
        path, temporary = self._path(entry.name), self._root / f"{next(self._serial)}{_TEMPORARY}"
        try:
            path.parent.mkdir(exist_ok=True)
            with temporary.open("wb") as file:
                file.write(encode_header(self._fingerprint, entry))
                file.write(entry.payload)
                file.flush()
                if modified is None:
                    os.fsync(file.fileno())
            if modified is not None:
                os.utime(temporary, (modified, modified))
            temporary.replace(path)
        except OSError as error:
            _remove([temporary])
            return error
        return None

    def _read_all(self, names: list[Name]) -> Loaded:
        entries: list[Entry] = []
        gone: list[Name] = []
        damaged: list[Name] = []
        failures = 0
        for name in names:
            path = self._path(name)
            try:
                entries.append(_read(path, name, self._fingerprint))
            except ProtocolError as error:
                log.warning("Cache entry %s is not used: %s", path, error)
                _remove([path])
                damaged.append(name)
                gone.append(name)
            except FileNotFoundError:
                log.warning("Cache entry %s is gone: somebody else removed it", path)
                gone.append(name)
            except OSError as error:
                log.warning("Cache entry %s cannot be read: %s", path, error)
                failures += 1
                if error.errno not in _NO_FAULT_OF_THE_FILE:
                    _remove([path])
                    gone.append(name)
        return Loaded(entries, gone, damaged, failures)


def _own(root: Path) -> int:
    """Make the directory this process's own, and remove what an earlier one left half written.

    Raises:
        ConfigError: it cannot be made, or another process has it.

    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"the disk cache {root} cannot be used: {error}; give a writable directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(f"the disk cache {root} is another worker's; give each its own directory") from error
    _remove(root.glob(f"*{_TEMPORARY}"))
    return lock


def _files(root: Path) -> Iterator[Path]:
    for folder in root.iterdir():
        try:
            if folder.is_dir():
                yield from (path for path in sorted(folder.iterdir()) if path.suffix in (".block", ".state"))
        except OSError as error:
            log.warning("Cache folder %s cannot be read: %s", folder, error)


def _read(path: Path, name: Name, fingerprint: bytes) -> Entry:
    """Read a file and check it wholly; raises ProtocolError or OSError."""
    with path.open("rb", buffering=0) as file:
        header = decode_header(file.read(MAX_HEADER_BYTES), fingerprint, os.fstat(file.fileno()).st_size)
        file.seek(header.header_bytes)
        payload = bytearray(header.payload_bytes)  # read into, since a copy would hold up the engine's thread
        if file.readinto(payload) != len(payload):
            raise ProtocolError("it was cut short while it was read")
    if header.name != name:
        raise ProtocolError("it holds another entry")
    check_payload(header, payload)
    return Entry(name, header.about, payload)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("Cache file %s cannot be removed: %s", path, error)
