"""The steady part of a run, and how sure its figures are.

A run begins with an empty system, so its first requests wait less than later ones. A tenth of them is left out, and
more where MSER-5 asks for it (White, *Simulation* 69, 1997; Franklin and White, *Winter Simulation Conference* 2008):
it takes the means of five requests each, in order of arrival, and finds the cut after which the standard error of the
mean is smallest. That very cut would favour the quiet end of a busy queue: figures of M/G/1 at 90 % would be a
quarter too low. So the earliest cut counts after which that error is at most 1.4 times the smallest. If it lies in the
second half, there is no steady part. Nor is there one if many requests are refused: such a run is overloaded. So is one
whose requests in flight grow all the time. But a queue with room may grow by chance, so what its steady part would be
is kept (`prfaas.evaluate.rows` says when it counts). Nothing comes behind the last requests, which makes the end of a
run too quiet. So those that arrive within the limit's time of the last one are sent, and not counted.

First tokens that follow each other waited in the same queue, and their spread says too little about the error of their
mean. So the steady part is divided into a few long batches, whose means depend little on each other (Schmeiser,
*Operations Research* 30, 1982), and Student's t gives the interval. A quantile's interval lies between two
observations: those at the shares that the quantile's own share may be off by, again by the batches (Woodruff, *JASA*
47, 1952). The closer a system is to its limit, the longer its queues remember, and the less sure the interval of a
single run is. From three runs with other seeds on, the runs are the batches.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from prfaas.evaluate.record import MOST_LOST, AnsweredRequest, Run

BATCHES: Final = 5
"""As few, and so as long, as an interval bears: with more of them, it holds the true value too rarely."""
FEWEST: Final = 100
"""Requests of a steady part: with fewer, the batches are too short."""
MOST_GROWTH: Final = 0.04
"""Of the requests that arrive: as many may stay, in the mean, before a run counts as overloaded."""
_ALWAYS_CUT: Final = 0.1
_MSER_BATCH: Final = 5
_MSER_TAIL: Final = 5
"""Batches at the end where no cut is looked for: so few may be alike by chance (Hoad et al., JORS 61, 2010)."""
_NEAR_LEAST: Final = 2
"""Times the least square of the standard error."""
_FEWEST_BEYOND: Final = 10
"""Values beyond a quantile: with fewer of them, nobody knows its interval."""
_SPANS: Final = 3
_NORMAL_95: Final = 1.96
_ROUNDING: Final = 1e-6
_T_95: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Student's t at 97.5 %, by degrees of freedom from 1 on."""


class Sampled(msgspec.Struct, frozen=True):
    """A measured value, and the interval that holds the true one in 95 of 100 cases."""

    value: float
    low: float
    high: float
    by_seed: dict[int, float] = {}
    """Of the runs that it is the mean of."""


class SteadyPart(msgspec.Struct, frozen=True, kw_only=True):
    """What of a run counts; times are the case's seconds from the start of the run."""

    answers: tuple[AnsweredRequest, ...] = ()
    """With a first token, in order of arrival."""
    begin_seconds: float = 0.0
    end_seconds: float = 0.0
    """The last arrival, less the tail that is not counted."""
    served_from_seconds: float = 0.0
    """When the first of the answers ended: until then the hub still fills."""
    ends_seconds: tuple[float, ...] = ()
    """When requests of the whole run ended, from then until the end."""
    why_not: str = ""
    """Why there is no steady part; empty if there is."""
    overloaded: bool = False
    """There is none because more arrives than is served; if False, nothing is known of a run without one. Where
    requests in flight grow, the other fields are set as if they did not."""

    @property
    def first_tokens_seconds(self) -> list[float]:
        return [one.ttft_seconds for one in self.answers if one.ttft_seconds is not None]


