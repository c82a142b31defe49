"""The page of an evaluation: one file of HTML that loads nothing, with the document's sections, and charts."""

from collections.abc import Iterable
from html import escape
from typing import Final

from prfaas.cli.chart import Axis, ChartSigns, Lines, draw_bars, draw_lines, draw_stacks
from prfaas.cli.evaluation.content import TITLES, Evaluation, TextTable
from prfaas.cli.evaluation.sections import Chart, ReportSection, sections_of
from prfaas.cli.page import make_table, wrap_page
from prfaas.evaluate.record import Reading, Run
from prfaas.evaluate.rows import LoadRow
from prfaas.evaluate.summary import CaseSummary
from prfaas.simulate.scenario import POLICIES
from prfaas.wire.trace import PARTS, UNKNOWN

SAID: Final = {
    "gateway_queue": "waits at the gateway",
    "prefill_queue": "waits for a prefill",
    "prefill": "is prefilled",
    "link_wait": "waits for the link",
    "transfer": "the cache crosses",
    "decode_queue": "waits to be decoded",
    "first_step": "first decode step",
    UNKNOWN: "not known",
}
"""The parts of the time to the first token, in words."""


def evaluation_page(evaluation: Evaluation) -> str:
    """Return the page."""
    (_, (verdict, *opening)), *sections = sections_of(evaluation)
    parts = [f'<p class="verdict">{escape(str(verdict))}</p>']
    for section in (ReportSection("", tuple(opening)), *sections):
        parts += [f"<h2>{escape(section.title)}</h2>"] if section.title else []
        parts += [part for item in section.items for part in _shown(item, evaluation.summary)]
    return wrap_page(f"Evaluation of {evaluation.case.name}", *parts)


def _shown(item: str | TextTable | Chart, summary: CaseSummary) -> Iterable[str]:
    match item:
        case str():
            return [f"<p>{escape(item)}</p>"]
        case TextTable():
            return [draw_table(item)]
        case Chart():
            return _CHARTS[item](summary)


def _most(summary: CaseSummary) -> list[str]:
    """Return what each system completes when it is saturated, beside what models say."""
    there = [(TITLES[policy], one) for policy, one in summary.answers.items() if one.saturated]
    if not there:
        return []
    bars = {
        "measured": [one.saturated.value if one.saturated else 0.0 for _, one in there],
        "plan": [one.saturated_planned for _, one in there],
    }
    if all(one.saturated_simulated for _, one in there):
        bars["simulator"] = [one.saturated_simulated.value if one.saturated_simulated else 0.0 for _, one in there]
    y = Axis("requests/s completed while more arrive", shown="{:,.2f}".format)
    return [_figure("The most that each system serves", draw_bars(y, [title for title, _ in there], bars))]


def _first_tokens(summary: CaseSummary) -> list[str]:
    """Return P90 by rate, a line a system."""
    by_system = _rows_by_system(summary)
    lines = {title: _points(rows, "measured") for title, rows in by_system.items()}
    rates = [row.rate_per_second for row in summary.rows]
    if any(lines.values()):
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
    chart = draw_lines(Axis(""), Axis("P90 of the time to the first token, s, by requests/s"), lines, beside=beside)
    return [
        _figure("Nine of ten first tokens come within", chart),
        '<p class="soft">Lines: measured, with 95 % intervals; a line ends before a load that is too much. '
        "Rings: the plan. Crosses: the simulator.</p>",
    ]


def _rows_by_system(summary: CaseSummary) -> dict[str, list[LoadRow]]:
    return {
        TITLES[policy]: [row for row in summary.rows if row.policy == policy]
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


def _over_time(summary: CaseSummary) -> list[str]:
    """Return threshold and link of one run of PrfaaS-PD; nothing if none counts."""
    return [] if summary.shown is None else draw_over_time(summary.shown, {})


def draw_over_time(run: Run, beside_threshold: Lines) -> list[str]:
    """Return threshold and link of a run, and other lines beside the threshold."""
    seconds = Axis("s")
    lines = {"threshold": _series(run.readings, "threshold_tokens", 1), **beside_threshold}
    threshold = draw_lines(seconds, Axis("threshold, tokens"), lines)
    link = {
        "sent": _series(run.readings, "egress_mbps", 1000),
        "what the link carries": _series(run.readings, "link_mbps", 1000),
    }
    return [
        f"<h3>{TITLES[run.key.policy]} over time, at {run.key.load:.0%} load, seed {run.key.seed}</h3>",
        '<div class="row wide">',
        _figure("Longer prompts are prefilled elsewhere", threshold),
        _figure("The link", draw_lines(seconds, Axis("Gbit/s"), link)),
        "</div>",
    ]


def _series(readings: tuple[Reading, ...], field: str, unit: float) -> list[tuple[float, float]]:
    return [(one.at_seconds, value / unit) for one in readings if (value := getattr(one, field)) is not None]


def _parts(summary: CaseSummary) -> list[str]:
    """Return where the first token's time went, a chart a system."""
    charts: list[str] = []
    names = (*PARTS, UNKNOWN)
    for title, rows in _rows_by_system(summary).items():
        known = [row.measured.parts for row in rows if row.measured and row.measured.parts]
        loads = [f"{row.load:.0%}" for row in rows if row.measured and row.measured.parts]
        if known:
            stacks = {SAID[name]: [parts.get(name, 0.0) for parts in known] for name in names}
            charts.append(
                _figure(title, draw_stacks(Axis("mean seconds, by load", shown="{:,.2f}".format), loads, stacks))
            )
    if not charts:
        return []
    key = " ".join(
        f'<span style="white-space: nowrap"><span class="s{number}">&#9632;</span> {SAID[name]}</span>'
        for number, name in enumerate(names)
    )
    return [
        "<h3>Where the time to the first token went</h3>",
        f"<p>{key}</p>",
        '<div class="row wide">',
        *charts,
        "</div>",
    ]


def draw_table(table: TextTable) -> str:
    """Return a table under its title."""
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return title + make_table(table.head, table.rows, are_words=table.are_words)


def _figure(title: str, drawing: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>\n{drawing}</figure>"


_CHARTS: Final = {
    Chart.MOST: _most,
    Chart.FIRST_TOKENS: _first_tokens,
    Chart.OVER_TIME: _over_time,
    Chart.PARTS: _parts,
}
