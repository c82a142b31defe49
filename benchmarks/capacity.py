"""The planner's figures, held against the simulator, which knows none of its equations.

    prfaas bench capacity

The paper's case: how far a plan is from the bound, lambda_max against what is served when 15 % more comes, estimated
times to the first token against simulated ones at 50, 70 and 90 % load, and how the short loop takes a link that falls
to a fifth. Virtual time: other work on the machine changes nothing but how long it takes, some minutes.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median

import msgspec
from benchmarks.report import Figure, run
from benchmarks.reproduction import sections, simulated

from prfaas.capacity import equations, optimum, ttft
from prfaas.capacity.optimum import Plan
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.system import System
from prfaas.cli.plan import load
from prfaas.cli.simulate import SimulatedLoad
from prfaas.simulate.arrivals import poisson
from prfaas.simulate.outcome import Result, Tally
from prfaas.simulate.run import simulate
from prfaas.simulate.setup import LinkSetup

EXAMPLES = Path(__file__).parents[1] / "examples"
LOADS = (0.5, 0.7, 0.9)
SEEDS = (1, 2, 3)
TTFT_REQUESTS = 40_000
FALL_SECONDS, LOW_SHARE = 600.0, 0.2
FALL_SEEDS = range(1, 11)
FALL_LOADS = (0.7, 0.9)
FALL_REQUESTS = 1_000
FALL_INTERVALS = 10
"""What makes the link busy later than this is no caches that were under way, but the next prompts."""
HIGH_PERCENT = 80


def plan_figures(file: PlanFile) -> Iterator[Figure]:
    """How near plans come to what no policy exceeds."""
    whole = optimum.best(file.system, file.workload).lambda_max
    divided = optimum.fractional(file.system, file.workload).lambda_max
    limit = equations.find_bound(file.system, file.workload).lambda_max
    rival = {"rival": "bound of the linear programme over whole instances", "rival_value": limit / whole}
    yield Figure(
        name="lambda_max, divided roles over whole instances",
        value=divided / whole,
        unit="ratio",
        reach=1.04,
        better="higher",
        **rival,
    )


def carried(file: PlanFile, name: str, system: System, plan: Plan) -> Iterator[Figure]:
    """Served in overload against lambda_max, the worst of the seeds."""
    served = [simulated.carried(system, file.workload, plan, seed).requests_per_second for seed in SEEDS]
    worst = max(abs(one / plan.lambda_max - 1) for one in served)
    yield Figure(name=f"{name}: lambda_max, simulated off by", value=100 * worst, unit="%", reach=3.0)


def times(file: PlanFile, name: str, system: System, plan: Plan) -> Iterator[Figure]:
    """Estimated beside simulated times, and by how much they are off, the worse of mean and P90."""
    for share in LOADS:
        rate = share * plan.lambda_max
        arrivals = poisson(file.workload, round(system.output_tokens), rate, Random(1))
        seen = simulate(simulated.scenario(system, plan), islice(arrivals, TTFT_REQUESTS), Tally()).ttft_seconds
        found = ttft.queued(system, file.workload, plan, rate)
        both = ("mean", found.mean_seconds, seen.mean), ("P90 of", found.p90_seconds, seen.p90)
        for what, estimated, served in both:
            rival = {"rival": "the simulation", "rival_value": served}
            yield Figure(name=f"{name}: {what} TTFT at {share:.0%} load, estimated", value=estimated, unit="s", **rival)
        worst = max(abs(estimated / served - 1) for _, estimated, served in both)
        yield Figure(name=f"{name}: TTFT at {share:.0%} load, estimate off by", value=100 * worst, unit="%", reach=10.0)


def recovery(load: float) -> Iterator[Figure]:
    """The link falls for good to a fifth, at a share of the load that the best threshold then still carries."""
    loaded = SimulatedLoad(EXAMPLES / "simulate.yaml", None, None, requests=FALL_REQUESTS)
    system = loaded.file.system
    (link,) = system.links
    low = msgspec.structs.replace(link, capacity_mbps=LOW_SHARE * link.capacity_mbps)
    plan = optimum.best(system, loaded.file.workload)
    left = optimum.plan_for(msgspec.structs.replace(system, links=(low,)), loaded.file.workload, plan.split)
    falls = LinkSetup(schedule=((FALL_SECONDS, low.capacity_mbps),))
    results: list[Result] = []
    for seed in FALL_SEEDS:
        loaded.setup = msgspec.structs.replace(loaded.setup, seed=seed, bursts=None, links={link.name: falls})
        results.append(loaded.run("threshold", load * left.lambda_max))
    moved = [_until_moved(one, left.threshold_tokens or 0) for one in results]
    name = f"link falls, {load:.0%} load: intervals of 1 s until the threshold is what it bears"
    yield Figure(name=f"{name}, median", value=median(moved), unit="", reach=3)
    yield Figure(name="  the worst of ten seeds", value=max(moved), unit="", reach=3)
    drained = [_until_drained(one) for one in results]
    name = f"link falls, {load:.0%} load: until it is under 80 %, with the caches that were under way"
    yield Figure(name=f"{name}, median", value=median(drained), unit="", reach=3)
    yield Figure(name="  the worst of ten seeds", value=max(drained), unit="", reach=3)
    lost = sum(one.requests - one.completed for one in results)
    yield Figure(name="requests lost or refused meanwhile", value=lost, unit="", reach=0)


def _until_moved(result: Result, bearable_tokens: int) -> int:
    """Count from the first interval in which something waits for the link: before, nobody can know."""
    after = [one for one in result.timeline if one.at_seconds > FALL_SECONDS]
    seen = next(place for place, one in enumerate(after) if one.unsent_bytes > 0)
    return next(place for place, one in enumerate(after[seen:], 1) if one.threshold_tokens >= bearable_tokens)


def _until_drained(result: Result) -> int:
    """Count the intervals of trouble that the fall brought; 0 where the link is not busy in the window after it."""
    after = [one for one in result.timeline if one.at_seconds > FALL_SECONDS]
    busy = [one.utilisation_percent > HIGH_PERCENT for one in after]
    return busy.index(False, busy.index(True)) - busy.index(True) + 1 if True in busy[:FALL_INTERVALS] else 0


def figures() -> Iterator[Figure]:
    """Compute everything."""
    file = load(EXAMPLES / "paper.yaml")
    yield from plan_figures(file)
    for name, (system, plan) in sections.plans(file).items():
        yield from carried(file, sections.TITLES[name], system, plan)
        yield from times(file, sections.TITLES[name], system, plan)
    for share in FALL_LOADS:
        yield from recovery(share)


if __name__ == "__main__":
    run("capacity", __doc__, figures)
