"""The row of a policy at a load: what its runs show, what the plan says, and what the simulator shows.

A run that is invalid or has no steady part gives no figures. If most runs of a load were overloaded, it breaks the
limit; if all were, they say what the system serves: see `prfaas.evaluate.limit`. Close to the limit the requests in
flight may grow by chance in fewer than half of the runs. The others alone would be the luckier ones, so all count.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import msgspec

from prfaas.capacity import equations
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.profile import Profile, prefill_seconds
from prfaas.capacity.workload import Workload
from prfaas.evaluate.expected import PlanFigures, link_percent, plan_figures
from prfaas.evaluate.limit import FILLED_AFTER, LoadVerdict, decode_span, judge, prefill_span, saturated_rate
from prfaas.evaluate.record import AnsweredRequest, Reading, Run, RunKey
from prfaas.evaluate.steady import BATCHES, Sampled, SteadyPart, find_steady, mean_of, of_seeds, quantile_of, rate_of
from prfaas.simulate import setup as setups
from prfaas.simulate.scenario import PolicyName

Simulated = Callable[[RunKey], Run]
"""Makes the record that a run would have in the simulator."""
_LEAST_SHARE: Final = 0.05


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a policy at a load, of one run or several. None: metrics did not say."""

    ttft_mean_seconds: Sampled
    ttft_p90_seconds: Sampled
    ttft_p99_seconds: Sampled
    requests_per_second: Sampled
    offloaded_share: Sampled
    egress_gbps: Sampled | None
    link_percent: Sampled | None
    """See `prfaas.evaluate.expected.link_percent`."""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of a policy at a load show. `saturated_per_second` is None unless all are overloaded.

    `figures` is None if none has a steady part, and if at least half are overloaded or one of these has nothing to
    count: the others are the best of that load.
    """

    figures: LoadFigures | None
    saturated_per_second: Sampled | None
    saturated_counted: Sampled | None
    """The same, with each request counted as one."""
    verdict: LoadVerdict
    parts: dict[str, float] = {}
    """Mean seconds of each part of the time to the first token; of an overloaded load, of all its requests: what waits
    longest there is short of room."""


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy at a load. `planned` is None if the load is too high for the plan; `simulated` if nothing was."""

    policy: PolicyName
    load: float
    rate_per_second: float
    seeds: tuple[int, ...]
    """Of the runs that were made."""
    counted_seeds: tuple[int, ...]
    """Of those that say something."""
    requests: int
    lost: int
    fallbacks: int
    """Of all runs, as `requests` and `lost`."""
    result: LoadResult
    planned: PlanFigures | None
    simulated_result: LoadResult | None

    @property
    def measured(self) -> LoadFigures | None:
        return self.result.figures

    @property
    def simulated(self) -> LoadFigures | None:
        return self.simulated_result.figures if self.simulated_result else None


def row_of(
    file: PlanFile,
    runs: Sequence[Run],
    steady: Mapping[RunKey, SteadyPart],
    simulated: Simulated | None,
    limit_seconds: float,
) -> LoadRow:
    """Return the row of the runs of one policy at one load; `simulated` is None where those figures are left out."""
    first = runs[0]
    counted = [run for run in runs if not run.why_invalid]
    expected = [simulated(run.key) for run in runs] if simulated else []
    return LoadRow(
        policy=first.key.policy,
        load=first.key.load,
        rate_per_second=first.rate_per_second,
        seeds=tuple(run.key.seed for run in runs),
        counted_seeds=tuple(
            run.key.seed for run in counted if not (part := steady[run.key]).why_not or part.overloaded
        ),
        requests=sum(len(run.answers) for run in runs),
        lost=sum(len(run.lost) for run in runs),
        fallbacks=sum(one.fallback for run in runs for one in run.answers),
        result=_result_of(file, first, [(run, steady[run.key]) for run in counted], limit_seconds),
        planned=plan_figures(file, first.key.policy, first.rate_per_second),
        simulated_result=_result_of(
            file, first, [(run, find_steady(run, limit_seconds)) for run in expected], limit_seconds
        )
        if simulated
        else None,
    )


def figures_of(run: Run, part: SteadyPart, capacity_mbps: float) -> LoadFigures:
    """Return the figures of a run's steady part; `capacity_mbps` is what its links are declared to carry."""
    firsts = part.first_tokens_seconds
    egress = _metric(run.readings, part, "egress_mbps")
    ends = [(ended, ended, 1.0) for ended in part.ends_seconds]
    return LoadFigures(
        ttft_mean_seconds=mean_of(firsts),
        ttft_p90_seconds=quantile_of(firsts, 0.9),
        ttft_p99_seconds=quantile_of(firsts, 0.99),
        requests_per_second=rate_of(ends, part.served_from_seconds, part.end_seconds),
        offloaded_share=mean_of([float(one.offloaded) for one in part.answers]),
        egress_gbps=egress and _each(egress, lambda mbps: mbps / 1000),
        link_percent=egress and _each(egress, lambda mbps: link_percent(mbps, capacity_mbps)),
    )


def most_of(file: PlanFile, run: Run) -> Sampled | None:
    """Return the requests a second, of all lengths, that a saturated run's system carries; None: it is not saturated.

    A pool carries, of all requests, as many as it prefills over its share of them, and the least of the pools is the
    system's most. Their sum would count what a pool with room prefills while prompts wait for the other one. Where the
    plan says that decodes limit the system, these are counted.
    """
    if _is_limited_by_decodes(file, run):
        return counted_of(file, run)
    rates = [rate for work in works_of(file, run) if (rate := saturated_rate(run, work)) and rate.value > 0]
    return min(rates, key=lambda one: one.value, default=None)


