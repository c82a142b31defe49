"""What the page and the document of an evaluation both say: the answer in sentences, and tables of text.

PrfaaS-PD is the system whose short loop moves the threshold. All figures are in the case's own units: seconds, requests
a second and Gbit/s as they would be at full scale.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from prfaas.capacity.planfile import PlanFile
from prfaas.evaluate.case import Case
from prfaas.evaluate.limit import Bounds
from prfaas.evaluate.record import ExcludedRun, MachineTiming, Run
from prfaas.evaluate.rows import LoadRow
from prfaas.evaluate.steady import Sampled
from prfaas.evaluate.summary import CaseSummary
from prfaas.measure.emulated import LATE, MOST_BUSY, MOST_LATE, MOST_LATE_SHARE
from prfaas.simulate.scenario import POLICIES, PolicyName
from prfaas.wire.stats import LATE_BOUNDS
from prfaas.wire.trace import UNKNOWN

TITLES: Final[dict[PolicyName, str]] = {
    "threshold": "PrfaaS-PD",
    "price": "by price",
    "static": "static",
    "naive": "naive",
    "homogeneous": "homogeneous",
}
SYSTEMS: Final[dict[PolicyName, str]] = {
    "threshold": "Prompts above a threshold are prefilled elsewhere, and the threshold follows the load.",
    "price": "Each prompt goes where it costs least, by prices that follow the load.",
    "static": "As PrfaaS-PD, with the planned threshold, which stays.",
    "naive": "All prompts are prefilled elsewhere, and the hub only decodes.",
    "homogeneous": "As many instances, all in the hub and of its kind; nothing is prefilled elsewhere.",
}
BRIEFLY: Final[dict[PolicyName, str]] = {
    "threshold": "long prompts are prefilled in another cluster",
    "naive": "all are",
    "homogeneous": "none are",
}
PART_WORDS: Final = {
    "gateway_queue": "waits at the gateway",
    "prefill_queue": "waits for a prefill",
    "prefill": "is prefilled",
    "link_wait": "waits for the link",
    "transfer": "the cache crosses",
    "decode_queue": "waits to be decoded",
    "first_step": "first decode step",
    UNKNOWN: "not known",
}
"""The parts of the time to the first token, in words and in their order."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """All that a page needs. `command` repeats it."""

    case: Case
    runs: tuple[Run, ...]
    summary: CaseSummary
    unread: tuple[ExcludedRun, ...] = ()
    """Files among the runs that hold none."""
    command: str


class TextTable(NamedTuple):
    """Rows of text under their heads."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    are_words: bool = False
    """Not figures, which are aligned otherwise."""


class DrawnChart(NamedTuple):
    """A chart as SVG text. `name` is its file's, without the ending."""

    name: str
    title: str
    drawing: str


class ChartGroup(NamedTuple):
    """Charts under one title, and a note that says how to read them."""

    title: str
    charts: Sequence[DrawnChart]
    note: str


class ReportSection(NamedTuple):
    """Paragraphs, tables and charts under a title. The first one of a chapter has none, and opens with the answer."""

    title: str
    items: Sequence[str | TextTable | ChartGroup]


class Chapter(NamedTuple):
    """All that is said of a case: a page of its own, or a part of a document. `command` repeats it."""

    case: Case
    command: str
    sections: Sequence[ReportSection]


def section(title: str, *items: str | TextTable | ChartGroup | None) -> ReportSection:
    """Return a section. Empty paragraphs, tables without rows and charts of nothing are left out."""
    return ReportSection(title, [one for one in items if one and not (isinstance(one, TextTable) and not one.rows)])


class _Column(NamedTuple):
    field: str
    title: str
    shown: str
    scale: float = 1.0


