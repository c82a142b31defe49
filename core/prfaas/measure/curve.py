"""How long a prompt takes that was measured: the curve through the measured points.

A fit of three numbers misses what it was fitted to by several per cent where an engine computes in chunks, or where its
kernels change with the length. So what was measured counts, and the fit says how times go on from one point to the
next: it is moved to go through both, by an amount on a line between them. A line alone would be too high between points
that are far apart, as attention grows by the square. Beyond the ends the fit goes on from the last point.

The curve never falls. What is convex and begins and ends at the points' times may dip below the first of them only at
its beginning, and stays at that time there.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from prfaas.capacity.profile import prefill_seconds
from prfaas.wire.profile import Profile


class Point(NamedTuple):
    """A prompt of so many tokens, alone, takes so long."""

    tokens: int
    seconds: float


class PrefillTimes(NamedTuple):
    """T_prefill by the fit, and through the points where there are any: by length, with times that never fall."""

    profile: Profile
    points: tuple[Point, ...] = ()

    @classmethod
    def through(cls, points: Iterable[Point], profile: Profile) -> "PrefillTimes":
        """Return the curve through points in any order. One that is slower than a longer one takes as long as that:
        other work makes a prompt slower, and nothing makes it quicker than it is."""
        longest_first = sorted(points, reverse=True)
        seconds = accumulate((point.seconds for point in longest_first), min)
        quick = [Point(point.tokens, least) for point, least in zip(longest_first, seconds, strict=True)]
        return cls(profile, tuple(reversed(quick)))

    @property
    def longest_tokens(self) -> int:
        """The longest prompt that is known. The fit may have left out the longest that was measured."""
        return max(self.profile.max_tokens, *(point.tokens for point in self.points), 0)

    def prompt_seconds(self, tokens: int) -> float:
        """Return the seconds of a whole prompt, alone; 0 for no tokens."""
        return self._at(tokens) if tokens > 0 else 0.0

    def chunk_seconds(self, start_tokens: int, tokens: int, *, is_first: bool) -> float:
        """Return the seconds of a prompt's next tokens. The chunks of a prompt sum to its prefill: what that costs
        however short it is, the first one takes."""
        if tokens <= 0:
            return 0.0
        return self._at(start_tokens + tokens) - self._at(start_tokens) + is_first * self._at(0)

    def _at(self, tokens: int) -> float:
        """Return the curve's value; at 0 tokens it is what a prompt costs however short it is."""
        fit = _fit_seconds(self.profile, tokens)
        if not self.points:
            return fit
        place = bisect_left(self.points, tokens, key=lambda point: point.tokens)
        low, high = self.points[max(0, place - 1)], self.points[min(place, len(self.points) - 1)]
        low_off, high_off = (one.seconds - _fit_seconds(self.profile, one.tokens) for one in (low, high))
        share = (tokens - low.tokens) / (high.tokens - low.tokens) if low.tokens < high.tokens else 0.0
        return max(low.seconds if place else 0.0, fit + low_off + share * (high_off - low_off))


def _fit_seconds(profile: Profile, tokens: int) -> float:
    return prefill_seconds(profile, tokens) if tokens > 0 else profile.fixed_seconds
