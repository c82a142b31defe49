"""`prfaas evaluate`: flags, which runs are missing, the report, and the exit code.

A call makes the runs that its folder lacks, and once more those that are invalid. Then it writes the report of all that
are there. So an evaluation of hours can be made in parts, and goes on after an interruption.
"""

import asyncio
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from prfaas.cli.evaluation.content import Evaluation, TextTable, answer, answer_table, figure_tables
from prfaas.cli.evaluation.document import evaluation_markdown
from prfaas.cli.evaluation.folder import evaluation_of
from prfaas.cli.evaluation.report import evaluation_page
from prfaas.cli.plan import load
from prfaas.console import TableOrJson, echo_json, new_app
from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case, runs_of, scenario_of
from prfaas.evaluate.record import RunKey
from prfaas.evaluate.summary import rising_loads
from prfaas.simulate.scenario import POLICIES, PolicyName
from prfaas_sandbox.evaluate.objects import instances
from prfaas_sandbox.progress import progress
from prfaas_sandbox.tools import ensure_tools

app = new_app()
_WIDTH: Final = 110


@app.command()
def evaluate(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    file: Annotated[Path, typer.Option("--file", "-f", help="The case, as for prfaas plan.", show_default=False)],
    systems: Annotated[str, typer.Option(help=f"Which to run, of {', '.join(POLICIES)}.")] = ",".join(POLICIES),
    loads: Annotated[str, typer.Option(help="Shares of what each system's plan carries.")] = "0.5,0.7,0.9",
    rise: Annotated[bool, typer.Option("--rise", help="Then raise each load until P90 breaks its limit.")] = False,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Of P90 of the first token; the file's slo.ttftMillis if not given.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each load from 0.9 on.")] = 1,
    requests: Annotated[int, typer.Option(min=20, help="Of each run.")] = 600,
    stretch: Annotated[float, typer.Option(min=1.0, help="All times are so many times as long.")] = 4.0,
    cache_scale: Annotated[int, typer.Option(min=1, help="Caches and the link are so many times as small.")] = 128,
    runs: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path(".prfaas/evaluation"),
    state: Annotated[Path, typer.Option(help="Folder of the sandbox's logs.")] = Path(".prfaas"),
    report_only: Annotated[bool, typer.Option("--report-only", help="Run nothing; report what is there.")] = False,
    output: TableOrJson = "table",
) -> None:
    """Run a case live on emulated instances. Example: prfaas evaluate -f examples/evaluation.yaml --loads 0.7."""
    case = _case(file, requests, stretch, cache_scale)
    folder = runs / f"{case.name}-{case.digest}"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _wanted(systems), _loads(loads)
    asked = runs_of(*wanted, seeds, (), random.Random(f"order of {case.digest}"))  # noqa: S311 - as before an end
    command = shlex.join(["prfaas", *sys.argv[1:]])

    def read() -> Evaluation:
        return evaluation_of(case, folder, command, asked, limit_seconds)

    def missing() -> list[RunKey]:
        summary = read().summary
        higher = rising_loads(summary, wanted[0]) if rise else []
        return [*(key for key in asked if key in summary.missing), *higher]

    if not report_only and (keys := [*missing(), *(run.key for run in read().runs if run.machine.why_invalid)]):
        _run(case, keys, missing, folder, state)
    evaluation = read()
    (folder / "report.html").write_text(evaluation_page(evaluation), encoding="utf-8")
    (folder / "evaluation.md").write_text(evaluation_markdown(evaluation), encoding="utf-8")
    if output == "json":
        echo_json(evaluation.summary)
    else:
        _show(evaluation, folder)
    if evaluation.summary.excluded or evaluation.unread:
        raise typer.Exit(1)


def _run(
    case: Case, keys: Sequence[RunKey], missing: Callable[[], Sequence[RunKey]], folder: Path, state: Path
) -> None:
    from prfaas_sandbox.evaluate.live import evaluate as run  # it imports what only a run needs

    for key in keys:
        instances(scenario_of(case, key))  # what cannot be run is said before anything starts
    try:
        with progress() as report:
            ensure_tools(report)
            asyncio.run(run(case, keys, missing, folder, state, report))
    except KeyboardInterrupt:
        typer.echo(f"\nInterrupted. Whole runs are kept in {folder}: the same command makes the others.", err=True)
        raise typer.Exit(130) from None


def _show(evaluation: Evaluation, folder: Path) -> None:
    console = Console(width=_WIDTH, highlight=False)
    console.print(answer(evaluation.summary))
    for table in (answer_table(evaluation.summary), *figure_tables(evaluation.summary)[:2]):
        console.print(_table(table))
    for one in (*evaluation.summary.excluded, *evaluation.unread):
        console.print(f"{one.name} gives no figure: {one.why}")
    console.print(f"Report: {folder / 'report.html'}")


def _table(table: TextTable) -> Table:
    shown = Table(*table.head, title=table.title, title_justify="left", box=None)
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _case(file: Path, requests: int, stretch: float, cache_scale: int) -> Case:
    read = load(file)
    return Case(
        name=file.stem,
        file=read,
        requests=requests,
        stretch=stretch,
        cache_scale=cache_scale,
        text=file.read_text(encoding="utf-8"),
    )


def _wanted(text: str) -> Sequence[PolicyName]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in POLICIES]
    if wrong or not names:
        raise ConfigError(f"--systems is {text!r}; give some of {', '.join(POLICIES)}, separated by commas")
    return [name for name in POLICIES if name in names]


def _loads(text: str) -> Sequence[float]:
    try:
        loads = [float(word) for word in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < load <= 2 for load in loads):
        raise ConfigError(f"--loads is {text!r}; give shares above 0 and at most 2, such as 0.5,0.9")
    return sorted(set(loads))
