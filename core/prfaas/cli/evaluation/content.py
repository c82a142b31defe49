"""What the page and the document of an evaluation both say: the answer in sentences, and tables of text.

PrfaaS-PD is the system whose short loop moves the threshold. All figures are in the case's own units: seconds, requests
a second and Gbit/s as they would be at full scale.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from prfaas.capacity.planfile import PlanFile
from prfaas.evaluate.case import Case
from prfaas.evaluate.record import ExcludedRun, Run
from prfaas.evaluate.steady import Sampled
from prfaas.evaluate.summary import CaseSummary, HighestRate, LoadRow, RateBound
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
    "run is left out, at least a tenth. Intervals hold the true value in 95 of 100 cases: of up to two runs by batches "
    "of requests, and from three runs on by their spread. Close to its limit a system's queue remembers long; there "
    "the interval of a single run is rather too short. The simulator served the same requests, and is counted alike."
)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """All that a page needs. `command` repeats it; `machine` says on what it ran."""

    case: Case
    runs: tuple[Run, ...]
    summary: CaseSummary
    unread: tuple[ExcludedRun, ...] = ()
    """Files among the runs that hold none."""
    command: str
    machine: str


class TextTable(NamedTuple):
    """Rows of text under their heads."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]


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
    _Column("utilisation_percent", "Utilisation of the link, %", "{:,.1f}"),
)


def question(evaluation: Evaluation) -> str:
    """Return what was asked."""
    return (
        f"How many requests a second does each system of {evaluation.case.name} serve, with nine of ten first tokens "
        f"within {evaluation.summary.limit_seconds:g} s, and does it serve what the plan and the simulator say?"
    )


def answer(summary: CaseSummary) -> str:
    """Return the answer: what PrfaaS-PD serves beside the others, and its first tokens beside those of homogeneous."""
    ours = summary.answers.get("threshold")
    if ours is None or ours.measured is None:
        return "No run of PrfaaS-PD counts, so there is no answer."
    limit = f"nine of ten first tokens within {summary.limit_seconds:g} s"
    if ours.measured.bound == "at most":
        return f"PrfaaS-PD keeps {limit} at none of the measured loads."
    ratios = [
        f"{_bounded(one.bound)}{one.value:.2f} times as many as {TITLES[policy]}"
        for policy, one in summary.ratios.items()
    ]
    sentences = [f"PrfaaS-PD serves {_rate(ours.measured)} requests a second with {limit}"]
    sentences[0] += f": {' and '.join(ratios)}." if ratios else "."
    if beside := summary.beside:
        sentences.append(
            f"At {beside.rate_per_second:.2f} requests a second, 90 % of what homogeneous serves, its P90 is "
            f"{_bounded(beside.ours_bound)}{beside.ours_seconds:.2f} s, and that of homogeneous "
            f"{beside.homogeneous_seconds:.2f} s."
        )
    return " ".join(sentences)


def against_expected(summary: CaseSummary) -> str:
    """Return how far the measured P90 lies from what plan and simulator say, in the mean of all loads."""
    both = [
        (name, [abs(off) for row in summary.rows if (off := off_by(row, "ttft_p90_seconds", field)) is not None])
        for name, field in (("the plan", "planned"), ("the simulator", "simulated"))
    ]
    said = [f"{sum(offs) / len(offs):.0%} from {name}, at most {max(offs):.0%}" for name, offs in both if offs]
    return f"Measured P90 differs in the mean by {', and by '.join(said)}." if said else ""


def system_table(evaluation: Evaluation) -> TextTable:
    """Return the systems, and the instances that they are made of."""
    there: list[PolicyName] = [policy for policy in POLICIES if policy in evaluation.summary.answers]
    instances = {run.key.policy: run.instances for run in evaluation.runs}
    systems = [(TITLES[one], SYSTEMS[one], _counts(instances.get(one, {}))) for one in there]
    return TextTable("Systems", ("system", "what it does", "instances"), systems)


def load_sentence(file: PlanFile, requests: int) -> str:
    """Return what arrives."""
    workload = file.workload
    return (
        f"Prompts have {workload.mean_tokens:,.0f} tokens in the mean, half at most {workload.quantile(0.5):,} and "
        f"nine of ten at most {workload.quantile(0.9):,}; answers have {file.system.output_tokens:,.0f}. They arrive "
        f"at random, {requests:,} in each run. A load is a share of what the system's own plan carries."
    )


