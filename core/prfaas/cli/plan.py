"""`prfaas plan`: a verdict, then the best threshold and split of a system, beside its baselines and published figures.

A file describes the system, or a running installation is it. Core knows no cluster: the operator registers a reader of
one under the entry point group `prfaas.plan_sources`.
"""

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from prfaas.capacity import planfile
from prfaas.capacity.comparison import BudgetedSystem, Comparison, EqualCost, Figures, compare
from prfaas.capacity.verdict import Verdict
from prfaas.cli.report import render
from prfaas.console import HubContext, HubKubeconfig, HubNamespace, TableOrJson, echo_json
from prfaas.errors import ConfigError, install_extra
from prfaas.simulate import setup as setups
from prfaas.simulate.arrivals import read_trace

TITLES = {
    "hub_alone": "hub alone",
    "homogeneous": "homogeneous",
    "equal_cost": "equal cost",
    "naive_heterogeneous": "naive",
    "prfaas_pd": "PrfaaS-PD",
    "fractional": "fractional",
}
# Key, what it is called in the paper, and its digits.
ROWS = (
    ("threshold_tokens", "t, tokens", 0),
    ("n_prfaas", "N_prfaas", 0),
    ("n_p", "N_p", 2),
    ("n_d", "N_d", 2),
    ("theta_prfaas", "Theta_prfaas, 1/s", 2),
    ("theta_pd_p", "Theta_pd-p, 1/s", 2),
    ("theta_pd_d", "Theta_pd-d, 1/s", 2),
    ("lambda_max", "Lambda_max, 1/s", 2),
    ("offloaded_fraction", "offloaded", 3),
    ("egress_gbps", "egress, Gbit/s", 1),
    ("ttft_mean_seconds", "mean TTFT, s", 2),
    ("ttft_p90_seconds", "P90 TTFT, s", 2),
)
SHOWN_LOADS = (0.5, 0.7, 0.9)
WIDTH = 120
PLAN_SOURCES = "prfaas.plan_sources"


def plan(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="The system; see docs/understand/capacity.md.", show_default=False),
    ] = None,
    output: TableOrJson = "table",
    html: Annotated[
        Path | None, typer.Option(help="Also write it as a page with plots, to read without tools.", show_default=False)
    ] = None,
    from_cluster: Annotated[
        bool, typer.Option("--from-cluster", help="Plan what a running installation measures, in place of a file.")
    ] = False,
    policy: Annotated[
        str | None, typer.Option(help="PrfaaSPolicy to plan; the only one if not given.", show_default=False)
    ] = None,
    context: HubContext = None,
    kubeconfig: HubKubeconfig = None,
    namespace: HubNamespace = "prfaas",
) -> None:
    """Find the best threshold and split into prefill and decode. Example: prfaas plan -f examples/paper.yaml."""
    if file is not None and policy is not None:
        raise ConfigError("--policy chooses what --from-cluster plans; a file describes one system: leave --policy out")
    if (file is None) != from_cluster:
        raise ConfigError("give either --file with a system, or --from-cluster for what is installed")
    described = load(file) if file is not None else _installed(kubeconfig, context, namespace, policy)
    if described.simulation:
        setups.read(described)  # raises for a mistake now, not only at the first simulation
    result = compare(described)
    if html is not None:
        _write(html, render(str(file or "the installation"), described, result, _compared(result, {})))
    if output == "json":
        echo_json(result)
        return
    console = Console(width=WIDTH, highlight=False, markup=False, emoji=False)
    console.print(result.verdict.sentence)
    console.print()
    console.print(_table_6(*_compared(result, described.published)))
    if result.prfaas_pd is not None:
        console.print(_by_length(result.verdict))
    console.print(_queueing(result))
    _say(console, result)


def _installed(kubeconfig: Path | None, context: str | None, namespace: str, policy: str | None) -> planfile.PlanFile:
    """Read a running installation; raises ConfigError or PeerError where that fails."""
    try:
        source = next(iter(entry_points(group=PLAN_SOURCES, name="cluster"))).load()
    except (StopIteration, ImportError) as error:
        raise ConfigError(f"--from-cluster needs the operator's part; {install_extra('operator')}") from error
    return source(kubeconfig, context, namespace, policy)


def load(path: Path) -> planfile.PlanFile:
    """Read a system's file, to which its traces' paths are relative; raises ConfigError for what is wrong with it."""

    def load_trace(name: str) -> list[tuple[int, int]]:
        where = path.parent / name
        return [(one.input_tokens, one.output_tokens) for one in read_trace(str(where), _text(where).splitlines())]

    try:
        documents: list[object] = list(yaml.safe_load_all(_text(path)))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if len(documents) > 1:
        raise ConfigError(f"{path} holds {len(documents)} YAML documents; give a file with one system")
    try:
        return planfile.read(documents[0] if documents else None, load_trace)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _table_6(head: Sequence[str], *rows: Sequence[str]) -> Table:
    table = _table("The plan and its baselines", gap=0 if "published" in head else 1)
    for title in head:
        table.add_column(title.replace(" ", "\n"), justify="right" if title else "left", no_wrap=not title)
    for row in rows:
        table.add_row(*row)
    return table


