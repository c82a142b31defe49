"""Small mechanisms for every deployable: deadline, rate bucket, back-off, whole and watched files, logging once, JSON,
and the networks of clients.

None waits or decides: the caller does.
"""

import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Iterable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from prfaas.errors import UNREADABLE, ProtocolError

T = TypeVar("T")
Stamp = tuple[int, int, int]
MIB: Final = 1 << 20


class Deadline:
    """A deadline on a monotonic clock; `renew` moves it, from any thread."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.renew(seconds)

    @property
    def left_seconds(self) -> float:
        return self._at - self._clock()

    @property
    def is_over(self) -> bool:
        return self.left_seconds < 0

    def renew(self, seconds: float) -> None:
        self._at = self._clock() + seconds


class RateBucket:
    """A token bucket: `rate_per_second` refills it up to `depth`. It may be overdrawn; it then refills from below zero.

    The unit is the caller's, the clock a monotonic one. It holds `level` at first; full when None.
    """

    def __init__(self, rate_per_second: float, depth: float, now_seconds: float, level: float | None = None):
        self.rate_per_second = rate_per_second
        self.depth = depth
        self._level = depth if level is None else level
        self._at_seconds = now_seconds

    def level(self, now_seconds: float) -> float:
        """Return the level now. A clock that went back adds nothing."""
        refilled = max(0.0, now_seconds - self._at_seconds) * self.rate_per_second
        return min(self.depth, self._level + refilled)

    def delay_seconds(self, amount: float, now_seconds: float) -> float:
        """Return the seconds until the bucket holds `amount`. `amount` may not exceed the depth."""
        return max(0.0, amount - self.level(now_seconds)) / self.rate_per_second

    def take(self, amount: float, now_seconds: float) -> None:
        """Take `amount` out, even below zero; a negative amount adds."""
        self._level = min(self.depth, self.level(now_seconds) - amount)
        self._at_seconds = max(self._at_seconds, now_seconds)


def backoff_seconds(failures: int, first_seconds: float, max_seconds: float, *, jitter: bool = True) -> float:
    """Return the pause after `failures` failures in a row: it doubles from `first_seconds` up to `max_seconds`.

    Jitter multiplies the pause by a random factor in [0.5, 1), so that a server's clients do not all return at once.
    """
    pause_seconds = min(max_seconds, first_seconds * 2 ** min(max(failures, 1) - 1, 30))
    return pause_seconds * random.uniform(0.5, 1.0) if jitter else pause_seconds  # noqa: S311  # spreads retries


class Backoff:
    """The pauses between attempts of one thing that keeps failing."""

    def __init__(self, first_seconds: float, max_seconds: float):
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self.failures = 0

    def failed(self) -> float:
        """Count one more failure; return the pause before the next attempt."""
        self.failures += 1
        return backoff_seconds(self.failures, self._first_seconds, self._max_seconds)

    def succeeded(self) -> None:
        """Begin again with the shortest pause."""
        self.failures = 0


def retry_after_seconds(text: str | None) -> float:
    """Return the seconds of a Retry-After header, a million at most; one if it is missing or a date."""
    return min(float(text), 1e6) if text and text.isdecimal() else 1.0


def network_of(host: str) -> str:
    """Return the address of a client; of IPv6 the network, since a client has a whole one."""
    address = ip_address(host.partition("%")[0])
    return address.exploded[:19] if isinstance(address, IPv6Address) and address.ipv4_mapped is None else host


def file_stamp(file: Path | os.DirEntry[str]) -> Stamp | None:
    """Return a value that changes when the file is written or replaced, through symlinks; None if it is missing."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def decode_json(document: bytes | bytearray | memoryview | msgspec.Raw, kind: type[T], what: str, hint: str = "") -> T:
    """Read JSON as `kind`; raise ProtocolError for anything else: `what`, the reason, and the hint."""
    try:
        return msgspec.json.decode(document, type=kind)
    except UNREADABLE as error:
        raise ProtocolError(f"{what}: {error}{hint}") from error


def check_values(document: bytes | bytearray, most: int, what: str) -> None:
    """Raise ProtocolError for JSON of too many values, each of which would take many times its own bytes.

    All marks before a value count, in its texts, too.
    """
    if len(document) > most and count_marks(document) > most:
        raise ProtocolError(f"{what} of more than {most} values")


def count_marks(document: bytes | bytearray) -> int:
    """Return how many marks JSON has that stand before a value, in its texts, too: its values are hardly more."""
    return sum(map(document.count, (b",", b"[", b"{")))


def replace_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file so that a reader sees it whole, old or new, also after a crash. No mode: 0644, less the umask."""
    new = path.with_name(f".{secrets.token_hex(8)}")  # a name may be as long as the file system takes
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if mode else 0o644), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


class WatchedFiles:
    """Detects changes of files since the last look."""

    def __init__(self, paths: Iterable[Path]):
        self._paths = tuple(paths)
        self._stamps: tuple[Stamp | None, ...] | None = None

    def changed(self) -> bool:
        """Return whether a file changed since the last call; the first call returns True."""
        stamps = tuple(file_stamp(path) for path in self._paths)
        is_new = stamps != self._stamps
        self._stamps = stamps
        return is_new


class LogOnce:
    """Logs a repeated failure once, and its end once."""

    def __init__(self, log: logging.Logger):
        self._log = log
        self._failing: dict[str, object] = {}

    def failed(self, what: str, message: str, *, reason: object = None, level: int = logging.WARNING) -> bool:
        """Log `message` and return True, unless `what` failed last for the same reason (by default: same message)."""
        reason = message if reason is None else reason
        if self._failing.get(what) == reason:
            return False
        self._failing[what] = reason
        self._log.log(level, "%s", message)
        return True

    def worked(self, what: str, message: str = "") -> None:
        """Log `message` (or "WHAT works again") if `what` failed before."""
        if self._failing.pop(what, None) is not None:
            self._log.info("%s", message or f"{what} works again")

    def forget(self, what: str) -> None:
        """Forget a `what` that is gone, and log nothing."""
        self._failing.pop(what, None)

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget every `what` that is not in `names`."""
        kept = set(names)
        self._failing = {what: reason for what, reason in self._failing.items() if what in kept}
