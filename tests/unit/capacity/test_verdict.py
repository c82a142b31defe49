"""Proves the verdict: the lab's gain, each limit by a system that has it, and who is worse off."""

import math

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from tests.unit.capacity.systems import lab, paper, systems, workloads

from prfaas.capacity import optimum, ttft
from prfaas.capacity.comparison import compare
from prfaas.capacity.memory import InstanceMemory
from prfaas.capacity.planfile import PlanFile, PlanSlo
from prfaas.capacity.system import NEVER_PREFILLS, LinkCapacity
from prfaas.capacity.workload import Workload

SLOWER = "times as long to its first token"


def with_pool(file: PlanFile, **fields: object) -> PlanFile:
    (pool,) = file.system.offload
    system = msgspec.structs.replace(file.system, offload=(msgspec.structs.replace(pool, **fields),))
    return msgspec.structs.replace(file, system=system)


def with_seconds(file: PlanFile, factor: float) -> PlanFile:
    """Return the file with offload instances that take so many times as long."""
    profile = file.system.offload[0].profile
    names = ("fixed_seconds", "token_seconds", "squared_seconds")
    slower = {name: factor * getattr(profile, name) for name in names}
    return with_pool(file, profile=msgspec.structs.replace(profile, **slower))


def test_the_lab_with_idle_gpus_gains_38_percent_over_the_hub_alone():
    result = compare(lab())
    assert result.prfaas_pd.lambda_max == pytest.approx(11.94, abs=0.01)
    assert result.hub_alone.lambda_max == pytest.approx(8.64, abs=0.01)
    found = result.verdict
    assert found.gain == pytest.approx(0.38, abs=0.005)
    assert found.limit == "link"
    assert found.from_tokens == result.prfaas_pd.threshold_tokens + 1
    assert found.sentence == (
        "PrfaaS-PD serves 38% more than the hub alone (11.94 against 8.64 requests/s): prompts from 57,833 tokens are "
        "prefilled away, which pays from a link of 1,200 Mbit/s on; the link limits. A lone prompt of 65,536 tokens "
        "takes 4.7 times as long to its first token (3.8 s against 0.81 s)."
    )


def test_the_same_lab_gains_85_percent_behind_25_gbit_and_then_decode_limits():
    found = compare(lab(25_000)).verdict
    assert found.gain == pytest.approx(0.85, abs=0.005)
    assert found.limit == "decode"
    assert found.from_mbps == pytest.approx(compare(lab()).verdict.from_mbps, rel=0.01)


def test_where_no_link_is_short_and_decode_has_room_prefill_limits():
    result = compare(paper())
    assert result.verdict.limit == "prefill"
    assert result.verdict.gain == pytest.approx(result.prfaas_pd.lambda_max / result.hub_alone.lambda_max - 1)


@pytest.mark.parametrize(("output_tokens", "limit"), [(4_000, "decode"), (400, "prefill")])
def test_a_large_hub_that_fills_both_stages_is_limited_by_the_dearer_one(output_tokens, limit):
    large = lab(1e6, instances=80)
    system = msgspec.structs.replace(large.system, output_tokens=output_tokens)
    result = compare(msgspec.structs.replace(large, system=system))
    assert result.prfaas_pd.theta_pd_d == pytest.approx(result.prfaas_pd.lambda_max, rel=0.03)
    assert result.verdict.limit == limit


@pytest.mark.parametrize(("weights_bytes", "limit"), [(80e9, "memory"), (35e9, "decode")])
def test_where_no_larger_batch_fits_memory_is_what_limits_decode(weights_bytes, limit):
    file = lab(25_000)
    memory = InstanceMemory(device="h100", devices=2, weights_bytes=weights_bytes)
    hub = msgspec.structs.replace(file.system.hub[0], max_batch=160, step_seconds=0.05, memory=memory)
    found = compare(msgspec.structs.replace(file, system=msgspec.structs.replace(file.system, hub=(hub,)))).verdict
    assert found.limit == limit
    assert ("no larger batch fits" in found.sentence) == (limit == "memory")


def test_behind_a_slow_link_the_verdict_says_which_link_or_cache_would_pay():
    found = compare(lab(500)).verdict
    assert found.limit == "link"
    assert found.gain < 0.05
    assert found.from_mbps == pytest.approx(compare(lab()).verdict.from_mbps, rel=0.01)
    assert found.sentence.startswith("PrfaaS-PD does not pay: it serves 2% more than the hub alone")
    assert "It would pay from a link of 1,200 Mbit/s on, or with caches of 43% of the bytes." in found.sentence


def test_a_useless_member_is_named_and_no_link_is_recommended():
    found = compare(with_seconds(lab(), 100)).verdict
    assert found.gain < 0.05
    assert (found.limit, found.from_mbps) == ("prefill", None)
    assert "No link changes that: more or faster offload instances would." in found.sentence


def test_where_decode_is_full_already_more_prefill_gains_nothing():
    found = compare(lab(maxBatch=4, minPrefill=1, minDecode=3)).verdict
    assert found.gain == pytest.approx(0)
    assert (found.limit, found.from_mbps) == ("decode", None)
    assert "No link changes that: more hub instances or larger batches would." in found.sentence


def test_a_hub_that_cannot_serve_alone_is_said_to_and_stands_in_no_column():
    result = compare(lab(minDecode=4))
    assert result.hub_alone is None
    assert "hub_alone" not in result.systems()
    assert result.notes[0].startswith("Hub alone: no split of the hub's 4 instances serves")
    assert result.verdict.gain == pytest.approx(result.prfaas_pd.lambda_max / result.homogeneous.lambda_max - 1)
    assert result.verdict.sentence.startswith("The hub alone cannot serve. PrfaaS-PD serves 2.63 requests/s, 92% less ")
    assert {one.hub_ttft_seconds for one in result.verdict.classes} == {None}


