"""The distribution of L, the incremental (uncached) input length of prompts in tokens.

Equations (3) to (7) ask only for integrals of T_prefill and S_kv over the prompts above or below a threshold. T is
quadratic in the length and S linear. So the zeroth, first and second partial moments answer all of them. A workload is
therefore a row of lengths with probabilities, and running sums of their moments. A threshold costs one bisection,
whether the lengths come from a formula, a trace or a histogram.

A log-normal is cut into narrow bins, each replaced by its mean length, which keeps shares and means exact at the edges.

A status carries an observed histogram as slices of equally many prompts, each given by its mean length. That keeps the
mean exactly, and a tail, which a few quantiles would lose. `workload_of` reads it back: it spreads each slice evenly as
far as half way to its nearer neighbour. So a threshold may fall inside a slice, and the mean stays.
"""

import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, Protocol, Self

from prfaas.errors import ConfigError

MAX_TOKENS: Final = 1 << 30
"""No prompt is longer; what claims to be is another unit."""
MIN_PROMPTS: Final = 50
"""Lengths of fewer prompts are too uncertain to move instances by."""
SLICES: Final = 32
_BINS: Final = 4096
_SPREAD: Final = (-0.75, -0.25, 0.25, 0.75)
"""Middles of four equal parts of [-1, 1]."""


class Randomness(Protocol):
    """A source of random numbers in [0, 1): `random.Random` is one."""

    def random(self) -> float: ...


class Moments(NamedTuple):
    """E[1; A], E[l; A] and E[l^2; A] of the lengths l in a part A of the workload: conditional means times `share`."""

    share: float
    tokens: float
    squares: float

    def __bool__(self) -> bool:
        return self.share > 0

    @property
    def mean_tokens(self) -> float:
        """E[l | A]; 0 where A is empty."""
        return self.tokens / self.share if self.share > 0 else 0.0