def answer_table(summary: CaseSummary) -> TextTable:
    """Return the rate up to which each system keeps the limit."""
    rows = [
        (
            TITLES[policy],
            _rate(one.measured),
            _span(one.measured.low, one.measured.high) if one.measured else "-",
            _number(one.planned, "{:,.2f}"),
            _rate(one.simulated),
        )
        for policy, one in summary.answers.items()
    ]
    title = f"Requests/s with P90 within {summary.limit_seconds:g} s"
    return TextTable(title, ("system", "measured", "95 % interval", "plan", "simulator"), rows)


def figure_tables(summary: CaseSummary) -> list[TextTable]:
    """Return a table a figure: measured, planned and simulated, and by how much measured differs from either."""
    head = ("system", "load", "requests/s", "measured", "95 % interval", "plan", "off", "simulator", "off")
    return [
        TextTable(column.title, head, [_cells(row, column) for row in _by_system(summary.rows)]) for column in _FIGURES
    ]


def run_table(summary: CaseSummary) -> TextTable:
    """Return which runs each load has, and what became of their requests."""
    rows = [
        (
            TITLES[row.policy],
            f"{row.load:.0%}",
            ", ".join(map(str, row.seeds)) or "none",
            f"{row.requests:,}",
            f"{row.lost:,}",
            f"{row.fallbacks:,}",
        )
        for row in _by_system(summary.rows)
    ]
    return TextTable("Runs", ("system", "load", "seeds that count", "requests", "lost", "fallbacks"), rows)


def failed_table(evaluation: Evaluation) -> TextTable:
    """Return the runs that give no figure, with the reason."""
    excluded = (*evaluation.summary.excluded, *evaluation.unread)
    rows = [(one.name, one.why) for one in excluded]
    rows += [(key.name, "it is missing") for key in evaluation.summary.missing]
    return TextTable("Runs without a figure", ("run", "why"), rows)


def made_table(evaluation: Evaluation) -> TextTable:
    """Return what made the figures."""
    runs, case = evaluation.runs, evaluation.case
    days = sorted(run.began_at for run in runs)
    busy = [run.machine.busy_share for run in runs if run.machine.busy_share is not None]
    late = [run.machine.mean_late for run in runs if run.machine.mean_late is not None]
    rows = [
        ("software", ", ".join(sorted({run.software for run in runs})) or "-"),
        ("machine", evaluation.machine),
        ("scale", f"stretch {case.stretch:g}, cache scale {case.cache_scale:,}"),
        ("runs", f"{len(runs)}, seeds {', '.join(map(str, sorted({run.key.seed for run in runs}))) or '-'}"),
        ("when", f"{days[0]} to {days[-1]}" if days else "-"),
        ("busy", f"at most {max(busy, default=0.0):.0%} of the machine"),
        ("late", f"steps ended at most {max(late, default=0.0):.1%} of their time late in the mean of a run"),
        ("case", case.digest),
        ("command", evaluation.command),
    ]
    return TextTable("How it was made", ("what", "value"), rows)


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
    if found is None:
        return "-"
    return f"{column.shown.format(found.low * column.scale)} to {column.shown.format(found.high * column.scale)}"


def _number(value: float | None, shown: str, scale: float = 1.0) -> str:
    return "-" if value is None else shown.format(value * scale)


def _rate(found: HighestRate | None) -> str:
    if found is None:
        return "-"
    if found.bound == "at most":
        return f"below {found.rate_per_second:.2f}"
    return f"{_bounded(found.bound)}{found.rate_per_second:.2f}"


def _span(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "-"
    if low is None:
        return f"up to {high:.2f}"
    return f"from {low:.2f}" if high is None else f"{low:.2f} to {high:.2f}"


def _bounded(bound: RateBound) -> str:
    return f"{bound} " if bound else ""


def _counts(instances: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in instances.items()) or "-"


def _by_system(rows: Sequence[LoadRow]) -> list[LoadRow]:
    return sorted(rows, key=lambda row: (POLICIES.index(row.policy), row.load))
