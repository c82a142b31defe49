"""The chapter of a case whose requests change for good: what the long loop did, beside the threshold and the link."""

from prfaas.cli.chart import Axis, draw_lines
from prfaas.cli.evaluation.charts import over_time, series_of
from prfaas.cli.evaluation.content import Chapter, ChartGroup, DrawnChart, TextTable, made_table, section
from prfaas.evaluate.case import Case
from prfaas.evaluate.longloop import LongLoopSeen
from prfaas.evaluate.record import Run


def long_loop_chapter(case: Case, run: Run, seen: LongLoopSeen, simulated: LongLoopSeen, command: str) -> Chapter:
    """Return what one run says; an invalid one has no figure."""
    if why := run.why_invalid:
        opening = section("", f"The run gives no figure: {why}")
    else:
        opening = section("", long_loop_answer(seen), _table(seen, simulated), over_time(run, {}), _instances(run))
    return Chapter(case, command, [opening, section("How it was made", made_table(case, [run], command))])


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