def find_steady(run: Run, tail_seconds: float = 0.0) -> SteadyPart:
    """Return the steady part of a run, or why it has none. What arrives in the last `tail_seconds` is not counted."""
    answers = sorted((one for one in run.answers if one.ttft_seconds is not None), key=lambda one: one.at_seconds)
    if (refused := refusals(run)) > MOST_LOST * len(run.answers):
        return SteadyPart(why_not=f"{refused} of {len(run.answers)} requests were refused", overloaded=True)
    least = round(_ALWAYS_CUT * len(answers))
    if len(answers) - least < FEWEST:
        return SteadyPart(
            why_not=f"{len(answers)} requests are too few: {FEWEST} have to follow the warm-up of {least}"
        )
    spans = [(one.at_seconds, one.at_seconds + (one.seconds or 0.0)) for one in answers]
    growth = growth_share(spans, answers[least].at_seconds, answers[-1].at_seconds)
    part = _steady_part(answers, spans, tail_seconds)
    if growth > MOST_GROWTH:
        why = f"more requests arrive than end: {growth:.0%} of them pile up"
        return msgspec.structs.replace(part, why_not=why, overloaded=True)
    return part


def _steady_part(
    answers: Sequence[AnsweredRequest], spans: Sequence[tuple[float, float]], tail_seconds: float
) -> SteadyPart:
    """Return what counts of these answers, in order of arrival, if the requests in flight do not grow."""
    end = answers[-1].at_seconds - tail_seconds
    counted = [one for one in answers if one.at_seconds <= end]
    cut = warmup_length([one.ttft_seconds for one in counted if one.ttft_seconds is not None])
    if 2 * cut > len(counted) or len(counted) - cut < FEWEST:
        tail = f" until {tail_seconds:g} s before the last" if tail_seconds else ""
        why = (
            f"the warm-up takes {cut} of {len(counted)} requests{tail}: "
            f"at least half of them, and {FEWEST}, have to follow"
        )
        return SteadyPart(why_not=why)
    served_from = spans[cut][1]
    if served_from >= end:
        return SteadyPart(why_not="its last request arrives before the first answers of a steady part have ended")
    return SteadyPart(
        answers=tuple(counted[cut:]),
        begin_seconds=counted[cut].at_seconds,
        end_seconds=end,
        served_from_seconds=served_from,
        ends_seconds=tuple(sorted(ended for _, ended in spans if served_from <= ended <= end)),
    )


def refusals(run: Run) -> int:
    """Return how many requests the system had no room for. Other losses say nothing of the load."""
    return sum(one.lost == "refused" for one in run.answers)


def warmup_length(values: Sequence[float]) -> int:
    """Return how many values to leave out at the beginning; more than half of them: there is no steady part."""
    size = _MSER_BATCH
    batches = [math.fsum(values[at : at + size]) / size for at in range(0, len(values) - size + 1, size)]
    middle = math.fsum(batches) / max(1, len(batches))  # sums of what is left stay small, and precise
    squares_of_error: list[float] = []
    total = squares = 0.0
    for count, batch in enumerate(reversed(batches), 1):
        total, squares = total + batch - middle, squares + (batch - middle) ** 2
        squares_of_error.append(max(0.0, squares - total * total / count) / count**2)
    candidates = squares_of_error[: _MSER_TAIL - 1 : -1]
    if not candidates:
        return 0
    enough = _NEAR_LEAST * min(candidates)
    cut = next(place for place, square in enumerate(candidates) if square <= enough)
    return max(cut * size, round(_ALWAYS_CUT * len(values)))


def growth_share(spans: Sequence[tuple[float, float]], begin_seconds: float, end_seconds: float) -> float:
    """Return the share of arrivals by which the requests in flight grow, or 0 if they do not always grow.

    `spans` are the begin and end of each request. They are counted in thirds of the time, from when the first one has
    ended: until then a stable system fills, too. Growing means that each third has more of them than the one before.
    """
    begin = max(begin_seconds, min((ended for _, ended in spans), default=end_seconds))
    arrived = sum(begin <= began <= end_seconds for began, _ in spans)
    third = (end_seconds - begin) / _SPANS
    if arrived == 0 or third <= 0:
        return 0.0
    edges = [begin + place * third for place in range(_SPANS + 1)]
    levels = [
        math.fsum(max(0.0, min(ended, last) - max(began, first)) for began, ended in spans) / third
        for first, last in pairwise(edges)
    ]
    if any(later <= earlier for earlier, later in pairwise(levels)):
        return 0.0
    return (levels[-1] - levels[0]) / (arrived * (_SPANS - 1) / _SPANS)


def mean_of(values: Sequence[float]) -> Sampled:
    """Return the mean of observations in their order."""
    value, off = _batched(values)
    return Sampled(value, value - off, value + off)


