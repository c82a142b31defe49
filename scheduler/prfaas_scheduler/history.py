"""What the gateway counted lately, from counts that only grow: shares, arrivals, and the distribution of lengths.

A distribution needs minutes of prompts, a share of offloads one minute, an arrival rate less. Counts of lengths are
hundreds of figures, so they are kept every ten seconds only. A gateway that restarted counts from zero: everything
before is then forgotten.
"""

from collections import deque
from collections.abc import Sequence

from prfaas.wire.control import Counters
from prfaas_scheduler import status

OFFLOADED_WINDOW_SECONDS = 60.0
LENGTHS_WINDOW_SECONDS = 300.0
LENGTHS_STEP_SECONDS = 10.0
ARRIVALS_WINDOW_SECONDS = 30.0
MIN_MEAN_SECONDS = 30.0


class CounterHistory:
    """What the gateway counted over the last minutes."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, Counters]] = deque()
        self._lengths: deque[tuple[float, tuple[int, ...]]] = deque()
        self._latest: tuple[float, tuple[int, ...]] | None = None

    def add(self, now_seconds: float, counters: Counters) -> None:
        """Take in a new count; a gateway that restarted begins anew."""
        if self._counts and counters.offloaded < self._counts[-1][1].offloaded:
            self._counts.clear()
        self._counts.append((now_seconds, counters))
        while self._counts[0][0] < now_seconds - OFFLOADED_WINDOW_SECONDS:
            self._counts.popleft()
        self._add_lengths(now_seconds, counters.lengths)

    def _add_lengths(self, now_seconds: float, lengths: tuple[int, ...]) -> None:
        before = self._latest[1] if self._latest else ()
        if len(lengths) != len(before) or any(map(int.__lt__, lengths, before)):
            self._lengths.clear()
        self._latest = (now_seconds, lengths)
        if not self._lengths or now_seconds - self._lengths[-1][0] >= LENGTHS_STEP_SECONDS:
            self._lengths.append((now_seconds, lengths))
        while len(self._lengths) > 1 and self._lengths[1][0] <= now_seconds - LENGTHS_WINDOW_SECONDS:
            self._lengths.popleft()

    def offloaded_percent(self) -> int | None:
        """Return the share of offloaded requests; None without any."""
        return status.offloaded_percent(self._counts[0][1], self._counts[-1][1]) if self._counts else None

    def offloads_since(self, at_seconds: float) -> int | None:
        """Return how many prompts were offloaded after the last count before `at_seconds`; None without two counts."""
        if len(self._counts) < 2:
            return None
        earlier = [counters for at, counters in self._counts if at <= at_seconds]
        first = earlier[-1] if earlier else self._counts[0][1]
        return self._counts[-1][1].offloaded - first.offloaded

    def lengths(self) -> Sequence[int]:
        """Return the prompts of the last minutes by bin; empty when the gateway counts none."""
        if self._latest is None:
            return ()
        return [last - first for first, last in zip(self._lengths[0][1], self._latest[1], strict=True)]

    def mean_arrivals_per_second(self) -> float | None:
        """Return the prompts a second over all that `lengths` counts; None while that is less than half a minute."""
        if self._latest is None:
            return None
        seconds = self._latest[0] - self._lengths[0][0]
        return sum(self.lengths()) / seconds if seconds >= MIN_MEAN_SECONDS else None

    def arrivals_per_second(self) -> float | None:
        """Return the prompts a second lately; None before there are two counts some time apart."""
        if self._latest is None:
            return None
        now_seconds, last = self._latest
        earlier = [one for one in self._lengths if one[0] <= now_seconds - ARRIVALS_WINDOW_SECONDS]
        at_seconds, first = earlier[-1] if earlier else self._lengths[0]
        if now_seconds - at_seconds < LENGTHS_STEP_SECONDS:
            return None
        return (sum(last) - sum(first)) / (now_seconds - at_seconds)
