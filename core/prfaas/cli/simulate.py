"""`prfaas simulate -f FILE` and `prfaas compare -f FILE`: serve a described load in virtual time, and show the figures.

`simulate` serves it under one policy, `compare` serves the same requests under every policy.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prfaas.capacity.comparison import profile_notes
from prfaas.capacity.planfile import PlanFile
from prfaas.cli.plan import load
from prfaas.cli.plots import check_plot, draw_runs
from prfaas.console import TableOrJson, echo_json
from prfaas.errors import ConfigError
from prfaas.simulate import setup as setups
from prfaas.simulate.arrivals import at_rate, read_trace
from prfaas.simulate.outcome import Result, Tally
from prfaas.simulate.request import Arrival
from prfaas.simulate.run import highest_rate
from prfaas.simulate.run import simulate as serve
from prfaas.simulate.scenario import POLICIES, PolicyName
from prfaas.simulate.setup import Setup

WIDTH = 110
File = Annotated[Path, typer.Option("--file", "-f", help="The system, with a simulation section.", show_default=False)]
Trace = Annotated[Path | None, typer.Option(help="Serve this trace instead of random prompts.", show_default=False)]
Rate = Annotated[float | None, typer.Option(help="Requests a second, for the file's own rate.", show_default=False)]
Plot = Annotated[Path | None, typer.Option(help="Also draw what happened, as PNG or HTML.", show_default=False)]
# Key, what it is called, and its digits.
ROWS = (
    ("requests_per_second", "served, 1/s", 2),
    ("offloaded_fraction", "offloaded", 3),
    ("egress_gbps", "egress, Gbit/s", 2),
    ("hit_rate", "hit rate", 3),
    ("completed", "completed", 0),
    ("refused", "refused", 0),
    ("rerouted", "rerouted", 0),
)


class SimulatedLoad:
    """A system's file and its arrivals: random ones, or a trace at its own times or at a rate.

    A trace's lengths are the workload that is planned for. `rate_per_second` and `requests` replace the file's own; a
    trace has its own rate.
    """

    def __init__(self, file: Path, trace: Path | None, rate_per_second: float | None, requests: int | None = None):
        self.file: PlanFile = load(file)
        self.trace: list[Arrival] | None = None
        if trace is not None:
            self.trace = read_trace_file(trace)
            self.file = setups.planned_for(self.file, self.trace)
        self.setup: Setup = setups.read(self.file)
        if requests is not None:
            self.setup = msgspec.structs.replace(self.setup, requests=requests)
        self.rate_per_second = self._rate(rate_per_second)

    @property
    def requests(self) -> int:
        return self.setup.requests if self.trace is None else len(self.trace)

    def run(self, policy: PolicyName, rate_per_second: float, progress: Callable[[int], None] | None = None) -> Result:
        horizon_seconds = 2 * self.requests / rate_per_second + 3600
        scenario = setups.scenario(self.file, self.setup, policy, horizon_seconds)
        slo_millis = self.file.slo.ttft_millis
        limit_seconds = slo_millis / 1000 if slo_millis is not None else float("inf")
        tally = Tally(slo_ttft_seconds=limit_seconds, warmup=self.setup.warmup_requests)
        return serve(scenario, self._arrivals(rate_per_second), tally, progress)

    def is_overloaded(self, policy: PolicyName) -> bool:
        """Tell whether arrivals reach the plan's capacity; times then only show how long the run was."""
        return self.rate_per_second >= setups.capacity(self.file, policy)

    def notes(self) -> list[str]:
        return profile_notes(self.file.system, self.file.workload)

    def _rate(self, rate_option: float | None) -> float:
        if rate_option is not None:
            if not 0 < rate_option < float("inf"):
                raise ConfigError(f"--rate is {rate_option:g} requests a second; it must be above 0")
            return rate_option
        if self.trace is None:
            return setups.rate(self.file, self.setup)
        seconds = self.trace[-1].at_seconds - self.trace[0].at_seconds
        if seconds <= 0:
            raise ConfigError("the trace has no two requests at different times: give --rate")
        return (len(self.trace) - 1) / seconds

    def _arrivals(self, rate_per_second: float) -> Iterable[Arrival]:
        if self.trace is not None:
            return at_rate(self.trace, rate_per_second)
        seed = self.setup.seed  # the same prompts each time are the purpose
        rng, prefix_rng = Random(seed), Random(f"prefixes of {seed}")  # noqa: S311
        return setups.draw(self.file, self.setup, rate_per_second, rng, prefix_rng)


def read_trace_file(path: Path) -> list[Arrival]:
    """Return the requests of a trace, as `read_trace` does. Raises ConfigError for a file that cannot be read, too."""
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(str(path), lines)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def with_progress(loaded: SimulatedLoad, policy: PolicyName, rate_per_second: float) -> Result:
    if not sys.stderr.isatty():
        return loaded.run(policy, rate_per_second)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(policy, total=loaded.requests)
        return loaded.run(policy, rate_per_second, lambda arrived: bars.update(bar, completed=arrived))


