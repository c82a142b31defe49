"""A run counts only where emulated engines kept their time and the machine had cores to spare."""

import pytest

from prfaas.measure.emulated import FEWEST_STEPS, why_engine_too_slow
from prfaas.wire.stats import LATE_BOUNDS, EmulationStats, Lateness


def lateness(late: int, steps: int, total: float = 0.0) -> Lateness:
    """Return counts of steps, of which `late` ended just later than by 5 % and the others by 2 % to 5 %."""
    counts = [0] * (len(LATE_BOUNDS) + 1)
    counts[LATE_BOUNDS.index(0.05)], counts[LATE_BOUNDS.index(0.1)] = steps - late, late
    return Lateness(tuple(counts), total)


NONE = Lateness()


def stats(prefills: Lateness = NONE, decodes: Lateness = NONE, busy: float = 50.0) -> EmulationStats:
    return EmulationStats("p", 1, 1.0, prefills, decodes, 10.0, busy, 100.0 - busy)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (stats(), ""),
        (EmulationStats("p", 1, 1.0), ""),
        (stats(lateness(5, 100), lateness(50, 1000)), ""),
        (stats(lateness(6, 100), lateness(50, 1000)), ""),
        (stats(lateness(24, 400), lateness(50, 1000)), "6% of the steps ended later than by 5% of their time"),
        (stats(lateness(0, 100), lateness(60, 1000)), "6% of the steps ended later than by 5% of their time"),
        (stats(decodes=lateness(0, 1000, total=20.0)), ""),
        (stats(decodes=lateness(0, 1000, total=21.0)), "steps ended 2.1% of their time late in the mean"),
        (stats(busy=90.0), ""),
        (stats(busy=91.0), "its cores were busy for 91% of the time"),
    ],
)
def test_what_was_late_or_busy_beyond_a_bound_is_no_measurement(found: EmulationStats, why: str):
    assert why_engine_too_slow(found) == why


def test_a_single_late_step_among_few_is_no_lateness():
    assert not why_engine_too_slow(stats(lateness(1, 50, total=2.0))), "4 % in the mean, by one step"
    assert not why_engine_too_slow(stats(lateness(FEWEST_STEPS - 1, FEWEST_STEPS - 1, total=FEWEST_STEPS)))
    assert why_engine_too_slow(stats(lateness(FEWEST_STEPS, FEWEST_STEPS, total=FEWEST_STEPS))), "negative control"
