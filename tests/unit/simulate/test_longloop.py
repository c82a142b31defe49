"""Proves the long loop closed over simulated requests: when what comes needs another split of the hub, it converts
instances towards the planner's, with the delays of a real conversion, and more is served sooner; else it rests. Offload
pools are scaled within their bounds. With `pytest -s` it prints the figures of benchmarks/log/measurements.md.
"""

from itertools import pairwise

import msgspec
import pytest

from prfaas.capacity import optimum
from prfaas.simulate.outcome import Result, Tally
from prfaas.simulate.request import Arrival, Request
from prfaas.simulate.request_process import RequestProcess
from prfaas.simulate.run import Faults, simulate
from prfaas.simulate.scenario import ConversionPolicy, Failure, ScaledPool, Scenario

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


SCALING = ConversionPolicy(cooldown_seconds=60, start_seconds=20, scaled=(ScaledPool(name="far", least=1, most=4),))


def offload_counts(result: Result) -> list[tuple[float, int]]:
    """When so many offload instances served."""
    timeline = result.timeline
    changes = [
        (b.at_seconds, b.offload_instances) for a, b in pairwise(timeline) if a.offload_instances != b.offload_instances
    ]
    return [(0.0, timeline[0].offload_instances), *changes]


def busy_far(scaling: ConversionPolicy) -> Scenario:
    """Two offload instances where four are planned."""
    return world(msgspec.structs.replace(threshold(19_400, "Auto"), conversion=scaling), offload=2)


def test_a_pool_that_is_too_busy_gets_instances_within_its_bounds_once_they_have_started():
    arrivals = list(requests(3_000, 2.2))
    fixed = served(busy_far(msgspec.structs.replace(SCALING, scaled=())), arrivals)
    scaled = served(busy_far(SCALING), arrivals)
    (_, first), *changes = offload_counts(scaled)

    assert [count for _, count in offload_counts(fixed)] == [2], "no pool is scaled that is not named"
    assert (first, max(count for _, count in changes)) == (2, 4)
    assert (changes[0][0] - SCALING.start_seconds) % SCALING.interval_seconds == pytest.approx(0, abs=1.001)
    assert scaled.completed == len(arrivals)
    assert scaled.ttft_seconds.p90 < 0.8 * fixed.ttft_seconds.p90


def test_instances_that_are_not_needed_go_one_at_a_time_and_lose_nothing():
    scenario = world(msgspec.structs.replace(threshold(19_400, "Auto"), conversion=SCALING), offload=4)
    arrivals = list(requests(1_000, 0.6))
    found = served(scenario, arrivals)
    counts = [count for _, count in offload_counts(found)]

    assert counts == sorted(counts, reverse=True)
    assert 1 <= counts[-1] < 4
    assert all(a - b == 1 for a, b in pairwise(counts))
    assert (found.completed, found.rerouted) == (len(arrivals), 0)


def test_an_instance_that_starts_while_its_link_is_down_fails_and_recovers_as_the_others():
    twice = tuple(Failure(at_seconds=at, for_seconds=seconds, name="member") for at, seconds in ((1, 10), (12, 2)))
    process = RequestProcess(msgspec.structs.replace(busy_far(SCALING), failures=twice), Tally())
    Faults(process)
    dead: list[int] = []
    process.events.at(5.0, lambda _: process.scale("far", 4))
    for at in (6.0, 11.5, 13.0, 15.0):
        process.events.at(at, lambda _: dead.append(len(process.dead & {one.name for one in process.table.instances})))
    while process.events.step():
        pass

    assert dead == [4, 0, 4, 0]


def test_an_instance_that_starts_again_has_nothing_cached():
    scenario = msgspec.structs.replace(busy_far(SCALING), cache_bytes={"member": 1e12})
    process, prompt = RequestProcess(scenario, Tally()), Request(0, Arrival(0.0, 1025, 1, blocks=(1, 2, 3)))
    for name in ("far-0", "far-1"):
        process.caches.insert(name, prompt)
    process.scale("far", 1)
    process.scale("far", 2)

    assert process.caches.found(prompt) == {"far-0": 1024}, "this one ran on"
