"""Proves what a file's simulation section means for each policy, and that mistakes in it are named with their fix."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from prfaas.capacity import planfile
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError
from prfaas.simulate import setup
from prfaas.simulate.arrivals import Bursts, poisson
from prfaas.simulate.run import highest_rate
from prfaas.simulate.scenario import POLICIES, ConversionPolicy, ScaledPool

LINK = "between"
DOCUMENT = {
    "workload": {"lognormal": {"mu": 9.9, "sigma": 1.0, "minTokens": 128, "maxTokens": 131072}, "outputTokens": 1024},
    "profiles": {
        "far": {"fixedSeconds": 0.39, "tokenSeconds": 5e-5, "stateBytes": 180_000_000, "tokenBytes": 17_143},
        "home": {"fixedSeconds": 0.33, "tokenSeconds": 1.45e-4, "stateBytes": 180_000_000, "tokenBytes": 17_143},
    },
    "links": [{"name": LINK, "capacityMbps": 10_000}],
    "offloadPools": [{"name": "far", "profile": "far", "instances": 4, "link": LINK}],
    "hub": [{"name": "pd", "profile": "home", "instances": 8, "maxBatch": 20, "stepMillis": 25}],
}


SHORTER = {"mu": 7.0, "sigma": 0.5, "minTokens": 100, "maxTokens": 2000}
SHIFT = {"atSeconds": 60, "lognormal": SHORTER, "outputTokens": 7}


def scaled(name: str, least: int, most: int) -> dict[str, Any]:
    return {"name": name, "minInstances": least, "maxInstances": most}


def described(**simulation) -> planfile.PlanFile:
    simulation = {"requests": 1000, "load": 0.5, **simulation}
    return planfile.read({**DOCUMENT, "simulation": simulation}, lambda _: [])


def scenarios(**simulation):
    file = described(**simulation)
    known = setup.read(file)
    return {name: setup.scenario(file, known, name, 1000.0) for name in POLICIES}


def test_each_policy_has_the_hardware_of_its_plan():
    found = scenarios(requests=10)
    assert {name: one.policy.threshold.mode for name, one in found.items()} == {
        "threshold": "Auto",
        "price": "Priced",
        "static": "Fixed",
        "naive": "Fixed",
        "homogeneous": "Disabled",
    }
    assert found["naive"].prefill_instances == {"pd": 0}
    assert found["naive"].policy.threshold.tokens == 0
    assert found["homogeneous"].system.hub_instances == 12
    assert found["static"].policy.threshold.tokens == found["threshold"].policy.threshold.tokens


def test_the_load_is_a_share_of_what_the_plan_carries_and_equal_for_all():
    file = described(load=0.5)
    full = described(load=1.0)
    assert 2 * setup.rate(file, setup.read(file)) == pytest.approx(setup.rate(full, setup.read(full)))


def test_a_flapping_link_is_low_at_the_end_of_every_period():
    links = [{"name": LINK, "flapping": {"everySeconds": 400, "forSeconds": 100, "lowMbps": 5}}]
    conditions = scenarios(links=links)["static"].conditions[LINK]
    assert conditions.schedule == ((0, 10_000), (300, 5), (400, 10_000), (700, 5), (800, 10_000), (1100, 5))


def test_a_diurnal_link_swings_between_declared_and_low():
    links = [{"name": LINK, "diurnal": {"everySeconds": 1000, "lowMbps": 2000}, "roundTripMillis": 30}]
    conditions = scenarios(links=links)["static"].conditions[LINK]
    rates = [mbps for _, mbps in conditions.schedule]
    assert (max(rates), min(rates), rates[12]) == pytest.approx((10_000, 2000, 6000))
    assert conditions.round_trip_seconds == pytest.approx(0.03)


def test_a_policy_ignores_failures_of_what_it_does_not_have():
    failures = [
        {"name": "far-0", "atSeconds": 5, "forSeconds": 5},
        {"name": "pd-prefill-0", "atSeconds": 5, "forSeconds": 5},
        {"name": LINK, "atSeconds": 5, "forSeconds": 5},
    ]
    found = {name: [one.name for one in there.failures] for name, there in scenarios(failures=failures).items()}
    assert found["threshold"] == ["far-0", "pd-prefill-0", LINK]
    assert found["naive"] == ["far-0", LINK]
    assert found["homogeneous"] == ["pd-prefill-0"]


def test_a_long_loop_is_for_those_that_follow_the_load_and_its_figures_have_defaults():
    found = {name: one.policy.conversion for name, one in scenarios(longLoop={"cooldownSeconds": 30}).items()}
    assert found == {
        **dict.fromkeys(POLICIES),
        "threshold": ConversionPolicy(cooldown_seconds=30),
        "price": found["price"],
    }
    assert found["price"] == found["threshold"]
    assert {one.policy.conversion for one in scenarios().values()} == {None}


def test_a_long_loop_scales_the_offload_pools_that_are_named():
    conversion = scenarios(longLoop={"scaled": [scaled("far", 1, 9)]})["threshold"].policy.conversion
    assert conversion == ConversionPolicy(scaled=(ScaledPool(name="far", least=1, most=9),))


def test_requests_shift_to_other_lengths_at_the_same_rate():
    file = described(shift=SHIFT)
    drawn = list(setup.draw(file, setup.read(file), 5.0, Random(1), Random(2)))
    first, later = ([one for one in drawn if (one.at_seconds >= 60) == is_late] for is_late in (False, True))

    assert len(first) / 60 == pytest.approx(5.0, rel=0.2)
    assert len(later) / (drawn[-1].at_seconds - 60) == pytest.approx(5.0, rel=0.2)
    assert {one.output_tokens for one in later} == {7}
    assert max(one.input_tokens for one in later) <= 2000 < max(one.input_tokens for one in first)
    assert all(a.at_seconds <= b.at_seconds for a, b in pairwise(drawn))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"requests": 0}, "simulation.requests is 0"),
        ({"requests": 10**12}, "simulation.requests is 1000000000000; it must be at most 10000000"),
        ({"load": 0}, "simulation.load is 0; it must be above 0"),
        ({"load": 75}, "simulation.load is 75 times .*: write 0.75 for 75 %"),
        ({"load": 7500}, "simulation.load is 7500 times .*: give at most 10"),
        ({"load": "75 %"}, "simulation.load is '75 %'; if it is a share, write it as a fraction: 0.75"),
        ({"ratePerSecond": 1}, "load and ratePerSecond.*exactly one"),
        ({"burst": {}}, "simulation.burst is no field here; did you mean bursts"),
        ({"cacheGib": {"moon": 1}}, "simulation.cacheGib.moon: there are between"),
        ({"links": [{"name": "moon"}]}, "simulation.links.moon: there are between"),
        ({"links": [{"name": LINK, "schedule": [{"atSeconds": 1, "capacityMbps": "1 Gbit/s"}]}]}, "in Mbit/s: 1000"),
        (
            {"links": [{"name": LINK, "flapping": {"everySeconds": 5, "forSeconds": 9, "lowMbps": 1}}]},
            "forSeconds must lie between",
        ),
        (
            {"links": [{"name": LINK, "diurnal": {"everySeconds": 0.001, "lowMbps": 1}}]},
            "raise everySeconds to at least 0.5",
        ),
        ({"failures": [{"name": "moon-1", "atSeconds": 1, "forSeconds": 1}]}, "failures.moon-1: there are between"),
        ({"failures": [{"name": "far-0", "atSeconds": 1, "forSeconds": 0}]}, "failures.forSeconds is 0.0; it must be"),
        ({"failures": [{"name": "pd-9", "atSeconds": 1, "forSeconds": 1}]}, "failures.pd-9: there are between"),
        ({"failures": [{"name": "pd-decode-12", "atSeconds": 1, "forSeconds": 1}]}, "failures.pd-decode-12: there"),
        ({"warmupRequests": 1000}, "warmupRequests is 1000 of 1000 requests, which leaves none"),
        ({"links": [{"name": LINK, "roundTripMillis": -1}]}, f"links.{LINK}.roundTripMillis is -1; it must be 0"),
        (
            {"links": [{"name": LINK, "diurnal": {"everySeconds": 9, "lowMbps": 10_001}}]},
            "lowMbps is 10001 where capacityMbps is 10000; it must be lower",
        ),
        ({"longLoop": {"interval": 1}}, "longLoop.interval is no field here"),
        ({"longLoop": {"intervalSeconds": 0}}, "longLoop.intervalSeconds is 0.0; it must be above 0"),
        ({"longLoop": {"startSeconds": -1}}, "longLoop.startSeconds is -1.0; it must be 0 or more"),
        ({"longLoop": {"targetLoad": 70}}, "longLoop.targetLoad is 70.0; it must be above 0, at most 1"),
        ({"longLoop": {"scaled": [scaled("moon", 1, 9)]}}, "longLoop.scaled is 'moon'; it must be an offload pool"),
        ({"longLoop": {"scaled": [scaled("far", 9, 99)]}}, "longLoop.scaled.far is '9 to 99'; it must be around its"),
        ({"shift": {**SHIFT, "atSeconds": 0}}, "shift.atSeconds is 0; it must be above 0"),
        ({"shift": {**SHIFT, "outputTokens": 0}}, "shift.outputTokens"),
        ({"stepTokens": 1}, "stepTokens is 1; it must be at least 64, or 0"),
    ],
)
def test_a_mistake_is_named_with_its_fix(wrong, message):
    with pytest.raises(ConfigError, match=message):
        scenarios(**wrong)


@pytest.mark.parametrize(
    "bursts", [Bursts(every_seconds=10, for_seconds=10, factor=2), Bursts(every_seconds=10, for_seconds=1, factor=0.5)]
)
def test_bursts_that_make_no_sense_are_refused(bursts):
    with pytest.raises(ConfigError, match=r"simulation\.bursts"):
        poisson(Workload([1000], [1.0]), 1, 10.0, Random(1), bursts)


@pytest.mark.parametrize(("limit", "start"), [(3.0, 1.0), (3.0, 100.0), (0.9, 1.0), (3.0, 3.0)])
def test_the_highest_rate_is_found_from_either_side(limit, start):
    assert highest_rate(lambda rate: rate <= limit, start) == pytest.approx(limit, rel=0.02)


def test_a_promise_that_no_rate_keeps_is_a_rate_of_zero():
    assert highest_rate(lambda _: False, 1.0) == 0.0
