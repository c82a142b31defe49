"""The bounds that all transfers of an instance share: egress, memory, and the FIFO order of threads that wait.

The egress cap is one token bucket for all connections that send:

    credit(t) = min(depth, credit(t0) + rate * (t - t0) - bytes granted since),    depth = 40 ms of the rate

In any window of T seconds at most rate * T + depth bytes are granted, 2 % too much in 2 s. A thread that wakes up to 30
ms late costs nothing, because the credit waited for it. Fair among connections: they wait in one queue. Each turn
grants at most 10 ms of the rate; then a connection is last again. With many in the queue turns are shorter. So each has
a turn in a quarter of a second and no peer takes the silence for an end. The cap counts what is given to TCP. Headers
below it (about 4 % at an MTU of 1,500) are extra.

The memory budget bounds what transfers use beside the cache: staging, buffers that TLS gathers in, room for codecs. A
connection's thread asks before it loads a frame and gives back when the frame is sent or placed. So a thousand
transfers over a slow link hold no more than the limit. A thread that holds some must not ask for more: two such threads
would wait for each other. So a thread asks once a frame, for all that the frame needs.
"""

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from prfaas.errors import CapacityError, PrfaasError
from prfaas.routing.compression import WireCodec
from prfaas.util import MIB, Deadline, LogOnce, RateBucket
from prfaas.wire.transfer import Buffer
from prfaas_transfer.compression import Packer
from prfaas_transfer.credentials import PeerCredentials
from prfaas_transfer.link_stats import BYTES_PER_MBIT, LinkMonitor
from prfaas_transfer.tls import PeerAuth, TlsAuth

log = logging.getLogger(__name__)

DEPTH_SECONDS: Final = 0.04
GRANT_SECONDS: Final = 0.01
ROUND_SECONDS: Final = 0.25
MIN_GRANT_BYTES: Final = 4096
_MIN_PAUSE_SECONDS: Final = 1e-6
POLL_SECONDS: Final = 1.0
MAX_MBPS: Final = 100_000_000
_MAX_BYTES: Final = 64


class StoppedError(PrfaasError):
    """The wait belonged to a transfer that was ended here."""


class Stop:
    """Ends all waits of a transfer. Any thread sets it, once; the waiting threads release what they hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._wakes: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """End all waits, present and later; further calls change nothing."""
        with self._lock:
            self._is_set = True
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` from the thread that sets this, if it is set while the block runs."""
        with self._lock:
            self._wakes.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakes.remove(wake)


class Fifo:
    """Lets threads through one at a time, in order of arrival, under one lock.

    No wake-up is lost: every departure wakes the thread that is first then, and only the first checks. The facts that
    let the first thread go change under `lock` only, and then `wake` is due.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._places: deque[threading.Condition] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def wake(self) -> None:
        if self._places:
            self._places[0].notify()

    @contextmanager
    def turn(self, delay_seconds: Callable[[], float], stop: Stop, timeout_seconds: float = math.inf) -> Iterator[None]:
        """Wait until first and allowed, then run the block under `lock`. The first calls `delay_seconds` there: 0 lets
        it go, else it asks again after that or a `wake`. Raises StoppedError if `stop` was set, or TimeoutError."""
        place = threading.Condition(self.lock)
        with stop.waking(lambda: self._wake_place(place)), self.lock:
            self._places.append(place)
            try:
                self._await(place, delay_seconds, stop, Deadline(timeout_seconds))
                yield
            finally:
                self._places.remove(place)
                self.wake()

    def _await(
        self, place: threading.Condition, delay_seconds: Callable[[], float], stop: Stop, deadline: Deadline
    ) -> None:
        while True:
            if stop.is_set:
                raise StoppedError("the transfer was ended here")
            # Who is not first needs no timer: every departure wakes the new first one.
            pause_seconds = delay_seconds() if self._places[0] is place else math.inf
            if pause_seconds <= 0:
                return
            left_seconds = deadline.left_seconds
            if left_seconds <= 0:
                raise TimeoutError(f"still queued behind {self._places.index(place)} others")
            pause_seconds = min(pause_seconds, left_seconds)
            place.wait(None if math.isinf(pause_seconds) else pause_seconds)

    def _wake_place(self, place: threading.Condition) -> None:
        with self.lock:
            place.notify()


class MemoryBudget:
    """At most `limit_bytes` held at a time, granted in order of arrival; a larger request is served by itself."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._fifo = Fifo()

    @property
    def waiting(self) -> int:
        return len(self._fifo)

    def acquire(self, count_bytes: int, stop: Stop, timeout_seconds: float = math.inf) -> None:
        """Wait until so many bytes may be held; `release` returns them. Raises StoppedError if `stop` was set,
        CapacityError after `timeout_seconds`. Nothing is held then."""
        if not count_bytes:
            return
        try:
            with self._fifo.turn(lambda: self._delay_seconds(count_bytes), stop, timeout_seconds):
                self.used_bytes += count_bytes
        except TimeoutError as error:
            raise CapacityError(
                f"no {count_bytes} of the {self.limit_bytes} bytes for transfers became free within "
                f"{timeout_seconds} s ({error}): raise --transfer-memory-mib, or see which peers are slow"
            ) from error

    def release(self, count_bytes: int) -> None:
        with self._fifo.lock:
            self.used_bytes -= count_bytes
            self._fifo.wake()

    def _delay_seconds(self, count_bytes: int) -> float:
        fits = self.used_bytes + count_bytes <= self.limit_bytes or not self.used_bytes
        return 0.0 if fits else math.inf


