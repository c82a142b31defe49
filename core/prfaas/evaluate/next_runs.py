"""Which runs come next, from those that are there.

Runs that were asked for come first, in their order, and once more those that are invalid. When all of them are there,
loads rise: to where one breaks the limit, and then to the middle between it and the highest that holds. A call tries
each run once. One that failed costs its own figure, and the others go on. A load counts here once all its seeds are
there, so an interrupted one is chosen again.
"""

from collections.abc import Collection, Sequence, Set
from itertools import pairwise
from typing import Final

import msgspec

from prfaas.evaluate.limit import bounding
from prfaas.evaluate.record import Run, RunKey
from prfaas.evaluate.rows import LoadRow
from prfaas.simulate.scenario import PolicyName

LOAD_STEP: Final = 0.1
MOST_LOAD: Final = 1.5
"""Of what a plan carries: to where loads rise that find no limit."""
_TOO_FAR: Final = 0.075
"""Between loads that hold and break the limit: one more is tried in their middle."""


class WantedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """What a call asks for: these runs, and of the policies in `rising` higher loads, each with all seeds."""

    asked: tuple[RunKey, ...]
    rising: tuple[PolicyName, ...] = ()
    seeds: int = 1


def next_runs(
    wanted: WantedRuns, runs: Sequence[Run], rows: Sequence[LoadRow], tried: Collection[RunKey] = ()
) -> list[RunKey]:
    """Return the runs to make now; none if all is done. `rows` are of `runs`, and `tried` is what the call has made."""
    there = {run.key for run in runs}
    left = [key for key in wanted.asked if key not in there]
    left += [run.key for run in runs if run.why_slow and (run.key in wanted.asked or run.key.policy in wanted.rising)]
    if left := [key for key in left if key not in tried]:
        return left
    known = there.union(tried)
    return [key for policy in wanted.rising for key in _rising(policy, wanted, rows, known) if key not in known]


def _rising(policy: PolicyName, wanted: WantedRuns, rows: Sequence[LoadRow], known: Set[RunKey]) -> list[RunKey]:
    """Return all runs of a policy's next load."""

    def runs_at(load: float) -> list[RunKey]:
        return [RunKey(policy, load, seed) for seed in range(1, 1 + wanted.seeds)]

    asked = {key.load for key in wanted.asked if key.policy == policy}
    own = [row for row in rows if row.policy == policy]
    load = next_load([row for row in own if row.load in asked or known >= {*runs_at(row.load)}])
    return [] if load is None else runs_at(load)


def next_load(rows: Sequence[LoadRow]) -> float | None:
    """Return a higher load until one breaks the limit, and then the middle of the first wide gap between it and the one
    that held; `rows` ascend. None: there is nothing to find, or no run of the highest load counts, nor would one of a
    higher."""
    held, broken = bounding([row.result.verdict.outcome for row in rows])
    if broken is None:
        can_rise = bool(rows) and bool(rows[-1].counted_seeds) and rows[-1].load < MOST_LOAD
        return round(rows[-1].load + LOAD_STEP, 2) if can_rise else None
    gaps = pairwise(row.load for row in rows[held or 0 : broken + 1])
    return next((round((low + high) / 2, 2) for low, high in gaps if high - low > _TOO_FAR), None)