_FIGURES: Final = (
    _Column("ttft_mean_seconds", "Time to the first token, mean, s", "{:,.2f}"),
    _Column("ttft_p90_seconds", "Time to the first token, P90, s", "{:,.2f}"),
    _Column("ttft_p99_seconds", "Time to the first token, P99, s", "{:,.2f}"),
    _Column("requests_per_second", "Throughput, requests/s", "{:,.2f}"),
    _Column("offloaded_share", "Offloaded requests, %", "{:,.1f}", 100),
    _Column("egress_gbps", "Over the link, Gbit/s", "{:,.2f}"),
    _Column("link_percent", "Over the link, % of what it is declared to carry", "{:,.1f}"),
)


def title_of(case: Case) -> str:
    """Return what stands above all."""
    return f"Evaluation of the case {case.name}"


def question(evaluation: Evaluation) -> str:
    """Return what was asked."""
    return (
        f"How many requests a second does each system of the case {evaluation.case.name} serve, at most and with nine "
        f"of ten first tokens within {evaluation.summary.limit_seconds:g} s, and is it what the plan and the simulator "
        "say?"
    )


def answer(summary: CaseSummary) -> str:
    """Return the answer: what PrfaaS-PD serves beside the others, and its first tokens beside those of homogeneous."""
    ours = summary.answers.get("threshold")
    if ours is None:
        return "There is no run of PrfaaS-PD, so there is no answer."
    sentences: list[str] = []
    if ours.saturated:
        ratios = [
            f"{_short(one.saturated)} times as many as {TITLES[policy]} ({BRIEFLY[policy]})"
            for policy, one in summary.ratios.items()
            if one.saturated
        ]
        title = f"PrfaaS-PD ({BRIEFLY['threshold']})"
        sentences.append(_joined(f"{title} serves {_short(ours.saturated)} requests a second at most", ratios))
    if _says_more(ours.limit.bounds, ours.saturated):
        ratios = [
            f"{_bounds(one.limit)} times as many as {TITLES[policy]}"
            for policy, one in summary.ratios.items()
            if one.limit != Bounds(None, None)
        ]
        limit = f"With nine of ten first tokens within {summary.limit_seconds:g} s"
        sentences.append(_joined(f"{limit} it serves {_bounds(ours.limit.bounds)} a second", ratios))
    if beside := summary.beside:
        sentences.append(
            f"At {beside.rate_per_second:.2f} requests a second, {beside.of_plan:.0%} of what the plan of homogeneous "
            f"carries, its P90 is {beside.ours.value:.2f} s, and that of homogeneous {beside.homogeneous.value:.2f} s: "
            f"{_short(beside.ratio)} of it."
        )
    return " ".join(sentences) or "No run of PrfaaS-PD says what it serves, so there is no answer."


def _says_more(limit: Bounds, saturated: Sampled | None) -> bool:
    """Whether bounds of the limit say more than that the system does not serve what is more than its most."""
    is_below = limit.high is not None and (saturated is None or limit.high < saturated.value)
    return limit.low is not None or is_below


def certainty(summary: CaseSummary) -> str:
    """Return how far the answer can be trusted, where that is not far."""
    sentences: list[str] = []
    if {len(row.counted_seeds) for row in summary.rows if row.counted_seeds} == {1}:
        sentences.append("Each load was served once, so the intervals are wide; more seeds narrow them.")
    if any(one.saturated for one in summary.answers.values()):
        sentences.append("± is the longer half of an interval that holds the true value in 95 of 100 cases.")
    if len(summary.software) > 1:
        versions = " and ".join(summary.software)
        sentences.append(f"The runs are of {versions}: a difference may be of these, and not of the systems.")
    unproven = [
        TITLES[policy]
        for policy, one in summary.ratios.items()
        if one.saturated and one.saturated.low <= 1 < one.saturated.value
    ]
    if unproven:
        over = " and ".join(unproven)
        sentences.append(f"The interval of the gain over {over} holds 1: these runs alone do not prove a gain.")
    return " ".join(sentences)


def against_expected(summary: CaseSummary) -> str:
    """Return how far the measured P90 lies from what plan and simulator say, in the mean of all loads."""
    both = [
        (name, _offs(summary, "ttft_p90_seconds", field))
        for name, field in (("the plan", "planned"), ("the simulator", "simulated"))
    ]
    said = [f"{sum(offs) / len(offs):.0%} from {name}, at most {max(offs):.0%}" for name, offs in both if offs]
    return f"Measured P90 differs in the mean by {', and by '.join(said)}." if said else ""


