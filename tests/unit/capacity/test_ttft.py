"""Proves the times to the first token: the paper's sense by hand, waits against exact results and a simulated queue,
and what steps add to them against the simulator, which knows none of these equations."""

import math
import random
from itertools import islice

import pytest
from benchmarks.reproduction import simulated as reproduced
from hypothesis import HealthCheck, given, settings
from tests.unit.capacity.systems import paper, systems, workloads

from prfaas.capacity import optimum, ttft
from prfaas.capacity.profile import prefill_seconds
from prfaas.capacity.system import HubPool, LinkCapacity, OffloadPool, System
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError
from prfaas.simulate.arrivals import poisson
from prfaas.simulate.outcome import Tally, Times
from prfaas.simulate.run import simulate
from prfaas.wire.profile import Profile

PROFILE = Profile(state_bytes=1_000_000, token_bytes=1_000, fixed_seconds=0.1, token_seconds=1e-4)
EXAMPLE = Workload([1_000, 9_000], [3, 1])
LONG = Workload([1_000_000, 9_000_000], [3, 1])
"""So long that steps, which have 8,192 tokens, change nothing to speak of."""


def hub_of(prefill: int, workload: Workload) -> tuple[System, optimum.Plan]:
    """Return a system whose decode never limits, with so many instances that prefill."""
    hub = HubPool(name="hub", profile=PROFILE, instances=prefill + 1, max_batch=10**4, step_seconds=1e-9, min_decode=1)
    system = System(links=(), offload=(), hub=(hub,), output_tokens=1)
    return system, optimum.plan_for(system, workload, {"hub": float(prefill)})


def test_in_the_papers_sense_a_first_token_is_prefill_and_transfer():
    pool = OffloadPool(name="pool", profile=PROFILE, instances=1, link="link")
    hub = HubPool(name="hub", profile=PROFILE, instances=2, max_batch=10, step_seconds=0.02)
    system = System(
        links=(LinkCapacity(name="link", capacity_mbps=800),), offload=(pool,), hub=(hub,), output_tokens=100
    )
    plan = optimum.plan_at(system, EXAMPLE, 1_000, {"hub": 1.0})
    found = ttft.unloaded(system, EXAMPLE, plan)
    assert found.mean_seconds == pytest.approx(0.75 * 0.2 + 0.25 * (1.0 + 0.1))
    assert found.p50_seconds == pytest.approx(0.2, rel=1e-3)
    assert found.p90_seconds == pytest.approx(1.1, rel=1e-3)


