"""The charts of an evaluation. Each is understood alone: by its title, its axes, its names, and the note below it.

The page has the drawings in itself. Beside the document each is a file.
"""

from prfaas.cli.chart import Axis, ChartSigns, Lines, Mark, draw_bars, draw_lines, draw_stacks
from prfaas.cli.evaluation.content import PART_WORDS, TITLES, ChartGroup, DrawnChart
from prfaas.evaluate.record import Reading, Run
from prfaas.evaluate.rows import LoadRow
from prfaas.evaluate.summary import CaseSummary
from prfaas.simulate.scenario import POLICIES, PolicyName


def over_time(run: Run, beside_threshold: Lines, prefix: str = "") -> ChartGroup:
    """Return threshold and link of a run, and other lines beside the threshold. The charts' names have the prefix."""
    seconds = Axis("s since the run began")
    last = Mark(max((one.at_seconds for one in run.answers), default=0.0), "last request")
    lines = {"threshold": series_of(run.readings, "threshold_tokens", 1), **beside_threshold}
    link = {
        "sent": series_of(run.readings, "egress_mbps", 1000),
        "what the link carries": series_of(run.readings, "link_mbps", 1000),
    }
    return ChartGroup(
        f"{TITLES[run.key.policy]} over time, at {run.key.load:.0%} load, seed {run.key.seed}",
        [
            DrawnChart(
                f"{prefix}threshold",
                "The threshold: longer prompts are prefilled elsewhere",
                draw_lines(seconds, Axis("threshold, tokens"), lines, last),
            ),
            DrawnChart(f"{prefix}link", "The link", draw_lines(seconds, Axis("Gbit/s, over the link"), link, last)),
        ],
        "As the installation's own metrics say. Behind the last request the system only ends what it has.",
    )


def most_chart(summary: CaseSummary) -> ChartGroup | None:
    """Return what each system serves when more arrives, beside what models say; None: no run says it."""
    there = [(TITLES[policy], one, found) for policy, one in summary.answers.items() if (found := one.saturated)]
    if not there:
        return None
    bars = {"measured": [found.value for *_, found in there], "plan": [one.saturated_planned for _, one, _ in there]}
    simulated = [one.saturated_simulated.value for _, one, _ in there if one.saturated_simulated]
    if len(simulated) == len(there):
        bars["simulator"] = simulated
    y = Axis("requests/s served while more arrive", shown="{:,.2f}".format)
    intervals = {"measured": [(found.low, found.high) for *_, found in there]}
    drawing = draw_bars(y, [title for title, *_ in there], bars, intervals)
    return ChartGroup(
        "The most that each system serves",
        [DrawnChart("most", "Requests a second that each system serves while more arrive", drawing)],
        "The line over a measured bar is its 95 % interval.",
    )


def first_token_chart(summary: CaseSummary) -> ChartGroup | None:
    """Return P90 by rate, a line a system; None: no run says it."""
    by_system = {TITLES[policy]: rows for policy, rows in _rows_by_system(summary).items()}
    lines = {title: _points(rows, "measured") for title, rows in by_system.items()}
    if not any(lines.values()):
        return None
    rates = [row.rate_per_second for row in summary.rows]
    lines["limit"] = [(min(rates), summary.limit_seconds), (max(rates), summary.limit_seconds)]
    beside = ChartSigns(
        intervals={
            title: [
                (row.rate_per_second, row.measured.ttft_p90_seconds.low, row.measured.ttft_p90_seconds.high)
                for row in rows
                if row.measured
            ]
            for title, rows in by_system.items()
        },
        rings={title: _points(rows, "planned") for title, rows in by_system.items()},
        crosses={title: _points(rows, "simulated") for title, rows in by_system.items()},
    )
    y = Axis("P90 of the time to the first token, s, by requests/s")
    return ChartGroup(
        "Nine of ten first tokens come within",
        [DrawnChart("first-tokens", y.title, draw_lines(Axis(""), y, lines, beside=beside))],
        "Lines: measured, with 95 % intervals; a line ends before a load that is too much. "
        "Rings: the plan. Crosses: the simulator.",
    )


def part_charts(summary: CaseSummary) -> ChartGroup | None:
    """Return where the first token's time went, a chart a system: at the loads that it carries, or else at all."""
    charts: list[DrawnChart] = []
    for policy, rows in _rows_by_system(summary).items():
        known = [row for row in rows if row.result.parts]
        if known := [row for row in known if row.measured] or known:
            loads = [f"{row.load:.0%}" + ("" if row.measured else ", overloaded") for row in known]
            stacks = {words: [row.result.parts.get(name, 0.0) for row in known] for name, words in PART_WORDS.items()}
            y = Axis(f"{TITLES[policy]}: mean seconds to the first token, by load", shown="{:,.2f}".format)
            charts.append(DrawnChart(f"parts-{policy}", TITLES[policy], draw_stacks(y, loads, stacks)))
    if not charts:
        return None
    note = (
        "The parts follow each other from bottom to top. Of an overloaded system all requests of the run count: waits "
        "are the longer the longer it lasts, and the longest one shows where room is short."
    )
    return ChartGroup("Where the time to the first token went", charts, note)


def _rows_by_system(summary: CaseSummary) -> dict[PolicyName, list[LoadRow]]:
    return {
        policy: [row for row in summary.rows if row.policy == policy]
        for policy in POLICIES
        if policy in summary.answers
    }


def _points(rows: list[LoadRow], field: str) -> list[tuple[float, float]]:
    """Return P90 by rate, as measured or as expected."""
    found: list[tuple[float, float]] = []
    for row in rows:
        p90 = getattr(getattr(row, field), "ttft_p90_seconds", None)
        if p90 is not None:
            found.append((row.rate_per_second, p90 if field == "planned" else p90.value))
    return found


def series_of(readings: tuple[Reading, ...], field: str, unit: float) -> list[tuple[float, float]]:
    """Return a field of the readings over time, in so large units."""
    return [(one.at_seconds, value / unit) for one in readings if (value := getattr(one, field)) is not None]