def headline_table(summary: CaseSummary) -> TextTable:
    """Return the ratios that the evaluation is made for, and how far the models lie from what was measured; what no run
    says is left out."""
    rows: list[tuple[str, ...]] = []
    for policy, one in summary.ratios.items():
        over = f"PrfaaS-PD over {TITLES[policy]}"
        planned, simulated = _number(one.saturated_planned, "{:.2f}"), _value_of(one.saturated_simulated)
        if one.saturated:
            rows.append((f"{over}: most requests/s", *_with_interval(one.saturated), planned, simulated))
        if one.limit != Bounds(None, None):
            within = f"{over}: requests/s with P90 within {summary.limit_seconds:g} s"
            expected = (_number(one.limit_planned, "{:.2f}"), _bounds(one.limit_simulated))
            rows.append((within, "-", _bounds(one.limit), *expected))
    if beside := summary.beside:
        title = f"PrfaaS-PD over homogeneous: P90 at {beside.rate_per_second:.2f} requests/s"
        expected = (_number(beside.planned, "{:.2f}"), _number(beside.simulated, "{:.2f}"))
        rows.append((title, *_with_interval(beside.ratio), *expected))
    for title, field in (("mean", "ttft_mean_seconds"), ("P90", "ttft_p90_seconds")):
        offs = [_offs(summary, field, expected) for expected in ("planned", "simulated")]
        rows += _off_row(f"Measured {title} of the first token is off by, in the mean of all loads", offs)
    rates = [(one.saturated, one.saturated_planned, one.saturated_simulated) for one in summary.answers.values()]
    offs = [abs(found.value / planned - 1) for found, planned, _ in rates if found]
    simulated_offs = [abs(found.value / said.value - 1) for found, _, said in rates if found and said]
    rows += _off_row("Measured most requests/s are off by, in the mean of all systems", (offs, simulated_offs))
    return TextTable("", ("figure", "measured", "95 % interval or bounds", "plan", "simulator"), rows)


def _off_row(title: str, offs: Sequence[Sequence[float]]) -> list[tuple[str, ...]]:
    """Return the row of how far measured figures are off those of plan and simulator; none if none are compared."""
    return [(title, "", "", *(f"{sum(one) / len(one):.0%}" if one else "-" for one in offs))] if any(offs) else []


def system_table(evaluation: Evaluation) -> TextTable:
    """Return the systems, and the instances that they are made of."""
    there: list[PolicyName] = [policy for policy in POLICIES if policy in evaluation.summary.answers]
    instances = {run.key.policy: run.instances for run in evaluation.runs}
    systems = [(TITLES[one], SYSTEMS[one], _counts(instances.get(one, {}))) for one in there]
    return TextTable("Systems", ("system", "what it does", "instances"), systems, are_words=True)


def load_sentence(file: PlanFile, requests: int) -> str:
    """Return what arrives."""
    workload = file.workload
    return (
        f"Prompts have {workload.mean_tokens:,.0f} tokens in the mean, half at most {workload.quantile(0.5):,} and "
        f"nine of ten at most {workload.quantile(0.9):,}; answers have {file.system.output_tokens:,.0f}. They arrive "
        f"at random, {requests:,} in each run. A load is a share of what the system's own plan carries."
    )


def saturated_table(summary: CaseSummary) -> TextTable:
    """Return what each system serves when more arrives."""
    rows = [
        (
            TITLES[policy],
            _number(one.saturated_load, "{:.0%}"),
            *_with_interval(one.saturated),
            _value_of(one.saturated_counted),
            f"{one.saturated_planned:.2f}",
            _value_of(one.saturated_simulated),
        )
        for policy, one in summary.answers.items()
    ]
    head = ("system", "measured at load", "measured", "95 % interval", "counted one by one", "plan", "simulator")
    return TextTable("Requests/s served while more arrive", head, rows)


