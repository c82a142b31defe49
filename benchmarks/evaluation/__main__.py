"""The gain, measured live: what PrfaaS-PD serves beside the other systems, and how far plan and simulator are off.

    prfaas bench evaluation [--part saturated|beside|steady|static|falls|swings|bursts|longloop|qwen]
    prfaas bench evaluation --part conversations --trace FILE
    prfaas bench evaluation --long [--trace FILE]

Without a part it serves a small case for four minutes. The paper's case has three parts of at most an hour each: what
the systems serve when more arrives, first tokens at the same rate, and loads that both carry. Three more disturb it at
70 % load: the link falls to a fifth and returns, it swings, or requests come in bursts. The moving threshold and prices
are then compared with the best thresholds that stay, and in `static` at 90 % while nothing changes, and in
`conversations` while prompts go on from earlier ones. In `longloop` the requests change, and the long loop converts and
scales. And `qwen` is what systems of Qwen3.5-397B serve when more arrives. With `--long` all parts are served, one
after the other, without conversations where no trace is named. What was interrupted goes on where it was, as `prfaas
evaluate` does. The first three parts write one report, the others one each.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec
import typer
from benchmarks.evaluation.compared import compared_part
from benchmarks.evaluation.disturbed import disturbed_part
from benchmarks.evaluation.longloop import long_loop_part
from benchmarks.evaluation.part import EvaluationPart
from benchmarks.report import Figure, run, say

from prfaas.errors import ConfigError

LongPartName = Literal[
    "saturated", "beside", "steady", "static", "conversations", "falls", "swings", "bursts", "longloop", "qwen"
]
PartName = Literal["short", LongPartName]
Part = Annotated[PartName, typer.Option(help="What to serve; short: a small case.")]
Trace = Annotated[Path | None, typer.Option(help="Conversations to serve, in Mooncake's form.", show_default=False)]
Long = Annotated[bool, typer.Option("--long", help="Serve all parts but the short one, one after the other.")]

STATE: Final = Path(".prfaas")


def figures(part: Part = "short", long: Long = False, trace: Trace = None) -> Iterator[Figure]:
    if not long:
        yield from part_of(part, trace).figures(STATE)
        return
    if part != "short":
        raise ConfigError(f"--long serves all parts, and --part {part} one: give one of both")
    names: list[LongPartName] = [name for name in get_args(LongPartName) if trace or name != "conversations"]
    parts = {name: part_of(name, trace if name == "conversations" else None) for name in names}
    for name, one in parts.items():
        say(what_is_left(parts))
        for figure in one.figures(STATE):
            yield msgspec.structs.replace(figure, name=f"{name}: {figure.name}")


def what_is_left(parts: dict[LongPartName, EvaluationPart]) -> str:
    """Return the parts that have runs to make, and about how long these take."""
    minutes = {name: round(seconds / 60) for name, one in parts.items() if (seconds := one.left_seconds(STATE))}
    if not minutes:
        return "all runs of all parts are there"
    said = ", ".join(f"{name} {count}" for name, count in minutes.items())
    return f"left are some {sum(minutes.values())} minutes of runs: {said}"


def part_of(name: PartName, trace: Path | None = None) -> EvaluationPart:
    """Return a part. Raises ConfigError for one of conversations without a trace, or another with one."""
    if trace and name != "conversations":
        raise ConfigError(f"--trace names what --part conversations serves; --part {name} draws its requests")
    match name:
        case "static" | "conversations" | "falls" | "swings" | "bursts":
            return disturbed_part(name, trace)
        case "longloop":
            return long_loop_part()
        case _:
            return compared_part(name)


if __name__ == "__main__":
    run("evaluation", __doc__, figures)
