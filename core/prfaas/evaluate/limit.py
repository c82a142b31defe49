"""The most that a system serves, measured in two ways, and the ratio of two systems.

**Saturated.** More arrives than a system serves, and the work that it does in a second is its throughput: Lambda_max of
the paper. One overloaded run tells. While queues grow, short prompts overtake long ones, so the requests that it serves
are easier than those that arrive: counting them would flatter a system by up to a fifth. So each counts as its
prefill's time over that of the mean prompt of its pool, unless decodes limit the system: then as one. And it counts
evenly over the time in which that work was done. Were it counted when its answer ends, the figure would hang on which
answers happen to end in a time that may be no longer than one of them, and nothing done for a long prompt that ends
later would count.

**Within a limit.** P90 of the first token keeps a promise up to some rate. A load *holds* if the interval of P90 lies
within the limit, and *breaks* it if the interval lies above, or if most of its runs are overloaded: requests in flight
grow, or requests are refused. A queue with room may look so by chance, at 90 % in 3 of 40 runs. So fewer of them leave
a load open that P90 would let hold. So does anything else, such as a machine that was too slow. The limit lies between
the highest load that holds and the lowest that breaks; nothing narrower is known. Where a load breaks and a higher one
holds, both are open.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Final, Literal

import msgspec

from prfaas.evaluate.record import MOST_LOST, AnsweredRequest, Run
from prfaas.evaluate.steady import MOST_GROWTH, Sampled, SteadyPart, growth_share, rate_of, refusals

FILLED_AFTER: Final = 0.2
"""Of the time in which requests arrive, and after it what an early request takes until its work is done: until then
the system fills."""
LoadOutcome = Literal["held", "broken", "open"]


class LoadVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a load kept the limit, with the reason."""

    rate_per_second: float
    outcome: LoadOutcome
    why: str


class Bounds(msgspec.Struct, frozen=True):
    """Bounds of a figure; None: there is no bound on this side."""

    low: float | None
    high: float | None


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Where the limit of a system lies: between a rate that holds and one that breaks it, in requests a second."""

    bounds: Bounds
    why_broken: str = ""
    """Of the lowest load that breaks it: what failed first."""


def judge(
    rate_per_second: float, parts: Sequence[SteadyPart], p90: Sampled | None, limit_seconds: float
) -> LoadVerdict:
    """Return the verdict on a load, of its valid runs, and of the P90 of those that count."""

    def found(outcome: LoadOutcome, why: str) -> LoadVerdict:
        return LoadVerdict(rate_per_second=rate_per_second, outcome=outcome, why=why)

    overloaded = [part.why_not for part in parts if part.overloaded]
    why = f"in {len(overloaded)} of {len(parts)} runs {overloaded[0]}" if overloaded else ""
    if 2 * len(overloaded) > len(parts):
        return found("broken", why)
    if p90 is not None and p90.low > limit_seconds:
        return found("broken", f"P90 is {p90.value:.2f} s")
    if p90 is None or overloaded:
        return found("open", why or "no run counts")
    if p90.high <= limit_seconds:
        return found("held", f"P90 is {p90.value:.2f} s")
    return found("open", f"P90 lies between {p90.low:.2f} and {p90.high:.2f} s, on both sides of the limit")


def limit_of(verdicts: Iterable[LoadVerdict]) -> RateLimit:
    """Return where the limit lies, from the loads of one system in any order."""
    ascending = sorted(verdicts, key=lambda one: one.rate_per_second)
    held, broken = bounding([one.outcome for one in ascending])
    return RateLimit(
        bounds=Bounds(
            None if held is None else ascending[held].rate_per_second,
            None if broken is None else ascending[broken].rate_per_second,
        ),
        why_broken="" if broken is None else ascending[broken].why,
    )


def bounding(outcomes: Sequence[LoadOutcome]) -> tuple[int | None, int | None]:
    """Return the places, among ascending loads, of the highest that holds and of the lowest that breaks the limit.

    One that breaks below one that holds contradicts it, and neither counts.
    """
    held = [place for place, one in enumerate(outcomes) if one == "held"]
    broken = [place for place, one in enumerate(outcomes) if one == "broken"]
    low = max((place for place in held if not broken or place < broken[0]), default=None)
    high = min((place for place in broken if not held or place > held[-1]), default=None)
    return low, high


def ratio_of(above: Bounds, below: Bounds) -> Bounds:
    """Return the bounds of a quotient of two rates."""
    return Bounds(_quotient(above.low, below.high), _quotient(above.high, below.low))


def prefill_span(one: AnsweredRequest) -> tuple[float, float]:
    """Return when a prefill began and ended, in seconds of the run. Where its parts do not say, that is the moment of
    the first token."""
    if "prefill_queue" not in one.parts:  # without it the queue is in the prefill
        first_token = one.at_seconds + (one.ttft_seconds or 0.0)
        return first_token, first_token
    waited = one.sent_late_seconds + one.parts.get("gateway_queue", 0.0) + one.parts["prefill_queue"]
    began = one.at_seconds + waited
    return began, began + one.parts["prefill"]


def decode_span(one: AnsweredRequest) -> tuple[float, float]:
    """Return when the first and the last token of an answer came, in seconds of the run."""
    return one.at_seconds + (one.ttft_seconds or 0.0), one.at_seconds + (one.seconds or 0.0)


def saturated_rate(
    run: Run,
    work: Callable[[AnsweredRequest], float],
    span: Callable[[AnsweredRequest], tuple[float, float]] = prefill_span,
) -> Sampled | None:
    """Return the requests a second that a system serves while more arrive; None: the run is not overloaded.

    `work` is as how many an answer counts; it is 1 in the mean of all that arrive. `span` is when that work began and
    ended.
    """
    served = [(one, span(one)) for one in run.answers if one.seconds is not None]
    if not served:
        return None
    end = max(one.at_seconds for one in run.answers)
    early = [done - one.at_seconds for one, (_, done) in served if one.at_seconds <= FILLED_AFTER * end]
    begin = FILLED_AFTER * end + (median(early) if early else 0.0)
    in_flight = [(one.at_seconds, one.at_seconds + (one.seconds or 0.0)) for one, _ in served]
    growth = growth_share(in_flight, FILLED_AFTER * end, end)
    if begin >= end or (growth <= MOST_GROWTH and refusals(run) <= MOST_LOST * len(run.answers)):
        return None
    return rate_of([(*when, work(one)) for one, when in served], begin, end)


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
