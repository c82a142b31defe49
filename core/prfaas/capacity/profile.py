"""The profile of an instance: T_prefill(l), S_kv(l), and Phi_kv(l) = S_kv(l) / T_prefill(l), equation (1).

S follows exactly from the cache's sizes. T is measured, and two things make that hard. Other work on the machine makes
single prefills slower by any factor, and nothing makes one faster than it is. And traffic does not visit all lengths.

Samples looked at together are upper bounds. So the curve that counts is the highest one which none of them is below
(deterministic frontier, Aigner and Chu 1968). What lies far above it was disturbed and is left out, and the rest is
fitted by its relative error. Else one slow sample at the longest length would be taken for a square. Prompts beyond it
would look many times as slow.

Single samples refine that. One that is slower than believed by more than a tolerance pulls no harder than at it (Huber,
on one side). Old ones are forgotten per class of length and offset, powers of two. So a thousand short prompts do not
erase what was known of long ones. Where the first measurement still stands in for traffic it is scaled. All of it may
have been disturbed, and the quickest of the latest prefills tells by how much.

T(l) = fixed + token * l + squared * l^2 with no coefficient below zero is monotone and never negative. It is right for
linear layers (fixed, token) and full attention (squared). A prefill of n tokens behind s cached ones costs fixed +
token * n + squared * ((s + n)^2 - s^2). The fixed part is paid again, the pairs of tokens are those added.
"""

import math
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, combinations
from typing import Final, NamedTuple

from prfaas.schedule import STEP_SIZES, step_tokens
from prfaas.wire.profile import Profile

Coefficients = tuple[float, float, float]
_Class = tuple[int, int]
POINT_TOKENS: Final = (1024, 16_384, 131_072)
"""Lengths at which three points describe a profile to people."""
_MEMORY_SAMPLES: Final = 16
"""Each class remembers about so many of its latest prefills."""
_TOLERANCE: Final = 0.1
"""Samples slower than believed by up to this share of their time weigh fully."""
_DISTURBED: Final = 1.15
"""Samples that took this many times as long as the frontier says are not fitted."""
_FEWEST_TOKENS: Final = 64
"""Of a prefill that says something of others. Where nearly all was cached it takes no longer than a decode step; by its
relative error that would count more than all others, and long prompts would look half as dear again."""
_FIT_ROUNDS: Final = 30
_SHORTEST_SECONDS: Final = 1e-7
_LONGEST_SECONDS: Final = 1e6
_SINGULAR: Final = 1e-9
"""Columns that are this close to depending on each other are not told apart."""
# A straight line through the origin first, then what explains more.
_SUPPORTS: Final = ((1,), (0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))


class Sample(NamedTuple):
    """One prefill: `tokens` computed behind `start_tokens` that stood in the cache already."""

    tokens: int
    seconds: float
    start_tokens: int = 0


class MeasuredPoint(NamedTuple):
    """The prefill seconds and the cache size of a prompt of one length."""

    tokens: int
    seconds: float
    cache_bytes: float


def prefill_seconds(profile: Profile, tokens: int, start_tokens: int = 0) -> float:
    """T_prefill: seconds to prefill `tokens` behind a cached prefix of `start_tokens`; 0 for no tokens."""
    return _seconds((profile.fixed_seconds, profile.token_seconds, profile.squared_seconds), tokens, start_tokens)


def chunk_seconds(profile: Profile, start_tokens: int, tokens: int, *, is_first: bool) -> float:
    """Seconds of a prompt's next `tokens`, with `start_tokens` cached or computed. The chunks of a prompt sum to its
    prefill: what that costs however short it is, the first one takes."""
    fixed_seconds = profile.fixed_seconds if is_first else 0.0
    return _seconds((fixed_seconds, profile.token_seconds, profile.squared_seconds), tokens, start_tokens)


def best_step_tokens(profile: Profile) -> int:
    """Return the tokens of a step that a worker finds best for a machine with this profile."""
    return step_tokens({size: prefill_seconds(profile, size) for size in STEP_SIZES})


def cache_bytes(profile: Profile, tokens: int) -> int:
    """S_kv: bytes of the cache of a prompt of `tokens`; 0 for no tokens."""
    return profile.state_bytes + profile.token_bytes * tokens if tokens > 0 else 0


def kv_bits_per_second(profile: Profile, tokens: int) -> float:
    """Phi_kv: bits a second that a link must carry for each instance that prefills this length; 0 where unknown."""
    seconds = prefill_seconds(profile, tokens)
    return 8 * cache_bytes(profile, tokens) / seconds if seconds > 0 else 0.0


def points_of(profile: Profile) -> list[MeasuredPoint]:
    """Return three points that determine a profile."""
    return [MeasuredPoint(n, prefill_seconds(profile, n), cache_bytes(profile, n)) for n in POINT_TOKENS]