def counted_of(file: PlanFile, run: Run) -> Sampled | None:
    """Return the same with each request counted as one."""
    return saturated_rate(run, lambda _: 1.0, decode_span if _is_limited_by_decodes(file, run) else prefill_span)


def _is_limited_by_decodes(file: PlanFile, run: Run) -> bool:
    _, plan = setups.planned(file, run.key.policy)
    return plan.theta_pd_d <= plan.lambda_max


def works_of(file: PlanFile, run: Run) -> list[Callable[[AnsweredRequest], float]]:
    """Return for each pool that served as how many requests of all an answer counts: 0 if the other pool made it.

    That is its prefill's time over the mean time that a request brings to the pool. For this mean each prompt stands
    for the workload's lengths that are nearest to its own, so that how many of a length came by chance does not count.
    A pool that got less than `_LEAST_SHARE` of the prompts, as others fell back, is none.
    """
    system, _ = setups.planned(file, run.key.policy)
    filled_seconds = FILLED_AFTER * max((one.at_seconds for one in run.answers), default=0.0)
    given = [one for one in run.answers if one.seconds is not None and one.at_seconds >= filled_seconds]
    given.sort(key=lambda one: one.prompt_tokens)
    between = [(one.prompt_tokens + other.prompt_tokens) / 2 for one, other in pairwise(given)]
    edges = [0.0, *between, math.inf]
    works: list[Callable[[AnsweredRequest], float]] = []
    for away in (False, True):
        places = [place for place, one in enumerate(given) if one.offloaded == away]
        if places and len(places) >= _LEAST_SHARE * len(given):
            profile = (system.offload if away else system.hub)[0].profile
            until = [_seconds_below(profile, file.workload, edge) for edge in edges]
            works.append(partial(_work_of, profile, math.fsum(until[at + 1] - until[at] for at in places), away))
    return works


def _seconds_below(profile: Profile, workload: Workload, tokens: float) -> float:
    """Return the mean time that a request brings to a pool that gets all prompts of up to so many tokens."""
    part = workload.below(tokens)
    return equations.mean_seconds(profile, part) * part.share


def _work_of(profile: Profile, brings_seconds: float, away: bool, one: AnsweredRequest) -> float:
    return prefill_seconds(profile, one.prompt_tokens) / brings_seconds if one.offloaded == away else 0.0


def _result_of(file: PlanFile, first: Run, runs: Sequence[tuple[Run, SteadyPart]], limit_seconds: float) -> LoadResult:
    """Return what the runs of one load show, each with its steady part."""
    capacity_mbps = sum(link.capacity_mbps for link in file.system.links)
    overloaded = [run for run, part in runs if part.overloaded]
    able = sum(not part.why_not or part.overloaded for _, part in runs)
    is_carried = 2 * len(overloaded) < able and all(part.answers for _, part in runs if part.overloaded)
    counted = [(run, part) for run, part in runs if not part.why_not or (part.overloaded and is_carried)]
    steady = _combined([(run.key.seed, figures_of(run, part, capacity_mbps)) for run, part in counted])
    p90 = steady.ttft_p90_seconds if steady else None
    timed = [one for _, part in counted for one in part.answers]
    return LoadResult(
        figures=steady if is_carried else None,
        saturated_per_second=_of_all([(run.key.seed, most_of(file, run)) for run, _ in runs]),
        saturated_counted=_of_all([(run.key.seed, counted_of(file, run)) for run, _ in runs]),
        verdict=judge(first.rate_per_second, [part for _, part in runs], p90, limit_seconds),
        parts=_mean_parts(timed if is_carried else [one for run in overloaded for one in run.answers]),
    )


def _mean_parts(answers: Sequence[AnsweredRequest]) -> dict[str, float]:
    divided = [one.parts for one in answers if one.parts]
    names = {name for parts in divided for name in parts}
    return {name: math.fsum(one.get(name, 0.0) for one in divided) / len(divided) for name in sorted(names)}


def _of_all(found: Sequence[tuple[int, Sampled | None]]) -> Sampled | None:
    """Return what the runs of several seeds say together; None unless each says something."""
    there = [(seed, one) for seed, one in found if one is not None]
    return of_seeds(there) if there and len(there) == len(found) else None


def _combined(runs: Sequence[tuple[int, LoadFigures]]) -> LoadFigures | None:
    """Return the figures of several runs at one load, each with its seed; None: there is no run."""
    if not runs:
        return None
    made: dict[str, Sampled | None] = {}
    for name in LoadFigures.__struct_fields__:
        values = [(seed, value) for seed, run in runs if isinstance(value := getattr(run, name), Sampled)]
        made[name] = of_seeds(values) if values else None
    return msgspec.structs.replace(runs[0][1], **made)


def _metric(readings: Iterable[Reading], part: SteadyPart, name: str) -> Sampled | None:
    """Return the mean of what metrics said during the steady part; None where they said too little."""
    values = [
        value
        for one in readings
        if part.begin_seconds <= one.at_seconds <= part.end_seconds and (value := getattr(one, name)) is not None
    ]
    return mean_of(values) if len(values) >= BATCHES else None


def _each(found: Sampled, change: Callable[[float], float]) -> Sampled:
    return Sampled(change(found.value), change(found.low), change(found.high))
