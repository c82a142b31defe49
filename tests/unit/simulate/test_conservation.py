"""Proves that every request ends exactly once, whatever fails, and that the same seed gives the same bytes."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import InternalError
from prfaas.simulate.outcome import Tally
from prfaas.simulate.request import Arrival, Request
from prfaas.simulate.scenario import Failure, LinkShape, Scenario, instance_names

from .worlds import linear, requests, run, threshold, world

NAMES = [*instance_names(world(hub=(1, 2), offload=2)), "member"]
FAILURES = st.lists(
    st.builds(Failure, at_seconds=st.floats(0, 60), for_seconds=st.floats(0.1, 30), name=st.sampled_from(NAMES)),
    max_size=6,
)
SCHEDULES = st.lists(st.tuples(st.floats(0, 60), st.sampled_from([0.0, 50.0, 2_000.0])), max_size=5).map(
    lambda steps: tuple(sorted(steps))
)
MODES = st.sampled_from(["Auto", "Priced", "Fixed", "Disabled"])
PROMPTS = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 60_000), st.integers(1, 300), st.integers(0, 3)), min_size=1, max_size=40
)


def arrivals(prompts) -> list[Arrival]:
    """Gaps, lengths, answers, and which of a few conversations a prompt belongs to."""
    at, made = 0.0, []
    for gap, tokens, output, conversation in prompts:
        at += gap
        blocks = [conversation * 1000 + i for i in range(tokens // 512)] if conversation else []
        made.append(Arrival(at, tokens, output, blocks))
    return made


def small(mode: str, schedule, failures, on_failure: str = "PrefillLocally") -> Scenario:
    return world(
        msgspec.structs.replace(threshold(8_000, mode), on_offload_failure=on_failure),
        hub=(1, 2),
        offload=2,
        link_mbps=2_000,
        conditions={"member": LinkShape(schedule=schedule, round_trip_seconds=0.05)},
        cache_bytes={"hub": 5e9, "member": 2e9},
        failures=tuple(failures),
    )


@given(PROMPTS, SCHEDULES, FAILURES, MODES, st.sampled_from(["PrefillLocally", "Reject"]))
def test_every_request_ends_exactly_once_whatever_fails(prompts, schedule, failures, mode, on_failure):
    served = run(small(mode, schedule, failures, on_failure), arrivals(prompts))
    assert served.completed + served.refused == served.requests == len(prompts)
    assert served.refused == 0 or failures or on_failure == "Reject"


@given(PROMPTS, SCHEDULES, MODES)
@settings(max_examples=30)
def test_a_link_loses_no_request(prompts, schedule, mode):
    served = run(small(mode, schedule, ()), arrivals(prompts))
    assert served.completed == len(prompts)


def test_a_request_that_never_ended_is_an_error_of_ours():
    tally = Tally()
    tally.arrive(Request(0, Arrival(0.0, 1, 1)))
    with pytest.raises(InternalError, match="1 requests came and 0 ended"):
        tally.result(0.0)


def test_a_decode_instance_that_dies_costs_time_and_no_answer():
    failure = Failure(at_seconds=20, for_seconds=1000, name="home-decode-0")
    scenario = world(profiles=(linear(1e-5), linear(1e-5)), hub=(1, 2))
    calm = run(scenario, requests(20, 2.0))
    hit = run(msgspec.structs.replace(scenario, failures=(failure,)), requests(20, 2.0))
    assert (hit.completed, hit.rerouted > 0) == (20, True)
    assert hit.seconds > calm.seconds


def test_a_dead_link_sends_prompts_to_the_hub_within_the_time_of_detection():
    conditions = {"member": LinkShape(schedule=((10.2, 0.0),))}  # between two looks of the short loop
    served = run(world(threshold(100), conditions=conditions), [Arrival(10.5, 20_000, 10)])
    undisturbed = run(world(threshold(100_000)), [Arrival(10.5, 20_000, 10)])
    assert (served.offloaded, served.rerouted, served.completed) == (1, 1, 1)
    assert served.ttft_seconds.mean == pytest.approx(undisturbed.ttft_seconds.mean + 1.0)


def test_all_decode_instances_dead_is_a_refusal_not_a_wait():
    failures = [Failure(at_seconds=0, for_seconds=1000, name=f"home-decode-{i}") for i in range(5)]
    served = run(world(failures=tuple(failures)), [Arrival(1.0, 1000, 10)])
    assert (served.refused, served.slo_attainment) == (1, 0.0)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    scenario = small("Auto", ((5.0, 50.0), (20.0, 2_000.0)), [Failure(at_seconds=9, for_seconds=5, name="far-0")])

    def encoded(seed: int) -> bytes:
        return msgspec.json.encode(run(scenario, requests(300, 0.8, seed)))

    assert encoded(1) == encoded(1)
    assert encoded(1) != encoded(2)


def test_a_member_that_dies_while_the_end_of_a_cache_is_on_its_way_costs_time_and_no_answer():
    far = LinkShape(round_trip_seconds=10.0)
    scenario = world(threshold(8_000), hub=(1, 2), offload=1, conditions={"member": far})
    calm = run(scenario, [Arrival(0.0, 20_000, 10)])
    assert 15.0 < calm.seconds < 20.0, "a round trip, the prefill, and half a round trip"
    failure = Failure(at_seconds=14.0, for_seconds=1000.0, name="member")
    hit = run(msgspec.structs.replace(scenario, failures=(failure,)), [Arrival(0.0, 20_000, 10)])
    assert (hit.completed, hit.rerouted) == (1, 1)
