"""The runs of a case that are asked for, and the folder that keeps them: what is missing, made, and summed up."""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.cli.evaluation.content import Evaluation
from prfaas.cli.evaluation.folder import evaluation_of
from prfaas.cli.plan import load
from prfaas.evaluate.case import Case, runs_of, scenario_of
from prfaas.evaluate.record import RunKey
from prfaas.evaluate.summary import rising_loads
from prfaas.simulate.scenario import PolicyName
from prfaas_sandbox.evaluate.live import evaluate
from prfaas_sandbox.evaluate.objects import check_live
from prfaas_sandbox.progress import OnProgress


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """`seeds` are of each load from 0.9 on. With `rises`, loads go on rising until P90 breaks `limit_seconds`, which is
    the file's `slo.ttftMillis` if None. `command` repeats it all."""

    case: Case
    policies: Sequence[PolicyName]
    loads: Sequence[float]
    seeds: int
    limit_seconds: float | None
    rises: bool
    folder: Path
    command: str

    @property
    def asked(self) -> list[RunKey]:
        """The runs at the given loads, in an order of chance that an interruption does not change."""
        rng = random.Random(f"order of {self.case.digest}")  # noqa: S311 - as it was before an interruption
        return runs_of(self.policies, self.loads, self.seeds, (), rng)

    def evaluation(self) -> Evaluation:
        """Return what the runs say that are there."""
        return evaluation_of(self.case, self.folder, self.command, self.asked, self.limit_seconds)

    def missing(self) -> list[RunKey]:
        summary = self.evaluation().summary
        higher = rising_loads(summary, self.policies) if self.rises else []
        return [*(key for key in self.asked if key in summary.missing), *higher]

    def check(self, keys: Iterable[RunKey]) -> None:
        """Raise ConfigError for a run that two clusters cannot hold, or that would not do what the file asks."""
        for key in keys:
            check_live(self.case, scenario_of(self.case, key))

    def to_make(self) -> list[RunKey]:
        """Return the runs that are missing, and those asked for that the machine was too slow for."""
        again = [run.key for run in self.evaluation().runs if run.machine.why_invalid and self._asks(run.key)]
        return [*self.missing(), *again]

    def run(self, state: Path, report: OnProgress) -> dict[RunKey, str]:
        """Make these runs. Return those that failed, with the reason."""
        if not (keys := self.to_make()):
            return {}
        self.check(keys)
        return asyncio.run(evaluate(self.case, keys, self.missing, self.folder, state, report))

    def _asks(self, key: RunKey) -> bool:
        is_higher = self.rises and key.policy in self.policies and key.load > max(self.loads)
        return is_higher or key in self.asked


def read_case(file: Path, requests: int, stretch: float, cache_scale: int) -> Case:
    """Read a plan's file as a case."""
    read = load(file)
    text = file.read_text(encoding="utf-8")
    return Case(name=file.stem, file=read, requests=requests, stretch=stretch, cache_scale=cache_scale, text=text)


def folder_of(case: Case, runs: Path) -> Path:
    """Make the folder of a case's runs, and return it."""
    folder = runs / f"{case.name}-{case.digest}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
