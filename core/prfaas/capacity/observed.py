"""What was observed of a running system, in few enough figures for a status, and back again into what is planned with.

A histogram of hundreds of bins becomes slices of equally many prompts, each told by its mean length: that keeps the
mean exactly, and a tail, which a few quantiles would lose. Reading it back spreads each slice evenly as far as half way
to its nearer neighbour, so that a threshold may fall inside a slice, and the mean stays. A profile becomes three points
of its curve, which a person can read, and which determine it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.capacity.workload import Workload
from prfaas.wire.profile import Profile

MIN_PROMPTS: Final = 50
"""Fewer say too little of lengths to move instances by."""
SLICES: Final = 32
POINT_TOKENS: Final = (1024, 16_384, 131_072)
_SPREAD: Final = (-0.75, -0.25, 0.25, 0.75)
"""Middles of four equal parts of [-1, 1]."""


class Point(NamedTuple):
    """A prompt of this length: time of its prefill, and size of its cache."""

    tokens: int
    seconds: float
    cache_bytes: float


def slices(edges: Sequence[float], counts: Sequence[float], number: int = SLICES) -> list[int]:
    """Return the mean length, in tokens, of each of `number` slices of equally many prompts, shortest first.

    Args:
        edges: of the bins, in tokens, one more than counts; inside a bin prompts count as of its middle length.
        counts: prompts by bin.
        number: how many slices.

    """
    total = sum(counts)
    if total <= 0:
        return []
    means: list[int] = []
    size, held, tokens = total / number, 0.0, 0.0
    for (low, high), count in zip(pairwise(edges), counts, strict=True):
        left = float(count)
        while left > 0 and len(means) < number - 1 and held + left >= size:
            part = size - held
            means.append(round((tokens + part * (low + high) / 2) / size))
            left -= part
            held = tokens = 0.0
        held += left
        tokens += left * (low + high) / 2
    last = tokens / held if held > 0 else float(means[-1])
    return [max(1, mean) for mean in (*means, round(last))]


def workload_of(means: Sequence[int]) -> Workload:
    """Return the workload behind slices.

    Raises:
        ConfigError: there are none, or they are no lengths.

    """
    weights: dict[int, float] = {}
    for place, mean in enumerate(means):
        gaps = [abs(mean - means[other]) for other in (place - 1, place + 1) if 0 <= other < len(means)]
        reach = min(gaps, default=0) / 2
        for share in _SPREAD:
            tokens = max(1, round(mean + share * reach))
            weights[tokens] = weights.get(tokens, 0.0) + 1.0
    lengths = sorted(weights)
    return Workload(lengths, [weights[length] for length in lengths])


def points_of(profile: Profile) -> list[Point]:
    """Return three points that determine a profile."""
    return [Point(n, prefill_seconds(profile, n), cache_bytes(profile, n)) for n in POINT_TOKENS]


def profile_through(points: Sequence[Point], samples: int) -> Profile | None:
    """Return the profile through three points; None where they make no curve: too few, absurd, or falling."""
    if len({point.tokens for point in points}) != 3 or not all(map(math.isfinite, _figures(points))):
        return None
    short, middle, long = sorted(points)
    slope = (middle.seconds - short.seconds) / (middle.tokens - short.tokens)
    rise = (long.seconds - middle.seconds) / (long.tokens - middle.tokens)
    squared = (rise - slope) / (long.tokens - short.tokens)
    token = slope - squared * (short.tokens + middle.tokens)
    fixed = short.seconds - token * short.tokens - squared * short.tokens * short.tokens
    token_bytes = (long.cache_bytes - short.cache_bytes) / (long.tokens - short.tokens)
    if short.seconds <= 0 or long.seconds <= short.seconds or token_bytes < 0:
        return None
    return Profile(
        state_bytes=max(0, round(short.cache_bytes - token_bytes * short.tokens)),
        token_bytes=round(token_bytes),
        fixed_seconds=max(0.0, fixed),  # a rounding error below 0 is none of the curve's
        token_seconds=max(0.0, token),
        squared_seconds=max(0.0, squared),
        samples=samples,
        max_tokens=long.tokens,
    )


def _figures(points: Sequence[Point]) -> list[float]:
    return [figure for point in points for figure in point]
