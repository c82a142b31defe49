"""The page of a case whose requests change for good: what the long loop did, beside the threshold and the link."""

from html import escape

from prfaas.cli.chart import Axis, draw_lines
from prfaas.cli.evaluation.charts import ChartGroup, DrawnChart, over_time, series_of
from prfaas.cli.evaluation.content import TITLES, TextTable, made_table
from prfaas.cli.evaluation.report import show_charts, show_table
from prfaas.cli.page import wrap_page
from prfaas.evaluate.case import Case
from prfaas.evaluate.longloop import LongLoopSeen
from prfaas.evaluate.record import Run


def long_loop_page(case: Case, run: Run, seen: LongLoopSeen, simulated: LongLoopSeen, command: str) -> str:
    """Return the page of one run; an invalid one has no figure."""
    parts: list[str] = []
    if why := run.why_invalid:
        verdict = f"The run gives no figure: {why}"
    else:
        verdict = long_loop_answer(seen)
        parts = [show_table(_table(seen, simulated)), show_charts(over_time(run, {})), show_charts(_instances(run))]
    return wrap_page(
        f"Evaluation of {case.name}, {TITLES[run.key.policy]}",
        f'<p class="verdict">{escape(verdict)}</p>',
        *parts,
        "<h2>How it was made</h2>",
        show_table(made_table(case, [run], command)),
    )


def _instances(run: Run) -> ChartGroup:
    """Return how many instances prefilled over time."""
    lines = {"prefill in the hub": "hub_prefills", "in the member cluster": "offload_instances"}
    counts = {title: series_of(run.readings, field, 1) for title, field in lines.items()}
    drawing = draw_lines(Axis("s since the run began"), Axis("instances"), counts)
    return ChartGroup(
        "Instances", [DrawnChart("instances", "Instances", drawing)], "As the instances' own metrics say."
    )


def long_loop_answer(seen: LongLoopSeen) -> str:
    """Return what the long loop did, in a sentence."""
    falls = (
        "and nobody knows the threshold"
        if seen.height_tokens is None or seen.end_tokens is None
        else f"and the threshold went to {seen.height_tokens:,.0f} tokens, and in the end to {seen.end_tokens:,.0f}"
    )
    return (
        f"After the requests changed, the hub's prefills changed {seen.conversions} times, {seen.started} instances "
        f"were started in the member cluster, {falls}. {seen.lost} requests were lost."
    )


def _table(seen: LongLoopSeen, simulated: LongLoopSeen) -> TextTable:
    rows = [
        ("conversions in the hub", f"{seen.conversions}", f"{simulated.conversions}"),
        ("instances started in the member cluster", f"{seen.started}", f"{simulated.started}"),
        ("readings beyond its bounds", f"{seen.beyond_bounds}", f"{simulated.beyond_bounds}"),
        ("highest threshold after the change", _tokens(seen.height_tokens), _tokens(simulated.height_tokens)),
        ("threshold in the end", _tokens(seen.end_tokens), _tokens(simulated.end_tokens)),
        ("requests lost", f"{seen.lost}", f"{simulated.lost}"),
    ]
    return TextTable("What the long loop did", ("what", "measured", "simulator"), rows)


def _tokens(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
