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
from prfaas.evaluate.record import ExcludedRun, Run
from prfaas.evaluate.rows import LoadRow
from prfaas.evaluate.steady import Sampled
from prfaas.evaluate.summary import CaseSummary
from prfaas.simulate.scenario import POLICIES, PolicyName

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
EMULATED: Final = (
    "All is real but the arithmetic of the model. Two clusters with API servers run the operator, the scheduler, the "
    "gateway and the instances, and caches cross a shaped link. An instance queues, batches and hands over as always; "
    "in place of computing it waits as long as its profile says."
)
COUNTED: Final = (
    "A request is sent at its time, however many wait, and its first token is timed from then. The beginning of each "
    "run is left out, at least a tenth, and so is its end, as long as the limit: nothing comes behind it. Intervals "
    "hold the true value in 95 of 100 cases: of up to two runs by batches of requests, and from three runs on by their "
    "spread. Close to its limit a system's queue remembers long; there the interval of a single run is rather too "
    "short. The simulator served the same requests, and is counted alike."
)
COUNTED_WHOLE: Final = (
    "A request is sent at its time, however many wait, and its first token is timed from then. All requests of a run "
    "count, for nothing in it is steady. The simulator served the same requests; the thresholds that stay are those "
    "that it found best for them."
)
MOST: Final = (
    "The most that a system serves is measured in two ways. Saturated: more arrives than it serves, and what it "
    "completes counts; short prompts overtake long ones then, so each counts as its prefill's time over that of the "
    "mean prompt of its pool, unless decodes limit the system. What is counted one by one stands beside it. Within the "
    "limit: a load holds if the interval of P90 lies within the limit. It breaks the limit if the interval lies above, "
    "or if in most of its runs the requests in flight grow without end, or some are refused. The limit lies between "
    "the highest load that holds and the lowest that breaks. Where one that breaks lies below one that holds, neither "
    "counts."
)
LINK_USE: Final = (
    "How much of the link is used means the same for all three: the bits that crossed it, of what the case declares "
    "that it carries. Those measured are of the connections to the hub, with headers and TLS, and multiplied by the "
    "scale of the caches; those of plan and simulator are of the caches alone."
)


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


def question(evaluation: Evaluation) -> str:
    """Return what was asked."""
    return (
        f"How many requests a second does each system of {evaluation.case.name} serve, at most and with nine of ten "
        f"first tokens within {evaluation.summary.limit_seconds:g} s, and is it what the plan and the simulator say?"
    )


def answer(summary: CaseSummary) -> str:
    """Return the answer: what PrfaaS-PD serves beside the others, and its first tokens beside those of homogeneous."""
    ours = summary.answers.get("threshold")
    if ours is None:
        return "There is no run of PrfaaS-PD, so there is no answer."
    sentences: list[str] = []
    if ours.saturated:
        ratios = [
            f"{_short(one.saturated)} times as many as {TITLES[policy]}"
            for policy, one in summary.ratios.items()
            if one.saturated
        ]
        sentences.append(_joined(f"PrfaaS-PD completes {_short(ours.saturated)} requests a second at most", ratios))
    if ours.limit.bounds != Bounds(None, None):
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


def against_expected(summary: CaseSummary) -> str:
    """Return how far the measured P90 lies from what plan and simulator say, in the mean of all loads."""
    both = [
        (name, _offs(summary, "ttft_p90_seconds", field))
        for name, field in (("the plan", "planned"), ("the simulator", "simulated"))
    ]
    said = [f"{sum(offs) / len(offs):.0%} from {name}, at most {max(offs):.0%}" for name, offs in both if offs]
    return f"Measured P90 differs in the mean by {', and by '.join(said)}." if said else ""


