"""What every part of the evaluation is: a case, the runs to make of it, and what is said of them."""

import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Figure, say

from prfaas.cli.evaluation.content import Chapter
from prfaas.evaluate.case import Case, run_seconds
from prfaas.evaluate.expected import simulated_run
from prfaas.evaluate.next_runs import WantedRuns
from prfaas.evaluate.record import RunKey
from prfaas.evaluate.rows import Simulated
from prfaas_sandbox.demo.install import repository_root
from prfaas_sandbox.evaluate.campaign import Campaign, folder_of, in_order_of_chance, read_case, write_report


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
    """`conclude` returns what is said of the runs that are there, and the figures; without a run there may be no more
    than these."""

    case: Case
    runs: list[RunKey]
    limit_seconds: float
    command: str
    conclude: Callable[[Campaign], tuple[Chapter | None, Iterable[Figure]]]

    def figures(self, state: Path) -> Iterator[Figure]:
        """Make the runs that are missing, write the report, and yield the figures of all."""
        campaign = self.campaign(state)
        failed = campaign.run(state, say)
        yield Figure(name="runs that failed", value=len(failed), unit="", reach=0)
        chapter, figures = self.conclude(campaign)
        if chapter is not None:
            say(f"the report: {write_report(chapter, campaign.folder)}")
        yield from figures

    def left_seconds(self, state: Path) -> float:
        """Return about how long the runs take that are missing."""
        return sum(run_seconds(self.case, key) for key in self.campaign(state).next_runs())

    def campaign(self, state: Path) -> Campaign:
        """Return what makes and reads the runs, whose folder is below `state`."""
        return Campaign(
            case=self.case,
            wanted=WantedRuns(asked=in_order_of_chance(self.case, self.runs)),
            limit_seconds=self.limit_seconds,
            folder=folder_of(self.case, state / "evaluation"),
            command=self.command,
        )


def simulator_of(case: Case) -> Simulated:
    """Return what makes the record that a run would have in the simulator, once for each."""
    return cache(partial(simulated_run, case, new_rng=random.Random))


def missing(name: str) -> Figure:
    """Return the figure of one that is not there, which misses what it should reach."""
    return Figure(name=f"there is none: {name}", value=1, unit="", reach=0)
