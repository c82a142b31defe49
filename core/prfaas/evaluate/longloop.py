"""A case whose requests change for good: what the long loop does, and whether the threshold comes down again.

Longer prompts with shorter answers ask for more prefill. At first the threshold alone gives way: it rises, as offload
pools and links are full. Then the long loop converts instances of the hub to prefill, and starts others in the member
cluster. When these serve, the threshold falls again: less has to be kept from them.

A threshold is noisy, so it is read as the median of some time: its *height* is the highest one after the change, and
its *end* that of the last fifth of the run.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Final

import msgspec

from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case, scenario_of, shift_of
from prfaas.evaluate.record import Reading, Run

_WINDOW_SECONDS: Final = 30.0
_LAST: Final = 0.2


class LongLoopSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What one run shows of the long loop. None: metrics did not say."""

    conversions: int
    """Changes of the number of prefills in the hub after the requests changed."""
    started: int
    """Offload instances that served in the end, beyond those of the beginning."""
    beyond_bounds: int
    """Readings with more or fewer of them than the bounds allow."""
    height_tokens: float | None
    end_tokens: float | None
    lost: int

    @property
    def end_over_height(self) -> float | None:
        return self.end_tokens / self.height_tokens if self.end_tokens and self.height_tokens else None


def long_loop_of(case: Case, run: Run) -> LongLoopSeen:
    """Return what the long loop did in a run. Raises ConfigError for a case without a change, or without that loop."""
    shift, conversion = shift_of(case, run.key), scenario_of(case, run.key).policy.conversion
    if shift is None or conversion is None:
        raise ConfigError(f"{case.name} has no simulation.shift and longLoop for {run.key.policy}: add both")
    end_seconds = max(one.at_seconds for one in run.answers)
    before = [one for one in run.readings if one.at_seconds < shift.at_seconds]
    after = [one for one in run.readings if shift.at_seconds <= one.at_seconds <= end_seconds]
    least = sum(pool.least for pool in conversion.scaled)
    most = sum(pool.most for pool in conversion.scaled)
    prefills = _values(after, lambda one: one.hub_prefills)
    away = _values(run.readings, lambda one: one.offload_instances)
    first = _values(before, lambda one: one.offload_instances)
    return LongLoopSeen(
        conversions=sum(former != later for former, later in pairwise(prefills)),
        started=round(away[-1] - first[0]) if away and first else 0,
        beyond_bounds=sum(not least <= count <= most for count in away),
        height_tokens=max(_medians(after), default=None),
        end_tokens=_median([one for one in after if one.at_seconds >= (1 - _LAST) * end_seconds]),
        lost=len(run.lost),
    )


def _medians(readings: Sequence[Reading]) -> list[float]:
    """Return the median threshold of each window of the readings."""
    windows: dict[int, list[Reading]] = {}
    for one in readings:
        windows.setdefault(math.floor(one.at_seconds / _WINDOW_SECONDS), []).append(one)
    return [found for window in windows.values() if (found := _median(window)) is not None]


def _median(readings: Sequence[Reading]) -> float | None:
    values = _values(readings, lambda one: one.threshold_tokens)
    return median(values) if values else None


def _values(readings: Sequence[Reading], value_of: Callable[[Reading], float | None]) -> list[float]:
    return [value for one in readings if (value := value_of(one)) is not None]