def simulate(
    file: File,
    trace: Trace = None,
    policy: Annotated[PolicyName, typer.Option(help="How requests are routed.")] = "threshold",
    rate: Rate = None,
    output: TableOrJson = "table",
    plot: Plot = None,
) -> None:
    """Serve a load in virtual time. Example: prfaas simulate -f examples/simulate.yaml --policy static."""
    check_plot(plot)
    loaded = SimulatedLoad(file, trace, rate)
    result = with_progress(loaded, policy, loaded.rate_per_second)
    if plot is not None:
        draw_runs(plot, {policy: result})
    if output == "json":
        figures = msgspec.to_builtins(result)
        facts = {"overloaded": loaded.is_overloaded(policy), "notes": loaded.notes()}
        echo_json({"policy": policy, "arrivals_per_second": loaded.rate_per_second, **facts, **figures})
    else:
        show(table({policy: result}, loaded), loaded)


def compare(
    file: File,
    trace: Trace = None,
    rate: Rate = None,
    within_slo: Annotated[bool, typer.Option(help="Also find the rate at which P90 keeps slo.ttftMillis.")] = False,
    output: TableOrJson = "table",
    plot: Plot = None,
) -> None:
    """Serve a load under every policy. Example: prfaas compare -f examples/simulate.yaml."""
    check_plot(plot)
    loaded = SimulatedLoad(file, trace, rate)
    slo_millis = loaded.file.slo.ttft_millis
    if within_slo and slo_millis is None:
        raise ConfigError("--within-slo needs slo.ttftMillis in the file: the limit of P90 TTFT")
    chosen = POLICIES if loaded.file.system.offload else ("homogeneous",)
    results: dict[PolicyName, Result] = {name: with_progress(loaded, name, loaded.rate_per_second) for name in chosen}
    rates = {name: _highest(loaded, name, slo_millis / 1000) for name in chosen} if within_slo and slo_millis else {}
    if plot is not None:
        draw_runs(plot, results)
    if output == "json":
        policies = {
            name: {**_figures(one, rates.get(name)), "overloaded": loaded.is_overloaded(name)}
            for name, one in results.items()
        }
        echo_json({"arrivals_per_second": loaded.rate_per_second, "notes": loaded.notes(), "policies": policies})
        return
    made = table(results, loaded)
    if rates:
        made.add_row("rate within SLO, 1/s", *(f"{rates[name]:.2f}" for name in chosen))
    show(made, loaded)


def show(made: Table, loaded: SimulatedLoad) -> None:
    console = Console(width=WIDTH, highlight=False, markup=False, emoji=False)
    console.print(made)
    for note in loaded.notes():
        console.print(f"Note: {note}")


def table(results: dict[PolicyName, Result], loaded: SimulatedLoad) -> Table:
    title = f"{loaded.requests:,} requests at {loaded.rate_per_second:.2f} a second"
    made = Table(title=title, box=box.SIMPLE, pad_edge=False)
    made.title_justify = "left"
    made.add_column("", no_wrap=True)
    for name in results:
        made.add_column(name, justify="right")
    for part, where in (
        ("ttft_seconds", "TTFT"),
        ("ttft_offloaded_seconds", "offloaded"),
        ("ttft_local_seconds", "local"),
    ):
        for key in ("mean", "p50", "p90", "p99"):
            cells = [f"{getattr(getattr(one, part), key):,.2f}" for one in results.values()]
            made.add_row(f"{where} {key}, s", *cells)
    for key, label, digits in ROWS:
        made.add_row(label, *(f"{getattr(one, key):,.{digits}f}" for one in results.values()))
    overloaded = [loaded.is_overloaded(name) for name in results]
    if any(overloaded):
        made.add_row("as much arrives as it carries", *("OVERLOADED" if one else "" for one in overloaded))
    if loaded.file.slo.ttft_millis is not None:
        label = f"first token within {loaded.file.slo.ttft_millis / 1000:g} s"
        made.add_row(label, *(f"{one.slo_attainment:.1%}" for one in results.values()))
    return made


def _figures(result: Result, rate_within_slo: float | None) -> dict[str, object]:
    figures = msgspec.to_builtins(result)
    del figures["timeline"]
    return {**figures, "arrivals_within_slo": rate_within_slo}


def _highest(loaded: SimulatedLoad, policy: PolicyName, limit_seconds: float) -> float:
    def keeps(rate_per_second: float) -> bool:
        result = with_progress(loaded, policy, rate_per_second)
        return result.refused == 0 and result.ttft_seconds.p90 <= limit_seconds

    return highest_rate(keeps, loaded.rate_per_second)
