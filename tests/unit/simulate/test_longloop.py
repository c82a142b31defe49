"""Proves the long loop closed over simulated requests: when what comes needs another split of the hub, it converts
instances towards the planner's, with the delays of a real conversion, and more is served sooner; else it rests.
With `pytest -s` it prints the figures of benchmarks/log/measurements.md.
"""

from itertools import pairwise

import msgspec
import pytest

from prfaas.capacity import optimum
from prfaas.simulate.outcome import Result, Tally
from prfaas.simulate.request import Arrival
from prfaas.simulate.run import simulate
from prfaas.simulate.scenario import ConversionPolicy, Failure, Scenario

from .worlds import PAPER, requests, threshold, world

SHORT_ANSWERS, LONG_ANSWERS = 300, 4096
RATE = 3.0
SHIFT_SECONDS = 400.0


def shifting() -> list[Arrival]:
    """Long answers need decode; from some time on short ones come, three times as fast, and need prefill."""
    first = [one._replace(output_tokens=LONG_ANSWERS) for one in requests(500, 0.9) if one.at_seconds < SHIFT_SECONDS]
    later = [
        one._replace(at_seconds=SHIFT_SECONDS + one.at_seconds, output_tokens=SHORT_ANSWERS)
        for one in requests(5_000, RATE, 2)
    ]
    return [*first, *later]


def decode_heavy(conversion: ConversionPolicy | None, **more) -> Scenario:
    """The paper's system as planned for answers that are long: nearly all of the hub decodes."""
    policy = msgspec.structs.replace(threshold(19_400, "Auto"), conversion=conversion)
    return world(policy, hub=(1, 7), **more)


def served(scenario: Scenario, arrivals: list[Arrival]) -> Result:
    return simulate(scenario, arrivals, Tally())


def splits(result: Result) -> list[tuple[float, int]]:
    """When which split began."""
    changes = [(b.at_seconds, b.hub_prefills) for a, b in pairwise(result.timeline) if a.hub_prefills != b.hub_prefills]
    return [(0.0, result.timeline[0].hub_prefills), *changes]


def described(result: Result) -> str:
    waits = result.ttft_seconds
    return (
        f"{splits(result)[-1][1]} instances prefill at the end, {result.requests_per_second:.2f} requests/s, "
        f"TTFT {waits.p90:.1f} s P90, {waits.mean:.1f} s mean"
    )


def test_a_shift_of_the_workload_converts_instances_and_serves_more_and_sooner():
    arrivals = shifting()
    still, moving = served(decode_heavy(None), arrivals), served(decode_heavy(ConversionPolicy()), arrivals)
    assert [count for _, count in splits(still)] == [1]
    counts = [count for _, count in splits(moving)]
    print(f"\nwith conversion: {described(moving)}\nwithout: {described(still)}")
    assert counts[-1] > 2, splits(moving)
    assert all(at >= SHIFT_SECONDS for at, _ in splits(moving)[1:]), "before, it rests"
    assert moving.completed == still.completed == len(arrivals)
    assert moving.requests_per_second > 1.05 * still.requests_per_second
    assert moving.ttft_seconds.p90 < 0.7 * still.ttft_seconds.p90
    assert moving.ttft_seconds.mean < 0.7 * still.ttft_seconds.mean


def test_it_ends_at_the_planners_split_and_rests_there():
    scenario = decode_heavy(ConversionPolicy(cooldown_seconds=60))
    arrivals = list(requests(6_000, 2.0))
    found = served(scenario, arrivals)
    best = optimum.best(scenario.system, PAPER).split["home"]
    counts = [count for _, count in splits(found)]
    assert abs(counts[-1] - best) <= 1, splits(found)
    assert counts == sorted(counts), "never back"


def test_a_conversion_takes_its_time_and_only_one_is_made_a_cooldown():
    slow = ConversionPolicy(interval_seconds=20, cooldown_seconds=100, conversion_seconds=30)
    began = [at for at, _ in splits(served(decode_heavy(slow), shifting()))[1:]]
    assert began
    assert all((at - 30) % 20 == pytest.approx(0, abs=1.001) for at in began), "looks are every 20 s, roles 30 s later"
    assert all(later - earlier >= 100 for earlier, later in pairwise(began))


def test_nothing_is_converted_while_an_instance_is_dead():
    failure = Failure(at_seconds=0, for_seconds=1e6, name="home-decode-0")
    assert len(splits(served(decode_heavy(ConversionPolicy(), failures=(failure,)), shifting()))) == 1
