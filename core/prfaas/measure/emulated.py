"""Whether emulated engines kept their time. If not, their machine was too slow, and no figure of the run counts.

A step begins when the one before should have ended, so late steps do not add up, and few of them change no figure.
Lateness in the mean makes every time too long, and many late steps move percentiles. Prefills and decodes are judged
apart. What is not emulated, such as the transfers, waits where no core is idle.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

from prfaas.wire.stats import LATE_BOUNDS, EmulationStats, Lateness

MOST_LATE: Final = 0.02
"""In the mean of all steps of a kind, as a share of their time."""
LATE: Final = 0.05
"""A step that ends later than by this share of its time is late. It is one of LATE_BOUNDS."""
MOST_LATE_SHARE: Final = 0.05
"""As many of the steps may be late: a P90 is still that of steps in time."""
MOST_BUSY: Final = 0.9
"""Of the cores' time."""
FEWEST_STEPS: Final = 100
"""Of a kind, to judge it: the mean of fewer hangs on a single one."""
FEWEST_SHARED_STEPS: Final = 400
"""Of a kind, to judge how many were late: of fewer, one more or less would decide."""


class StepTiming(NamedTuple):
    """How late steps of one kind ended: in the mean, as a share of their time, and the share of them that was late.
    The share is None of fewer than FEWEST_SHARED_STEPS."""

    mean_late: float
    late_share: float | None


def step_timing(counts: Mapping[float, float], total_late: float) -> StepTiming | None:
    """Return how late steps ended, of how many do not exceed each bound of lateness, the last of which is infinite, and
    of the sum of all their lateness. None of fewer than FEWEST_STEPS."""
    steps = counts.get(math.inf, 0.0)
    if steps < FEWEST_STEPS:
        return None
    late_share = (steps - counts[LATE]) / steps if steps >= FEWEST_SHARED_STEPS else None
    return StepTiming(total_late / steps, late_share)


def why_too_slow(timings: Iterable[StepTiming], busy_share: float | None) -> str:
    """Return why no figure counts, from steps of each kind and the share of the cores' time in which they worked, None
    if it is not known. Empty if all figures do."""
    for one in timings:
        if one.mean_late > MOST_LATE:
            return f"steps ended {one.mean_late:.1%} of their time late in the mean"
        if one.late_share is not None and one.late_share > MOST_LATE_SHARE:
            return f"{one.late_share:.0%} of the steps ended later than by {LATE:.0%} of their time"
    if busy_share is not None and busy_share > MOST_BUSY:
        return f"its cores were busy for {busy_share:.0%} of the time"
    return ""


def why_engine_too_slow(stats: EmulationStats) -> str:
    """Return the same of one engine since its first step."""
    timings = [step_timing(_bounds(one), one.total) for one in (stats.prefills, stats.decodes)]
    cores_seconds = stats.busy_seconds + stats.idle_seconds
    busy_share = stats.busy_seconds / cores_seconds if cores_seconds > 0 else None
    return why_too_slow([one for one in timings if one is not None], busy_share)


def late_p99(counts: Mapping[float, float]) -> float | None:
    """Return the least lateness that 99 % of the steps do not exceed, of how many do not exceed each bound, the last of
    which is infinite. None without a step."""
    steps = max(counts.values(), default=0.0)
    return min(bound for bound, count in counts.items() if count >= 0.99 * steps) if steps > 0 else None


def _bounds(lateness: Lateness) -> dict[float, float]:
    """Return how many steps do not exceed each bound."""
    return dict(zip((*LATE_BOUNDS, math.inf), accumulate(lateness.counts), strict=True))
