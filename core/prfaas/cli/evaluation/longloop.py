"""The chapter of a case whose requests change for good: what the long loop did, beside the threshold and the link."""

from prfaas.cli.chart import Axis, draw_lines
from prfaas.cli.evaluation.charts import over_time, series_of
from prfaas.cli.evaluation.content import Chapter, ChartGroup, DrawnChart, TextTable, load_sentence, made_table, section
from prfaas.evaluate.case import Case, scenario_of, shift_of
from prfaas.evaluate.longloop import LongLoopSeen
from prfaas.evaluate.record import Run, RunKey


def long_loop_chapter(case: Case, run: Run, seen: LongLoopSeen, simulated: LongLoopSeen, command: str) -> Chapter:
    """Return what one run says; an invalid one has no figure."""
    if why := run.why_invalid:
        said = [section("", f"The run gives no figure: {why}")]
    else:
        said = [
            section("", long_loop_answer(seen), _table(seen, simulated)),
            section("What was asked", *_asked(case, run.key)),
            section("What came out", over_time(run, {}), _instances(run)),
        ]
    return Chapter(case, command, [*said, section("How it was made", made_table(case, [run], command))])


def _asked(case: Case, key: RunKey) -> list[str]:
    """Return what arrives, and what the long loop may do; nothing of a case without a change, or without that loop."""
    shift, conversion = shift_of(case, key), scenario_of(case, key).policy.conversion
    if shift is None or conversion is None:
        return []
    bounds = ", ".join(f"{one.least} to {one.most} of {one.name}" for one in conversion.scaled)
    return [
        "Does a system follow requests that change for good?",
        load_sentence(case.file, case.requests),
        f"From second {shift.at_seconds:,.0f} on prompts have {shift.workload.mean_tokens:,.0f} tokens in the mean and "
        f"answers {shift.output_tokens:,}, at the same rate. That is more to prefill than the instances are for. At "
        "first only the threshold can give way. The long loop looks at the pools every "
        f"{conversion.interval_seconds:g} s: it converts instances of the hub between prefill and decode, and starts "
        f"and stops those of the member cluster within bounds: {bounds}.",
    ]


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
    times = {0: "never", 1: "once"}.get(seen.conversions, f"{seen.conversions} times")
    threshold = (
        "Nobody knows the threshold."
        if seen.height_tokens is None or seen.end_tokens is None
        else f"The threshold rose to {seen.height_tokens:,.0f} tokens, and was {seen.end_tokens:,.0f} in the end."
    )
    return (
        f"After the requests changed, the number of the hub's prefill instances changed {times}, and the member "
        f"cluster got {seen.started} more instances. {threshold} {seen.lost} requests were lost."
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
