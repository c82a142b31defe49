"""The chapter of a disturbed case: first tokens beside those of thresholds that stay, threshold and link over time."""

from collections.abc import Sequence

from prfaas.cli.chart import Lines
from prfaas.cli.evaluation.charts import over_time
from prfaas.cli.evaluation.content import TITLES, Chapter, TextTable, made_table, section
from prfaas.cli.evaluation.paragraphs import BORNE, COUNTED_WHOLE
from prfaas.evaluate.case import Case
from prfaas.evaluate.disturbed import SETTLED, DisturbedSummary, ThresholdSettling
from prfaas.evaluate.record import Run, RunKey


def disturbed_chapter(case: Case, runs: Sequence[Run], summary: DisturbedSummary, command: str) -> Chapter:
    """Return what the runs say; an invalid one is not drawn."""
    settlings = {one.key: one.settlings for one in summary.runs}
    settling = _settling_table(summary)
    drawn = [
        section(_title(run.key), over_time(run, _borne(run, settlings[run.key]), f"{run.key.name}-"))
        for run in runs
        if not run.why_invalid
    ]
    opening = section(
        "",
        *(disturbed_answer(summary), COUNTED_WHOLE, _run_table(summary)),
        *(settling, BORNE if settling.rows else ""),
    )
    return Chapter(case, command, [opening, *drawn, section("How it was made", made_table(case, runs, command))])


def disturbed_answer(summary: DisturbedSummary) -> str:
    """Return P90 of the moving threshold and of prices, beside the best threshold that stays."""
    if (best := summary.best_static) is None or best.p90_seconds is None:
        return "There is no run of each threshold that stays, so there is no answer."
    ratios = [
        f"{TITLES[policy]} {ratio:.2f}"
        for policy in ("threshold", "price")
        if (ratio := summary.over_best(policy)) is not None
    ]
    said = f", and of it have {' and '.join(ratios)}" if ratios else ""
    return f"The best threshold that stays, {best.key.threshold_tokens:,}, has a P90 of {best.p90_seconds:.2f} s{said}."


def _run_table(summary: DisturbedSummary) -> TextTable:
    rows = [
        (
            _title(one.key),
            "-" if one.p90_seconds is None else f"{one.p90_seconds:.2f}",
            f"{one.simulated_p90_seconds:.2f}",
            f"{one.lost:,}",
            f"{one.fallbacks:,}",
            one.why_invalid,
        )
        for one in summary.runs
    ]
    rows += [(_title(key), "-", "-", "-", "-", "it is missing") for key in summary.missing]
    head = ("system", "P90 of the first token, s", "simulator", "lost", "fallbacks", "why without a figure")
    return TextTable("Runs", head, rows)


def _settling_table(summary: DisturbedSummary) -> TextTable:
    rows = [
        (
            _title(one.key),
            f"{settling.at_seconds:,.0f}",
            f"{settling.before_tokens:,}",
            f"{settling.borne_tokens:,}",
            _intervals(settling),
            _intervals(expected),
        )
        for one in summary.runs
        for settling, expected in zip(one.settlings, one.simulated_settlings, strict=False)
    ]
    head = (
        *("system", "the link changes at, s", "it bore, tokens", "it then bears, tokens"),
        *("settled after intervals", "simulator"),
    )
    least, most = SETTLED
    return TextTable(f"Until the threshold stays within {least:g} to {most:g} of what the link bears", head, rows)


def _intervals(settling: ThresholdSettling) -> str:
    return f"not within {settling.most_intervals}" if settling.intervals is None else f"{settling.intervals}"


def _borne(run: Run, settlings: Sequence[ThresholdSettling]) -> Lines:
    """Return what the link bears from its first change on."""
    if not settlings:
        return {}
    ends = [*(one.at_seconds for one in settlings[1:]), max(one.at_seconds for one in run.answers)]
    line = [
        (at, float(one.borne_tokens)) for one, end in zip(settlings, ends, strict=True) for at in (one.at_seconds, end)
    ]
    return {"what the link bears": line}


def _title(key: RunKey) -> str:
    return f"{TITLES[key.policy]}, {key.threshold_tokens:,} tokens" if key.threshold_tokens else TITLES[key.policy]
