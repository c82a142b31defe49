"""The gain, measured live: what PrfaaS-PD serves beside the other systems, and how far plan and simulator are off.

    prfaas bench evaluation [--part saturated|beside|steady|falls|swings|bursts|longloop|qwen]

Without a part it serves a small case for thirteen minutes. The paper's case has three parts of at most an hour each:
what the systems complete when more arrives, first tokens at the same rate, and loads that both carry. Three more
disturb it at 70 % load: the link falls to a fifth and returns, it swings, or requests come in bursts. The moving
threshold and prices are then compared with the best thresholds that stay. In `longloop` the requests change, and the
long loop converts and scales. And `qwen` is what systems of Qwen3.5-397B complete when more arrives. An interrupted
part goes on where it was, as `prfaas evaluate` does. The first three parts write one report, the others one each.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from benchmarks.evaluation.compared import compared_part
from benchmarks.evaluation.disturbed import disturbed_part
from benchmarks.evaluation.longloop import long_loop_part
from benchmarks.evaluation.part import EvaluationPart
from benchmarks.report import Figure, run

PartName = Literal["short", "saturated", "beside", "steady", "falls", "swings", "bursts", "longloop", "qwen"]
Part = Annotated[PartName, typer.Option(help="What to serve; short: a small case.")]


def figures(part: Part = "short") -> Iterator[Figure]:
    return part_of(part).figures(Path(".prfaas"))


def part_of(name: PartName) -> EvaluationPart:
    match name:
        case "falls" | "swings" | "bursts":
            return disturbed_part(name)
        case "longloop":
            return long_loop_part()
        case _:
            return compared_part(name)


if __name__ == "__main__":
    run("evaluation", __doc__, figures)
