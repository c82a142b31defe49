"""The runs of a case that are asked for, and the folder that keeps them: what is missing, made, and summed up."""

import asyncio
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prfaas.cli.evaluation.content import Chapter, Evaluation
from prfaas.cli.evaluation.document import document_files
from prfaas.cli.evaluation.report import page_of
from prfaas.cli.plan import load
from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case, rate_per_second, scenario_of
from prfaas.evaluate.expected import simulated_run
from prfaas.evaluate.next_runs import WantedRuns, next_runs
from prfaas.evaluate.record import ExcludedRun, Run, RunKey, read_runs
from prfaas.evaluate.summary import summarise
from prfaas.util import replace_file
from prfaas_sandbox.evaluate.live import evaluate
from prfaas_sandbox.evaluate.objects import check_live
from prfaas_sandbox.progress import OnProgress


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """`limit_seconds` is of P90, the file's `slo.ttftMillis` if None. `command` repeats it all."""

    case: Case
    wanted: WantedRuns
    limit_seconds: float | None
    folder: Path
    command: str

    def made(self) -> tuple[list[Run], list[ExcludedRun]]:
        """Return the runs that are there, and the files that hold none that counts.

        Raises ConfigError if nobody can read them.
        """
        try:
            files = [(path.name, path.read_bytes()) for path in sorted(self.folder.glob("*.json"))]
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be read: {error}") from error
        return read_runs(files, self.case.digest, partial(rate_per_second, self.case))

    def evaluation(self) -> Evaluation:
        """Return what the runs say. Each is simulated, too. Raises ConfigError without a limit of P90 TTFT."""
        runs, unread = self.made()
        simulated = partial(simulated_run, self.case, new_rng=random.Random)
        return Evaluation(
            case=self.case,
            runs=tuple(runs),
            summary=summarise(self.case.file, runs, simulated, self.limit_seconds, self.wanted.asked),
            unread=tuple(unread),
            command=self.command,
        )

    def next_runs(self, tried: Collection[RunKey] = ()) -> list[RunKey]:
        """Return the runs to make now, of a call that has `tried` these; none if all is done."""
        runs, _ = self.made()
        rows = summarise(self.case.file, runs, None, self.limit_seconds).rows if self.wanted.rising else ()
        return next_runs(self.wanted, runs, rows, tried)

    def check(self, keys: Iterable[RunKey]) -> None:
        """Raise ConfigError for a run that two clusters cannot hold, or that would not do what the file asks."""
        for key in keys:
            check_live(self.case, scenario_of(self.case, key))

    def run(self, state: Path, report: OnProgress) -> dict[RunKey, str]:
        """Make these runs. Return those that failed, with the reason."""
        if not (keys := self.next_runs()):
            return {}
        self.check(keys)
        self.folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(evaluate(self.case, self.next_runs, self.folder, state, report))


def write_report(chapter: Chapter, folder: Path) -> Path:
    """Write the page and the document of a chapter; return where the page is."""
    write_document([chapter], folder)
    replace_file(page := folder / "report.html", page_of(chapter).encode())
    return page


def write_document(chapters: Sequence[Chapter], folder: Path) -> None:
    """Write a document of chapters, and its pictures in a folder beside it."""
    for name, text in document_files(chapters).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())


def read_case(file: Path, requests: int, stretch: float, cache_scale: int) -> Case:
    """Read a plan's file as a case."""
    return Case(name=file.stem, file=load(file), requests=requests, stretch=stretch, cache_scale=cache_scale)


def in_order_of_chance(case: Case, keys: Iterable[RunKey]) -> tuple[RunKey, ...]:
    """Return the runs in an order that an interruption does not change: what drifts then meets all systems alike."""
    rng = random.Random(f"order of {case.digest}")  # noqa: S311 - as it was before an interruption
    ordered = sorted({*keys})
    rng.shuffle(ordered)
    return tuple(ordered)


def folder_of(case: Case, runs: Path) -> Path:
    """Return the folder of a case's runs, which need not be there."""
    return runs / f"{case.name}-{case.digest}"