def limit_table(summary: CaseSummary) -> TextTable:
    """Return between which rates the limit of each system lies."""
    rows = [
        (
            TITLES[policy],
            _number(one.limit.bounds.low, "{:.2f}"),
            _number(one.limit.bounds.high, "{:.2f}"),
            _number(one.limit_planned, "{:.2f}"),
            _bounds(one.limit_simulated.bounds),
        )
        for policy, one in summary.answers.items()
    ]
    head = ("system", "holds at", "breaks at", "plan", "simulator")
    return TextTable(f"Requests/s with P90 within {summary.limit_seconds:g} s", head, rows)


def broken_table(summary: CaseSummary) -> TextTable:
    """Return at which rate each system broke the limit, why, and what its requests took longest for then."""
    parts = {(row.policy, row.rate_per_second): row.result.parts for row in summary.rows}
    rows = [
        (TITLES[policy], f"{rate:.2f}", one.limit.why_broken, _longest(parts[policy, rate]))
        for policy, one in summary.answers.items()
        if (rate := one.limit.bounds.high) is not None
    ]
    head = ("system", "at requests/s", "why", "most of the time to the first token")
    return TextTable("What failed first", head, rows, are_words=True)


def _longest(parts: dict[str, float]) -> str:
    if not parts:
        return "-"
    name = max(parts, key=lambda one: parts[one])
    return f"{PART_WORDS[name]}: {parts[name]:.1f} of {sum(parts.values()):.1f} s"


def figure_tables(summary: CaseSummary) -> list[TextTable]:
    """Return a table a figure: measured, planned and simulated, and by how much measured differs from either. A load
    without any figure is left out."""
    head = ("system", "load", "requests/s", "measured", "95 % interval", "plan", "off", "simulator", "off")
    known = [row for row in _by_system(summary.rows) if row.measured or row.planned or row.simulated]
    tables = [TextTable(column.title, head, [_cells(row, column) for row in known]) for column in _FIGURES]
    return tables if known else []


def run_table(summary: CaseSummary) -> TextTable:
    """Return which runs each load has, what became of their requests, and whether the load kept the limit."""
    rows = [
        (
            TITLES[row.policy],
            f"{row.load:.0%}",
            f"{row.rate_per_second:.2f}",
            ", ".join(map(str, row.counted_seeds)) or "none",
            f"{row.requests:,}",
            f"{row.lost:,}",
            f"{row.fallbacks:,}",
            f"{row.result.verdict.outcome}: {row.result.verdict.why}",
        )
        for row in _by_system(summary.rows)
    ]
    head = ("system", "load", "requests/s", "seeds that count", "requests", "lost", "fallbacks", "the limit")
    return TextTable("Runs", head, rows)


def failed_table(evaluation: Evaluation) -> TextTable:
    """Return the runs that give no figure, with the reason."""
    excluded = (*evaluation.summary.excluded, *evaluation.unread)
    rows = [(one.name, one.why) for one in excluded]
    rows += [(key.name, "it is missing") for key in evaluation.summary.missing]
    return TextTable("Runs without a figure", ("run", "why"), rows, are_words=True)


def made_table(case: Case, runs: Sequence[Run], command: str) -> TextTable:
    """Return what made the figures."""
    days = sorted(run.began_at for run in runs)
    busy = [run.machine.busy_share for run in runs if run.machine.busy_share is not None]
    rows = [
        ("software", ", ".join(sorted({run.software for run in runs})) or "-"),
        ("machine", ", ".join(sorted({run.hardware for run in runs if run.hardware})) or "-"),
        ("scale", f"stretch {case.stretch:g}, cache scale {case.cache_scale:,}"),
        ("runs", f"{len(runs)}, seeds {', '.join(map(str, sorted({run.key.seed for run in runs}))) or '-'}"),
        ("runs began", f"{_clock(days[0])} to {_clock(days[-1])}, UTC" if days else "-"),
        ("busy", f"at most {max(busy, default=0.0):.0%} of the machine"),
        (
            "late",
            f"{_late([run.machine for run in runs])}; a run does not count in which the mean is more than "
            f"{MOST_LATE:.0%}, more than {MOST_LATE_SHARE:.0%} of the steps end later than by {LATE:.0%}, or more than "
            f"{MOST_BUSY:.0%} of the machine is busy",
        ),
        ("digest of the case", case.digest),
        ("command", command),
    ]
    return TextTable("", ("what", "value"), rows, are_words=True)