def test_one_instance_waits_as_pollaczek_and_khinchine_say():
    system, plan = hub_of(1, LONG)
    mean, square = 0.75 * 100.1 + 0.25 * 900.1, 0.75 * 100.1**2 + 0.25 * 900.1**2
    arrivals = 0.6 / mean
    expected = mean + arrivals * square / 2 / (1 - 0.6)
    assert ttft.queued(system, LONG, plan, arrivals).mean_seconds == pytest.approx(expected, rel=2e-3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(systems(), workloads)
def test_the_means_of_all_classes_add_up_to_that_of_all_requests(system, workload):
    plan = optimum.best(system, workload)
    arrivals = 0.7 * plan.lambda_max
    means = ttft.mean_by_class(system, workload, plan, arrivals, workload.lengths)
    total = sum(weight * mean for (_, weight), mean in zip(workload.items(), means, strict=True))
    assert total == pytest.approx(ttft.queued(system, workload, plan, arrivals).mean_seconds)


def test_a_class_takes_its_own_prefill_and_waits_as_long_as_the_others():
    system, plan = hub_of(1, EXAMPLE)
    lone = ttft.mean_by_class(system, EXAMPLE, plan, 0.0, (1_000, 9_000))
    assert lone == pytest.approx([0.2, 1.0])
    with pytest.raises(ConfigError, match="queues would grow for ever"):
        ttft.mean_by_class(system, EXAMPLE, plan, plan.lambda_max, (9_000,))
    system, plan = hub_of(1, LONG)
    arrivals = 0.6 * plan.lambda_max
    short, long = ttft.mean_by_class(system, LONG, plan, arrivals, LONG.lengths)
    wait = ttft.queued(system, LONG, plan, arrivals).mean_seconds - 300.1
    assert (short, long) == pytest.approx((100.1 + wait, 900.1 + wait), rel=2e-3)


def served(system: System, workload: Workload, plan: optimum.Plan, arrivals: float, count: int) -> Times:
    """Return the times to the first token in the simulator."""
    requests = poisson(workload, round(system.output_tokens), arrivals, random.Random(1))
    return simulate(reproduced.scenario(system, plan), islice(requests, count), Tally()).ttft_seconds


def test_a_prompt_with_others_behind_it_ends_as_much_later_as_in_the_simulator():
    """Of equal prompts at one instance the wait is known exactly, and alone is too little."""
    workload = Workload([20_000], [1.0])  # two steps, and half of one
    system, plan = hub_of(1, workload)
    seconds = prefill_seconds(PROFILE, 20_000)
    waited = 0.5 * seconds / 2 / (1 - 0.5)
    seen = served(system, workload, plan, 0.5 / seconds, 6_000).mean
    assert seen > 1.1 * (seconds + waited)
    assert ttft.queued(system, workload, plan, 0.5 / seconds).mean_seconds == pytest.approx(seen, rel=0.05)


def test_the_papers_case_is_within_10_percent_of_the_simulator():
    file = paper()
    plan = optimum.best(file.system, file.workload)
    arrivals = 0.7 * plan.lambda_max
    seen = served(file.system, file.workload, plan, arrivals, 4_000)
    estimate = ttft.queued(file.system, file.workload, plan, arrivals)
    assert (estimate.mean_seconds, estimate.p90_seconds) == pytest.approx((seen.mean, seen.p90), rel=0.1)


@pytest.mark.parametrize(("decoding", "steps"), [(0.0, 1.0), (8.0, 2.5)])
def test_the_first_token_takes_a_step_of_decode_and_more_beside_others(decoding, steps):
    hub = HubPool(name="hub", profile=PROFILE, instances=2, max_batch=10**4, step_seconds=0.1)
    system = System(links=(), offload=(), hub=(hub,), output_tokens=100_000)
    plan = optimum.plan_for(system, EXAMPLE, {"hub": 1.0})
    arrivals = decoding / (0.1 * 100_000)  # hardly any, for prefill
    assert ttft.queued(system, EXAMPLE, plan, arrivals).mean_seconds == pytest.approx(0.4 + 0.1 * steps, abs=1e-3)


def simulated(instances: int, arrivals: float, workload: Workload) -> list[float]:
    """Return the times to the first token where each request joins the shortest of the instances' queues."""
    rng = random.Random(11)
    ends: list[list[float]] = [[] for _ in range(instances)]
    now, found = 0.0, []
    for tokens in workload.sample(rng, 30_000):
        now += -math.log(1 - rng.random()) / arrivals
        for queue in ends:
            queue[:] = [end for end in queue if end > now]
        fewest = min(map(len, ends))
        queue = rng.choice([queue for queue in ends if len(queue) == fewest])
        queue.append(max([now, *queue]) + prefill_seconds(PROFILE, tokens))
        found.append(queue[-1] - now)
    return sorted(found)


@pytest.mark.parametrize(("instances", "load"), [(2, 0.5), (2, 0.9), (4, 0.7), (4, 0.9), (9, 0.7)])
def test_estimates_are_within_15_percent_of_a_simulated_queue(instances, load):
    workload = Workload.lognormal(12.4, 0.8, 6_400, 3_000_000)
    system, plan = hub_of(instances, workload)
    arrivals = load * plan.lambda_max
    estimate = ttft.queued(system, workload, plan, arrivals)
    seen = simulated(instances, arrivals, workload)
    assert estimate.mean_seconds == pytest.approx(sum(seen) / len(seen), rel=0.15)
    assert estimate.p90_seconds == pytest.approx(seen[int(0.9 * len(seen))], rel=0.15)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(systems(), workloads)
def test_more_requests_never_wait_less_and_no_time_is_nan(system, workload):
    plan = optimum.best(system, workload)
    before = [0.0, 0.0, 0.0, 0.0]
    for load in (0.0, 0.3, 0.6, 0.9, 0.99):
        found = ttft.queued(system, workload, plan, load * plan.lambda_max)
        times = [found.mean_seconds, found.p50_seconds, found.p90_seconds, found.p99_seconds]
        assert all(math.isfinite(time) and time > 0 for time in times)
        assert times[1:] == sorted(times[1:])
        assert all(time >= 0.999 * earlier for time, earlier in zip(times, before, strict=True))
        before = times


def test_a_rate_that_keeps_the_slo_is_the_highest_that_does():
    file = paper()
    plan = optimum.best(file.system, file.workload)
    rate = ttft.arrivals_within(file.system, file.workload, plan, 5.0)
    assert 0 < rate < plan.lambda_max
    assert ttft.queued(file.system, file.workload, plan, rate).p90_seconds <= 5.0
    assert ttft.queued(file.system, file.workload, plan, 1.01 * rate).p90_seconds > 5.0


def test_what_cannot_be_served_is_refused():
    file = paper()
    plan = optimum.best(file.system, file.workload)
    with pytest.raises(ConfigError, match=r"where 3\.263 can be served"):
        ttft.queued(file.system, file.workload, plan, 4.0)
    with pytest.raises(ConfigError, match=r"slo\.ttftMillis is 500, but .* takes over 3"):
        ttft.arrivals_within(file.system, file.workload, plan, 0.5)
    with pytest.raises(ConfigError, match="whole instances only"):
        ttft.queued(file.system, file.workload, optimum.fractional(file.system, file.workload), 1.0)
