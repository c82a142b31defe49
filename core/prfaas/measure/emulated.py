"""Whether an emulated engine kept its time. If not, its machine was too slow, and no figure of the run counts."""

from collections.abc import Mapping
from typing import Final

from prfaas.wire.stats import LATE_BOUNDS, EmulationStats, Lateness

LATE: Final = 0.05
"""A step that ends later than by this share of its time is late. It is one of LATE_BOUNDS."""
_MOST_LATE: Final = 0.01
"""As many of the steps may be late."""
_MOST_BUSY: Final = 0.9
"""Of the cores' time: beyond it what is not emulated waits, such as the requests and the transfers."""


def why_too_slow(stats: EmulationStats) -> str:
    """Return why figures of this engine do not count, as a sentence's part; empty if it kept its time."""
    for kind, lateness in (("prefill", stats.prefills), ("decode", stats.decodes)):
        steps = sum(lateness.counts)
        if (late := late_steps(lateness)) > _MOST_LATE * steps:
            return f"{late} of {steps} {kind} steps ended later than by {LATE:.0%} of their time"
    cores_seconds = stats.busy_seconds + stats.idle_seconds
    if stats.busy_seconds > _MOST_BUSY * cores_seconds:
        return f"the machine's cores were busy for {stats.busy_seconds / cores_seconds:.0%} of the time"
    return ""


def late_p99(counts: Mapping[float, float]) -> float | None:
    """Return the least lateness that 99 % of the steps do not exceed, of how many do not exceed each bound, the last of
    which is infinite. None without a step."""
    steps = max(counts.values(), default=0.0)
    return min(bound for bound, count in counts.items() if count >= 0.99 * steps) if steps > 0 else None


def late_steps(lateness: Lateness) -> int:
    return sum(lateness.counts[LATE_BOUNDS.index(LATE) + 1 :])
