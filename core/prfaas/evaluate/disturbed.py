"""A case while its link or its load changes: what each run shows as a whole, for nothing in it is steady.

Three disturbances, whose times are shares of a run. The link *falls* to a fifth after a third of the run, and is whole
again after two thirds. It *swings* three times between all and a fifth. Or requests come in three *bursts*, twice as
dense. Two things are asked. How soon is the threshold what a changed link bears? And how long do first tokens take,
beside the best of all thresholds that stay? Nobody knows that one before. The simulator serves the same requests with
many, and those that are best there are also run.

*What a link bears* is the planner's threshold for the hub's split over a link of that width, of which so much is used
as the policy asks for: the middle between its watermarks. Where the hub with that threshold would carry less than
arrives, it is the one that uses all of the link, as the short loop does while prompts wait in the hub. Settled means
close to it until the link changes again, from when it is nearer to it than to what the link bore before, as it then is
for half of the rest at least. Both may lie so close that a threshold which stays would count, too.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, Final, Literal

import msgspec

from prfaas.capacity import optimum
from prfaas.capacity.optimum import Plan
from prfaas.capacity.planfile import PlanFile
from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case, scenario_of
from prfaas.evaluate.record import Run, RunKey
from prfaas.evaluate.rows import Simulated
from prfaas.evaluate.steady import quantile_of
from prfaas.simulate import setup as setups
from prfaas.simulate.scenario import PolicyName, Scenario

DisturbanceName = Literal["falls", "swings", "bursts"]

LOW_SHARE: Final = 0.2
"""Of what a link carries: to which it falls."""
SETTLED: Final = (0.75, 1.33)
"""Of what the link bears: where a threshold counts as settled."""
FEWEST_INTERVALS: Final = 20
"""Between two changes of a link: in less time nothing settles."""
_BURST_SHARE: Final = 0.2
_BURST_FACTOR: Final = 2.0
_TRIED: Final = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.8)
"""Thresholds that stay, as shares of the planned one."""


class ThresholdSettling(msgspec.Struct, frozen=True, kw_only=True):
    """How a threshold followed one change of the link."""

    at_seconds: float
    before_tokens: int
    """What the link bore until then."""
    borne_tokens: int
    intervals: int | None
    """Of control, until the threshold was close to what the link bears, and stayed; None: it never was."""
    most_intervals: int
    """Until the next change."""


class DisturbedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one run shows. An invalid one has no figure but `lost`."""

    key: RunKey
    p90_seconds: float | None
    """Of the first tokens of all requests; a lost one has none, ever."""
    simulated_p90_seconds: float
    lost: int
    fallbacks: int
    settlings: tuple[ThresholdSettling, ...]
    simulated_settlings: tuple[ThresholdSettling, ...]
    why_invalid: str


class DisturbedSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a disturbed case."""

    runs: tuple[DisturbedRun, ...]
    missing: tuple[RunKey, ...]

    @property
    def best_static(self) -> DisturbedRun | None:
        """The best threshold that stays; None unless all that were asked for have a figure."""
        there = [one for one in self.runs if one.key.policy == "static"]
        counted = [one for one in there if one.p90_seconds is not None]
        if len(counted) < len(there) or any(key.policy == "static" for key in self.missing):
            return None
        return min(counted, key=lambda one: one.p90_seconds or math.inf, default=None)

    def over_best(self, policy: PolicyName) -> float | None:
        """Return P90 of a policy over that of the best threshold that stays."""
        best = self.best_static
        ours = next((one.p90_seconds for one in self.runs if one.key.policy == policy), None)
        return ours / best.p90_seconds if ours is not None and best and best.p90_seconds else None

    def simulated_over_best(self, policy: PolicyName) -> float | None:
        """Return the same of the simulated runs."""
        best = min((one.simulated_p90_seconds for one in self.runs if one.key.policy == "static"), default=None)
        ours = next((one.simulated_p90_seconds for one in self.runs if one.key.policy == policy), None)
        return ours / best if ours is not None and best else None


def disturb(case: Case, name: DisturbanceName, load: float, link_mbps: float) -> Case:
    """Return a case of one link that carries `link_mbps`, disturbed in runs of PrfaaS-PD at this load."""
    links = tuple(msgspec.structs.replace(link, capacity_mbps=link_mbps) for link in case.file.system.links)
    system = msgspec.structs.replace(case.file.system, links=links)
    file = msgspec.structs.replace(case.file, system=system)
    seconds = case.requests / (load * setups.capacity(file, "threshold"))
    simulation = {**file.simulation, **_disturbance(file, name, round(seconds / 3))}
    return msgspec.structs.replace(
        case, name=f"{case.name}-{name}", file=msgspec.structs.replace(file, simulation=simulation)
    )


def _disturbance(file: PlanFile, name: DisturbanceName, third_seconds: int) -> dict[str, Any]:
    """Return the fields of the section `simulation`."""
    (link,) = file.system.links
    low_mbps = LOW_SHARE * link.capacity_mbps
    if name == "bursts":
        for_seconds = _BURST_SHARE * third_seconds
        return {"bursts": {"everySeconds": third_seconds, "forSeconds": for_seconds, "factor": _BURST_FACTOR}}
    if name == "swings":
        return {"links": [{"name": link.name, "diurnal": {"everySeconds": third_seconds, "lowMbps": low_mbps}}]}
    schedule = [
        {"atSeconds": third_seconds, "capacityMbps": low_mbps},
        {"atSeconds": 2 * third_seconds, "capacityMbps": link.capacity_mbps},
    ]
    return {"links": [{"name": link.name, "schedule": schedule}]}


def best_thresholds(case: Case, load: float, seed: int, simulated: Simulated, count: int) -> list[RunKey]:
    """Return the runs of those thresholds that stay and have the least P90 in the simulator, the best one first."""
    planned_tokens = _planned_tokens(case.file)
    keys = [RunKey("static", load, seed, round(share * planned_tokens)) for share in _TRIED]
    return sorted(keys, key=lambda key: p90_of(simulated(key)))[:count]


def p90_of(run: Run) -> float:
    """Return P90 of the first tokens of all requests of a run."""
    waits = [math.inf if one.ttft_seconds is None else one.ttft_seconds for one in run.answers]
    return quantile_of(waits, 0.9).value


def borne_tokens(file: PlanFile, scenario: Scenario, link_mbps: float, rate_per_second: float) -> int:
    """Return the threshold that a link of this width bears while so many requests arrive.

    Raises ConfigError where the planner has none.
    """
    marks = scenario.policy.watermarks
    plan = _plan_over(file, scenario, link_mbps * (marks.high_percent + marks.low_percent) / 200)
    if plan.lambda_max < rate_per_second:
        plan = _plan_over(file, scenario, link_mbps)
    if plan.threshold_tokens is None:
        raise ConfigError(f"the plan over a link of {link_mbps:g} Mbit/s has no threshold: let the link carry more")
    return plan.threshold_tokens


def _plan_over(file: PlanFile, scenario: Scenario, used_mbps: float) -> Plan:
    """Return the plan of a scenario's split if caches may use so much of the link."""
    links = tuple(msgspec.structs.replace(link, capacity_mbps=used_mbps) for link in scenario.system.links)
    split = {name: float(count) for name, count in scenario.prefill_instances.items()}
    return optimum.plan_for(msgspec.structs.replace(scenario.system, links=links), file.workload, split)


