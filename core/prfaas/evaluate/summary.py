"""What all runs of a case say together: a row a policy and load, and the answer to what was asked.

A row has what was measured, what the plan says and what the simulator says. A run that is invalid or has no steady part
gives no figure; it is listed with the reason. The most that a policy serves is the rate up to which P90 of the first
token keeps a limit, on the straight line between the loads that were measured. If no measured load broke the limit, it
is at least the last one.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final, Literal

import msgspec

from prfaas.capacity import ttft
from prfaas.capacity.planfile import PlanFile
from prfaas.errors import ConfigError
from prfaas.evaluate.expected import PlanFigures, plan_figures
from prfaas.evaluate.record import ExcludedRun, Reading, Run, RunKey
from prfaas.evaluate.steady import BATCHES, Sampled, SteadyPart, combine, find_steady, mean_of, quantile_of, rate_of
from prfaas.simulate import setup as setups
from prfaas.simulate.scenario import POLICIES, PolicyName

COMPARED_AT: Final = 0.9
"""Of what homogeneous serves: where the first tokens of both are compared."""
LOAD_STEP: Final = 0.1
MOST_LOAD: Final = 1.5
"""Of what a plan carries: to where loads rise that find no limit."""
Simulated = Callable[[RunKey], Run]
RateBound = Literal["", "at least", "at most"]


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a policy at a load, of one run or several. None: metrics did not say."""

    ttft_mean_seconds: Sampled
    ttft_p90_seconds: Sampled
    ttft_p99_seconds: Sampled
    requests_per_second: Sampled
    offloaded_share: Sampled
    egress_gbps: Sampled | None
    utilisation_percent: Sampled | None
    parts: dict[str, float] = {}
    """Mean seconds of each part of the time to the first token."""


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy at a load. `measured` is None if no run counts, and the others if the load is too high for them."""

    policy: PolicyName
    load: float
    rate_per_second: float
    seeds: tuple[int, ...]
    """Of the runs that count."""
    requests: int
    lost: int
    fallbacks: int
    """Of all runs, as `requests` and `lost`."""
    measured: LoadFigures | None
    planned: PlanFigures | None
    simulated: LoadFigures | None


class HighestRate(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a policy serves within the limit. `low` and `high` follow from the intervals of P90."""

    rate_per_second: float
    bound: RateBound = ""
    """`at least`: no measured load broke the limit; `at most`: all did."""
    low: float | None = None
    high: float | None = None


class RateRatio(msgspec.Struct, frozen=True, kw_only=True):
    """By how many times one policy serves more than another."""

    value: float
    bound: RateBound


class PolicyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy serves within the limit: measured, planned and simulated. None: there is no figure."""

    measured: HighestRate | None
    planned: float | None
    simulated: HighestRate | None


class TtftBeside(msgspec.Struct, frozen=True, kw_only=True):
    """P90 of the first token of PrfaaS-PD and of homogeneous at the same rate."""

    rate_per_second: float
    ours_seconds: float
    ours_bound: RateBound
    """`at most`: PrfaaS-PD was measured at higher rates only, and this is its P90 at the lowest of them."""
    homogeneous_seconds: float


class CaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report says of the figures of a case."""

    limit_seconds: float
    rows: tuple[LoadRow, ...]
    answers: dict[PolicyName, PolicyAnswer]
    ratios: dict[PolicyName, RateRatio]
    """PrfaaS-PD over homogeneous and over naive, where both are measured and their bounds leave a figure."""
    beside: TtftBeside | None
    """None: the rate lies outside what one of the two was measured at."""
    excluded: tuple[ExcludedRun, ...]
    missing: tuple[RunKey, ...]
    """Runs that were asked for and are not there."""
    shown: Run | None
    """The run whose threshold and link are drawn: PrfaaS-PD at its highest load that counts."""