class EgressCredit(RateBucket):
    """The bytes that may be sent now: a bucket that starts empty, and the limit of one turn."""

    def __init__(self, rate_bytes_per_second: float, now_seconds: float):
        depth_bytes = max(MIN_GRANT_BYTES, rate_bytes_per_second * DEPTH_SECONDS)
        # A change of the cap makes a new bucket. If it were full, each change would be a burst.
        super().__init__(rate_bytes_per_second, depth_bytes, now_seconds, level=0.0)

    def grant_bytes(self, waiting: int) -> int:
        seconds = min(GRANT_SECONDS, ROUND_SECONDS / max(1, waiting))
        return int(max(MIN_GRANT_BYTES, self.rate_per_second * seconds))

    def delay_seconds(self, amount: float, now_seconds: float) -> float:
        """Return the time until there is credit for so many bytes, 0 if there is."""
        seconds = super().delay_seconds(amount, now_seconds)
        return max(seconds, _MIN_PAUSE_SECONDS) if seconds > 0 else 0.0


class EgressBucket:
    """Lets connections send `mbps` million bits a second together; None means no limit. The threads of connections call
    it. It holds no lock while it waits, and waits for nothing but time."""

    def __init__(self, mbps: int | None = None):
        self.mbps: int | None = None
        self._fifo = Fifo()
        self._credit: EgressCredit | None = None
        self.set_mbps(mbps)

    def set_mbps(self, mbps: int | None) -> None:
        """Change the cap, also for waiting threads. The credit of the old cap is lost."""
        with self._fifo.lock:
            if mbps != self.mbps:
                self.mbps = mbps
                self._credit = None if mbps is None else EgressCredit(mbps * BYTES_PER_MBIT, time.monotonic())
                self._fifo.wake()

    def portions(self, parts: Sequence[Buffer], stop: Stop) -> Iterator[list[memoryview]]:
        """Yield all parts, without a copy, in portions that may be sent when they are yielded; all at once without a
        cap. Raises StoppedError if `stop` was set, and there is a cap."""
        whole = [memoryview(part) for part in parts if len(part)]
        if self._credit is None:
            if whole:
                yield whole
            return
        left = deque(whole)
        left_bytes = sum(map(len, left))
        while left_bytes:
            granted = self.take(left_bytes, stop)
            left_bytes -= granted
            yield _cut(left, granted)

    def take(self, count_bytes: int, stop: Stop) -> int:
        """Wait until some bytes may be sent; return how many, at least 1. Raises StoppedError if `stop` was set."""
        if self._credit is None:
            return count_bytes
        with self._fifo.turn(lambda: self._delay_seconds(count_bytes), stop):
            if self._credit is None:
                return count_bytes
            granted = min(count_bytes, self._credit.grant_bytes(len(self._fifo)))
            self._credit.take(granted, time.monotonic())
            return granted

    def _delay_seconds(self, count_bytes: int) -> float:
        credit = self._credit
        if credit is None:
            return 0.0
        return credit.delay_seconds(min(count_bytes, credit.grant_bytes(len(self._fifo))), time.monotonic())