def profile_through(points: Sequence[MeasuredPoint], samples: int) -> Profile | None:
    """Return the profile through three points; None where they make no curve: too few, absurd, or falling."""
    if len({point.tokens for point in points}) != 3 or not all(map(math.isfinite, chain(*points))):
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


class Curve:
    """T_prefill(l), fitted to the prefills that were added."""

    def __init__(self) -> None:
        self.coefficients: Coefficients = (0.0, 0.0, 0.0)
        self._sums: dict[_Class, _Sums] = {}
        self._samples = 0
        self._max_tokens = 0
        self._error = _Decaying()
        # What was measured together: its sums, its curve, and how long prefills took since, as shares of that curve.
        self._first: dict[_Class, _Sums] = {}
        self._first_coefficients = self.coefficients
        # A pause of the machine says nothing yet: it takes a whole memory of slow ones to believe that it is slower.
        self._paces = deque([1.0] * _MEMORY_SAMPLES, maxlen=_MEMORY_SAMPLES)

    @classmethod
    def fitted(cls, samples: Iterable[Sample]) -> "Curve":
        """Fit to a few samples looked at together, of which those that others prove disturbed do not count."""
        kept = [sample for sample in samples if _usable(sample)]
        curve = cls()
        if not kept:
            return curve
        quickest = _quickest(kept)
        frontier = _frontier(quickest)
        fitting = [
            sample
            for sample in quickest
            if sample.seconds <= _DISTURBED * _seconds(frontier, sample.tokens, sample.start_tokens)
        ]
        estimate = frontier
        for _ in range(_FIT_ROUNDS):
            curve._first = {}
            for sample in fitting:
                _note(curve._first, sample, estimate)
            curve.coefficients = _solve(curve._first.values())
            if curve.coefficients == estimate:
                break
            estimate = curve.coefficients
        for sample in fitting:
            curve._error.add(_error(curve.coefficients, sample))
        curve._first_coefficients = curve.coefficients
        curve._samples = len(kept)
        curve._max_tokens = max(sample.start_tokens + sample.tokens for sample in fitting)
        return curve

    def add(self, sample: Sample) -> None:
        """Learn from one more prefill; one of a few tokens, or without time, teaches nothing."""
        if not _usable(sample) or sample.tokens < _FEWEST_TOKENS:
            return
        if self._samples:
            self._error.add(_error(self.coefficients, sample))
        place = _note(self._sums, sample, self.coefficients)
        if place in self._first:
            self._first[place].decay()
        if first := _seconds(self._first_coefficients, sample.tokens, sample.start_tokens):
            self._paces.append(sample.seconds / first)
        pace = min(self._paces)
        self.coefficients = _solve([*self._sums.values(), *(sums.scaled(pace) for sums in self._first.values())])
        self._samples += 1
        self._max_tokens = max(self._max_tokens, sample.start_tokens + sample.tokens)

    def profile(self, state_bytes: int, token_bytes: int) -> Profile:
        fixed, token, squared = self.coefficients
        return Profile(
            state_bytes=state_bytes,
            token_bytes=token_bytes,
            fixed_seconds=fixed,
            token_seconds=token,
            squared_seconds=squared,
            samples=self._samples,
            max_tokens=self._max_tokens,
            relative_error=self._error.value,
        )


class _Sums:
    """The normal equations of one class of samples, in which each new sample fades the older ones."""

    def __init__(self) -> None:
        self.matrix = [[0.0] * 3 for _ in range(3)]
        self.vector = [0.0] * 3

    def add(self, features: Coefficients, seconds: float, weight: float) -> None:
        self.decay()
        for row in range(3):
            self.vector[row] += weight * features[row] * seconds
            for column in range(3):
                self.matrix[row][column] += weight * features[row] * features[column]

    def decay(self) -> None:
        """Make older samples count less, as one more is there."""
        keep = 1 - 1 / _MEMORY_SAMPLES
        self.vector = [keep * value for value in self.vector]
        self.matrix = [[keep * value for value in row] for row in self.matrix]

    def scaled(self, pace: float) -> "_Sums":
        """Return the sums of the same samples, had each taken `pace` times as long."""
        scaled = _Sums()
        scaled.vector = [value / pace for value in self.vector]
        scaled.matrix = [[value / pace**2 for value in row] for row in self.matrix]
        return scaled


