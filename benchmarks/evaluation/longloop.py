"""The paper's case with one of its four offload instances: requests change, and the long loop converts and scales."""

from collections.abc import Iterable, Iterator
from typing import Final

from benchmarks.evaluation.part import EvaluationPart, Form, missing, simulator_of
from benchmarks.report import Figure, say

from prfaas.cli.evaluation.content import Chapter
from prfaas.cli.evaluation.longloop import long_loop_chapter
from prfaas.evaluate.longloop import LongLoopSeen, long_loop_of
from prfaas.evaluate.record import Run, RunKey
from prfaas_sandbox.evaluate.campaign import Campaign

FORM: Final = Form("examples/longloop.yaml", 850, 2.0, 128, 20.0)
RUN: Final = RunKey("threshold", 0.55, 1)
REACH_END: Final = 0.9
"""Of the height of the threshold: where it has to come down to."""
FIGURES: Final = ("conversions in the hub", "instances started in the member", "readings beyond the member's bounds")
FALLS: Final = "threshold in the end over its height"


def long_loop_part() -> EvaluationPart:
    return EvaluationPart(
        case=FORM.case(),
        runs=[RUN],
        limit_seconds=FORM.limit_seconds,
        command="prfaas bench evaluation --part longloop",
        conclude=_conclude,
    )


def _conclude(campaign: Campaign) -> tuple[Chapter | None, Iterable[Figure]]:
    runs, _ = campaign.made()
    simulated = long_loop_of(campaign.case, simulator_of(campaign.case)(RUN))
    run = next((run for run in runs if run.key == RUN), None)
    if run is None:
        return None, figures_of(None, None, simulated)
    seen = long_loop_of(campaign.case, run)
    chapter = long_loop_chapter(campaign.case, run, seen, simulated, campaign.command)
    return chapter, figures_of(run, seen, simulated)


def figures_of(run: Run | None, seen: LongLoopSeen | None, simulated: LongLoopSeen) -> Iterator[Figure]:
    """Yield what the run says; without a valid one each figure misses what it should reach."""
    if run is None or seen is None or run.why_invalid:
        if run is not None:
            say(f"{run.key.name} gives no figure: {run.why_invalid}")
        for name in ("requests lost", *FIGURES, FALLS):
            yield missing(name)
        return
    yield Figure(name="requests lost", value=seen.lost, unit="", reach=0)
    conversions, started, beyond = FIGURES
    both = ((conversions, seen.conversions, simulated.conversions), (started, seen.started, simulated.started))
    for name, value, said in both:
        yield Figure(name=name, value=value, unit="", better="higher", reach=1, rival="simulator", rival_value=said)
    yield Figure(name=beyond, value=seen.beyond_bounds, unit="", reach=0)
    if seen.end_over_height is None:
        yield missing(FALLS)
    else:
        yield Figure(
            name=FALLS,
            value=seen.end_over_height,
            unit="",
            reach=REACH_END,
            rival="simulator",
            rival_value=simulated.end_over_height,
        )