def _cut(left: deque[memoryview], count_bytes: int) -> list[memoryview]:
    """Remove the first bytes from `left`, as views."""
    portion: list[memoryview] = []
    while count_bytes:
        part = left.popleft()
        portion.append(part[:count_bytes])
        if len(part) > count_bytes:
            left.appendleft(part[count_bytes:])
        count_bytes -= len(portion[-1])
    return portion


class EgressFile:
    """Keeps a bucket at its part of the file's Mbit/s, a whole number from 1; at `otherwise` without the file."""

    def __init__(self, path: Path, bucket: EgressBucket, otherwise: int | None, parts: int = 1):
        self._path = path
        self._bucket = bucket
        self._otherwise = otherwise
        self._parts = parts
        self._seen: bytes | None = None
        self._problems = LogOnce(log)
        self.look()

    def start(self) -> None:
        threading.Thread(target=self._run, name="egress-file", daemon=True).start()

    def look(self) -> None:
        """Read the file and apply a change. A value that is no number is only logged."""
        try:
            found = self._read()
        except OSError as error:
            self._problems.failed("egress file", f"egress file {self._path} cannot be read, the cap stays: {error}")
            return
        self._problems.worked("egress file")
        if found == self._seen:
            return
        self._seen = found
        text = b"" if found is None else found.strip()
        if found is not None and not (text.isdigit() and 1 <= int(text) <= MAX_MBPS):
            log.error(
                "egress file %s holds %r, the cap stays %s: write Mbit/s as a whole number from 1 to %d",
                *(self._path, text, self._bucket.mbps, MAX_MBPS),
            )
            return
        self._bucket.set_mbps(self._otherwise if found is None else _part_of(int(text), self._parts))
        log.info("egress cap: %s Mbit/s", self._bucket.mbps)

    def _read(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                return file.read(_MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _run(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            self.look()


class Traffic(NamedTuple):
    """An engine process's limits and measurements, one of each, for all its transfers."""

    monitor: LinkMonitor
    egress: EgressBucket
    memory: MemoryBudget
    packer: Packer
    auth: PeerAuth


class TrafficOptions(Protocol):
    """The options of an engine that its transfers obey; empty paths and an egress of 0 mean without."""

    @property
    def tls_dir(self) -> str: ...
    @property
    def egress_mbps(self) -> int: ...
    @property
    def egress_file(self) -> str: ...
    @property
    def transfer_memory_mib(self) -> int: ...
    @property
    def wire_codec(self) -> WireCodec: ...


def traffic_of(options: TrafficOptions, processes: int = 1) -> Traffic:
    """Return the options' limits; follow the cap's file. Of an egress cap that several processes of an instance have
    together, each gets an equal part. Raises ConfigError for unusable credentials."""
    mbps = _part_of(options.egress_mbps, processes) if options.egress_mbps else None
    egress = EgressBucket(mbps)
    if options.egress_file:
        EgressFile(Path(options.egress_file), egress, mbps, processes).start()
    memory_bytes = options.transfer_memory_mib * MIB
    monitor = LinkMonitor()
    auth = TlsAuth(PeerCredentials(Path(options.tls_dir))) if options.tls_dir else PeerAuth()
    return Traffic(monitor, egress, MemoryBudget(memory_bytes), Packer(options.wire_codec, monitor), auth)


def _part_of(mbps: int, parts: int) -> int:
    return max(1, mbps // parts)


def unlimited() -> Traffic:
    """Return limits that never delay anything."""
    monitor = LinkMonitor()
    return Traffic(monitor, EgressBucket(), MemoryBudget(sys.maxsize), Packer("none", monitor), PeerAuth())
