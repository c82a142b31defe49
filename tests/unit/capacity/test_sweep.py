"""Proves what faster links change: the points of the sweep, and the capacity from which offloading pays."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from tests.unit.capacity.systems import lab, systems, workloads

from prfaas.capacity import optimum, sweep
from prfaas.capacity.comparison import compare
from prfaas.capacity.system import System

some = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LAB = lab()


def with_offload(system: System, **fields: object) -> System:
    (pool,) = system.offload
    return msgspec.structs.replace(system, offload=(msgspec.structs.replace(pool, **fields),))


def rate(system: System) -> float:
    return optimum.best(system, LAB.workload).lambda_max


def test_the_lab_gains_38_percent_as_it_is_and_85_with_a_link_two_and_a_half_times_as_fast():
    alone = rate(optimum.hub_alone(LAB.system))
    points = {point.scale: point for point in sweep.over_links(LAB.system, LAB.workload, alone)}
    assert min(points) == 1 / 16
    assert max(points) == 16
    assert points[1].mbps == 10_000
    assert points[1].gain == pytest.approx(0.38, abs=0.005)
    assert points[1].threshold_tokens == optimum.best(LAB.system, LAB.workload).threshold_tokens
    assert rate(sweep.scaled(LAB.system, 2.5)) == pytest.approx(16.0)
    assert points[4].gain == pytest.approx(0.85, abs=0.005)


@some
@given(systems(), workloads)
def test_a_faster_link_never_carries_less(system, workload):
    rates = [point.lambda_max for point in sweep.over_links(system, workload, 1.0)]
    assert all(fast >= slow * (1 - 1e-9) for slow, fast in pairwise(rates))


def test_where_nothing_offloads_there_is_nothing_to_sweep():
    assert sweep.over_links(optimum.hub_alone(LAB.system), LAB.workload, 1.0) == ()
    assert sweep.over_links(with_offload(LAB.system, instances=0), LAB.workload, 1.0) == ()


def test_where_the_hub_alone_cannot_serve_gains_are_over_the_homogeneous_system():
    system = lab(minDecode=4).system
    base = rate(optimum.homogeneous(system))
    for point in compare(lab(minDecode=4)).over_links:
        assert point.gain == pytest.approx(point.lambda_max / base - 1)


def test_offloading_pays_from_the_capacity_found_and_not_from_a_little_less():
    alone = rate(optimum.hub_alone(LAB.system))
    found = sweep.paying_mbps(LAB.system, LAB.workload, alone)
    assert rate(sweep.scaled(LAB.system, found / 10_000)) >= (1 + sweep.PAYS) * alone
    assert rate(sweep.scaled(LAB.system, 0.98 * found / 10_000)) < (1 + sweep.PAYS) * alone


def test_half_the_bytes_are_worth_as_much_as_twice_the_link():
    profile = LAB.system.offload[0].profile
    halved = msgspec.structs.replace(
        profile, state_bytes=profile.state_bytes // 2, token_bytes=profile.token_bytes // 2
    )
    assert rate(with_offload(LAB.system, profile=halved)) == pytest.approx(rate(sweep.scaled(LAB.system, 2)), rel=1e-3)


def test_no_link_makes_a_useless_member_pay():
    useless = msgspec.structs.replace(LAB.system.offload[0].profile, token_seconds=0.1)
    system = with_offload(LAB.system, profile=useless)
    assert sweep.paying_mbps(system, LAB.workload, rate(optimum.hub_alone(system))) is None


@pytest.mark.parametrize("mbps", [1e-6, 1e-3, 10.0, 1e8])
def test_the_capacity_that_pays_does_not_depend_on_the_present_one(mbps):
    alone = rate(optimum.hub_alone(LAB.system))
    found = sweep.paying_mbps(LAB.system, LAB.workload, alone)
    (link,) = LAB.system.links
    slow = msgspec.structs.replace(LAB.system, links=(msgspec.structs.replace(link, capacity_mbps=mbps),))
    assert sweep.paying_mbps(slow, LAB.workload, alone) == pytest.approx(found, rel=0.01)
