"""`prfaas evaluate`: flags, which runs are missing, the report, and the exit code.

A call makes the runs that it asks for and its folder lacks, and once more those that are invalid. Then it writes the
report of all that are there. So an evaluation of hours can be made in parts, and goes on after an interruption.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from prfaas.cli.evaluation.content import (
    Evaluation,
    TextTable,
    answer,
    figure_tables,
    headline_table,
    limit_table,
    saturated_table,
)
from prfaas.console import TableOrJson, echo_json, new_app
from prfaas.errors import ConfigError
from prfaas.evaluate.case import runs_of
from prfaas.evaluate.next_runs import WantedRuns
from prfaas.simulate.scenario import POLICIES, PolicyName
from prfaas_sandbox.progress import progress
from prfaas_sandbox.tools import ensure_tools

if TYPE_CHECKING:
    from prfaas.evaluate.record import RunKey
    from prfaas_sandbox.evaluate.campaign import Campaign

app = new_app()
_WIDTH: Final = 110


@app.command()
def evaluate(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    file: Annotated[Path, typer.Option("--file", "-f", help="The case, as for prfaas plan.", show_default=False)],
    systems: Annotated[str, typer.Option(help=f"Which to run, of {', '.join(POLICIES)}.")] = ",".join(POLICIES),
    loads: Annotated[
        str, typer.Option(help="Shares of what each system's plan carries; above 1.2, saturated.")
    ] = "0.5,0.7,0.9",
    rise: Annotated[bool, typer.Option("--rise", help="Then raise each load until it breaks the limit.")] = False,
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
    from prfaas.cli.evaluation.sections import chapter_of
    from prfaas_sandbox.evaluate.campaign import Campaign, folder_of, in_order_of_chance, read_case, write_report

    case, policies = read_case(file, requests, stretch, cache_scale), _policies(systems)
    asked = in_order_of_chance(case, runs_of(case, policies, _loads(loads), seeds))
    campaign = Campaign(
        case=case,
        wanted=WantedRuns(asked=asked, rising=policies if rise else (), seeds=seeds),
        limit_seconds=limit_seconds,
        folder=(folder := folder_of(case, runs)),
        command=shlex.join(["prfaas", *sys.argv[1:]]),
    )
    failed = {} if report_only else _run(campaign, state)
    evaluation = campaign.evaluation()
    if report_only and not (evaluation.runs or evaluation.unread):
        raise ConfigError(
            f"{folder} has no run of this case: a run is of a file, --requests, --stretch and --cache-scale; "
            "give those of its call"
        )
    page = write_report(chapter_of(evaluation), folder)
    if output == "json":
        echo_json(evaluation.summary)
    else:
        _show(evaluation, page)
    missing = [key for key in evaluation.summary.missing if key not in failed]
    for line in (
        *(f"{key.name} failed: {why}" for key, why in failed.items()),
        *(f"{key.name} is missing" for key in missing),
    ):
        typer.echo(line, err=True)
    if failed or missing or evaluation.summary.excluded or evaluation.unread:
        raise typer.Exit(1)


def _run(campaign: "Campaign", state: Path) -> "dict[RunKey, str]":
    campaign.check(campaign.next_runs())  # what cannot be run is said before anything is built
    try:
        with progress() as report:
            ensure_tools(report)  # before asyncio takes the signals over, so that Ctrl-C also ends a build
            return campaign.run(state, report)
    except KeyboardInterrupt:
        typer.echo(f"\nInterrupted. Whole runs are in {campaign.folder}: the same command makes the others.", err=True)
        raise typer.Exit(130) from None


def _show(evaluation: Evaluation, page: Path) -> None:
    console = Console(width=_WIDTH, highlight=False)
    console.print(answer(evaluation.summary))
    summary = evaluation.summary
    for table in (headline_table(summary), saturated_table(summary), limit_table(summary), *figure_tables(summary)[:2]):
        console.print(_table(table))
    for one in (*evaluation.summary.excluded, *evaluation.unread):
        console.print(f"{one.name} gives no figure: {one.why}")
    console.print(f"Report: {page}")


def _table(table: TextTable) -> Table:
    shown = Table(*table.head, title=table.title, title_justify="left", box=None)
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _policies(text: str) -> tuple[PolicyName, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in POLICIES]
    if wrong or not names:
        raise ConfigError(f"--systems is {text!r}; give some of {', '.join(POLICIES)}, separated by commas")
    return tuple(name for name in POLICIES if name in names)


def _loads(text: str) -> Sequence[float]:
    try:
        loads = [round(float(word), 4) for word in text.split(",")]  # as many digits as a run's name has
    except ValueError:
        loads = []
    if not loads or not all(0 < load <= 2 for load in loads):
        raise ConfigError(f"--loads is {text!r}; give shares above 0 and at most 2, such as 0.5,0.9")
    return sorted(set(loads))