def summarise(
    file: PlanFile, runs: Sequence[Run], simulated: Simulated, limit_seconds: float | None, asked: Iterable[RunKey] = ()
) -> CaseSummary:
    """Return the summary of a case's runs. The limit of P90 is the file's `slo.ttftMillis` if none is given.

    `simulated` makes the record that a run would have in the simulator. Raises ConfigError without any limit.
    """
    limit = _limit_seconds(file, limit_seconds)
    ordered = sorted(runs, key=lambda run: run.key)
    steady = {run.key: find_steady(run) for run in ordered if not run.machine.why_invalid}
    why_not = {run.key: run.machine.why_invalid or steady[run.key].why_not for run in ordered}
    rows = [
        _row(file, list(group), steady, simulated)
        for _, group in groupby(ordered, key=lambda run: (run.key.policy, run.key.load))
    ]
    answers: dict[PolicyName, PolicyAnswer] = {}
    for policy in POLICIES:
        if own := [row for row in rows if row.policy == policy]:
            answers[policy] = _answer(file, own, limit)
    ours = [run for run in ordered if run.key.policy == "threshold" and not why_not[run.key]]
    return CaseSummary(
        limit_seconds=limit,
        rows=tuple(rows),
        answers=answers,
        ratios=_ratios(answers),
        beside=_beside(rows, answers),
        excluded=tuple(ExcludedRun(key.name, why) for key, why in why_not.items() if why),
        missing=tuple(sorted(set(asked) - {run.key for run in ordered})),
        shown=max(ours, key=lambda run: run.key, default=None),
    )


def rising_loads(summary: CaseSummary, policies: Iterable[PolicyName]) -> list[RunKey]:
    """Return for each policy the next load to try: none once the highest one gave no figure, or broke the limit."""
    found: list[RunKey] = []
    for policy in policies:
        rows = [row for row in summary.rows if row.policy == policy]
        if not rows or rows[-1].measured is None or rows[-1].load >= MOST_LOAD:
            continue
        if rows[-1].measured.ttft_p90_seconds.value <= summary.limit_seconds:
            found.append(RunKey(policy, round(rows[-1].load + LOAD_STEP, 2), 1))
    return found


def figures_of(run: Run, part: SteadyPart) -> LoadFigures:
    """Return the figures of a run's steady part."""
    firsts = part.first_tokens_seconds
    egress = _metric(run.readings, part, "egress_mbps")
    divided = [one.parts for one in part.answers if one.parts]
    names = {name for parts in divided for name in parts}
    return LoadFigures(
        ttft_mean_seconds=mean_of(firsts),
        ttft_p90_seconds=quantile_of(firsts, 0.9),
        ttft_p99_seconds=quantile_of(firsts, 0.99),
        requests_per_second=rate_of(part.ends_seconds, part.served_from_seconds, part.end_seconds),
        offloaded_share=mean_of([float(one.offloaded) for one in part.answers]),
        egress_gbps=egress and Sampled(egress.value / 1000, egress.low / 1000, egress.high / 1000),
        utilisation_percent=_metric(run.readings, part, "utilisation_percent"),
        parts={name: math.fsum(one.get(name, 0.0) for one in divided) / len(divided) for name in sorted(names)},
    )


def find_highest(points: Sequence[tuple[float, Sampled]], limit_seconds: float) -> HighestRate | None:
    """Return the rate up to which P90 keeps the limit; None without points (requests a second, P90), which ascend."""
    found = _crossing([(rate, p90.value) for rate, p90 in points], limit_seconds)
    if found is None:
        return None
    # Where P90 is at the upper end of its interval, the rate is at its lower one.
    low = _crossing([(rate, p90.high) for rate, p90 in points], limit_seconds)
    high = _crossing([(rate, p90.low) for rate, p90 in points], limit_seconds)
    return msgspec.structs.replace(
        found,
        low=low.rate_per_second if low is not None and low.bound != "at most" else None,
        high=high.rate_per_second if high is not None and high.bound != "at least" else None,
    )


