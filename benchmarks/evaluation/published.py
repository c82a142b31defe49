"""Makes docs/understand/evaluation.md and its pictures from the records of the runs that are published.

    python -m benchmarks.evaluation.published

The page has a chapter for each folder of `records`; one without records has none. PARTS names them: they have runs of
`prfaas bench evaluation`, all of each part that they have any of, each packed by `xz -9`. Plan and simulator are asked
again. NOTES are the only words that are written by hand.
"""

import lzma
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.evaluation.__main__ import LongPartName, part_of
from benchmarks.evaluation.part import EvaluationPart

from prfaas.cli.evaluation.content import Chapter
from prfaas.cli.evaluation.sections import FAILED
from prfaas.errors import ConfigError
from prfaas.evaluate.next_runs import WantedRuns
from prfaas.evaluate.record import ExcludedRun, RunKey
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
ALL: Final = "make evaluation"
"""Serves all parts."""
NOTES: Final[dict[str, Sequence[str]]] = {
    "paper": (
        "Before these runs others were made, and five things failed first.",
        "Caches ended while their decodes were queued. A cache waited 30 s for the instance that decodes. Under "
        "overload that instance had a queue of half a minute, so the cache was gone, and the prompt was computed "
        "once more where it is decoded. That made the queue longer: 26 of 250 requests of PrfaaS-PD, and 114 of 250 "
        "of homogeneous. A cache waits two minutes now, and these runs have no such request.",
        "The most that a system carries was estimated as the sum of what its pools completed. That flattered moving "
        "thresholds by 5 to 12 %: a pool with room completes prompts while others wait for the other pool. Now the "
        "fullest pool counts: what it prefills, over its share of the requests.",
        "Of the most that a system carries, what counted were the answers that ended in the time. An answer decodes "
        "for 26 s, so that time was as short as one answer. Homogeneous, whose instances all worked, was counted as "
        "1.75 requests a second, 16 % less than its plan, and PrfaaS-PD as 1.68 times as much, which is more than "
        "the plans allow. Now work counts while it is done.",
        "Under overload, what relieved a full pool moved the threshold away from its optimum. With that threshold one "
        "run of each system gave 1.50 (1.39 to 1.61) over homogeneous and 1.29 (1.18 to 1.40) over naive. Since then "
        "it balances what waits on either side.",
        "At a stretch of 1.4 two cores are too slow: steps ended late by more than is allowed, so the run marked "
        "itself as invalid, and gave no figure.",
        "In these runs one thing failed. In one of three of homogeneous at 90 % more requests arrived than ended: 5 % "
        "of them piled up. By the rule of before, such a load had no times at all. The rule was changed after these "
        "runs: where fewer than half of them pile up, all of them count, that one too.",
    )
}
"""By folder: what failed before. It changes with the runs."""


def chapters(records: Path = RECORDS) -> list[Chapter]:
    """Return the chapters of the page. Raises ConfigError if a run of one is missing, or gives no figure."""
    there = {name: parts for name, parts in PARTS.items() if any((records / name).glob(PACKED))}
    return [_chapter(records / name, [*map(part_of, parts)]) for name, parts in there.items()]


def _chapter(folder: Path, parts: Sequence[EvaluationPart]) -> Chapter:
    """Return the chapter of parts of one case."""
    part = parts[0]
    with tempfile.TemporaryDirectory() as unpacked:
        for path in folder.glob(PACKED):
            (Path(unpacked) / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        campaign = replace(part.campaign(folder), folder=Path(unpacked))
        runs, unread = campaign.made()
        there = {run.key for run in runs}
        begun = [one for one in parts if there & {*one.runs}]
        command = begun[0].command if len(begun) == 1 else ALL
        asked = sorted({key for one in begun for key in one.runs})
        invalid = [ExcludedRun(run.key.name, run.why_invalid) for run in runs if run.why_invalid]
        _refuse(folder, command, (*invalid, *unread), [key for key in asked if key not in there])
        chapter, _ = part.conclude(replace(campaign, wanted=WantedRuns(asked=tuple(asked)), command=command))
    if chapter is None:
        raise ConfigError(f"{folder} has no run of {part.case.name}: call {command}, and pack its runs")
    return _with_notes(chapter, NOTES.get(folder.name, ()))


def _with_notes(chapter: Chapter, notes: Iterable[str]) -> Chapter:
    sections = [one._replace(items=[*one.items, *notes]) if one.title == FAILED else one for one in chapter.sections]
    return chapter._replace(sections=sections)


def _refuse(folder: Path, command: str, without: Iterable[ExcludedRun], missing: Iterable[RunKey]) -> None:
    """Raise ConfigError if there are runs without a figure, or missing ones."""
    failed = [*(f"{one.name}: {one.why}" for one in without), *(f"{key.name}: it is missing" for key in missing)]
    if failed:
        raise ConfigError(f"{folder} gives no whole page ({'; '.join(failed)}): call {command}, and pack its runs")


if __name__ == "__main__":
    write_document(chapters(), Path(__file__).parents[2] / "docs/understand")
