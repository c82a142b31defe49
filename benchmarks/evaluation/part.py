"""What every part of the evaluation is: a case, the runs to make of it, and what is said of them."""

import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Figure, say

from prfaas.evaluate.case import Case
from prfaas.evaluate.expected import simulated_run
from prfaas.evaluate.next_runs import WantedRuns
from prfaas.evaluate.record import RunKey
from prfaas.evaluate.rows import Simulated
from prfaas_sandbox.demo.install import repository_root
from prfaas_sandbox.evaluate.campaign import Campaign, folder_of, in_order_of_chance, read_case


class Form(NamedTuple):
    """A file, at which scale it is served, and the limit of P90."""

    file: str
    requests: int
    stretch: float
    cache_scale: int
    limit_seconds: float

    def case(self) -> Case:
        return read_case(repository_root() / self.file, self.requests, self.stretch, self.cache_scale)


class EvaluationPart(NamedTuple):
    """`conclude` writes the report of the runs that are there, and yields the figures."""

    case: Case
    runs: list[RunKey]
    limit_seconds: float
    command: str
    conclude: Callable[[Campaign], Iterator[Figure]]

    def figures(self, state: Path) -> Iterator[Figure]:
        """Make the runs that are missing, and yield the figures of all."""
        campaign = Campaign(
            case=self.case,
            wanted=WantedRuns(asked=in_order_of_chance(self.case, self.runs)),
            limit_seconds=self.limit_seconds,
            folder=folder_of(self.case, state / "evaluation"),
            command=self.command,
        )
        failed = campaign.run(state, say)
        yield Figure(name="runs that failed", value=len(failed), unit="", reach=0)
        yield from self.conclude(campaign)


def simulator_of(case: Case) -> Simulated:
    """Return what makes the record that a run would have in the simulator, once for each."""
    return cache(partial(simulated_run, case, new_rng=random.Random))


def missing(name: str) -> Figure:
    """Return the figure of one that is not there, which misses what it should reach."""
    return Figure(name=f"there is none: {name}", value=1, unit="", reach=0)