def value_at(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """Return the value at x on the straight lines between points of ascending x; None outside of them."""
    for (left, before), (right, after) in pairwise(points):
        if left <= x <= right:
            return before + (after - before) * (x - left) / (right - left)
    return None


def _limit_seconds(file: PlanFile, limit_seconds: float | None) -> float:
    if limit_seconds is not None:
        return limit_seconds
    if file.slo.ttft_millis is None:
        raise ConfigError("the case has no slo.ttftMillis, the limit of P90 TTFT: add it, or give one")
    return file.slo.ttft_millis / 1000


def _row(file: PlanFile, runs: Sequence[Run], steady: Mapping[RunKey, SteadyPart], simulated: Simulated) -> LoadRow:
    """Return the row of the runs of one policy at one load."""
    first = runs[0]
    counted = [run for run in runs if run.key in steady and not steady[run.key].why_not]
    expected = [
        (run, part) for run in map(simulated, [run.key for run in runs]) if not (part := find_steady(run)).why_not
    ]
    return LoadRow(
        policy=first.key.policy,
        load=first.key.load,
        rate_per_second=first.rate_per_second,
        seeds=tuple(run.key.seed for run in counted),
        requests=sum(len(run.answers) for run in runs),
        lost=sum(len(run.failed) for run in runs),
        fallbacks=sum(one.fallback for run in runs for one in run.answers),
        measured=_combined([figures_of(run, steady[run.key]) for run in counted]),
        planned=plan_figures(file, first.key.policy, first.rate_per_second),
        simulated=_combined([figures_of(run, part) for run, part in expected]),
    )


def _combined(runs: Sequence[LoadFigures]) -> LoadFigures | None:
    """Return the figures of several runs at one load; None: there is no run."""
    if not runs:
        return None
    made: dict[str, Sampled | None] = {}
    for name in LoadFigures.__struct_fields__:
        values = [value for run in runs if isinstance(value := getattr(run, name), Sampled)]
        made[name] = combine(values) if values else None
    names = {name for run in runs for name in run.parts}
    parts = {name: math.fsum(run.parts.get(name, 0.0) for run in runs) / len(runs) for name in sorted(names)}
    return msgspec.structs.replace(runs[0], **{**made, "parts": parts})


def _metric(readings: Iterable[Reading], part: SteadyPart, name: str) -> Sampled | None:
    """Return the mean of what metrics said during the steady part; None where they said too little."""
    values = [
        value
        for one in readings
        if part.begin_seconds <= one.at_seconds <= part.end_seconds and (value := getattr(one, name)) is not None
    ]
    return mean_of(values) if len(values) >= BATCHES else None


def _answer(file: PlanFile, rows: Sequence[LoadRow], limit_seconds: float) -> PolicyAnswer:
    system, plan = setups.planned(file, rows[0].policy)
    try:
        planned = ttft.arrivals_within(system, file.workload, plan, limit_seconds)
    except ConfigError:  # not even alone a request keeps it
        planned = None
    return PolicyAnswer(
        measured=find_highest(_measured_points(rows), limit_seconds),
        planned=planned,
        simulated=find_highest(
            [(row.rate_per_second, row.simulated.ttft_p90_seconds) for row in rows if row.simulated], limit_seconds
        ),
    )


def _measured_points(rows: Iterable[LoadRow]) -> list[tuple[float, Sampled]]:
    return [(row.rate_per_second, row.measured.ttft_p90_seconds) for row in rows if row.measured]


def _crossing(points: Sequence[tuple[float, float]], limit: float) -> HighestRate | None:
    """Return the rate at which the line through the points first exceeds the limit."""
    if not points:
        return None
    if points[0][1] > limit:
        return HighestRate(rate_per_second=points[0][0], bound="at most")
    for (left, before), (right, after) in pairwise(points):
        if after > limit:
            return HighestRate(rate_per_second=left + (right - left) * (limit - before) / (after - before))
    return HighestRate(rate_per_second=points[-1][0], bound="at least")


def _ratios(answers: Mapping[PolicyName, PolicyAnswer]) -> dict[PolicyName, RateRatio]:
    ours = answers.get("threshold")
    found: dict[PolicyName, RateRatio] = {}
    others: tuple[PolicyName, ...] = ("homogeneous", "naive")
    for policy in others:
        theirs = answers.get(policy)
        if ours is not None and theirs is not None and ours.measured and theirs.measured:
            bound = _bound_of_ratio(ours.measured.bound, theirs.measured.bound)
            if bound is not None:
                value = ours.measured.rate_per_second / theirs.measured.rate_per_second
                found[policy] = RateRatio(value=value, bound=bound)
    return found


def _bound_of_ratio(above: RateBound, below: RateBound) -> RateBound | None:
    """Return what is known of a quotient of two bounds; None: nothing."""
    turned: RateBound = {"at least": "at most", "at most": "at least"}.get(below, "")  # type: ignore[assignment]
    if above and turned and above != turned:
        return None
    return above or turned


def _beside(rows: Sequence[LoadRow], answers: Mapping[PolicyName, PolicyAnswer]) -> TtftBeside | None:
    homogeneous = answers.get("homogeneous")
    if homogeneous is None or homogeneous.measured is None:
        return None
    rate = COMPARED_AT * homogeneous.measured.rate_per_second
    ours, theirs = (
        [(at, p90.value) for at, p90 in _measured_points(row for row in rows if row.policy == policy)]
        for policy in ("threshold", "homogeneous")
    )
    theirs_seconds = value_at(theirs, rate)
    bound: RateBound = "at most" if ours and rate < ours[0][0] else ""
    ours_seconds = ours[0][1] if bound else value_at(ours, rate)
    if ours_seconds is None or theirs_seconds is None:
        return None
    return TtftBeside(
        rate_per_second=rate, ours_seconds=ours_seconds, ours_bound=bound, homogeneous_seconds=theirs_seconds
    )
