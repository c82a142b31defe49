"""What routing by prices, and a threshold that moves, are worth against thresholds that stay.

    prfaas bench policies [--file FILE] [--seeds N] [--first-seed N] [--trace FILE]

The paper's case study with bursts, and more troubles step by step: a link that falls to a fifth now and then, one that
swings between all and a fifth of its capacity within ten minutes, and prompts of which half go on from earlier ones, so
that clusters hold different prefixes. At 60 % of the plan a burst asks for just what the plan carries, at 75 % for a
quarter more. The rivals are the best of many fixed thresholds, chosen with hindsight for that very run, the one that
was planned, and naive. All meet the same requests. Virtual time: other work on the machine changes nothing.

With --trace the same on published conversations or code, which bring bursts and prefixes of their own.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated

import msgspec
import typer
from benchmarks.report import Figure, run

from prfaas.cli.simulate import SimulatedLoad
from prfaas.simulate.outcome import Result
from prfaas.simulate.scenario import PolicyName
from prfaas.simulate.setup import LinkSetup, Setup, planned

PAPER = Path(__file__).parents[1] / "examples" / "simulate.yaml"
OF_PLANNED = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
"""The fixed thresholds that are tried, as shares of the planned one."""
SWING_SECONDS, LOW_SHARE = 600.0, 0.2
BEST_REACH, STATIC_REACH, NAIVE_REACH = 0.9, 0.7, 0.5


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of trouble. `link`: steady, as the file says, or swings; `best`: whether fixed thresholds are tried."""

    name: str
    load: float
    link: str = "steady"
    prefix_share: float = 0.0
    best: bool = False


TRIALS = (
    Trial(name="bursts, load 0.6", load=0.6, best=True),
    Trial(name="bursts, load 0.75", load=0.75, best=True),
    Trial(name="bursts, link falls, 0.75", load=0.75, link="file"),
    Trial(name="bursts, link swings, 0.6", load=0.6, link="swings"),
    Trial(name="four troubles, 0.6", load=0.6, link="swings", prefix_share=0.5),
    Trial(name="four troubles, 0.75", load=0.75, link="swings", prefix_share=0.5),
)
ON_TRACES = (
    Trial(name="trace, load 0.7", load=0.7, best=True),
    Trial(name="trace, load 0.9", load=0.9, best=True),
    Trial(name="trace, load 1.1", load=1.1, best=True),
    Trial(name="trace, link swings, 0.7", load=0.7, link="swings"),
    Trial(name="trace, link swings, 0.9", load=0.9, link="swings"),
)


class Runs:
    """One trial with several seeds."""

    def __init__(self, load: SimulatedLoad, trial: Trial, seeds: Sequence[int]):
        self._load = load
        plan = planned(load.file, "static")[1]
        self._planned_tokens = plan.threshold_tokens or 1
        self._rate_per_second = trial.load * plan.lambda_max
        links = {"steady": {}, "file": load.setup.links, "swings": _swinging(load)}[trial.link]
        self._setups = [
            msgspec.structs.replace(load.setup, seed=seed, links=links, prefix_share=trial.prefix_share)
            for seed in seeds
        ]

    def p90_seconds(self, policy: PolicyName) -> float:
        """Return the mean over the seeds of the P90 of TTFT."""
        return mean(self._run(setup, policy).ttft_seconds.p90 for setup in self._setups)

    def best_p90_seconds(self) -> float:
        """Return what the best fixed threshold of each run reaches."""
        tried = [round(share * self._planned_tokens) for share in OF_PLANNED]
        fixed = ([msgspec.structs.replace(setup, threshold_tokens=one) for one in tried] for setup in self._setups)
        return mean(min(self._run(one, "static").ttft_seconds.p90 for one in each) for each in fixed)

    def _run(self, setup: Setup, policy: PolicyName) -> Result:
        if sys.stderr.isatty():
            print(f"\r{policy:12s} {setup.threshold_tokens or '':6}", end="", file=sys.stderr)
        before, self._load.setup = self._load.setup, setup
        try:
            return self._load.run(policy, self._rate_per_second)
        finally:
            self._load.setup = before


def _swinging(load: SimulatedLoad) -> dict[str, LinkSetup]:
    return {
        link.name: LinkSetup(every_seconds=SWING_SECONDS, low_mbps=LOW_SHARE * link.capacity_mbps)
        for link in load.file.system.links
    }


def figures(
    file: Path = PAPER,
    trace: Annotated[Path | None, typer.Option(help="Serve this trace; seeds then change nothing.")] = None,
    seeds: int = 5,
    first_seed: int = 1,
) -> Iterator[Figure]:
    """Serve every trial under every policy."""
    load = SimulatedLoad(file, trace, None)
    for trial in ON_TRACES if trace else TRIALS:
        runs = Runs(load, trial, range(first_seed, first_seed + (1 if trace else seeds)))
        rivals = {"the planned threshold": runs.p90_seconds("static"), "naive": runs.p90_seconds("naive")}
        if trial.best:
            rivals = {"the best fixed threshold": runs.best_p90_seconds(), **rivals}
        for rival, rival_value in rivals.items():
            yield Figure(name=f"{trial.name}: P90 TTFT, {rival}", value=rival_value, unit="s")
        for policy in ("price", "threshold"):
            value = runs.p90_seconds(policy)
            yield Figure(name=f"{trial.name}: P90 TTFT, {policy}", value=value, unit="s")
            for rival, rival_value in rivals.items():
                reach = _reach(trial, policy, rival)
                yield Figure(name=f"  of {rival}", value=value / rival_value, unit="ratio", reach=reach)


def _reach(trial: Trial, policy: PolicyName, rival: str) -> float | None:
    """Return what is asked for: of prices under bursts against the best one, and of all troubles against the others."""
    if trial.best:
        return BEST_REACH if policy == "price" and rival.startswith("the best") else None
    return NAIVE_REACH if rival == "naive" else STATIC_REACH


if __name__ == "__main__":
    run("policies", __doc__, figures)
