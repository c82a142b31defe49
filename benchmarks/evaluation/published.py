"""Writes docs/understand/evaluation.md and its charts from the records of the runs that are published.

    python -m benchmarks.evaluation.published

The page has a chapter for each group of runs in `records`; what has none there has no chapter. The files of the folder
itself are what COMMAND made; its runs take some 18 minutes of two cores. The folders in it are named in PARTS, and have
the runs of `prfaas bench evaluation`: all of each part that they have any of. Each file is packed by `xz -9`. Plan and
simulator are asked again. NOTES are the only words that are written by hand.
"""

import lzma
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.evaluation.__main__ import LongPartName, part_of
from benchmarks.evaluation.compared import POLICIES
from benchmarks.evaluation.part import EvaluationPart, Form, simulator_of

from prfaas.cli.evaluation.content import Chapter, Evaluation
from prfaas.cli.evaluation.sections import chapter_of
from prfaas.errors import ConfigError
from prfaas.evaluate.answer import SATURATED_AT
from prfaas.evaluate.case import rate_per_second
from prfaas.evaluate.next_runs import WantedRuns
from prfaas.evaluate.record import ExcludedRun, RunKey, read_runs
from prfaas.evaluate.summary import summarise
from prfaas_sandbox.evaluate.campaign import write_document

RECORDS: Final = Path(__file__).parent / "records"
PACKED: Final = "*.json.xz"
PARTS: Final[dict[str, Sequence[LongPartName]]] = {
    "paper": ("saturated", "beside", "steady"),
    "static": ("static",),
    "falls": ("falls",),
    "swings": ("swings",),
    "bursts": ("bursts",),
    "longloop": ("longloop",),
    "qwen": ("qwen",),
}
"""By folder: the parts whose runs are of one case."""
FORM: Final = Form("examples/paper.yaml", 300, 2.0, 128, 20.0)
COMMAND: Final = (
    f"prfaas evaluate -f {FORM.file} --systems threshold,homogeneous,naive --loads {SATURATED_AT:g} "
    f"--requests {FORM.requests} --stretch {FORM.stretch:g} --cache-scale {FORM.cache_scale} "
    f"--limit-seconds {FORM.limit_seconds:g}"
)
NOTES: Final = (
    "Before these runs others were made, and five things failed first.",
    "Caches ended while their decodes were queued. A cache waited 30 s for the instance that decodes. Under overload "
    "that instance had a queue of half a minute, so the cache was gone, and the prompt was computed once more where it "
    "is decoded. That made the queue longer: 26 of 250 requests of PrfaaS-PD, and 114 of 250 of homogeneous. A cache "
    "waits two minutes now, and these runs have no such request.",
    "The most that a system carries was estimated as the sum of what its pools completed. That flattered moving "
    "thresholds by 5 to 12 %: a pool with room completes prompts while others wait for the other pool. Now the fullest "
    "pool counts: what it prefills, over its share of the requests.",
    "Of the most that a system carries, what counted were the answers that ended in the time. An answer decodes for "
    "26 s, so that time was as short as one answer. Homogeneous, whose instances all worked, was counted as 1.75 "
    "requests a second, 16 % less than its plan, and PrfaaS-PD as 1.68 times as much, which is more than the plans "
    "allow. Now work counts while it is done.",
    "Under overload, what relieved a full pool moved the threshold away from its optimum. So PrfaaS-PD carries 96 % of "
    "its plan here, and misses 1.3 times naive by a hundredth. Since these runs the threshold balances what waits on "
    "either side.",
    "At a stretch of 1.4 two cores are too slow: steps ended late by more than is allowed, so the run marked itself as "
    "invalid, and gave no figure.",
)
"""What failed before. It changes with the runs."""


def chapters(records: Path = RECORDS) -> list[Chapter]:
    """Return the chapters of the page. Raises ConfigError if a run of one is missing, or gives no figure."""
    found = [chapter_of(published(records))] if any(records.glob(PACKED)) else []
    there = {name: parts for name, parts in PARTS.items() if any((records / name).glob(PACKED))}
    return [*found, *(_chapter(records / name, [*map(part_of, parts)]) for name, parts in there.items())]


def published(records: Path = RECORDS) -> Evaluation:
    """Return the evaluation that COMMAND made. Raises ConfigError if a run is missing, or gives no figure."""
    case = FORM.case()
    files = [(path.stem, lzma.decompress(path.read_bytes())) for path in sorted(records.glob(PACKED))]
    runs, unread = read_runs(files, case.digest, partial(rate_per_second, case))
    asked = [RunKey(policy, SATURATED_AT, 1) for policy in POLICIES]
    summary = summarise(case.file, runs, simulator_of(case), FORM.limit_seconds, asked)
    _refuse(records, COMMAND, (*summary.excluded, *unread), summary.missing)
    return Evaluation(case=case, runs=tuple(runs), summary=summary, command=COMMAND, notes=NOTES)


def _chapter(folder: Path, parts: Sequence[EvaluationPart]) -> Chapter:
    """Return the chapter of parts of one case."""
    part = parts[0]
    with tempfile.TemporaryDirectory() as unpacked:
        for path in folder.glob(PACKED):
            (Path(unpacked) / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        campaign = replace(part.campaign(folder), folder=Path(unpacked))
        runs, unread = campaign.made()
        there = {run.key for run in runs}
        asked = sorted({key for one in parts if _is_begun(one, parts, there) for key in one.runs})
        invalid = [ExcludedRun(run.key.name, run.why_invalid) for run in runs if run.why_invalid]
        _refuse(folder, part.command, (*invalid, *unread), [key for key in asked if key not in there])
        chapter, _ = part.conclude(replace(campaign, wanted=WantedRuns(asked=tuple(asked))))
    if chapter is None:
        raise ConfigError(f"{folder} has no run of {part.case.name}: call {part.command}, and pack its runs")
    return chapter


def _is_begun(part: EvaluationPart, parts: Sequence[EvaluationPart], there: set[RunKey]) -> bool:
    """Whether a run is there that is of this part alone."""
    of_others = {key for one in parts if one is not part for key in one.runs}
    return bool(there & {*part.runs} - of_others)


def _refuse(folder: Path, command: str, without: Iterable[ExcludedRun], missing: Iterable[RunKey]) -> None:
    """Raise ConfigError if there are runs without a figure, or missing ones."""
    failed = [*(f"{one.name}: {one.why}" for one in without), *(f"{key.name}: it is missing" for key in missing)]
    if failed:
        raise ConfigError(f"{folder} gives no whole page ({'; '.join(failed)}): call {command}, and pack its runs")


if __name__ == "__main__":
    write_document(chapters(), Path(__file__).parents[2] / "docs/understand")