def headline_table(summary: CaseSummary) -> TextTable:
    """Return the ratios that the evaluation is made for, and how far the models lie from what was measured."""
    rows: list[tuple[str, ...]] = []
    for policy, one in summary.ratios.items():
        over = f"PrfaaS-PD over {TITLES[policy]}"
        planned, simulated = _number(one.saturated_planned, "{:.2f}"), _value_of(one.saturated_simulated)
        rows.append((f"{over}: most requests/s", *_with_interval(one.saturated), planned, simulated))
        within = f"{over}: requests/s with P90 within {summary.limit_seconds:g} s"
        rows.append(
            (within, "-", _bounds(one.limit), _number(one.limit_planned, "{:.2f}"), _bounds(one.limit_simulated))
        )
    if beside := summary.beside:
        title = f"PrfaaS-PD over homogeneous: P90 at {beside.rate_per_second:.2f} requests/s"
        expected = (_number(beside.planned, "{:.2f}"), _number(beside.simulated, "{:.2f}"))
        rows.append((title, *_with_interval(beside.ratio), *expected))
    for title, field in (("mean", "ttft_mean_seconds"), ("P90", "ttft_p90_seconds")):
        offs = [_offs(summary, field, expected) for expected in ("planned", "simulated")]
        cells = [f"{sum(one) / len(one):.0%}" if one else "-" for one in offs]
        rows.append((f"Measured {title} of the first token is off by, in the mean of all loads", "", "", *cells))
    rates = [(one.saturated, one.saturated_planned, one.saturated_simulated) for one in summary.answers.values()]
    offs = [abs(found.value / planned - 1) for found, planned, _ in rates if found]
    simulated_offs = [abs(found.value / said.value - 1) for found, _, said in rates if found and said]
    cells = [f"{sum(one) / len(one):.0%}" if one else "-" for one in (offs, simulated_offs)]
    rows.append(("Measured most requests/s are off by, in the mean of all systems", "", "", *cells))
    return TextTable("", ("figure", "measured", "95 % interval or bounds", "plan", "simulator"), rows)


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
    """Return what each system completes when more arrives than it serves."""
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
    return TextTable("Requests/s completed while more arrive", head, rows)


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
    """Return at which rate each system broke the limit, and why."""
    rows = [
        (TITLES[policy], f"{one.limit.bounds.high:.2f}", one.limit.why_broken)
        for policy, one in summary.answers.items()
        if one.limit.bounds.high is not None
    ]
    return TextTable("What failed first", ("system", "at requests/s", "why"), rows, are_words=True)


def figure_tables(summary: CaseSummary) -> list[TextTable]:
    """Return a table a figure: measured, planned and simulated, and by how much measured differs from either."""
    head = ("system", "load", "requests/s", "measured", "95 % interval", "plan", "off", "simulator", "off")
    return [
        TextTable(column.title, head, [_cells(row, column) for row in _by_system(summary.rows)]) for column in _FIGURES
    ]


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
    late = [run.machine.mean_late for run in runs if run.machine.mean_late is not None]
    rows = [
        ("software", ", ".join(sorted({run.software for run in runs})) or "-"),
        ("machine", ", ".join(sorted({run.hardware for run in runs if run.hardware})) or "-"),
        ("scale", f"stretch {case.stretch:g}, cache scale {case.cache_scale:,}"),
        ("runs", f"{len(runs)}, seeds {', '.join(map(str, sorted({run.key.seed for run in runs}))) or '-'}"),
        ("when", f"{days[0]} to {days[-1]}" if days else "-"),
        ("busy", f"at most {max(busy, default=0.0):.0%} of the machine"),
        ("late", f"steps ended at most {max(late, default=0.0):.1%} of their time late in the mean of a run"),
        ("case", case.digest),
        ("command", command),
    ]
    return TextTable("", ("what", "value"), rows, are_words=True)


def off_by(row: LoadRow, field: str, expected: str) -> float | None:
    """Return by which share of the expected figure the measured one is more; None where one of them is not there."""
    measured, said = _value(row.measured, field), _value(getattr(row, expected), field)
    return None if measured is None or not said else measured / said - 1


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
    """Return a figure with half of its interval, the longer one."""
    return f"{found.value:.2f} ± {max(found.value - found.low, found.high - found.value):.2f}"


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
