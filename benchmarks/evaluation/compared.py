"""Systems beside each other at even loads: what they serve when more arrives, and first tokens at the same rate."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final, Literal

from benchmarks.evaluation.part import EvaluationPart, Form, missing
from benchmarks.report import Figure

from prfaas.cli.evaluation.content import TITLES, Chapter, off_by
from prfaas.cli.evaluation.sections import chapter_of
from prfaas.evaluate.case import COMPARED_AT, Case, compared_load
from prfaas.evaluate.record import RunKey
from prfaas.evaluate.steady import Sampled
from prfaas.evaluate.summary import CaseSummary
from prfaas.simulate.scenario import PolicyName
from prfaas_sandbox.evaluate.campaign import Campaign

POLICIES: Final[tuple[PolicyName, ...]] = ("threshold", "naive", "homogeneous")
REACH_OVER: Final[dict[PolicyName, float]] = {"homogeneous": 1.5, "naive": 1.3}
"""In the paper's case; another case has another gain."""
REACH_P90: Final = 0.4
REACH_OFF: Final = 0.1
"""Of a time to the first token, by plan and simulator."""
REACH_OFF_MOST: Final = 0.05
"""Of the most requests/s."""

SEEDS: Final = (1, 2, 3)
"""Where luck counts most: of the most requests/s, and at COMPARED_AT."""
ComparedName = Literal["short", "saturated", "beside", "steady", "qwen"]

SHORT: Final = Form("examples/evaluation.yaml", 134, 1.0, 32, 6.0)
"""As many as five minutes hold, with the start of a sandbox. With fewer a steady part is too short for a figure."""
PAPER: Final = Form("examples/paper.yaml", 320, 2.0, 128, 20.0)
QWEN: Final = Form("examples/qwen3.5-397b.yaml", 1800, 2.5, 128, 20.0)
"""Enough that each simulated system is within 4 % of its plan; of 640 requests, naive is up to 11 % above it."""


def compared_part(part: ComparedName) -> EvaluationPart:
    form = {"short": SHORT, "qwen": QWEN}.get(part, PAPER)
    case = form.case()
    return EvaluationPart(
        case=case,
        runs=runs_of_part(part, case),
        limit_seconds=form.limit_seconds,
        command="prfaas bench evaluation" + ("" if part == "short" else f" --part {part}"),
        conclude=partial(_conclude, part),
    )


def _conclude(part: ComparedName, campaign: Campaign) -> tuple[Chapter, Iterable[Figure]]:
    evaluation = campaign.evaluation()
    return chapter_of(evaluation), figures_of(evaluation.summary, part)


def runs_of_part(part: ComparedName, case: Case) -> list[RunKey]:
    """Return the runs of a part; those of one that takes part in two are made once."""
    if part == "short":
        return [RunKey(policy, 0.7, 1) for policy in ("threshold", "homogeneous")]
    if part in ("saturated", "qwen"):
        seeds = (1,) if part == "qwen" else SEEDS  # three would take two hours
        return [RunKey(policy, 1.3, seed) for policy in POLICIES for seed in seeds]
    if part == "beside":
        loads: dict[PolicyName, float] = {"homogeneous": COMPARED_AT, "threshold": compared_load(case.file)}
        return [RunKey(policy, load, seed) for policy, load in loads.items() for seed in SEEDS]
    both: tuple[PolicyName, ...] = ("threshold", "homogeneous")
    low = [RunKey(policy, load, 1) for policy in both for load in (0.5, 0.7)]
    return low + [RunKey("threshold", COMPARED_AT, seed) for seed in SEEDS]  # those of homogeneous are in `beside`


def figures_of(found: CaseSummary, part: ComparedName) -> Iterator[Figure]:
    """Yield what a summary says. A headline that a part is served for, and that its runs do not give, is a figure that
    misses what it should reach."""
    lost = sum(row.lost for row in found.rows if row.result.verdict.outcome != "broken")
    yield Figure(name="requests lost below the limit", value=lost, unit="", reach=0)
    yield Figure(name="runs without a figure", value=len(found.excluded), unit="", reach=0)
    yield Figure(name="versions of the software in all runs", value=len(found.software), unit="", reach=1)
    yield from _gains(found, part)
    name = f"P90 of PrfaaS-PD over homogeneous, at {COMPARED_AT:.0%} of what the plan of that carries"
    if found.beside is not None:
        yield Figure(name=name, value=found.beside.ratio.value, unit="", reach=REACH_P90)
        yield from _interval_of(name, found.beside.ratio)
    elif part == "beside":
        yield missing(name)
    yield from _most_off(found)
    yield from _times_off(found, part)


def _gains(found: CaseSummary, part: ComparedName) -> Iterator[Figure]:
    """Yield by how many times PrfaaS-PD serves more than the others."""
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
            yield from _interval_of(name, ratio.saturated)
        elif part in ("saturated", "qwen"):
            yield missing(name)
        name = f"requests/s within {found.limit_seconds:g} s"
        if ratio is not None and ratio.limit.low is not None:
            yield Figure(name=f"{name}, at least, {over}", value=ratio.limit.low, unit="", better="higher", reach=reach)
        if ratio is not None and ratio.limit.high is not None:
            yield Figure(name=f"{name}, at most, {over}", value=ratio.limit.high, unit="", better="higher")


def _most_off(found: CaseSummary) -> Iterator[Figure]:
    """Yield how far the most that each system serves is off plan and simulator."""
    for policy, one in found.answers.items():
        simulated = one.saturated_simulated.value if one.saturated_simulated else None
        for expected, said in (("planned", one.saturated_planned), ("simulated", simulated)):
            if one.saturated and said:
                name = f"{TITLES[policy]} at {one.saturated_load:.0%}: measured most requests/s beside {expected}"
                off = abs(one.saturated.value / said - 1)
                yield Figure(name=name, value=off, unit="of it", reach=REACH_OFF_MOST)


def _times_off(found: CaseSummary, part: ComparedName) -> Iterator[Figure]:
    """Yield how far times to the first token are off plan and simulator at each load."""
    for row in found.rows:
        for title, field in (("mean", "ttft_mean_seconds"), ("P90", "ttft_p90_seconds")):
            for expected in ("planned", "simulated"):
                off = off_by(row, field, expected)
                name = f"{TITLES[row.policy]} at {row.load:.0%}: measured {title} TTFT beside {expected}"
                if off is not None:
                    yield Figure(name=name, value=abs(off), unit="of it", reach=REACH_OFF)
                elif part == "steady" and row.load <= COMPARED_AT and row.planned is not None:
                    yield missing(name)


def _interval_of(name: str, found: Sampled) -> Iterator[Figure]:
    """Yield the bounds that hold the true value in 95 of 100 cases."""
    for title, bound in (("low", found.low), ("high", found.high)):
        yield Figure(name=f"{name}: {title} of its interval", value=bound, unit="")
