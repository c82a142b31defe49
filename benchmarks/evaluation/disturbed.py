"""The moving threshold, prices, and the best thresholds that stay: the paper's case at 70 % load while its link or its
load changes, and at 90 % while nothing does, or while prompts go on from others, which some instances have cached."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec
from benchmarks.evaluation.compared import PAPER
from benchmarks.evaluation.part import EvaluationPart, Form, missing, simulator_of
from benchmarks.report import Figure

from prfaas.cli.evaluation.content import TITLES, Chapter
from prfaas.cli.evaluation.disturbed import disturbed_chapter
from prfaas.cli.simulate import read_trace_file
from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case, case_of_trace
from prfaas.evaluate.disturbed import (
    DisturbanceName,
    DisturbedSummary,
    ThresholdSettling,
    best_thresholds,
    disturb,
    summarise_disturbed,
)
from prfaas.evaluate.record import RunKey
from prfaas.simulate.scenario import PolicyName
from prfaas_sandbox.evaluate.campaign import Campaign

BesideStatic = Literal[DisturbanceName, "static", "conversations"]
FORM: Final[Form] = PAPER._replace(requests=600)
"""Twice as long: the threshold follows what comes once it knows 200 prompts, and the link falls after as many."""
CONVERSATIONS: Final[Form] = PAPER._replace(requests=1200)
KEPT_GIB: Final = {"hub": 512, "between-datacentres": 256}
"""What the clusters keep of prompts."""
LOAD: Final = 0.7
STEADY_LOAD: Final = 0.9
NARROW_MBPS: Final = 40_000.0
"""Of the link: a fifth of it still carries the load, but not at the threshold that the whole one bears."""
MOVING: Final[tuple[PolicyName, ...]] = ("threshold", "price")
BEST_STATIC: Final = 2
"""Thresholds that stay are served: the best of those simulated."""
REACH_INTERVALS: Final = 10
REACH_OVER_STATIC: Final = 0.9
CHANGES: Final = ("the link falls", "it is whole again")


def disturbed_part(name: BesideStatic, trace: Path | None = None) -> EvaluationPart:
    """Return a part; `trace` is of conversations, which have no requests without one."""
    command = f"prfaas bench evaluation --part {name}"
    if name == "static":
        case, load = msgspec.structs.replace(PAPER.case(), name="paper-static"), STEADY_LOAD
    elif name == "conversations":
        if trace is None:
            raise ConfigError(f"--part {name} serves a published trace of conversations: name its file by --trace")
        case, load, command = conversations(trace), STEADY_LOAD, f"{command} --trace {trace.name}"
    else:
        case, load = disturb(FORM.case(), name, LOAD, NARROW_MBPS), LOAD
    best = best_thresholds(case, load, 1, simulator_of(case), BEST_STATIC)
    return EvaluationPart(
        case=case,
        runs=[*(RunKey(policy, load, 1) for policy in MOVING), *best],
        limit_seconds=FORM.limit_seconds,
        command=command,
        conclude=partial(_conclude, name),
    )


def conversations(trace: Path) -> Case:
    """Return the paper's case with the requests of a trace, and with caches that keep what was prefilled."""
    case = CONVERSATIONS.case()
    file = msgspec.structs.replace(case.file, simulation={**case.file.simulation, "cacheGib": KEPT_GIB})
    requests = read_trace_file(trace)
    if not any(one.blocks for one in requests):
        raise ConfigError(f"{trace} says of no prompt how it goes on from others: name a trace of Mooncake's form")
    return case_of_trace(msgspec.structs.replace(case, name="paper-conversations", file=file), requests)


def _conclude(name: BesideStatic, campaign: Campaign) -> tuple[Chapter, Iterable[Figure]]:
    runs, _ = campaign.made()
    found = summarise_disturbed(campaign.case, runs, simulator_of(campaign.case), campaign.wanted.asked)
    return disturbed_chapter(campaign.case, runs, found, campaign.command), figures_of(found, name)


def figures_of(found: DisturbedSummary, name: BesideStatic) -> Iterator[Figure]:
    """Yield what the runs say. A figure that they do not give misses what it should reach."""
    yield Figure(name="requests lost", value=sum(one.lost for one in found.runs), unit="", reach=0)
    without = sum(bool(one.why_invalid) for one in found.runs) + len(found.missing)
    yield Figure(name="runs without a figure", value=without, unit="", reach=0)
    if name == "falls":
        yield from _settlings(found)
    ratios = {policy: found.over_best(policy) for policy in MOVING}
    for policy, ratio in ratios.items():
        title = f"P90 of {TITLES[policy]} over the best threshold that stays"
        if ratio is None:
            yield missing(title)
        else:
            said = found.simulated_over_best(policy)
            yield Figure(name=title, value=ratio, unit="", rival="simulator", rival_value=said)
    if known := [ratio for ratio in ratios.values() if ratio is not None]:
        reach = None if name == "static" else REACH_OVER_STATIC
        yield Figure(name="  the better of both", value=min(known), unit="", reach=reach)


def _settlings(found: DisturbedSummary) -> Iterator[Figure]:
    moving = next((one for one in found.runs if one.key.policy == "threshold"), None)
    for place, change in enumerate(CHANGES):
        title = f"intervals until the threshold is, and stays, what the link bears after {change}"
        if moving is None or place >= len(moving.settlings):
            yield missing(title)
            continue
        value, said = (_intervals(one[place]) for one in (moving.settlings, moving.simulated_settlings))
        yield Figure(name=title, value=value, unit="", reach=REACH_INTERVALS, rival="simulator", rival_value=said)


def _intervals(one: ThresholdSettling) -> int:
    """Return the intervals, all until the next change where they did not do."""
    return one.most_intervals if one.intervals is None else one.intervals