class Workload:
    """A distribution of incremental input lengths, on ascending whole lengths in tokens.

    Raises ConfigError for no lengths, one that is no positive whole number, or a weight that is negative or no number.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float]) -> None:
        if len(lengths) != len(weights):
            raise ConfigError(f"workload: {len(lengths)} lengths but {len(weights)} weights; give one weight a length")
        shares = [0.0, *accumulate(weights)]
        if not lengths or not 0 < shares[-1] < math.inf or min(weights) < 0:
            raise ConfigError(
                "workload: there must be at least one prompt, and no weight below 0 or infinite; "
                f"found {len(lengths)} lengths with the total weight {shares[-1]:g}"
            )
        if lengths[0] < 1 or lengths[-1] > MAX_TOKENS:
            raise ConfigError(
                f"workload: lengths run from {lengths[0]} to {lengths[-1]}; they must be tokens, 1 to {MAX_TOKENS}"
            )
        if not all(map(operator.lt, lengths, lengths[1:])):
            raise ConfigError(
                "workload: lengths must ascend, each once; sort them and add up the weights of equal ones"
            )
        first = list(map(operator.mul, lengths, weights))
        self.lengths = lengths
        self.weights = weights
        # Running sums, not yet divided by the last of the first: a control loop makes one of these an interval.
        self._shares = shares
        self._tokens = [0.0, *accumulate(first)]
        self._squares = [0.0, *accumulate(map(operator.mul, lengths, first))]

    @classmethod
    def observed(cls, lengths: Iterable[int]) -> Self:
        counts = Counter(lengths)
        if not counts:
            raise ConfigError("workload: the trace holds no prompts; give one with at least one line")
        ascending = sorted(counts)
        return cls(ascending, [float(counts[length]) for length in ascending])

    @classmethod
    def histogram(cls, edges: Sequence[int], counts: Sequence[float]) -> Self:
        """Return the workload of bins [edges[i], edges[i + 1]) in tokens, each taken at its middle."""
        if len(edges) != len(counts) + 1:
            raise ConfigError(
                f"workload.histogram: {len(edges)} edges and {len(counts)} counts; give one edge more than counts"
            )
        for low, high in pairwise(edges):
            if high <= low:
                raise ConfigError(f"workload.histogram.edgesTokens: {high} follows {low}; edges must ascend")
        middles = [(low + high) // 2 for low, high in pairwise(edges)]
        return cls(middles, counts)

    @classmethod
    def lognormal(cls, mu: float, sigma: float, min_tokens: int, max_tokens: int) -> Self:
        """Return exp(Normal(mu, sigma)) truncated to [min_tokens, max_tokens]; mu and sigma are of ln(tokens)."""
        if not (math.isfinite(mu) and 0 < sigma <= 10):
            raise ConfigError(
                f"workload.lognormal: mu is {mu:g} and sigma {sigma:g}, which are of ln(tokens); "
                "mu must be a number and sigma above 0 and at most 10"
            )
        if not 1 <= min_tokens < max_tokens <= MAX_TOKENS:
            raise ConfigError(
                f"workload.lognormal: minTokens is {min_tokens} and maxTokens {max_tokens}; "
                f"they must ascend, within 1 and {MAX_TOKENS}"
            )
        growth = math.log(max_tokens / min_tokens) / _BINS
        edges = sorted({round(min_tokens * math.exp(growth * place)) for place in range(_BINS + 1)})
        masses: dict[int, float] = {}
        for low, high in pairwise(edges):
            a, b = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
            mass = _normal_between(a, b)
            if mass > 0:
                mean = math.exp(mu + sigma**2 / 2) * _normal_between(a - sigma, b - sigma) / mass
                # Far in a tail the quotient of two tiny numbers may leave the bin.
                middle = round(min(max(mean, low), high))
                masses[middle] = masses.get(middle, 0.0) + mass
        if not masses:
            raise ConfigError(
                f"workload.lognormal.mu is {mu:g}: nothing of it lies between {min_tokens} and {max_tokens} tokens; "
                "mu is the mean of ln(tokens), such as 9.9 for 20,000"
            )
        return cls(list(masses), list(masses.values()))

    @property
    def mean_tokens(self) -> float:
        """E[L]."""
        return self.all().tokens

    @property
    def max_tokens(self) -> int:
        return self.lengths[-1]

    def items(self) -> Iterator[tuple[int, float]]:
        """Yield each length with its probability."""
        total = self._shares[-1]
        return ((length, weight / total) for length, weight in zip(self.lengths, self.weights, strict=True))

    def all(self) -> Moments:
        return self._until(len(self.lengths))

    def below(self, threshold_tokens: float) -> Moments:
        """Return the moments of the prompts with l <= t, which stay in the hub."""
        return self._until(bisect_right(self.lengths, threshold_tokens))

    def above(self, threshold_tokens: float) -> Moments:
        """Return the moments of the prompts with l > t, which are offloaded."""
        place = bisect_right(self.lengths, threshold_tokens)
        if place == len(self.lengths):
            return Moments(0.0, 0.0, 0.0)
        return Moments(*(max(0.0, a - b) for a, b in zip(self.all(), self._until(place), strict=True)))

    def _until(self, place: int) -> Moments:
        total = self._shares[-1]
        return Moments(self._shares[place] / total, self._tokens[place] / total, self._squares[place] / total)

    def quantile(self, share: float) -> int:
        """Return the shortest length that at least this share, 0 to 1, of the prompts does not exceed."""
        return self._at(bisect_left(self._shares, share * self._shares[-1], 1))

    def sample(self, rng: Randomness, count: int) -> list[int]:
        """Draw `count` lengths, one random number each."""
        total = self._shares[-1]
        return [self._at(bisect_right(self._shares, total * rng.random(), 1)) for _ in range(count)]

    def _at(self, place: int) -> int:
        return self.lengths[min(place, len(self.lengths)) - 1]


def slices(edges: Sequence[float], counts: Sequence[float], number: int = SLICES) -> list[int]:
    """Return the mean length, in tokens, of each of `number` slices of equally many prompts, shortest first.

    `counts` are the prompts by bin, which count as of the bin's middle length; `edges` are one more, in tokens.
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
    """Return the workload that slices stand for; raises ConfigError where there are none, or they are no lengths."""
    weights: dict[int, float] = {}
    for place, mean in enumerate(means):
        gaps = [abs(mean - means[other]) for other in (place - 1, place + 1) if 0 <= other < len(means)]
        reach = min(gaps, default=0) / 2
        for share in _SPREAD:
            tokens = max(1, round(mean + share * reach))
            weights[tokens] = weights.get(tokens, 0.0) + 1.0
    lengths = sorted(weights)
    return Workload(lengths, [weights[length] for length in lengths])


def _normal_between(low: float, high: float) -> float:
    """P(low < Z < high) of a standard normal, from the side on which the tails are small."""
    if low > 0:
        low, high = -high, -low
    return (math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2))) / 2
