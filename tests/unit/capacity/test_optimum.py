"""Proves that plans are the best ones: against every threshold and split, the equations, and the find_bound."""

import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from tests.unit.capacity.systems import paper, systems, workloads

from prfaas.capacity import equations, optimum
from prfaas.capacity.equations import find_bound
from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.capacity.system import HubPool, LinkCapacity, OffloadPool, System
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError
from prfaas.wire.profile import Profile

some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PROFILE = Profile(state_bytes=1_000_000, token_bytes=1_000, fixed_seconds=0.1, token_seconds=1e-4)


def test_equations_3_to_6_are_what_one_counts_by_hand():
    workload = Workload([1_000, 9_000], [3, 1])
    hub = HubPool(name="hub", profile=PROFILE, instances=4, max_batch=10, step_seconds=0.02)
    pool = OffloadPool(name="pool", profile=PROFILE, instances=2, link="link")
    system = System(
        links=(LinkCapacity(name="link", capacity_mbps=80),), offload=(pool,), hub=(hub,), output_tokens=100
    )
    long, short, split = workload.above(1_000), workload.below(1_000), {"hub": 1.0}
    assert prefill_seconds(PROFILE, 9_000) == pytest.approx(1.0)
    assert 8 * cache_bytes(PROFILE, 9_000) == 80e6
    assert equations.egress_demand_mbps(pool, long) == pytest.approx(160)
    assert equations.theta_prfaas(system, long) == pytest.approx(1)  # instances could do 2, the link carries 1
    assert equations.theta_pd_p(system, short, split) == pytest.approx(5)
    assert equations.theta_pd_d(system, split) == pytest.approx(15)
    assert equations.lambda_max(system, workload, 1_000, split) == pytest.approx(min(1 / 0.25, 5 / 0.75, 15))


def test_pools_with_small_caches_come_first_on_a_narrow_link():
    small = Profile(state_bytes=0, token_bytes=10, token_seconds=1e-3)
    large = Profile(state_bytes=0, token_bytes=1_000, token_seconds=1e-3)
    pools = tuple(
        OffloadPool(name=name, profile=profile, instances=1, link="link")
        for name, profile in (("large", large), ("small", small))
    )
    hub = HubPool(name="hub", profile=large, instances=1, max_batch=1, step_seconds=0.01)
    # 1,000 tokens a second and instance: 0.08 Mbit/s from the small one, 8 from the large one, of which half fits.
    system = System(links=(LinkCapacity(name="link", capacity_mbps=4.08),), offload=pools, hub=(hub,), output_tokens=1)
    shares = equations.offload_shares(system, Workload([1_000], [1.0]).all())
    assert {share.pool.name: share.rate for share in shares} == pytest.approx({"small": 1.0, "large": 0.5})


@some
@given(systems(), workloads)
def test_no_threshold_and_no_split_beats_the_best_plan(system, workload):
    found = optimum.best(system, workload)
    splits = itertools.product(*(range(pool.min_prefill, pool.instances - pool.min_decode + 1) for pool in system.hub))
    highest = max(
        equations.lambda_max(system, workload, t, dict(zip((pool.name for pool in system.hub), split, strict=True)))
        for split in splits
        for t in (0, *workload.lengths)
    )
    assert found.lambda_max == pytest.approx(highest, rel=1e-9)


@some
@given(systems(), workloads)
def test_divided_roles_carry_no_less_than_whole_ones_and_no_more_than_the_bound(system, workload):
    whole = optimum.best(system, workload).lambda_max
    divided = optimum.fractional(system, workload).lambda_max
    limit = find_bound(system, workload)
    assert whole <= divided * (1 + 1e-9)
    assert divided <= limit.lambda_max * (1 + 1e-9)
    assert limit.reached <= limit.lambda_max * (1 + 1e-9)
    assert limit.lambda_max <= limit.reached * 1.001
    assert sum(limit.prices.values()) == pytest.approx(limit.lambda_max)


@some
@given(systems(offload=False), workloads)
def test_without_offload_every_figure_is_a_number_and_no_threshold_decides(system, workload):
    found = optimum.best(system, workload)
    assert found.threshold_tokens is None
    assert found.theta_prfaas == found.egress_gbps == found.offloaded_fraction == 0


@some
@given(systems(), workloads)
def test_no_figure_of_a_plan_is_nan_or_infinite_and_the_link_carries_its_egress(system, workload):
    for plan in (optimum.best(system, workload), optimum.fractional(system, workload), optimum.naive(system, workload)):
        for name in plan.__struct_fields__:
            value = getattr(plan, name)
            assert isinstance(value, dict) or value is None or math.isfinite(value), name
        assert 1000 * plan.egress_gbps <= sum(link.capacity_mbps for link in system.links) * (1 + 1e-9)
        assert plan.n_p + plan.n_d == pytest.approx(system.hub_instances)


def test_the_best_threshold_balances_both_prefills_and_a_wrong_one_costs():
    file = paper()
    plan = optimum.best(file.system, file.workload)
    left = plan.theta_prfaas / plan.offloaded_fraction
    assert left == pytest.approx(plan.theta_pd_p / (1 - plan.offloaded_fraction), rel=0.01)
    [hub] = file.system.hub
    for wrong, prefill in itertools.product((0.7, 1.4), range(hub.instances)):
        t = round(wrong * (plan.threshold_tokens or 0))
        found = optimum.plan_at(file.system, file.workload, t, {hub.name: float(prefill)})
        assert found.lambda_max < 0.95 * plan.lambda_max


def test_divided_roles_balance_equation_8_exactly():
    file = paper()
    plan = optimum.fractional(file.system, file.workload)
    assert plan.theta_prfaas + plan.theta_pd_p == pytest.approx(plan.theta_pd_d, rel=1e-3)


def test_a_search_that_would_never_end_is_refused():
    pools = tuple(
        HubPool(name=f"hub-{i}", profile=PROFILE, instances=100, max_batch=1, step_seconds=0.01) for i in range(3)
    )
    system = System(links=(), offload=(), hub=pools, output_tokens=1)
    with pytest.raises(ConfigError, match="1030301 ways"):
        optimum.best(system, Workload([100], [1.0]))
