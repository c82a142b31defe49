"""Proves where a limit lies, and what a saturated system completes, with systems whose most is known."""

import operator
from functools import cache
from random import Random

import msgspec
import pytest

from prfaas.evaluate.expected import simulated_run
from prfaas.evaluate.limit import Bounds, LoadVerdict, judge, limit_of, ratio_of, saturated_rate
from prfaas.evaluate.record import AnsweredRequest, Run, RunKey
from prfaas.evaluate.rows import most_of, works_of
from prfaas.evaluate.steady import Sampled, SteadyPart
from prfaas.simulate import setup as setups
from prfaas.simulate.scenario import PolicyName

from .cases import CASE
from .test_steady import queue, run_of

LONG = msgspec.structs.replace(CASE, requests=1000)
STEADY = SteadyPart()
GROWS = SteadyPart(why_not="requests in flight grow", overloaded=True)
UNSTEADY = SteadyPart(why_not="the warm-up takes long")


def run(answers: list[AnsweredRequest]) -> Run:
    return msgspec.structs.replace(run_of([]), answers=tuple(answers))


def verdicts(**outcomes: str) -> list[LoadVerdict]:
    """Return verdicts on rates from 1 on, by their words."""
    return [
        LoadVerdict(rate_per_second=float(rate), outcome=outcome, why=f"because of {name}")
        for rate, (name, outcome) in enumerate(outcomes.items(), 1)
    ]


@pytest.mark.parametrize(
    ("parts", "p90", "outcome", "why"),
    [
        ([STEADY], Sampled(8.0, 7.0, 9.0), "held", "P90 is 8.00 s"),
        ([STEADY], Sampled(12.0, 11.0, 13.0), "broken", "P90 is 12.00 s"),
        ([STEADY], Sampled(10.0, 9.0, 11.0), "open", "both sides"),
        ([STEADY, STEADY, GROWS], Sampled(8.0, 7.0, 9.0), "open", "in 1 of 3 runs requests in flight grow"),
        ([STEADY, GROWS, GROWS], Sampled(8.0, 7.0, 9.0), "broken", "in 2 of 3 runs requests in flight grow"),
        ([STEADY, STEADY, GROWS], Sampled(12.0, 11.0, 13.0), "broken", "P90 is 12.00 s"),
        ([UNSTEADY, UNSTEADY, GROWS], None, "open", "in 1 of 3 runs requests in flight grow"),
        ([GROWS], None, "broken", "in 1 of 1 runs"),
        ([UNSTEADY], None, "open", "no run counts"),
        ([], None, "open", "no run counts"),
    ],
)
def test_a_load_holds_or_breaks_the_limit_only_if_that_is_sure(parts, p90, outcome, why):
    found = judge(2.0, parts, p90, 10.0)

    assert found.outcome == outcome
    assert why in found.why


@pytest.mark.parametrize(
    ("outcomes", "low", "high"),
    [
        ({"a": "held", "b": "held", "c": "broken"}, 2.0, 3.0),
        ({"a": "held", "b": "open", "c": "broken"}, 1.0, 3.0),
        ({"a": "held", "b": "broken", "c": "held"}, 1.0, None),
        ({"a": "held", "b": "broken", "c": "held", "d": "broken"}, 1.0, 4.0),
        ({"a": "broken", "b": "held"}, None, None),
        ({"a": "held", "b": "held"}, 2.0, None),
        ({"a": "broken", "b": "broken"}, None, 1.0),
        ({"a": "open"}, None, None),
        ({}, None, None),
    ],
)
def test_the_limit_lies_between_what_holds_and_what_breaks(outcomes, low, high):
    assert limit_of(reversed(verdicts(**outcomes))).bounds == Bounds(low, high)


def test_what_failed_first_is_said():
    assert limit_of(verdicts(a="held", b="broken", c="broken")).why_broken == "because of b"


@pytest.mark.parametrize(
    ("above", "below", "ratio"),
    [
        (Bounds(3.0, 4.0), Bounds(1.0, 2.0), Bounds(1.5, 4.0)),
        (Bounds(3.0, None), Bounds(1.0, 2.0), Bounds(1.5, None)),
        (Bounds(3.0, 4.0), Bounds(1.0, None), Bounds(None, 4.0)),
        (Bounds(3.0, None), Bounds(1.0, None), Bounds(None, None)),
        (Bounds(None, 4.0), Bounds(1.0, 2.0), Bounds(None, 4.0)),
    ],
)
def test_a_ratio_of_limits_has_the_bounds_of_both(above, below, ratio):
    assert ratio_of(above, below) == ratio