class _Decaying:
    """A mean of the latest values."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += (value - self.value) / min(self._count, _MEMORY_SAMPLES)


def _note(classes: "dict[_Class, _Sums]", sample: Sample, estimate: Coefficients) -> _Class:
    """Add a sample to the sums of its class, weighed by its error against the estimate, and return the class."""
    expected = _seconds(estimate, sample.tokens, sample.start_tokens) or sample.seconds
    slower = 1 - expected / sample.seconds
    weight = min(1.0, _TOLERANCE / slower if slower > 0 else 1.0) / sample.seconds**2
    place = sample.tokens.bit_length(), sample.start_tokens.bit_length()
    classes.setdefault(place, _Sums()).add(_features(sample.tokens, sample.start_tokens), sample.seconds, weight)
    return place


def _error(estimate: Coefficients, sample: Sample) -> float:
    return abs(1 - _seconds(estimate, sample.tokens, sample.start_tokens) / sample.seconds)


def _usable(sample: Sample) -> bool:
    return sample.tokens > 0 and sample.start_tokens >= 0 and _SHORTEST_SECONDS < sample.seconds < _LONGEST_SECONDS


def _features(tokens: int, start_tokens: int) -> Coefficients:
    return 1.0, float(tokens), float(tokens) * (tokens + 2 * start_tokens)


def _seconds(coefficients: Coefficients, tokens: int, start_tokens: int) -> float:
    if tokens <= 0:
        return 0.0
    return sum(map(operator.mul, coefficients, _features(tokens, start_tokens)))


def _quickest(samples: Iterable[Sample]) -> list[Sample]:
    quickest: dict[tuple[int, int], Sample] = {}
    for sample in sorted(samples, key=operator.attrgetter("seconds")):
        quickest.setdefault((sample.tokens, sample.start_tokens), sample)
    return list(quickest.values())


def _frontier(samples: Sequence[Sample]) -> Coefficients:
    """Return the curve above none of the samples that comes nearest to them, by the mean of its shares of their times.

    A linear programme in three unknowns: its best corner is found by trying all, for which there must be few samples.
    """
    rows = [[feature / one.seconds for feature in _features(one.tokens, one.start_tokens)] for one in samples]
    sizes = [max(column) for column in zip(*rows, strict=True)]
    rows = [[value / size for value, size in zip(row, sizes, strict=True)] for row in rows]
    gains = [sum(column) for column in zip(*rows, strict=True)]
    best, most = [0.0] * 3, 0.0
    for support in _SUPPORTS:
        for tight in combinations(rows, len(support)):
            found = _eliminate([[*(row[i] for i in support), 1.0] for row in tight])
            if found is None or min(found) < 0:
                continue
            corner = [0.0] * 3
            for i, value in zip(support, found, strict=True):
                corner[i] = value
            gain = sum(map(operator.mul, gains, corner))
            if gain > most * (1 + _SINGULAR) and all(
                sum(map(operator.mul, row, corner)) < 1 + _SINGULAR for row in rows
            ):
                best, most = corner, gain
    fixed, token, squared = (value / size for value, size in zip(best, sizes, strict=True))
    return fixed, token, squared


def _solve(classes: Iterable[_Sums]) -> Coefficients:
    """Return the coefficients, none below zero, that fit best, from trying every set of non-zero ones.

    Where sets fit equally well, as after a single sample, the first of `_SUPPORTS` wins.
    """
    matrix = [[0.0] * 3 for _ in range(3)]
    vector = [0.0] * 3
    for sums in classes:
        for row in range(3):
            vector[row] += sums.vector[row]
            for column in range(3):
                matrix[row][column] += sums.matrix[row][column]
    # Columns of equal size: squares of lengths beside ones would drown everything.
    sizes = [math.sqrt(matrix[i][i]) or 1.0 for i in range(3)]
    matrix = [[matrix[i][j] / (sizes[i] * sizes[j]) for j in range(3)] for i in range(3)]
    vector = [vector[i] / sizes[i] for i in range(3)]
    best, least = (0.0, 0.0, 0.0), 0.0
    for support in _SUPPORTS:
        found = _eliminate([[*(matrix[i][j] for j in support), vector[i]] for i in support])
        if found is None or min(found) < 0:
            continue
        loss = -sum(value * vector[i] for i, value in zip(support, found, strict=True))
        if loss < least - _SINGULAR * abs(least):
            values = dict(zip(support, found, strict=True))
            fixed, token, squared = (values.get(i, 0.0) / sizes[i] for i in range(3))
            best, least = (fixed, token, squared), loss
    return best


def _eliminate(rows: list[list[float]]) -> list[float] | None:
    """Solve the equations, each row with its right side last; None where they are nearly dependent."""
    size = len(rows)
    for pivot in range(size):
        largest = max(range(pivot, size), key=lambda row: abs(rows[row][pivot]))
        rows[pivot], rows[largest] = rows[largest], rows[pivot]
        if abs(rows[pivot][pivot]) < _SINGULAR:
            return None
        for row in range(size):
            if row != pivot:
                factor = rows[row][pivot] / rows[pivot][pivot]
                rows[row] = [value - factor * above for value, above in zip(rows[row], rows[pivot], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
