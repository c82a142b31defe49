"""Proves the simulator against what is known exactly: one request's times, M/D/1 waits, and the bottleneck of
equations (3) to (6) when everything waits.
"""

import operator

import pytest

from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.capacity.workload import Workload
from prfaas.simulate.request import Arrival
from prfaas.simulate.scenario import LinkShape

from .worlds import FAST, OUTPUT_TOKENS, SLOW, linear, quick_decode, requests, run, world

STEP = world().system.hub[0].step_seconds
"""A decode instance computes the last token of a prompt whose cache came, and samples the first one from it."""


def first_token_seconds(scenario, tokens: int) -> float:
    return run(scenario, [Arrival(5.0, tokens, 100)]).ttft_seconds.mean


def test_a_local_prompt_waits_only_for_its_prefill_and_a_decode_step():
    assert first_token_seconds(world(), 10_000) == pytest.approx(prefill_seconds(SLOW, 10_000) + STEP)


def test_an_offloaded_cache_crosses_during_the_prefill():
    tokens, mbps = 40_000, 1_000.0
    scenario = world(link_mbps=mbps, profiles=(linear(1e-4, 1000, 5_000_000), SLOW), step_tokens=5_000)
    # Chunks of 1 s and 10 MB, each 0.08 s on the link. The fourth ends at 39,936 tokens, the last full block; only it,
    # the rest and the state follow.
    rest = 3.9936 + (10e6 + 5e6) * 8 / (mbps * 1e6) + STEP
    assert first_token_seconds(scenario, tokens) == pytest.approx(rest)
    whole = world(link_mbps=mbps, profiles=(linear(1e-4, 1000, 5_000_000), SLOW), step_tokens=tokens)
    assert first_token_seconds(whole, tokens) == pytest.approx(3.9936 + (40e6 + 5e6) * 8 / (mbps * 1e6) + STEP)


def test_a_link_slower_than_the_prefill_is_what_counts():
    scenario = world(link_mbps=10.0, profiles=(linear(1e-4, 1000), SLOW), step_tokens=5_000)
    # The first chunk is there after 1 s; from then on the link is never idle.
    assert first_token_seconds(scenario, 40_000) == pytest.approx(1.0 + 40e6 * 8 / 10e6 + STEP)


def test_the_round_trip_is_paid_before_the_prefill_and_half_after():
    near = world()
    far = world(conditions={"member": LinkShape(round_trip_seconds=0.2)})
    assert first_token_seconds(far, 40_000) - first_token_seconds(near, 40_000) == pytest.approx(0.3)


def test_a_decode_instance_without_prefill_beside_it_prefills_itself():
    assert first_token_seconds(world(hub=(0, 8)), 10_000) == pytest.approx(prefill_seconds(SLOW, 10_000))


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_waits_before_one_instance_are_those_of_m_d_1(load):
    """W = rho S / (2 (1 - rho)): Pollaczek and Khinchine for equal service times. Of equal prompts the first is served
    first. Steps are short, since a prompt's end waits for the end of its step."""
    tokens, count = 10_000, 12_000
    service_seconds = 1.0
    scenario = quick_decode(
        world(offload=0, hub=(1, 1), profiles=(FAST, linear(service_seconds / tokens)), step_tokens=64)
    )
    served = run(scenario, requests(count, load / service_seconds, workload=Workload([tokens], [1.0])))
    waited = served.ttft_seconds.mean - service_seconds
    assert waited == pytest.approx(load * service_seconds / (2 * (1 - load)), rel=0.06)


def mean_seconds(profile, part) -> float:
    parts = (profile.fixed_seconds, profile.token_seconds, profile.squared_seconds)
    return sum(map(operator.mul, parts, part))


T = 19_400
WAITING = list(requests(4000, 1e6))
DRAWN = Workload.observed(one.input_tokens for one in WAITING)
BOTTLENECKS = {
    "offload prefill": (world(offload=2, hub=(7, 11)), 2 / mean_seconds(FAST, DRAWN.above(T))),
    "local prefill": (world(offload=8, hub=(2, 9)), 2 / mean_seconds(SLOW, DRAWN.below(T))),
    "decode": (world(offload=8, hub=(6, 3)), 3 * 0.782),
    "link": (
        world(link_mbps=5_000, offload=8, hub=(6, 9)),
        5e9 / (8 * (FAST.state_bytes * DRAWN.above(T).share + FAST.token_bytes * DRAWN.above(T).tokens)),
    ),
}


@pytest.mark.parametrize("name", BOTTLENECKS)
def test_when_everything_waits_the_throughput_is_that_of_the_bottleneck(name):
    scenario, expected = BOTTLENECKS[name]
    served = run(scenario, WAITING)
    assert served.completed == len(WAITING)
    assert served.requests_per_second == pytest.approx(expected, rel=0.03)


def test_egress_is_the_caches_that_left():
    served = run(world(), requests(1000, 2.0))
    lengths = [one.input_tokens for one in requests(1000, 2.0)]
    sent = sum(cache_bytes(FAST, tokens) for tokens in lengths if tokens > T)
    assert served.egress_gbps * served.seconds / 8 * 1e9 == pytest.approx(sent)
    assert served.offloaded == sum(tokens > T for tokens in lengths)
    assert OUTPUT_TOKENS * served.completed == sum(one.output_tokens for one in requests(1000, 2.0))
