"""The gain, measured live: what PrfaaS-PD serves beside the other systems, and how far plan and simulator are off.

    prfaas bench evaluation [--long]

The short form serves a small case for some five minutes. The long one serves the paper's case at rising load, for many
hours; an interrupted one goes on where it was, as `prfaas evaluate` does. Both write its report.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from benchmarks.report import Figure, run, say

from prfaas.cli.evaluation.content import TITLES, off_by
from prfaas.evaluate.summary import CaseSummary
from prfaas.simulate.scenario import PolicyName
from prfaas_sandbox.demo.install import repository_root
from prfaas_sandbox.evaluate.campaign import Campaign, folder_of, read_case, write_report

POLICIES: Final[tuple[PolicyName, ...]] = ("threshold", "naive", "homogeneous")
REACH_OVER: Final = {"homogeneous": 1.5, "naive": 1.3}
REACH_P90: Final = 0.4
REACH_OFF: Final = 0.1

Long = Annotated[bool, typer.Option("--long", help="Serve the paper's case, for hours.")]


class Form(NamedTuple):
    """What is served, and how."""

    file: str
    requests: int
    stretch: float
    cache_scale: int
    loads: tuple[float, ...]
    seeds: int
    limit_seconds: float
    rises: bool


SHORT: Final = Form("examples/evaluation.yaml", 200, 1.0, 32, (0.7,), 1, 6.0, rises=False)
PAPER: Final = Form("examples/paper.yaml", 800, 4.0, 128, (0.3, 0.5, 0.7, 0.9, 1.3), 3, 20.0, rises=True)


def figures(long: Long = False) -> Iterator[Figure]:
    form, state = PAPER if long else SHORT, Path(".prfaas")
    case = read_case(repository_root() / form.file, form.requests, form.stretch, form.cache_scale)
    campaign = Campaign(
        case=case,
        policies=POLICIES,
        loads=form.loads,
        seeds=form.seeds,
        limit_seconds=form.limit_seconds,
        rises=form.rises,
        folder=folder_of(case, state / "evaluation"),
        command="prfaas bench evaluation --long" if long else "prfaas bench evaluation",
    )
    failed = campaign.run(state, say)
    yield Figure(name="runs that failed", value=len(failed), unit="", reach=0)
    evaluation = campaign.evaluation()
    say(f"the report: {write_report(evaluation, campaign.folder)}")
    yield from figures_of(evaluation.summary)


def figures_of(found: CaseSummary) -> Iterator[Figure]:
    """Yield what a summary says, as far as its runs count."""
    lost = sum(row.lost for row in found.rows if row.seen.verdict.outcome != "broken")
    yield Figure(name="requests lost below the limit", value=lost, unit="", reach=0)
    yield Figure(name="runs that say nothing", value=len(found.excluded), unit="", reach=0)
    for policy, ratio in found.ratios.items():
        over, reach = f"PrfaaS-PD over {TITLES[policy]}", REACH_OVER[policy]
        if ratio.saturated is not None:
            name = f"most requests/s, {over}"
            yield Figure(name=name, value=ratio.saturated.value, unit="", better="higher", reach=reach)
        if ratio.limit.low is not None:
            name = f"requests/s within {found.limit_seconds:g} s, at least, {over}"
            yield Figure(name=name, value=ratio.limit.low, unit="", better="higher", reach=reach)
    if beside := found.beside:
        name = "P90 of PrfaaS-PD over homogeneous, at 90 % of what the plan of that carries"
        yield Figure(name=name, value=beside.ratio.value, unit="", reach=REACH_P90)
    for row in found.rows:
        if row.measured is None:
            continue
        for title, field in (("mean", "ttft_mean_seconds"), ("P90", "ttft_p90_seconds")):
            for expected in ("planned", "simulated"):
                off = off_by(row, field, expected)
                name = f"{TITLES[row.policy]} at {row.load:.0%}: measured {title} TTFT beside {expected}"
                if off is not None:
                    yield Figure(name=name, value=abs(off), unit="of it", reach=REACH_OFF)


if __name__ == "__main__":
    run("evaluation", __doc__, figures)
