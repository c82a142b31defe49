"""`prfaas compare -f FILE`: the same requests under every policy, side by side."""

from typing import Annotated

import msgspec
import typer

from prfaas.cli.plots import check_plot, draw_runs
from prfaas.cli.simulate import (
    File,
    Load,
    Plot,
    Rate,
    Trace,
    echo_json,
    show,
    table,
    with_progress,
)
from prfaas.console import TableOrJson
from prfaas.errors import ConfigError
from prfaas.simulate.outcome import Result
from prfaas.simulate.run import highest_rate
from prfaas.simulate.scenario import POLICIES, PolicyName


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
    loaded = Load(file, trace, rate)
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


def _figures(result: Result, rate_within_slo: float | None) -> dict[str, object]:
    """Return a run's figures without its timeline."""
    figures = msgspec.to_builtins(result)
    del figures["timeline"]
    return {**figures, "arrivals_within_slo": rate_within_slo}


def _highest(loaded: Load, policy: PolicyName, limit_seconds: float) -> float:
    def keeps(rate_per_second: float) -> bool:
        result = with_progress(loaded, policy, rate_per_second)
        return result.refused == 0 and result.ttft_seconds.p90 <= limit_seconds

    return highest_rate(keeps, loaded.rate_per_second)