def _late(timings: Sequence[MachineTiming]) -> str:
    """Return how late steps ended, of the runs where that is worst."""
    known = [one for one in timings if one.mean_late is not None]
    mean = max((one.mean_late or 0.0 for one in known), default=0.0)
    p99 = max((math.inf if one.p99_late is None else one.p99_late for one in known), default=0.0)
    bound = f"at most {p99:.0%}" if p99 < math.inf else f"more than {LATE_BOUNDS[-1]:.0%}"
    return f"steps ended at most {mean:.1%} of their time late in the mean of a run, with a P99 of {bound}"


def off_by(row: LoadRow, field: str, expected: str) -> float | None:
    """Return by which share of the expected figure the measured one is more; None where one of them is not there."""
    measured, said = _value(row.measured, field), _value(getattr(row, expected), field)
    return None if measured is None or not said else measured / said - 1


def _clock(moment: str) -> str:
    """Return a time of ISO 8601 to the minute."""
    return moment[:16].replace("T", " ")


def _cells(row: LoadRow, column: _Column) -> list[str]:
    measured = getattr(row.measured, column.field, None)
    cells = [TITLES[row.policy], f"{row.load:.0%}", f"{row.rate_per_second:.2f}"]
    cells.append(_number(_value(row.measured, column.field), column.shown, column.scale))
    cells.append(_interval(measured, column))
    for expected in ("planned", "simulated"):
        cells.append(_number(_value(getattr(row, expected), column.field), column.shown, column.scale))
        cells.append(_number(off_by(row, column.field, expected), "{:+.0%}"))
    return cells


def _value(figures: object | None, field: str) -> float | None:
    found = getattr(figures, field, None)
    return found.value if isinstance(found, Sampled) else found


def _interval(found: Sampled | None, column: _Column) -> str:
    if found is None or math.isinf(found.high):
        return "-"
    return _between(found.low * column.scale, found.high * column.scale, column.shown)


def _number(value: float | None, shown: str, scale: float = 1.0) -> str:
    return "-" if value is None else shown.format(value * scale)


def _offs(summary: CaseSummary, field: str, expected: str) -> list[float]:
    return [abs(off) for row in summary.rows if (off := off_by(row, field, expected)) is not None]


def _with_interval(found: Sampled | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{found.value:.2f}", _between(found.low, found.high))


def _value_of(found: Sampled | None) -> str:
    return "-" if found is None else f"{found.value:.2f}"


def _short(found: Sampled) -> str:
    """Return a figure with half of its interval, the longer one, rounded up: none is certain."""
    half = max(found.value - found.low, found.high - found.value)
    return f"{found.value:.2f} ± {math.ceil(round(100 * half, 6)) / 100:.2f}"


def _bounds(found: Bounds) -> str:
    if found.low is None:
        return "-" if found.high is None else f"less than {found.high:.2f}"
    return f"at least {found.low:.2f}" if found.high is None else _between(found.low, found.high)


def _between(low: float, high: float, shown: str = "{:.2f}") -> str:
    """Return two figures that no line break parts."""
    return f"{shown.format(low)}\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}{shown.format(high)}"


def _joined(sentence: str, parts: Iterable[str]) -> str:
    said = " and ".join(parts)
    return f"{sentence}: {said}." if said else f"{sentence}."


def _counts(instances: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in instances.items()) or "-"


def _by_system(rows: Sequence[LoadRow]) -> list[LoadRow]:
    return sorted(rows, key=lambda row: (POLICIES.index(row.policy), row.load))
