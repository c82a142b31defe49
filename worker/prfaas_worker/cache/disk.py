"""Keeps cache entries as files, the tier that outlives the process.

A file is written under a temporary name, synced and renamed. So a name belongs to a whole file or to none. Digests are
checked on every read; a damaged file is removed and counted, and the engine computes its tokens anew.

A write may fail because of its entry, as when its path is taken. Or it fails because of the whole disk, as when that is
full. The first costs only that entry. After the second the tier is only read for a while, then tried again, at growing
intervals. A disk that has room again needs no help.

One thread writes files and another reads them, each in the order of requests. The index belongs to the engine's thread,
which learns of results in `poll` and never waits. The directory belongs to one process.
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
from prfaas.util import Backoff
from prfaas_worker.cache.entries import (
    MAX_HEADER_BYTES,
    BlockContent,
    CacheEntry,
    EntryHeader,
    EntryName,
    check_payload,
    decode_header,
    encode_header,
    header_bytes,
)

log = logging.getLogger(__name__)

MAX_UNWRITTEN_BYTES: Final = 256 << 20
"""Bytes of entries that wait for the disk. Beyond it entries are dropped: a slow disk must not fill the memory."""
FIRST_PAUSE_SECONDS: Final = 1.0
MAX_PAUSE_SECONDS: Final = 60.0
_TEMPORARY: Final = ".tmp"
_NOT_THE_FILE: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_WHOLE_DISK: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENODEV, errno.ESTALE}
_MAX_ENTRY_FAILURES: Final = 3  # So many failures in a row count as the disk's.

OnDiskChange = Callable[[EntryName, BlockContent | None], None]
"""Gets an entry that became available, and its content, or None when it was removed."""


class LoadedEntries(NamedTuple):
    """The result of reading entries: the whole ones, the missing ones, and of these the damaged ones. `failures` counts
    the entries that the disk could not read."""

    entries: list[CacheEntry]
    gone: list[EntryName]
    damaged: list[EntryName]
    failures: int = 0


class DiskHealth:
    """Decides from the results of writes whether to write now, or to pause."""

    def __init__(self, root: Path, clock: Callable[[], float]):
        self._root, self._clock = root, clock
        self._failures = 0  # since the last write that succeeded
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, jitter=False)
        self._retry_at = 0.0

    @property
    def is_paused(self) -> bool:
        """True after a failed write, until one succeeds."""
        return self._backoff.failures > 0

    def can_write(self) -> bool:
        return not self.is_paused or self._clock() >= self._retry_at

    def succeeded(self) -> None:
        if self.is_paused:
            log.warning("The cache tier in %s can be written again", self._root)
        self._failures = 0
        self._backoff.succeeded()

    def failed(self, path: Path, error: OSError) -> None:
        if not self.can_write():  # it was on its way when an earlier one failed
            return
        self._failures += 1
        if error.errno not in _WHOLE_DISK and self._failures < _MAX_ENTRY_FAILURES and not self.is_paused:
            log.warning("Cache entry %s cannot be written, and is dropped: %s", path, error)
            return
        if not self.is_paused:
            log.warning(
                "The cache tier in %s cannot be written: the worker only reads it, and tries to write "
                "again at least once a minute: %s",
                self._root,
                error,
            )
        self._retry_at = self._clock() + self._backoff.failed()


class DiskTier:
    """Files of one model below a directory, at most so many bytes of them."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        fingerprint: str,
        on_change: OnDiskChange = lambda _, __: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._fingerprint = bytes.fromhex(fingerprint)
        self._root = directory / fingerprint[:16]
        self.max_bytes, self._on_change = max_bytes, on_change
        self._sizes: OrderedDict[EntryName, int] = OrderedDict()  # least recently used first
        self._writes: deque[tuple[CacheEntry, int, Future[OSError | None]]] = deque()
        self._unwritten: dict[EntryName, int] = {}
        self._serial = itertools.count()
        self.bytes = self.unwritten_bytes = self.corrupt_entries = self.failures = 0
        self._lock = _lock_directory(self._root)
        self.health = DiskHealth(self._root, clock)
        # `close` ends both: threads of an executor cannot be daemonic.
        self._writer = ThreadPoolExecutor(1, "cache-write")
        self._reader = ThreadPoolExecutor(1, "cache-read")
        self._scan()

    def __contains__(self, name: EntryName) -> bool:
        return name in self._sizes

    def accepts(self, size_bytes: int) -> bool:
        fits = size_bytes <= self.max_bytes and self.unwritten_bytes < MAX_UNWRITTEN_BYTES
        return fits and self.health.can_write()

    def touch(self, name: EntryName) -> bool:
        """Count an entry as used, if it is here or being written; return False if it is not."""
        if name in self._sizes:
            self._sizes.move_to_end(name)
        return name in self._sizes or name in self._unwritten

    def size_of(self, name: EntryName) -> int:
        """Return an entry's size, 0 if it is missing, and count the entry as used."""
        return (self._sizes.get(name) or self._unwritten.get(name, 0)) if self.touch(name) else 0

    def put(self, entry: CacheEntry) -> None:
        """Write an entry in the background, unless it exists or `accepts` refuses it."""
        size = MAX_HEADER_BYTES + len(entry.payload)  # an upper bound, until it is written
        if self.touch(entry.name) or not self.accepts(size):
            return
        self._unwritten[entry.name] = size
        self.unwritten_bytes += size
        self._writes.append((entry, size, self._writer.submit(self._write, entry)))

    def write_now(self, entry: CacheEntry, used_at: float) -> bool:
        """Write an entry without a sync, at the process's end, with `used_at` as its time. Return True if it is on the
        disk. Digests reveal bytes that a power loss kept from the disk."""
        if self.touch(entry.name):
            return True
        if not self.health.can_write():
            return False
        self._record_write(entry, self._write(entry, used_at))
        return entry.name in self._sizes

    def finish(self, seconds: float) -> None:
        wait([future for _, _, future in self._writes], timeout=max(0.0, seconds))
        self.poll()

    def load(self, names: list[EntryName]) -> "Future[LoadedEntries]":
        return self._reader.submit(self._read_all, names)

    def record_load(self, result: LoadedEntries) -> None:
        self.corrupt_entries += len(result.damaged)
        self.failures += result.failures
        for name in result.gone:
            if name in self._sizes:
                self._forget(name)
        for entry in result.entries:
            if entry.name in self._sizes:
                self._sizes.move_to_end(entry.name)

    def poll(self) -> None:
        while self._writes and self._writes[0][2].done():
            entry, size, future = self._writes.popleft()
            if self._unwritten.pop(entry.name, None) is None:  # forgotten meanwhile
                continue
            self.unwritten_bytes -= size
            self._record_write(entry, future.result())

    def clear(self) -> None:
        """Forget all entries; a thread removes their files."""
        paths = [self._path(name) for name in [*self._sizes, *self._unwritten]]
        self._unwritten.clear()
        self.unwritten_bytes = 0
        self._sizes.clear()
        self.bytes = 0
        self._writer.submit(_remove, paths)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.poll()
        os.close(self._lock)

    def _record_write(self, entry: CacheEntry, error: OSError | None) -> None:
        if error is not None:
            self.failures += 1
            self.health.failed(self._path(entry.name), error)
            return
        self.health.succeeded()
        self._index(entry.name, entry.content, header_bytes(entry.content) + len(entry.payload))

    def _index(self, name: EntryName, content: BlockContent, size: int) -> None:
        self._sizes[name] = size
        self.bytes += size
        self._on_change(name, content)
        while self.bytes > self.max_bytes:
            oldest = next(iter(self._sizes))
            self._forget(oldest)
            self._writer.submit(_remove, [self._path(oldest)])

    def _forget(self, name: EntryName) -> None:
        self.bytes -= self._sizes.pop(name)
        self._on_change(name, None)

    def _path(self, name: EntryName) -> Path:
        text = name.key.hex()
        return self._root / text[:2] / f"{text}.{'state' if name.is_state else 'block'}"

    def _scan(self) -> None:
        """Rebuild the index from the files' headers, oldest first."""
        found: list[tuple[float, EntryHeader, int]] = []
        for path in _entry_files(self._root):
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
            self._index(header.name, header.content, size)

    def _header(self, path: Path, size: int) -> EntryHeader:
        with path.open("rb") as file:
            header = decode_header(file.read(MAX_HEADER_BYTES), self._fingerprint, size)
        if path != self._path(header.name):
            raise ProtocolError("it has another entry's name")
        return header

    def _write(self, entry: CacheEntry, modified: float | None = None) -> OSError | None:
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

    def _read_all(self, names: list[EntryName]) -> LoadedEntries:
        entries: list[CacheEntry] = []
        gone: list[EntryName] = []
        damaged: list[EntryName] = []
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
                log.warning("Cache entry %s is gone: something else removed it", path)
                gone.append(name)
            except OSError as error:
                log.warning("Cache entry %s cannot be read: %s", path, error)
                failures += 1
                if error.errno not in _NOT_THE_FILE:
                    _remove([path])
                    gone.append(name)
        return LoadedEntries(entries, gone, damaged, failures)


def _lock_directory(root: Path) -> int:
    """Create, lock and tidy the directory; return the lock. Raises ConfigError if it cannot be had."""
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


def _entry_files(root: Path) -> Iterator[Path]:
    for folder in root.iterdir():
        try:
            if folder.is_dir():
                yield from (path for path in sorted(folder.iterdir()) if path.suffix in (".block", ".state"))
        except OSError as error:
            log.warning("Cache folder %s cannot be read: %s", folder, error)


def _read(path: Path, name: EntryName, fingerprint: bytes) -> CacheEntry:
    """Read and check a whole file; raises ProtocolError or OSError."""
    with path.open("rb", buffering=0) as file:
        header = decode_header(file.read(MAX_HEADER_BYTES), fingerprint, os.fstat(file.fileno()).st_size)
        file.seek(header.header_bytes)
        payload = bytearray(header.payload_bytes)  # read into, since a copy would hold up the engine's thread
        if file.readinto(payload) != len(payload):
            raise ProtocolError("it was cut short while it was read")
    if header.name != name:
        raise ProtocolError("it holds another entry")
    check_payload(header, payload)
    return CacheEntry(name, header.content, payload)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("Cache file %s cannot be removed: %s", path, error)