def _compared(result: Comparison, published: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return a head, then a row a figure: a column a system, each followed by what was published and how far off it is.

    The first column names the figure.
    """
    columns = _columns(result)
    head = [""]
    for name in columns:
        head += [TITLES[name], "published", "off by"] if name in published else [TITLES[name]]
    rows = [head]
    for key, title, digits in ROWS:
        rows.append([title])
        for name, figures in columns.items():
            value: float | None = getattr(figures, key, None) or None  # the system may lack the stage
            rows[-1].append(_shown(value, digits))
            if name in published:
                rows[-1] += _beside(value, published[name].get(key), digits)
    for base in ("hub_alone", "homogeneous"):
        if base not in columns:
            continue
        rows.append([f"over {TITLES[base]}"])
        for name, figures in columns.items():
            ratio = figures.lambda_max / columns[base].lambda_max
            rows[-1].append(_shown(ratio, 2))
            if name in published:
                theirs, others = (published.get(one, {}).get("lambda_max") for one in (name, base))
                rows[-1] += _beside(ratio, theirs / others if theirs and others else None, 2)
    return rows


def _columns(result: Comparison) -> dict[str, Figures | BudgetedSystem]:
    """Return the systems in the order of TITLES, in which each stands beside what it has to surpass."""
    columns: dict[str, Figures | BudgetedSystem] = {**result.systems(), "fractional": result.fractional}
    if result.equal_cost is not None:
        columns["equal_cost"] = result.equal_cost.homogeneous
    return {name: columns[name] for name in TITLES if name in columns}


def _beside(value: float | None, published: float | None, digits: int) -> list[str]:
    return [_shown(published, digits), f"{value / published - 1:+.1%}" if value and published else "-"]


def _table(title: str, gap: int = 1) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, gap, 0, 0), pad_edge=False)


def _shown(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() and digits == 2 and value < 1000 else f"{value:,.{digits}f}"


def _by_length(found: Verdict) -> Table:
    """Return the means of each class of lengths in the hub alone and with PrfaaS-PD."""
    rate = f"{found.arrivals_per_second:.2f} requests/s"
    table = _table(f"Mean time to the first token by length, s: at {rate}, and of a lone prompt (estimate)")
    titles = ("hub alone", "PrfaaS-PD", "ratio", "lone, hub alone", "lone, PrfaaS-PD", "ratio")
    for title in ("tokens", "share", "offloaded", *titles):
        table.add_column(title, justify="right")
    for one in found.classes:
        table.add_row(
            f"{one.from_tokens:,} to {one.to_tokens:,}",
            f"{one.share:.1%}",
            f"{one.offloaded:.0%}",
            *_ratio(one.hub_ttft_seconds, one.ttft_seconds),
            *_ratio(one.lone_hub_seconds, one.lone_seconds),
        )
    return table


def _ratio(base: float | None, seconds: float) -> list[str]:
    return [_shown(base, 2), _shown(seconds, 2), _shown(seconds / base if base else None, 2)]


def _queueing(result: Comparison) -> Table:
    table = _table("Time to the first token with waits, s (estimate)")
    for title in ("system", "load", "requests/s", "mean", "P50", "P90", "P99"):
        table.add_column(title, justify="left" if title == "system" else "right")
    for name, rows in result.queueing.items():
        shown = [row for row in rows if row.load in SHOWN_LOADS]
        for row in shown:
            times = (row.ttft_mean_seconds, row.ttft_p50_seconds, row.ttft_p90_seconds, row.ttft_p99_seconds)
            cells = (f"{row.load:.0%}", f"{row.arrivals_per_second:.2f}", *(f"{seconds:.2f}" for seconds in times))
            table.add_row(TITLES[name] if row is shown[0] else "", *cells)
    return table


def _equal_cost(found: EqualCost) -> str:

    def shown(one: BudgetedSystem) -> str:
        bought = " + ".join(f"{count} {name}" for name, count in one.instances.items())
        return f"{bought}: {one.lambda_max:.2f} requests/s"

    alone, mix = found.homogeneous, found.best_mix
    return (
        f"At equal cost ({found.described.cost_per_hour:g} an hour): {shown(found.described)}, {found.gain:+.1%} of "
        f"{shown(alone)} ({alone.cost_per_hour:g} spent). Best mix: {shown(mix)}, {found.gain_of_best_mix:+.1%}. "
        f"Even where an offload instance costs {found.even_at_ratio:.2f} of the hub's."
    )


def _say(console: Console, result: Comparison) -> None:
    console.print(
        f"Fractional roles carry {result.fractional.lambda_max:.3f} requests/s, x{result.fractional_gain:.3f} of whole "
        f"instances. No policy carries more than {result.lambda_bound:.3f} (bound of a linear programme)."
    )
    for name, rate in (result.arrivals_within_slo or {}).items():
        kept = f"at up to {rate:.2f} requests/s" if rate is not None else "at no rate"
        console.print(f"{TITLES[name]} keeps slo.ttftMillis at P90 {kept}.")
    if result.equal_cost is not None:
        console.print(_equal_cost(result.equal_cost))
    for note in result.notes:
        console.print(f"Note: {note}")
