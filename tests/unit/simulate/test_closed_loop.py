"""Proves the short loop closed over simulated requests: from the lengths that come and the profiles of the instances
it finds the planner's threshold wherever it began, and follows when either changes.
"""

from itertools import pairwise
from statistics import median

import pytest

from prfaas.capacity import optimum
from prfaas.capacity.workload import Workload
from prfaas.simulate.request import Arrival
from prfaas.simulate.scenario import Scenario

from .worlds import PAPER, requests, run, threshold, world

RATE = 2.0
SHORTER = Workload([max(1, tokens // 4) for tokens in PAPER.lengths[512::16]], PAPER.weights[512::16])


def planned(scenario: Scenario, workload: Workload) -> int:
    """The planner's threshold for this very split."""
    split = {name: float(count) for name, count in scenario.prefill_instances.items()}
    found = optimum.plan_for(scenario.system, workload, split).threshold_tokens
    assert found is not None
    return found


def settled(scenario: Scenario, arrivals: list[Arrival], from_seconds: float, to_seconds: float) -> float:
    """The threshold of the middle one of these intervals."""
    timeline = run(scenario, arrivals).timeline
    return median(one.threshold_tokens for one in timeline if from_seconds <= one.at_seconds < to_seconds)


@pytest.mark.parametrize("start_tokens", [500, 19_400, 120_000])
def test_wherever_it_begins_it_finds_the_planners_threshold(start_tokens):
    scenario = world(threshold(start_tokens, "Auto"))
    arrivals = list(requests(1200, RATE))
    drawn = Workload.observed(one.input_tokens for one in arrivals)
    end = arrivals[-1].at_seconds
    assert settled(scenario, arrivals, end / 2, end) == pytest.approx(planned(scenario, drawn), rel=0.12)


def test_it_follows_when_the_lengths_change():
    scenario = world(threshold(19_400, "Auto"))
    first = list(requests(1000, RATE))
    turn = first[-1].at_seconds
    later = [one._replace(at_seconds=turn + one.at_seconds) for one in requests(1600, RATE, 2, SHORTER)]
    arrivals = [*first, *later]
    assert all(a.at_seconds <= b.at_seconds for a, b in pairwise(arrivals))
    before = settled(scenario, arrivals, turn / 2, turn)
    end = later[-1].at_seconds
    after = settled(scenario, arrivals, end - 200, end)  # the window of lengths, 300 s, has left the first behind
    assert before == pytest.approx(planned(scenario, PAPER), rel=0.15)
    assert after == pytest.approx(planned(scenario, SHORTER), rel=0.2)
    assert after < 0.5 * before


def test_until_it_knows_the_lengths_it_stays_at_its_start():
    """Else a link that idles at first would send everything away, to instances that cannot do it."""
    timeline = run(world(threshold(19_400, "Auto")), list(requests(150, RATE))).timeline
    assert min(one.threshold_tokens for one in timeline) == 19_400
