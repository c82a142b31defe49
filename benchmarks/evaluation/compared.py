"""Systems beside each other at even loads: what they complete when more arrives, and first tokens at the same rate."""

from collections.abc import Iterator
from functools import partial
from typing import Final, Literal

from benchmarks.evaluation.part import EvaluationPart, Form, missing
from benchmarks.report import Figure, say

from prfaas.cli.evaluation.content import TITLES, off_by
from prfaas.evaluate.case import COMPARED_AT, Case, compared_load
from prfaas.evaluate.record import RunKey
from prfaas.evaluate.summary import CaseSummary
from prfaas.simulate.scenario import PolicyName
from prfaas_sandbox.evaluate.campaign import Campaign, write_report

POLICIES: Final[tuple[PolicyName, ...]] = ("threshold", "naive", "homogeneous")
REACH_OVER: Final[dict[PolicyName, float]] = {"homogeneous": 1.5, "naive": 1.3}
"""In the paper's case; another case has another gain."""
REACH_P90: Final = 0.4
REACH_OFF: Final = 0.1

ComparedName = Literal["short", "saturated", "beside", "steady", "qwen"]

SHORT: Final = Form("examples/evaluation.yaml", 400, 1.0, 32, 6.0)
PAPER: Final = Form("examples/paper.yaml", 320, 2.0, 128, 20.0)
QWEN: Final = Form("examples/qwen3.5-397b.yaml", 2400, 2.5, 128, 20.0)
"""Answers are short, so more requests have to come before the longest prompts have ended."""


def compared_part(part: ComparedName) -> EvaluationPart:
    form = {"short": SHORT, "qwen": QWEN}.get(part, PAPER)
    case = form.case()
    commands = {"short": "prfaas bench evaluation", "qwen": "prfaas bench evaluation --part qwen"}
    return EvaluationPart(
        case=case,
        runs=runs_of_part(part, case),
        limit_seconds=form.limit_seconds,
        command=commands.get(part, "make evaluation"),
        conclude=partial(_conclude, part),
    )


def _conclude(part: ComparedName, campaign: Campaign) -> Iterator[Figure]:
    evaluation = campaign.evaluation()
    say(f"the report: {write_report(evaluation, campaign.folder)}")
    yield from figures_of(evaluation.summary, part)


def runs_of_part(part: ComparedName, case: Case) -> list[RunKey]:
    """Return the runs of a part; those of one that takes part in two are made once."""
    if part == "short":
        return [RunKey(policy, 0.7, 1) for policy in POLICIES]
    if part in ("saturated", "qwen"):
        seeds = (1,) if part == "qwen" else (1, 2)
        return [RunKey(policy, 1.3, seed) for policy in POLICIES for seed in seeds]
    if part == "beside":
        loads: dict[PolicyName, float] = {"homogeneous": COMPARED_AT, "threshold": compared_load(case.file)}
        return [RunKey(policy, load, seed) for policy, load in loads.items() for seed in (1, 2, 3)]
    both: tuple[PolicyName, ...] = ("threshold", "homogeneous")
    return [RunKey(policy, load, 1) for policy in both for load in (0.5, 0.7, 0.9)]


def figures_of(found: CaseSummary, part: ComparedName) -> Iterator[Figure]:
    """Yield what a summary says. A headline that a part is served for, and that its runs do not give, is a figure that
    misses what it should reach."""
    lost = sum(row.lost for row in found.rows if row.result.verdict.outcome != "broken")
    yield Figure(name="requests lost below the limit", value=lost, unit="", reach=0)
    yield Figure(name="runs without a figure", value=len(found.excluded), unit="", reach=0)
    for policy in REACH_OVER:
        reach = None if part == "qwen" else REACH_OVER[policy]
        ratio, over = found.ratios.get(policy), f"PrfaaS-PD over {TITLES[policy]}"
        name = f"most requests/s, {over}"
        if ratio is not None and ratio.saturated is not None:
            yield Figure(
                name=name,
                value=ratio.saturated.value,
                unit="",
                better="higher",
                reach=reach,
                rival="plan",
                rival_value=ratio.saturated_planned,
            )
        elif part in ("saturated", "qwen"):
            yield missing(name)
        if ratio is not None and ratio.limit.low is not None:
            name = f"requests/s within {found.limit_seconds:g} s, at least, {over}"
            yield Figure(name=name, value=ratio.limit.low, unit="", better="higher", reach=reach)
    name = f"P90 of PrfaaS-PD over homogeneous, at {COMPARED_AT:.0%} of what the plan of that carries"
    if found.beside is not None:
        yield Figure(name=name, value=found.beside.ratio.value, unit="", reach=REACH_P90)
    elif part == "beside":
        yield missing(name)
    for row in found.rows:
        for title, field in (("mean", "ttft_mean_seconds"), ("P90", "ttft_p90_seconds")):
            for expected in ("planned", "simulated"):
                off = off_by(row, field, expected)
                name = f"{TITLES[row.policy]} at {row.load:.0%}: measured {title} TTFT beside {expected}"
                if off is not None:
                    yield Figure(name=name, value=abs(off), unit="of it", reach=REACH_OFF)
                elif part == "steady" and row.load <= COMPARED_AT and row.planned is not None:
                    yield missing(name)
