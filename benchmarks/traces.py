"""Serves published traces under every policy, at several rates.

    prfaas bench traces TRACE... [--write] [--loads 0.5 --loads 0.7]

The hardware is that of examples/simulate.yaml, planned for the trace's lengths. The link has its declared capacity all
the time; bursts and prefixes are the trace's own. Rates are shares of the planned rate, which ignores prefixes. Lambda
at SLO is the highest rate at which P90 keeps slo.ttftMillis, within 2 %. --write also writes benchmarks/log/traces.md.
Traces are not part of the repository: docs/understand/simulation.md lists the formats. Virtual time, a few minutes of
one core a trace.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from benchmarks.report import Figure, run

from prfaas.cli.simulate import SimulatedLoad
from prfaas.simulate.outcome import Result
from prfaas.simulate.run import highest_rate
from prfaas.simulate.scenario import POLICIES, PolicyName
from prfaas.simulate.setup import planned

ROOT = Path(__file__).parents[1]
SYSTEM = ROOT / "examples" / "simulate.yaml"
PAGE = ROOT / "benchmarks" / "log" / "traces.md"
LOADS = [0.5, 0.7, 0.9]
HEAD = """# Policies on published traces

    prfaas bench traces mooncake_conversation.jsonl azure_2023_code.csv --write       # regenerates this page

A cache that comes now takes a slot of its decode instance with its first token. While it held one since its source
began to compute, Λ at SLO on code was 5.62 instead of 6.30 (threshold and price), 5.70 instead of 6.22 (static) and
4.90 instead of 5.62 (homogeneous), and P90 at 50 % was 20 to 22 s instead of 17. On conversations little changed.

This page compares the [policies](../../docs/understand/simulation.md#policies) on two published traces.

- The hardware is that of `examples/simulate.yaml`: the paper's case with a link of 20 Gbit/s, planned for each trace's
  lengths. `homogeneous` has the same number of instances, all in the hub.
- The link keeps its declared capacity. Bursts, lengths and prefixes are the trace's own; Azure's trace has no prefixes.
- Rates are shares of the planned rate. The plan ignores prefixes.
- Caches are those of a model of 1T parameters, with 2 TB in each cluster.
- *Λ at SLO* is the highest rate at which P90 of TTFT is at most {slo:g} s and no request is refused.
- P50, P90, P99 and mean are TTFT in seconds. *Offloaded* is a share of requests, *hit rate* a share of input tokens.
"""
COLUMNS = (
    "policy",
    "requests/s",
    "P50",
    "P90",
    "P99",
    "mean",
    "offloaded",
    "egress, Gbit/s",
    "hit rate",
    "Λ at SLO, 1/s",
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one rate."""

    trace: str
    policy: PolicyName
    load: float
    rate_per_second: float
    result: Result
    rate_within_slo: float


def rows(path: Path, loads: Sequence[float]) -> Iterator[Row]:
    """Serve a trace under every policy."""
    load = SimulatedLoad(SYSTEM, path, None)
    load.setup = msgspec.structs.replace(load.setup, links={})
    highest = planned(load.file, "static")[1].lambda_max
    for policy in POLICIES:
        _say(f"{path.name}: {policy}")
        results = {share: load.run(policy, share * highest) for share in loads}
        within = _within_slo(load, policy, highest)
        for share, result in results.items():
            rate = share * highest
            yield Row(
                trace=path.name, policy=policy, load=share, rate_per_second=rate, result=result, rate_within_slo=within
            )


def _within_slo(load: SimulatedLoad, policy: PolicyName, start: float) -> float:
    limit_seconds = (load.file.slo.ttft_millis or 0.0) / 1000

    def keeps(rate_per_second: float) -> bool:
        result = load.run(policy, rate_per_second)
        return result.refused == 0 and result.ttft_seconds.p90 <= limit_seconds

    return highest_rate(keeps, start)


def page(found: Sequence[Row], slo_seconds: float) -> str:
    """Return benchmarks/log/traces.md."""
    parts = [HEAD.format(slo=slo_seconds)]
    for trace, load in dict.fromkeys((row.trace, row.load) for row in found):
        mine = [row for row in found if (row.trace, row.load) == (trace, load)]
        lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *map(_cells, mine)]
        shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"## {trace} at {load:.0%} of the plan\n\n{shown}\n")
    return "\n".join(parts)


def _cells(row: Row) -> list[str]:
    ttft, result = row.result.ttft_seconds, row.result
    return [
        row.policy,
        f"{row.rate_per_second:.2f}",
        *(f"{value:.2f}" for value in (ttft.p50, ttft.p90, ttft.p99, ttft.mean)),
        f"{result.offloaded_fraction:.2f}",
        f"{result.egress_gbps:.1f}",
        f"{result.hit_rate:.2f}",
        f"{row.rate_within_slo:.2f}",
    ]


def figures(
    traces: list[Path],
    loads: Annotated[list[float], typer.Option(help="Share of the planned rate; repeat it for several.")] = LOADS,
    write: Annotated[bool, typer.Option(help="Also write benchmarks/log/traces.md.")] = False,
) -> Iterator[Figure]:
    """Compute everything."""
    found = [row for path in traces for row in rows(path, loads)]
    if write:
        slo_millis = SimulatedLoad(SYSTEM, None, None).file.slo.ttft_millis or 0.0
        PAGE.write_text(page(found, slo_millis / 1000), encoding="utf-8")
    for row in found:
        where = f"{row.trace}, {row.policy}, {row.load:.0%}"
        yield Figure(name=f"{where}: P90 TTFT", value=row.result.ttft_seconds.p90, unit="s")
    for (trace, policy), rate in {(row.trace, row.policy): row.rate_within_slo for row in found}.items():
        yield Figure(name=f"{trace}, {policy}: rate within SLO", value=rate, unit="1/s", better="higher")


def _say(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{what:60s}", end="", file=sys.stderr)


if __name__ == "__main__":
    run("traces", __doc__, figures)
