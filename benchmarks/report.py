"""What every benchmark shares: the figure, the table and JSON it is printed as, and what /proc says of a process."""

import inspect
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from prfaas.console import TableOrJson, echo_json, new_app, run_app

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
LOG = Path(__file__).parent / "log"
Record = Annotated[bool, typer.Option("--record", help="Also append the figures to benchmarks/log/NAME.jsonl.")]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value, what it should reach, and what was measured beside it in the same run."""

    name: str
    value: float
    unit: str
    better: Literal["lower", "higher"] = "lower"
    reach: float | None = None
    rival: str | None = None
    rival_value: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's figures, and where they come from."""

    bench: str
    time: str
    commit: str
    machine: str
    figures: list[Figure]


def cpu_seconds(pid: int) -> float:
    """Return user and system time that a process has used; other work on the machine disturbs it little."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def waited_seconds(pid: int) -> float:
    """Return how long a process's first thread was ready and had no core."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


def children_of(pid: int) -> list[int]:
    """Return the processes that a process's threads have started, and that still run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    return [pid, *(one for child in children_of(pid) for one in family(child))]


def peak_mib(pid: int) -> float:
    """Return the largest resident set that a process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) / 1024 if found else float("nan")


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def say(words: str) -> None:
    """Tell the person who waits."""
    print(f"{time.strftime('%T')} {words}", file=sys.stderr, flush=True)


def run(bench: str, description: str | None, measure: Callable[..., Iterable[Figure]]) -> None:
    """Read the command line, measure, and print. The parameters of `measure` are the benchmark's own flags."""

    def command(output: TableOrJson = "table", record: Record = False, **flags: Any) -> None:
        report = make_report(bench, measure(**flags))
        show(report, output)
        if record:
            append(report)

    signatures = inspect.signature(measure), inspect.signature(command)
    parameters = [one for signature in signatures for one in signature.parameters.values() if one.name != "flags"]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    app = new_app(add_completion=False)
    app.command(help=(description or "").partition("\n")[0])(command)
    run_app(app, f"prfaas bench {bench}")


def make_report(bench: str, measured: Iterable[Figure]) -> Report:
    """Return the figures with where they come from; `-dirty` marks a checkout with changes."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    time_utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Report(bench=bench, time=time_utc, commit=git.stdout.strip(), machine=machine, figures=list(measured))


def show(report: Report, output: Literal["table", "json"]) -> None:
    """Print the figures."""
    if output == "json":
        echo_json(report)
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table(report))


def append(report: Report, log: Path = LOG) -> None:
    """Append a line of JSON to the benchmark's log."""
    log.mkdir(exist_ok=True)
    with (log / f"{report.bench}.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(report) + b"\n")


def table(report: Report) -> Table:
    """Return the figures a row each, with the ratio to the rival where there is one."""
    rivals = sorted({one.rival for one in report.figures if one.rival})
    caption = f"rival: {', '.join(rivals)}" if rivals else None
    made = Table(title=f"{report.bench}: {report.machine}", caption=caption, box=None, pad_edge=False)
    made.title_justify = made.caption_justify = "left"
    made.add_column("figure")  # a narrow terminal breaks names, never figures
    for name in ("value", "unit", "reach", "rival", "ratio"):
        made.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
    for one in report.figures:
        ratio = f"{one.value / one.rival_value:.2f}" if one.rival_value else ""
        rival = "" if one.rival_value is None else f"{one.rival_value:,.3f}"
        reach = "" if one.reach is None else f"{one.reach:,g}"
        made.add_row(one.name, f"{one.value:,.3f}", one.unit, reach, rival, ratio)
    return made