def quantile_of(values: Sequence[float], share: float) -> Sampled:
    """Return a quantile of observations in their order; it and its bounds are values that occurred.

    Where few values lie beyond it, as with P99 of less than 1,000, its interval is 0 to infinity.
    """
    ordered = sorted(values)

    def at(place: float) -> float:
        return ordered[min(max(0, math.ceil(place * len(ordered)) - 1), len(ordered) - 1)]

    value = at(share)
    if len(ordered) * (1 - share) < _FEWEST_BEYOND - _ROUNDING:
        return Sampled(value, 0.0, math.inf)
    _, off = _batched([float(one <= value) for one in values])
    return Sampled(value, at(share - off), at(share + off))


def rate_of(pieces: Iterable[tuple[float, float, float]], begin_seconds: float, end_seconds: float) -> Sampled:
    """Return how much is done in a second between two times. A piece is when it began and ended, and as how much it
    counts: evenly over its time, or at its moment if it has no length."""
    seconds = (end_seconds - begin_seconds) / BATCHES
    edges = [begin_seconds + place * seconds for place in range(BATCHES + 1)]
    done = [0.0] * BATCHES
    for began, ended, count in pieces:
        if began < ended:
            for place, (first, last) in enumerate(pairwise(edges)):
                done[place] += count * max(0.0, min(ended, last) - max(began, first)) / (ended - began)
        elif begin_seconds <= ended <= end_seconds:
            done[min(BATCHES - 1, int((ended - begin_seconds) / seconds))] += count
    rate = mean_of(done)
    return Sampled(rate.value / seconds, rate.low / seconds, rate.high / seconds)


def combine(runs: Sequence[Sampled]) -> Sampled:
    """Return the mean of several runs' figures, which are at least 0. From three runs on, their spread gives the
    interval, and before their own intervals, as those of independent values."""
    value = math.fsum(one.value for one in runs) / len(runs)
    if len(runs) > 2:
        off = _t_interval([one.value for one in runs])
        return Sampled(value, max(0.0, value - off), value + off)
    below = math.hypot(*(one.value - one.low for one in runs)) / len(runs)
    above = math.hypot(*(one.high - one.value for one in runs)) / len(runs)
    return Sampled(value, max(0.0, value - below), value + above)


def of_seeds(runs: Sequence[tuple[int, Sampled]]) -> Sampled:
    """Return the mean of one figure of several runs, each with its seed."""
    return msgspec.structs.replace(combine([one for _, one in runs]), by_seed={seed: one.value for seed, one in runs})


def quotient(above: Sampled, below: Sampled) -> Sampled:
    """Return a quotient of two figures above 0.

    Runs of one seed met the same requests, so what these do to both is no error: from three such pairs on, the spread
    of their quotients gives the interval. Before, the figures count as independent: their relative errors add up as
    squares.
    """
    value = above.value / below.value
    pairs = [above.by_seed[seed] / below.by_seed[seed] for seed in above.by_seed.keys() & below.by_seed.keys()]
    if len(pairs) > 2:
        off = _t_interval(pairs)
        return Sampled(value, max(0.0, value - off), value + off)
    less = math.hypot((above.value - above.low) / above.value, (below.high - below.value) / below.value)
    more = math.hypot((above.high - above.value) / above.value, (below.value - below.low) / below.value)
    return Sampled(value, value * max(0.0, 1 - less), value * (1 + more))


def _batched(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and how far the true one may be off, by the means of batches.

    These may be alike by chance. It is off by as much at least as the mean of so many independent values.
    """
    edges = [round(place * len(values) / BATCHES) for place in range(BATCHES + 1)]
    means = [math.fsum(values[first:last]) / (last - first) for first, last in pairwise(edges)]
    mean = math.fsum(values) / len(values)
    least = _NORMAL_95 * math.sqrt(math.fsum((one - mean) ** 2 for one in values)) / len(values)
    return mean, max(least, _t_interval(means))


def _t_interval(values: Sequence[float]) -> float:
    """Return half the interval of the mean of independent values."""
    mean = math.fsum(values) / len(values)
    square = math.fsum((one - mean) ** 2 for one in values) / (len(values) - 1)
    return _T_95[min(len(values) - 1, len(_T_95)) - 1] * math.sqrt(square / len(values))
