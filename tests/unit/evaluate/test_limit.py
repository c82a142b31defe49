"""Proves where a limit lies, and what a saturated system serves, with systems whose most is known."""

import operator
from collections.abc import Callable
from functools import cache
from random import Random
from statistics import median

import msgspec
import pytest

from prfaas.capacity.profile import prefill_seconds
from prfaas.evaluate.expected import simulated_run
from prfaas.evaluate.limit import (
    FILLED_AFTER,
    Bounds,
    LoadVerdict,
    decode_span,
    judge,
    limit_of,
    prefill_span,
    ratio_of,
    saturated_rate,
)
from prfaas.evaluate.record import AnsweredRequest, Run, RunKey
from prfaas.evaluate.rows import counted_of, most_of, works_of
from prfaas.evaluate.steady import Sampled, SteadyPart, rate_of
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


SERVERS, PREFILL_SECONDS, ANSWER_SECONDS = 9, 4.5, 25.6


def busy(seed: int) -> Run:
    """Return a run of servers that all work until the last request has come, and so serve SERVERS / PREFILL_SECONDS a
    second. Half of each prefills the first prompt, half the shortest, as an instance does. A prompt of a thousand
    tokens takes a whole one a second."""
    rng, at, coming = Random(seed), 0.0, []
    for _ in range(300):
        at += rng.expovariate(1.6 * SERVERS / PREFILL_SECONDS)
        coming.append((at, PREFILL_SECONDS * rng.lognormvariate(-0.5, 1.0)))
    free, waiting, answers = [0.0] * (2 * SERVERS), [], []
    while coming or waiting:
        half = free.index(min(free))
        while coming and (coming[0][0] <= free[half] or not waiting):
            waiting.append(coming.pop(0))
        came, seconds = min(waiting, key=operator.itemgetter(1)) if half % 2 else waiting[0]
        waiting.remove((came, seconds))
        began = max(free[half], came)
        free[half] = began + 2 * seconds
        first = free[half] - came
        parts = {"prefill_queue": began - came, "prefill": 2 * seconds}
        answers.append(
            AnsweredRequest(
                at_seconds=came,
                prompt_tokens=round(1000 * seconds),
                ttft_seconds=first,
                seconds=first + ANSWER_SECONDS,
                parts=parts,
            )
        )
    return run(answers)


def of_mean(one: AnsweredRequest) -> float:
    return one.prompt_tokens / 1000 / PREFILL_SECONDS


def by_ends(run: Run, work: Callable[[AnsweredRequest], float]) -> Sampled:
    """Count each request when its answer ends."""
    end = max(one.at_seconds for one in run.answers)
    filled = FILLED_AFTER * end
    begin = filled + median(one.seconds for one in run.answers if one.at_seconds <= filled)
    ends = [(one.at_seconds + one.seconds, work(one)) for one in run.answers]
    return rate_of([(at, at, count) for at, count in ends], begin, end)


def test_servers_that_always_work_serve_what_they_can_with_hardly_a_doubt():
    found = [one for seed in range(20) if (one := saturated_rate(busy(seed), of_mean))]

    assert len(found) >= 15, "a few meet so many short prompts that they have room"
    for one in found:
        assert one.value == pytest.approx(2.0, rel=0.005)
        assert one.high - one.low <= 0.02 * one.value


def test_answers_counted_when_they_end_would_tell_less_of_the_same_servers():
    """The negative control: that is why work counts when it is done."""
    found = [by_ends(busy(seed), of_mean) for seed in range(20)]

    assert sum(one.value for one in found) / len(found) < 0.97 * 2.0
    assert sum(one.high - one.low for one in found) / len(found) > 0.4 * 2.0


def test_a_long_prompt_under_way_counts_for_what_is_done_of_it():
    """Half of a server prefills short prompts, of 2 s each, and half one of 150 s, which ends later."""
    pieces = [*((float(at), at + 4.0, 2.0) for at in range(0, 200, 4)), (0.0, 300.0, 150.0)]

    assert rate_of(pieces, 40.0, 200.0).value == pytest.approx(1.0)
    ends = [(ended, ended, work) for _, ended, work in pieces]
    assert rate_of(ends, 42.0, 198.0).value == pytest.approx(0.5, abs=0.02), "the negative control"


def test_decodes_count_while_they_decode():
    """Forty at once, 20 s each: two a second; three a second are prefilled."""
    at = [place / 3 for place in range(600)]
    begins = [max(one, place // 40 * 20.0) for place, one in enumerate(at)]
    answers = [
        AnsweredRequest(
            at_seconds=one,
            prompt_tokens=1,
            ttft_seconds=begin - one,
            seconds=begin - one + 20.0,
            parts={"prefill_queue": 0.0, "prefill": 0.1},
        )
        for one, begin in zip(at, begins, strict=True)
    ]

    assert saturated_rate(run(answers), lambda _: 1.0, decode_span).value == pytest.approx(2.0, rel=0.01)
    assert saturated_rate(run(answers), lambda _: 1.0).value == pytest.approx(3.0, rel=0.05), "the negative control"


def test_a_prefill_begins_when_it_has_waited_at_the_gateway_and_at_its_instance():
    parts = {"gateway_queue": 0.5, "prefill_queue": 1.0, "prefill": 2.0, "transfer": 3.0}
    one = AnsweredRequest(
        at_seconds=10.0, prompt_tokens=1, sent_late_seconds=0.25, ttft_seconds=7.0, seconds=9.0, parts=parts
    )

    assert prefill_span(one) == (11.75, 13.75)
    assert prefill_span(msgspec.structs.replace(one, parts={})) == (17.0, 17.0)
    assert decode_span(one) == (17.0, 19.0)


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

    assert most_of(file, run) == counted_of(file, run) == saturated_rate(run, lambda _: 1.0, decode_span)
    assert most_of(CASE.file, run) != counted_of(CASE.file, run), "the negative control"


def test_the_simulator_says_when_a_prefill_began_and_ended():
    answers = saturated("homogeneous").answers
    one = answers[0]
    alone_seconds = prefill_seconds(CASE.file.system.hub[0].profile, one.prompt_tokens)

    assert one.parts["prefill"] == pytest.approx(alone_seconds, rel=0.05), "the first one shares no step"
    for each in answers:
        assert min(each.parts.values()) >= -1e-6
        assert sum(each.parts.values()) == pytest.approx(each.ttft_seconds)
