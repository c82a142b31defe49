"""The profile of an instance: T_prefill(l), S_kv(l), and Phi_kv(l) = S_kv(l) / T_prefill(l), equation (1).

S follows exactly from the cache's sizes. T is measured, and two things make that hard. Other work on the machine makes
single prefills slower by any factor, and nothing makes one faster than it is: what counts is a sample's *relative*
error, and one that is slower than believed by more than a tolerance pulls no harder than at it (Huber, on one side).
And traffic does not visit all lengths: old samples are forgotten per class of length and offset, powers of two, so that
a thousand short prompts do not erase what was known of long ones.

T(l) = fixed + token * l + squared * l^2 with no coefficient below zero is monotone, never negative, and right for
linear layers (fixed, token) and full attention (squared). A prefill of n tokens behind s cached ones costs
fixed + token * n + squared * ((s + n)^2 - s^2): the fixed part is paid again, the pairs of tokens are those added.
"""

import math
import operator
import statistics
from collections.abc import Iterable
from typing import Final, NamedTuple

from prfaas.wire.profile import Profile

Coefficients = tuple[float, float, float]

_MEMORY_SAMPLES: Final = 16.0
"""Each class remembers about so many of its latest prefills."""
_TOLERANCE: Final = 0.1
"""Samples slower than believed by up to this share of their time weigh fully."""
_FIT_ROUNDS: Final = 30
_SHORTEST_SECONDS: Final = 1e-7
_LONGEST_SECONDS: Final = 1e6
_SINGULAR: Final = 1e-9
"""Columns that are this close to depending on each other are not told apart."""


class Sample(NamedTuple):
    """One prefill: `tokens` computed behind `start_tokens` that stood in the cache already."""

    tokens: int
    seconds: float
    start_tokens: int = 0


def prefill_seconds(profile: Profile, tokens: int, start_tokens: int = 0) -> float:
    """T_prefill: seconds to prefill `tokens` behind a cached prefix of `start_tokens`; 0 for no tokens."""
    return _seconds(_coefficients(profile), tokens, start_tokens)


def cache_bytes(profile: Profile, tokens: int) -> int:
    """S_kv: bytes of the cache of a prompt of `tokens`; 0 for no tokens."""
    return profile.state_bytes + profile.token_bytes * tokens if tokens > 0 else 0


def kv_bits_per_second(profile: Profile, tokens: int) -> float:
    """Phi_kv in bits a second: what a link must carry for each instance that prefills prompts of this length.

    0 for no tokens or a curve without samples.
    """
    seconds = prefill_seconds(profile, tokens)
    return 8 * cache_bytes(profile, tokens) / seconds if seconds > 0 else 0.0


class Curve:
    """T_prefill(l) as fitted to the prefills that it was told of."""

    def __init__(self) -> None:
        self.coefficients: Coefficients = (0.0, 0.0, 0.0)
        self._sums: dict[tuple[int, int], _Sums] = {}
        self._samples = 0
        self._max_tokens = 0

    @classmethod
    def fitted(cls, samples: Iterable[Sample]) -> "Curve":
        """Fit to samples looked at together, those of one length and offset as their median."""
        kept = [sample for sample in samples if _usable(sample)]
        medians = _medians(kept)
        curve = cls()
        for _ in range(_FIT_ROUNDS):
            belief, curve = curve.coefficients, cls()
            for sample in medians:
                curve._note(sample, belief)
            curve.coefficients = _solve(curve._sums.values())
            if curve.coefficients == belief:
                break
        curve._samples = len(kept)
        return curve

    def add(self, sample: Sample) -> None:
        """Learn from one more prefill; one without tokens or time teaches nothing."""
        if _usable(sample):
            self._note(sample, self.coefficients)
            self.coefficients = _solve(self._sums.values())

    def profile(self, state_bytes: int, token_bytes: int) -> Profile:
        """Return the curve as it is now beside the cache's sizes."""
        fixed, token, squared = self.coefficients
        return Profile(
            state_bytes=state_bytes,
            token_bytes=token_bytes,
            fixed_seconds=fixed,
            token_seconds=token,
            squared_seconds=squared,
            samples=self._samples,
            max_tokens=self._max_tokens,
        )

    def _note(self, sample: Sample, belief: Coefficients) -> None:
        """Add a sample to the sums of its class, weighed by its error against what is believed."""
        expected = _seconds(belief, sample.tokens, sample.start_tokens) or sample.seconds
        slower = 1 - expected / sample.seconds
        weight = min(1.0, _TOLERANCE / slower if slower > 0 else 1.0) / sample.seconds**2
        place = sample.tokens.bit_length(), sample.start_tokens.bit_length()
        self._sums.setdefault(place, _Sums()).add(_features(sample.tokens, sample.start_tokens), sample.seconds, weight)
        self._samples += 1
        self._max_tokens = max(self._max_tokens, sample.start_tokens + sample.tokens)


class _Sums:
    """The normal equations of one class of samples, in which each new sample fades the older ones."""

    def __init__(self) -> None:
        self.matrix = [[0.0] * 3 for _ in range(3)]
        self.vector = [0.0] * 3

    def add(self, features: Coefficients, seconds: float, weight: float) -> None:
        keep = 1 - 1 / _MEMORY_SAMPLES
        for row in range(3):
            self.vector[row] = keep * self.vector[row] + weight * features[row] * seconds
            for column in range(3):
                self.matrix[row][column] = keep * self.matrix[row][column] + weight * features[row] * features[column]


def _usable(sample: Sample) -> bool:
    return sample.tokens > 0 and sample.start_tokens >= 0 and _SHORTEST_SECONDS < sample.seconds < _LONGEST_SECONDS


def _features(tokens: int, start_tokens: int) -> Coefficients:
    return 1.0, float(tokens), float(tokens) * (tokens + 2 * start_tokens)


def _seconds(coefficients: Coefficients, tokens: int, start_tokens: int) -> float:
    if tokens <= 0:
        return 0.0
    return sum(map(operator.mul, coefficients, _features(tokens, start_tokens)))


def _coefficients(profile: Profile) -> Coefficients:
    return profile.fixed_seconds, profile.token_seconds, profile.squared_seconds


def _medians(samples: Iterable[Sample]) -> list[Sample]:
    seconds: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        seconds.setdefault((sample.tokens, sample.start_tokens), []).append(sample.seconds)
    return [Sample(tokens, statistics.median(found), start) for (tokens, start), found in seconds.items()]


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


# A straight line through the origin first, then what explains more.
_SUPPORTS: Final = ((1,), (0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))


def _eliminate(rows: list[list[float]]) -> list[float] | None:
    """Solve the symmetric equations, each row with its right side last; None where they are nearly dependent."""
    size = len(rows)
    for pivot in range(size):
        if rows[pivot][pivot] < _SINGULAR:
            return None
        for row in range(size):
            if row != pivot:
                factor = rows[row][pivot] / rows[pivot][pivot]
                rows[row] = [value - factor * above for value, above in zip(rows[row], rows[pivot], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
