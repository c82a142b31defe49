"""The egress cap: one token bucket for all connections of an instance that send.

    credit(t) = min(depth, credit(t0) + rate * (t - t0) - bytes granted since),    depth = 40 ms of the rate

In any window of T seconds at most rate * T + depth bytes are granted, 2 % too much in 2 s; and a thread that wakes up
to 30 ms late costs nothing, because the credit waited for it. Fair among connections: they wait in one line, and each
turn grants at most 10 ms of the rate, after which a connection stands at the end again. With many in line turns are
shorter, so that each comes round in a quarter of a second and no peer takes the silence for an end.

The cap counts what is given to TCP. Headers below it (about 4 % at an MTU of 1,500) come on top.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from prfaas.wire.transfer import Buffer
from prfaas_worker.transfer.line import Line
from prfaas_worker.transfer.stop import Stop

BYTES_PER_MBIT: Final = 125_000
DEPTH_SECONDS: Final = 0.04
GRANT_SECONDS: Final = 0.01
ROUND_SECONDS: Final = 0.25
MIN_GRANT_BYTES: Final = 4096
_MIN_PAUSE_SECONDS: Final = 1e-6


class Credit:
    """The arithmetic of a bucket that starts empty; whoever asks says what time it is, in monotonic seconds."""

    def __init__(self, rate_bytes_per_second: float, now_seconds: float):
        self.rate_bytes_per_second = rate_bytes_per_second
        self.depth_bytes = max(MIN_GRANT_BYTES, rate_bytes_per_second * DEPTH_SECONDS)
        self._bytes = 0.0
        self._at_seconds = now_seconds

    def grant_bytes(self, in_line: int) -> int:
        """Return the most that one turn grants while so many are in line."""
        seconds = min(GRANT_SECONDS, ROUND_SECONDS / max(1, in_line))
        return int(max(MIN_GRANT_BYTES, self.rate_bytes_per_second * seconds))

    def at(self, now_seconds: float) -> float:
        """Return the bytes that may be sent now."""
        earned = (now_seconds - self._at_seconds) * self.rate_bytes_per_second
        return min(self.depth_bytes, self._bytes + earned)

    def delay_seconds(self, count_bytes: int, now_seconds: float) -> float:
        """Return how long until there is credit for so many bytes, 0 when there is."""
        missing = count_bytes - self.at(now_seconds)
        return max(missing / self.rate_bytes_per_second, _MIN_PAUSE_SECONDS) if missing > 0 else 0.0

    def spend(self, count_bytes: int, now_seconds: float) -> None:
        """Take bytes out."""
        self._bytes = self.at(now_seconds) - count_bytes
        self._at_seconds = now_seconds


class TokenBucket:
    """Lets connections send `mbps` million bits a second together; None: as much as they like.

    Its callers are the threads of connections. It never holds a lock while it waits, and waits for nothing but time.
    """

    def __init__(self, mbps: int | None = None):
        self._line = Line()
        self._mbps: int | None = None
        self._credit: Credit | None = None
        self.set_mbps(mbps)

    @property
    def mbps(self) -> int | None:
        """The cap in force."""
        return self._mbps

    def set_mbps(self, mbps: int | None) -> None:
        """Change the cap, for those who wait as well. What was saved up under the old one is gone."""
        with self._line.lock:
            if mbps != self._mbps:
                self._mbps = mbps
                self._credit = None if mbps is None else Credit(mbps * BYTES_PER_MBIT, time.monotonic())
                self._line.wake()

    def portions(self, parts: Sequence[Buffer], stop: Stop) -> Iterator[list[memoryview]]:
        """Yield all parts, without a copy, in portions that may be sent when they are yielded; all at once uncapped.

        Raises:
            StoppedError: `stop` was set, and there is a cap.

        """
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
        """Wait until some of `count_bytes` may be sent; return how many, at least 1.

        Raises:
            StoppedError: `stop` was set.

        """
        if self._credit is None:
            return count_bytes
        with self._line.turn(lambda: self._delay_seconds(count_bytes), stop):
            if self._credit is None:
                return count_bytes
            granted = min(count_bytes, self._credit.grant_bytes(len(self._line)))
            self._credit.spend(granted, time.monotonic())
            return granted

    def _delay_seconds(self, count_bytes: int) -> float:
        credit = self._credit
        if credit is None:
            return 0.0
        return credit.delay_seconds(min(count_bytes, credit.grant_bytes(len(self._line))), time.monotonic())


def _cut(left: deque[memoryview], count_bytes: int) -> list[memoryview]:
    """Take the first bytes out of `left`, as views."""
    portion: list[memoryview] = []
    while count_bytes:
        part = left.popleft()
        portion.append(part[:count_bytes])
        if len(part) > count_bytes:
            left.appendleft(part[count_bytes:])
        count_bytes -= len(portion[-1])
    return portion