def settlings_of(case: Case, run: Run) -> tuple[ThresholdSettling, ...]:
    """Return how the threshold followed each change of the link that leaves time for it."""
    scenario = scenario_of(case, run.key)
    if scenario.policy.threshold.mode != "Auto":
        return ()
    interval_seconds = scenario.policy.short_interval_seconds
    end_seconds = max(one.at_seconds for one in run.answers)
    (link,) = scenario.system.links
    changes = [step for shape in scenario.conditions.values() for step in shape.schedule if step[0] < end_seconds]
    widths = [link.capacity_mbps, *(mbps for _, mbps in changes)]
    times = [*(at for at, _ in changes), end_seconds]

    @cache
    def borne(mbps: float) -> int:
        return borne_tokens(case.file, scenario, mbps, run.rate_per_second)

    return tuple(
        _settling(run, (at, until), (borne(before), borne(after)), interval_seconds)
        for at, until, before, after in zip(times, times[1:], widths, widths[1:], strict=False)
        if until - at >= FEWEST_INTERVALS * interval_seconds
    )


def _settling(
    run: Run, within_seconds: tuple[float, float], borne: tuple[int, int], interval_seconds: int
) -> ThresholdSettling:
    """Return how the threshold followed a change within this time, from what the link bore to what it bears."""
    (at, until), (before, after) = within_seconds, borne
    least, most = (share * after for share in SETTLED)
    seen = [
        (one.at_seconds, one.threshold_tokens)
        for one in run.readings
        if at <= one.at_seconds < until and one.threshold_tokens is not None
    ]
    close = list(takewhile(lambda one: least <= one[1] <= most, reversed(seen)))
    nearer = [at_seconds for at_seconds, tokens in reversed(close) if abs(tokens - after) <= abs(tokens - before)]
    # What the link bore before may be close, too: a threshold that goes back to it for good has not settled.
    settled = (one for one in nearer if 2 * _since(one, nearer) >= _since(one, [at_seconds for at_seconds, _ in close]))
    settled_at = next(settled, None)
    return ThresholdSettling(
        at_seconds=at,
        before_tokens=before,
        borne_tokens=after,
        intervals=None if settled_at is None else math.ceil((settled_at - at) / interval_seconds),
        most_intervals=math.floor((until - at) / interval_seconds),
    )


def _since(at_seconds: float, times_seconds: Iterable[float]) -> int:
    return sum(one >= at_seconds for one in times_seconds)


def summarise_disturbed(
    case: Case, runs: Sequence[Run], simulated: Simulated, asked: Iterable[RunKey]
) -> DisturbedSummary:
    """Return the summary of a disturbed case's runs; `simulated` makes the record that a run would have there."""
    return DisturbedSummary(
        runs=tuple(_disturbed(case, run, simulated(run.key)) for run in sorted(runs, key=lambda run: run.key)),
        missing=tuple(sorted(set(asked) - {run.key for run in runs})),
    )


def _disturbed(case: Case, run: Run, expected: Run) -> DisturbedRun:
    why = run.why_invalid
    return DisturbedRun(
        key=run.key,
        p90_seconds=None if why else p90_of(run),
        simulated_p90_seconds=p90_of(expected),
        lost=len(run.lost),
        fallbacks=sum(one.fallback for one in run.answers),
        settlings=() if why else settlings_of(case, run),
        simulated_settlings=settlings_of(case, expected),
        why_invalid=why,
    )


def _planned_tokens(file: PlanFile) -> int:
    _, plan = setups.planned(file, "threshold")
    if plan.threshold_tokens is None:
        raise ConfigError("the plan has no threshold, so none that stays can be tried")
    return plan.threshold_tokens
