"""What all runs of a case say together: a row a policy and load, the answer, what is left out and what is missing."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from prfaas.capacity.planfile import PlanFile
from prfaas.errors import ConfigError
from prfaas.evaluate.answer import (
    FirstTokenRatio,
    PolicyAnswer,
    PolicyRatio,
    answer_of,
    compare_first_tokens,
    ratios_of,
)
from prfaas.evaluate.record import ExcludedRun, Run, RunKey, in_order
from prfaas.evaluate.rows import LoadRow, Simulated, row_of
from prfaas.evaluate.steady import find_steady
from prfaas.simulate.scenario import POLICIES, PolicyName


class CaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report says of the figures of a case."""

    limit_seconds: float
    rows: tuple[LoadRow, ...]
    answers: dict[PolicyName, PolicyAnswer]
    ratios: dict[PolicyName, PolicyRatio]
    """PrfaaS-PD over homogeneous and over naive, where both have runs."""
    beside: FirstTokenRatio | None
    """None: no two runs that count have the same rate."""
    excluded: tuple[ExcludedRun, ...]
    """Runs that give no figure. An overloaded one is none of them."""
    missing: tuple[RunKey, ...]
    """Runs that were asked for and are not there."""
    software: tuple[str, ...]
    """The versions that the runs were made with."""
    shown: Run | None
    """The run whose threshold and link are drawn: PrfaaS-PD at the highest load that it carries, or else at the highest
    that was served."""


def summarise(
    file: PlanFile,
    runs: Sequence[Run],
    simulated: Simulated | None,
    limit_seconds: float | None,
    asked: Iterable[RunKey] = (),
) -> CaseSummary:
    """Return the summary of a case's runs. The limit of P90 is the file's `slo.ttftMillis` if none is given.

    `simulated` makes the record that a run would have in the simulator; None leaves those figures out. Raises
    ConfigError without any limit.
    """
    limit = _limit_seconds(file, limit_seconds)
    ordered = sorted(runs, key=in_order)
    steady = {run.key: find_steady(run, limit) for run in ordered}
    rows = [
        row_of(file, list(group), steady, simulated, limit)
        for _, group in groupby(ordered, key=lambda run: run.key.without_seed)
    ]
    own: dict[PolicyName, list[LoadRow]] = {
        policy: [row for row in rows if row.policy == policy] for policy in POLICIES
    }
    answers: dict[PolicyName, PolicyAnswer] = {
        policy: answer_of(file, found, limit) for policy, found in own.items() if found
    }
    drawn = {row.load for row in own["threshold"] if row.measured} or {row.load for row in own["threshold"]}
    why_not = {
        run.key: run.why_invalid or ("" if steady[run.key].overloaded else steady[run.key].why_not) for run in ordered
    }
    return CaseSummary(
        limit_seconds=limit,
        rows=tuple(rows),
        answers=answers,
        ratios=ratios_of(answers),
        beside=compare_first_tokens(rows, answers),
        excluded=tuple(ExcludedRun(key.name, why) for key, why in why_not.items() if why),
        missing=tuple(sorted(set(asked) - {run.key for run in ordered})),
        software=tuple(sorted({run.software for run in ordered})),
        shown=next(
            (
                run
                for run in reversed(ordered)
                if run.key.policy == "threshold" and run.key.load in drawn and not why_not[run.key]
            ),
            None,
        ),
    )


def _limit_seconds(file: PlanFile, limit_seconds: float | None) -> float:
    if limit_seconds is not None:
        return limit_seconds
    if file.slo.ttft_millis is None:
        raise ConfigError("the case has no slo.ttftMillis, the limit of P90 TTFT: add it, or give one")
    return file.slo.ttft_millis / 1000
