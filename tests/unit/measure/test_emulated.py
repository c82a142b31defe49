"""A run counts only where emulated engines kept their time and the machine had cores to spare."""

import pytest

from prfaas.measure.emulated import why_too_slow
from prfaas.wire.stats import LATE_BOUNDS, EmulationStats, Lateness


def lateness(**shares: int) -> Lateness:
    """Return counts by bound: `at_0_05=3` are three steps later by 2 % to 5 %."""
    counts = [0] * (len(LATE_BOUNDS) + 1)
    for name, count in shares.items():
        counts[LATE_BOUNDS.index(float(name.removeprefix("at_").replace("_", ".")))] = count
    return Lateness(tuple(counts))


NONE = lateness()


def stats(prefills: Lateness = NONE, decodes: Lateness = NONE, busy: float = 50.0) -> EmulationStats:
    return EmulationStats("p", 1, 1.0, prefills, decodes, 10.0, busy, 100.0 - busy)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (stats(), ""),
        (EmulationStats("p", 1, 1.0), ""),
        (stats(lateness(at_0_05=10), lateness(at_0_05=1000, at_0_1=10)), ""),
        (stats(lateness(at_0_05=8, at_0_1=1)), "1 of 9 prefill steps ended later than by 5% of their time"),
        (stats(decodes=lateness(at_0_001=979, at_0_1=20, at_5_0=1)), "21 of 1000 decode steps ended later than by 5%"),
        (stats(busy=90.0), ""),
        (stats(busy=91.0), "the machine's cores were busy for 91% of the time"),
    ],
)
def test_what_was_late_or_busy_beyond_a_bound_is_no_measurement(found: EmulationStats, why: str):
    assert why_too_slow(found).startswith(why)
    assert bool(why_too_slow(found)) == bool(why)
