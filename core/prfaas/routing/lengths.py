"""A histogram of incremental lengths, and the part of the demand above a threshold.

Work is not proportional to length: a prefill costs fixed + token * l + squared * l^2 seconds and state + token * l
bytes. So the mean above a threshold is not enough; shares, lengths and squares have to be summed. They are summed once,
from the longest bin down, and every threshold that is tried afterwards costs one look-up. Within a bin lengths count as
evenly spread. This makes all of it continuous in the threshold: a search does not jump from bin to bin.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import add, lt, mul
from typing import Final, NamedTuple

from prfaas.errors import InternalError
from prfaas.wire.control import PrefillTokens
from prfaas.wire.profile import Profile

BINS_PER_OCTAVE: Final = 16
OCTAVES: Final = 24
EDGES: Final = (0.0, *(2.0 ** (step / BINS_PER_OCTAVE) for step in range(OCTAVES * BINS_PER_OCTAVE + 1)))
"""Edges of the bins in which lengths are counted, in tokens: each 4.4 % wide, up to the longest threshold."""


class Bins:
    """The edges of a histogram, in tokens, and what follows from them alone; made once, used every interval.

    Raises InternalError unless they are a rising sequence of finite lengths; bins are ours, never a peer's.
    """

    def __init__(self, edges: Sequence[float]):
        lows, highs = edges[:-1], edges[1:]
        if not lows or edges[0] < 0 or not math.isfinite(edges[-1]) or not all(map(lt, lows, highs)):
            raise InternalError(f"bins need at least two edges that rise from 0 or more, not {list(edges[:8])}")
        self.edges = tuple(edges)
        self.ends: list[float] = list(map(add, lows, highs))
        """Low + high of each bin, twice its mean."""
        self.squares: list[float] = [
            low * low + low * high + high * high for low, high in zip(lows, highs, strict=True)
        ]
        """Three times each bin's mean square."""


BINS: Final = Bins(EDGES)


class DemandAbove(NamedTuple):
    """The demand of prompts longer than a threshold, each figure per prompt of *any* length."""

    share: float
    tokens: float
    """Mean of l where l > t, else 0."""
    squares: float
    """Mean of l^2 where l > t, else 0."""

    def seconds(self, profile: Profile) -> float:
        """Return the mean of T_prefill(l) over them; prefixes cached elsewhere in the prompt are not charged."""
        fixed, token = profile.fixed_seconds * self.share, profile.token_seconds * self.tokens
        return fixed + token + profile.squared_seconds * self.squares

    def bits(self, profile: Profile) -> float:
        """Return the mean of S_kv(l) over them, in bits."""
        return 8.0 * (profile.state_bytes * self.share + profile.token_bytes * self.tokens)


class Demand:
    """A histogram with its sums; immutable. Only `demand_of` makes one, of counts that make sense."""

    def __init__(self, bins: Bins, counts: Sequence[float]):
        # Bins outside of what was seen add nothing but time: a control loop makes one of these an interval.
        first = next(place for place, count in enumerate(counts) if count)
        end = len(counts) - next(place for place, count in enumerate(reversed(counts)) if count)
        counts = counts[first:end]
        tokens = list(map(mul, counts, bins.ends[first:end]))
        self._edges, self._counts = bins.edges[first : end + 1], counts
        self._shares_above = _from_the_end(counts)
        self._tokens_above = _from_the_end(tokens)
        self._squares_above = _from_the_end(list(map(mul, counts, bins.squares[first:end])))
        self.prompts = self._shares_above[0]
        longest_part = max(tokens) / self._tokens_above[0] if self._tokens_above[0] > 0 else 1.0
        self.has_spread = longest_part <= 0.5
        """False when one bin holds most tokens: a threshold cannot divide prompts of one length."""

    def above(self, threshold_tokens: float) -> DemandAbove:
        """Return what is longer than a threshold. Every figure falls, without a jump, as the threshold rises."""
        edges = self._edges
        if threshold_tokens >= edges[-1]:
            return DemandAbove(0.0, 0.0, 0.0)
        place = bisect_left(edges, threshold_tokens)  # the bin of the threshold ends at this edge
        share, tokens, squares = self._shares_above[place], self._tokens_above[place], self._squares_above[place]
        if place > 0:
            low, high, cut = edges[place - 1], edges[place], threshold_tokens
            part = self._counts[place - 1] * (high - cut) / (high - low)
            share += part
            tokens += part * (high + cut)
            squares += part * (high * high + high * cut + cut * cut)
        return DemandAbove(share / self.prompts, tokens / (2.0 * self.prompts), squares / (3.0 * self.prompts))


def demand_of(bins: Bins, counts: Sequence[float]) -> Demand | None:
    """Return the demand; None when there is no prompt, or the counts make no sense: they come from another process."""
    if len(counts) != len(bins.ends) or min(counts) < 0:
        return None
    total = sum(counts)
    return Demand(bins, counts) if math.isfinite(total) and total > 0 else None


class LengthTally:
    """Counts lengths as they come, in the bins of `EDGES`. One addition a prompt."""

    def __init__(self) -> None:
        self._counts = [0] * (len(EDGES) - 1)

    def add(self, tokens: int) -> None:
        """Count a prompt of this incremental length; one with nothing to prefill is no demand."""
        if tokens > 0:
            self._counts[min(bisect_left(EDGES, tokens), len(self._counts)) - 1] += 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Prompts by bin since the start."""
        return tuple(self._counts)


class PrefillTally:
    """Sums the tokens of prompts as they come, by the kind of their route."""

    def __init__(self) -> None:
        self._counted_tokens, self._computed_tokens = Counter[str](), Counter[str]()

    def add(self, kind: str, tokens: int, computed_tokens: int) -> None:
        """Add a prompt of this incremental length, of which the chosen instance has to compute `computed_tokens`."""
        self._counted_tokens[kind] += tokens
        self._computed_tokens[kind] += computed_tokens

    def of(self, kind: str) -> PrefillTokens:
        """Return the sums since the start."""
        return PrefillTokens(counted=self._counted_tokens[kind], computed=self._computed_tokens[kind])


def _from_the_end(values: Sequence[float]) -> list[float]:
    """Return, for every place, the sum from there to the end; one more place, of 0, at the end."""
    sums = list(accumulate(values[::-1], initial=0.0))
    sums.reverse()
    return sums