def test_pools_without_instances_are_the_hub_alone():
    result = compare(with_pool(lab(), instances=0))
    assert result.prfaas_pd is None
    assert result.homogeneous == result.hub_alone
    assert result.verdict.gain == 0
    assert result.verdict.from_tokens is result.verdict.from_mbps is None
    assert result.verdict.sentence == (
        "Nothing can be prefilled away: the hub alone serves 8.64 requests/s; prefill limits."
    )


def test_a_lone_prompt_is_said_to_be_slower_only_where_it_is():
    assert SLOWER in compare(lab()).verdict.sentence
    assert SLOWER not in compare(with_seconds(lab(100_000), 0.1)).verdict.sentence
    assert SLOWER not in compare(paper()).verdict.sentence


def test_classes_say_who_waits_longer_away_and_who_does_not():
    *short, long = compare(lab()).verdict.classes
    assert (long.from_tokens, long.to_tokens) == (32_769, lab().workload.max_tokens)
    assert long.lone_seconds > 2 * long.lone_hub_seconds
    for one in short:
        assert one.offloaded == 0
        assert one.lone_seconds == pytest.approx(one.lone_hub_seconds)
        assert one.ttft_seconds < one.hub_ttft_seconds, "others left the queue"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(systems(), workloads)
def test_classes_add_up_to_the_whole_of_every_system(system, workload):
    file = PlanFile(system=system, workload=workload, slo=PlanSlo(), published={}, simulation={})
    found = compare(file).verdict
    plan = optimum.best(system, workload)
    mean = sum(one.share * one.ttft_seconds for one in found.classes)
    assert sum(one.share for one in found.classes) == pytest.approx(1)
    offloaded = sum(one.share * one.offloaded for one in found.classes)
    assert offloaded == pytest.approx(plan.offloaded_fraction, abs=1e-9)
    assert mean == pytest.approx(ttft.queued(system, workload, plan, found.arrivals_per_second).mean_seconds)
    assert found.gain >= -1e-9 or "cannot serve" in found.sentence
    assert not math.isnan(found.gain)


def test_lengths_without_prompts_make_no_class():
    workload = Workload([1_000, 5_000, 40_000, 900_000], [1.0, 0.0, 2.0, 0.0])
    classes = compare(msgspec.structs.replace(lab(), workload=workload)).verdict.classes
    assert [(one.from_tokens, one.to_tokens) for one in classes] == [(1_000, 2_048), (32_769, 131_072)]
    assert [one.share for one in classes] == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.parametrize("mbps", [1e-6, 1e-3, 1.0])
def test_behind_the_slowest_link_no_cure_is_missing(mbps):
    file = lab()
    (link,) = file.system.links
    links = (msgspec.structs.replace(link, capacity_mbps=mbps),)
    for changed in (file, with_seconds(file, 100)):
        slow = msgspec.structs.replace(changed.system, links=links)
        found = compare(msgspec.structs.replace(changed, system=slow)).verdict
        assert found.sentence.startswith("PrfaaS-PD does not pay")


def test_links_that_no_pool_uses_are_no_part_of_what_pays():
    file = lab()
    more = (*file.system.links, LinkCapacity(name="unused", capacity_mbps=90_000))
    both = compare(msgspec.structs.replace(file, system=msgspec.structs.replace(file.system, links=more)))
    assert both.verdict == compare(file).verdict
    assert both.over_links == compare(file).over_links


def test_a_batch_grows_by_whole_requests_when_memory_is_asked():
    file = lab(25_000)
    profile, tokens = file.system.hub[0].profile, file.workload.mean_tokens + file.system.output_tokens
    cache = profile.state_bytes + profile.token_bytes * tokens
    memory = InstanceMemory(device="h100", devices=2, weights_bytes=0.9 * 160e9 - 4.5 * cache)
    hub = msgspec.structs.replace(file.system.hub[0], max_batch=4, memory=memory)
    system = msgspec.structs.replace(file.system, hub=(hub,))
    assert compare(msgspec.structs.replace(file, system=system)).verdict.limit == "memory"


def test_a_decode_pool_that_was_never_measured_is_no_baseline():
    """As in an installation whose hub only decodes: its stand-in would prefill anything in a second."""
    file = lab(minDecode=4)
    hub = msgspec.structs.replace(file.system.hub[0], profile=NEVER_PREFILLS)
    result = compare(msgspec.structs.replace(file, system=msgspec.structs.replace(file.system, hub=(hub,))))
    assert result.hub_alone is result.homogeneous is None
    assert result.notes[1].startswith("Homogeneous: no prefill of the hub's instances was measured")
    assert result.verdict.gain == 0
    assert result.verdict.sentence.startswith("The hub alone cannot serve. PrfaaS-PD serves 2.63 requests/s: every")


def test_a_measured_pool_is_the_baseline_beside_one_that_was_never_measured():
    file = lab()
    known = msgspec.structs.replace(file.system.hub[0], name="local")
    decode = msgspec.structs.replace(known, name="decode", profile=NEVER_PREFILLS, min_decode=4)
    system = msgspec.structs.replace(file.system, hub=(decode, known))
    assert [pool.instances for pool in optimum.homogeneous(system).hub] == [4, 12]