@pytest.mark.parametrize("load", [1.2, 1.5, 3.0])
def test_a_saturated_server_completes_what_it_can(load):
    """A service takes a second in the mean."""
    rates = [saturated_rate(run_of(queue(seed, load, 1000)), lambda _: 1.0) for seed in range(100)]

    assert all(rates) or load == 1.2, "a queue that is hardly overloaded may look as if it had room"
    there = [one for one in rates if one is not None]
    assert len(there) >= 90
    assert sum(one.value for one in there) / len(there) == pytest.approx(1.0, abs=0.02)
    assert sum(one.low <= 1.0 <= one.high for one in there) >= 0.88 * len(there)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_server_with_room_completes_what_arrives_and_is_not_saturated(load):
    """The negative control: throughput of a system that waits for requests says nothing of its most."""
    rates = [saturated_rate(run_of(queue(seed, load, 1000)), lambda _: 1.0) for seed in range(40)]

    assert sum(one is not None for one in rates) <= 1


def test_a_system_that_refuses_what_it_cannot_serve_is_saturated_too():
    rng = Random(1)
    at = [place / 2 for place in range(1000)]
    answers = [
        AnsweredRequest(at_seconds=one, prompt_tokens=1, ttft_seconds=1.0, seconds=1.0)
        if rng.random() < 0.5
        else AnsweredRequest(at_seconds=one, prompt_tokens=1, lost="refused")
        for one in at
    ]

    assert saturated_rate(run(answers), lambda _: 1.0).value == pytest.approx(1.0, abs=0.1)


def test_a_system_with_room_that_fails_is_not_saturated():
    """The negative control: its failures say nothing of the load."""
    answers = [
        AnsweredRequest(at_seconds=place / 2, prompt_tokens=1, ttft_seconds=1.0, seconds=1.0)
        if place % 2
        else AnsweredRequest(at_seconds=place / 2, prompt_tokens=1, lost="failure", error="502")
        for place in range(1000)
    ]

    assert saturated_rate(run(answers), lambda _: 1.0) is None


def test_a_run_without_answers_says_nothing_of_the_most():
    assert saturated_rate(run([]), lambda _: 1.0) is None
    lost = [AnsweredRequest(at_seconds=float(place), prompt_tokens=1, lost="refused") for place in range(20)]
    assert saturated_rate(run(lost), lambda _: 1.0) is None


@cache
def saturated(policy: PolicyName) -> Run:
    return simulated_run(LONG, RunKey(policy, 1.3, 1), Random)


@pytest.mark.parametrize("policy", ["homogeneous", "naive", "static"])
def test_saturated_systems_complete_what_their_plan_carries(policy):
    found = most_of(CASE.file, saturated(policy))

    assert found.value == pytest.approx(setups.capacity(CASE.file, policy), rel=0.04)


def test_a_moving_threshold_off_its_optimum_carries_less_than_its_plan():
    """What a pool with room completes while prompts wait for the other one is no gain."""
    run, planned = saturated("threshold"), setups.capacity(CASE.file, "threshold")
    pools = [saturated_rate(run, work).value for work in works_of(CASE.file, run)]
    shares = [sum(one.offloaded == away for one in run.answers) / len(run.answers) for away in (False, True)]

    assert 0.88 * planned < most_of(CASE.file, run).value < planned
    assert sum(map(operator.mul, pools, shares)) > 1.02 * planned, "the negative control: all that both pools complete"


def test_counting_requests_would_flatter_a_system_whose_long_prompts_wait():
    """The negative control: that is why each request counts as its prefill's time."""
    assert saturated_rate(saturated("naive"), lambda _: 1.0).value > 1.1 * setups.capacity(CASE.file, "naive")


@pytest.mark.parametrize(
    ("policy", "used"), [("homogeneous", [False]), ("naive", [True]), ("threshold", [False, True])]
)
def test_a_pool_counts_its_own_answers_by_its_share(policy, used):
    """By the times of one pool for all, the long prompts of the other one would count for more than they are."""
    run = saturated(policy)
    works = works_of(CASE.file, run)

    assert len(works) == len(used)
    for work, away in zip(works, used, strict=True):
        given = [one for one in run.answers if one.offloaded == away]
        assert sum(map(work, given)) / len(run.answers) == pytest.approx(1.0, rel=0.2)
        assert not any(work(one) for one in run.answers if one.offloaded != away)


def test_where_decodes_limit_a_system_each_request_is_one():
    hub, *_ = CASE.file.system.hub
    slow = msgspec.structs.replace(hub, step_seconds=10 * hub.step_seconds)
    file = msgspec.structs.replace(CASE.file, system=msgspec.structs.replace(CASE.file.system, hub=(slow,)))
    run = saturated("naive")

    assert most_of(file, run) == saturated_rate(run, lambda _: 1.0)
    assert most_of(CASE.file, run) != saturated_rate(run, lambda _: 1.0), "the negative control"
