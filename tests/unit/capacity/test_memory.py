"""Proves that a plan of instances that cannot hold what they serve is refused, with both figures and what would fit."""

import re
from copy import deepcopy
from typing import Any

import pytest
import yaml

from prfaas.capacity import planfile
from prfaas.capacity.builtin import builtin_names, read_builtin
from prfaas.capacity.comparison import compare
from prfaas.capacity.memory import DEVICE_BYTES
from prfaas.capacity.optimum import best
from prfaas.errors import ConfigError
from prfaas.simulate import setup

FILE: dict[str, Any] = yaml.safe_load(
    """
workload: {lognormal: {mu: 9.0, sigma: 1.2, minTokens: 128, maxTokens: 131072}, outputTokens: 600}
profiles:
  far: {stateBytes: 192086016, tokenBytes: 30720, tokenSeconds: 0.00003, gpu: h200, gpus: 8, weightsGb: 400}
  near: {stateBytes: 192086016, tokenBytes: 30720, tokenSeconds: 0.00008, gpu: h20-141, gpus: 8, weightsGb: 400}
  slow: {stateBytes: 192086016, tokenBytes: 30720, tokenSeconds: 0.00016}
links: [{name: link, capacityMbps: 10000}]
offloadPools: [{name: member, profile: far, instances: 2, link: link}]
hub: [{name: hub, profile: near, instances: 6, maxBatch: 32, stepMillis: 25}]
"""
)

NAMED: dict[str, Any] = {
    "model": "qwen3.5-397b",
    "tokenSeconds": 0.00008,
    "gpu": "h20-141",
    "gpus": 8,
    "weightsGb": 400,
}


def read(**changes: Any) -> planfile.PlanFile:
    """Read the file with fields changed; a name such as `profiles__far__gpus` leads to the field."""
    document: dict[str, Any] = deepcopy(FILE)
    for name, value in changes.items():
        *path, last = name.split("__")
        place: Any = document
        for part in path:
            place = place[int(part) if part.isdigit() else part]
        place[last] = value
    return planfile.read(document, lambda _: [])


def test_what_fits_is_planned():
    """Negative control of all that follows."""
    system = read().system
    assert system.offload[0].memory is not None
    assert system.offload[0].memory.total_bytes == 8 * 141e9


def test_weights_that_do_not_fit_are_refused_with_both_figures_and_what_would_fit():
    with pytest.raises(ConfigError) as refused:
        read(profiles__far__weightsGb=1560)
    assert str(refused.value) == (
        "profiles.far: the weights take 1,560 GB, and 8 x h200 hold 1,128 GB, of which engines use 90% (1,015 GB); "
        "it fits in 16 x h200 (2 nodes an instance) or 8 x b300 or 8 x gb300 (2 nodes an instance)"
    )


@pytest.mark.parametrize("weights", [45, 90, 200, 400, 800, 1560, 2000])
def test_what_is_said_to_fit_does_and_half_of_it_does_not(weights: float):
    with pytest.raises(ConfigError, match="it fits in ") as refused:
        read(profiles__far={**FILE["profiles"]["far"], "gpu": "l40s", "gpus": 1, "weightsGb": weights})
    offered = re.findall(r"(\d+) x ([a-z0-9-]+)", str(refused.value).partition("it fits in ")[2])
    assert offered[0][1] == "l40s"
    for gpus, gpu in offered:
        read(profiles__far={**FILE["profiles"]["far"], "gpu": gpu, "gpus": int(gpus), "weightsGb": weights})
        if int(gpus) > 1:
            with pytest.raises(ConfigError, match="the weights take"):
                read(
                    profiles__far={**FILE["profiles"]["far"], "gpu": gpu, "gpus": int(gpus) // 2, "weightsGb": weights}
                )


def test_weights_in_bytes_fit_nothing_and_are_said_to_be_in_gb():
    with pytest.raises(ConfigError, match="not even 64 devices do: give weightsGb in GB"):
        read(profiles__far__weightsGb=400e9)


def test_a_model_has_the_weights_that_are_published_and_weights_given_go_before():
    kimi = {"model": "kimi-k3", "tokenSeconds": 0.00003, "gpu": "h200", "gpus": 8}
    with pytest.raises(
        ConfigError, match=r"weights of kimi-k3 as published \(give weightsGb for others\) take 1,560 GB"
    ):
        read(profiles__far=kimi)
    read(profiles__far=kimi | {"weightsGb": 900})
    memory = read(profiles__far=kimi | {"gpus": 16}).system.offload[0].memory
    assert memory is not None
    assert (memory.devices, memory.weights_bytes) == (16, 1.56e12)


def test_weights_that_fit_only_without_the_engines_share_are_refused():
    read(profiles__far__weightsGb=1000)
    with pytest.raises(ConfigError, match=r"weights take 1,100 GB, and 8 x h200 hold 1,128 GB"):
        read(profiles__far__weightsGb=1100)


def test_the_longest_prompt_has_to_fit_beside_the_weights_where_it_is_prefilled():
    with pytest.raises(
        ConfigError, match=r"offloadPools.member: weights and the cache of 130,961 tokens take 1,016 GB"
    ):
        read(profiles__far__weightsGb=1012)


def test_where_it_is_decoded_the_longest_request_has_to_fit_with_its_answer():
    with pytest.raises(ConfigError, match=r"hub.hub: weights and the cache of 131,561 tokens take 1,016 GB") as refused:
        read(profiles__near__weightsGb=1012, hub__0__maxBatch=1)
    assert "it fits in 16 x h20-141" in str(refused.value)
    read(profiles__near__weightsGb=1010, hub__0__maxBatch=1)


def test_a_batch_of_longer_answers_is_smaller():
    most: list[int] = []
    for tokens in (600, 60_000):
        with pytest.raises(ConfigError, match="give at most") as refused:
            read(hub__0__maxBatch=2000, workload__outputTokens=tokens)
        most.append(int(str(refused.value).rpartition(" ")[2]))
    # 14,612 tokens in the mean, 30,720 bytes each, beside a state of 192 MB.
    state = 192_086_016
    assert most[0] / most[1] == pytest.approx((state + 30_720 * 74_612) / (state + 30_720 * 15_212), rel=0.01)


def test_what_no_pool_uses_is_not_checked():
    read(profiles__far__weightsGb=1012, offloadPools__0__instances=0)


def test_a_batch_has_to_fit_beside_the_weights_where_it_is_decoded_and_what_fits_is_said():
    with pytest.raises(ConfigError, match=r"hub.hub.maxBatch is 2000: .*; give at most (\d+)") as refused:
        read(hub__0__maxBatch=2000)
    most = int(str(refused.value).rpartition(" ")[2])
    read(hub__0__maxBatch=most)
    with pytest.raises(ConfigError, match="maxBatch"):
        read(hub__0__maxBatch=most + 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"profiles__far__gpu": "h201"}, r"profiles.far.gpu is 'h201'; there are: a100"),
        ({"profiles__far__gpus": 0}, r"profiles.far.gpus is 0; it must be a whole number of at least 1"),
        ({"profiles__far__weightsGb": "400 GiB"}, r"profiles.far.weightsGb is '400 GiB'"),
        ({"offloadPools__0__profile": {"builtin": "qwen3.5"}}, r"offloadPools.member.profile.builtin is 'qwen3.5'"),
        ({"offloadPools__0__profile": {"model": "kimi-k3"}}, r"offloadPools.member.profile.builtin is missing"),
        ({"profiles__far": {"builtin": "qwen3.5-397b-fp8-8xh200", "gpus": 8}}, r"profiles.far.gpus is no field here"),
        ({"hub__0__instances": 0}, r"hub has no instances, so nothing would decode"),
        ({"profiles__far__weightsGb": 0}, r"profiles.far.weightsGb is 0; it must be above 0"),
        ({"profiles__far": {"model": "kimi-k3", "tokenSeconds": 1e-5, "weightsGiB": 1}}, r"weightsGb, in GB: multiply"),
    ],
)
def test_bad_input_is_one_sentence_with_field_value_and_cure(change: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        read(**change)


@pytest.mark.parametrize("part", ["gpu", "gpus", "weightsGb"])
def test_half_a_description_of_the_devices_is_refused(part: str):
    far = dict(FILE["profiles"]["far"])
    del far[part]
    with pytest.raises(ConfigError, match=rf"profiles.far.{part} is missing"):
        read(profiles__far=far)


@pytest.mark.parametrize("name", builtin_names())
def test_every_built_in_profile_fits_its_devices(name: str):
    assert read_builtin("name", name).memory.left_bytes > 0


def test_a_pool_may_name_a_built_in_profile_which_knows_its_decode_step():
    name = "qwen3.5-397b-fp8-8xh200"
    pool = {"name": "hub", "profile": {"builtin": name}, "instances": 6, "maxBatch": 32}
    system = read(hub=[pool]).system
    assert system.hub[0].step_seconds == read_builtin("name", name).step_seconds(32)
    assert system.hub[0].profile == read_builtin("name", name).profile()
    assert read(hub=[pool | {"stepMillis": 25}]).system.hub[0].step_seconds == 0.025
    with pytest.raises(ConfigError, match=r"hub.hub.stepMillis is missing, and .* knows no step of a batch of 300"):
        read(hub=[pool | {"maxBatch": 300}])


def test_without_offload_instances_the_plan_is_the_hub_alone():
    file = read(offloadPools__0__instances=0)
    assert file.system.offload == ()
    found = compare(file)
    assert found.prfaas_pd is None
    assert found.hub_alone == found.homogeneous
    assert found.hub_alone.lambda_max == compare(read()).hub_alone.lambda_max


def test_a_hub_pool_without_instances_is_as_if_it_were_not_there():
    pool = {"name": "slow", "profile": "slow", "instances": 0, "maxBatch": 8, "stepMillis": 900}
    slo = {"tpotMillis": 25}
    assert best(read(hub=[*FILE["hub"], pool], slo=slo).system, read().workload) == best(read().system, read().workload)
    with pytest.raises(ConfigError, match=r"a step of hub.slow takes stepMillis 900"):
        read(hub=[*FILE["hub"], pool | {"instances": 1}], slo=slo)


def test_what_does_not_offload_is_simulated_without_offload_instances():
    file = read(offloadPools__0__instances=0, simulation={"requests": 10, "load": 0.5, "cacheGib": {"link": 10}})
    known = setup.read(file)
    assert setup.scenario(file, known, "homogeneous", 1000.0).system.hub_instances == 6
    with pytest.raises(ConfigError, match=r"no offload pool has instances, and static offloads"):
        setup.scenario(file, known, "static", 1000.0)


def test_every_device_has_a_size_that_one_can_buy():
    assert all(40e9 <= size <= 300e9 for size in DEVICE_BYTES.values())


def test_rows_that_several_ranks_hold_count_as_often():
    """K3 in TP16 holds each row of its MLA layers 16 times, Qwen3.5-397B in TP8 the rows of its two heads 4 times."""
    k3, qwen = read_builtin("name", "kimi-k3-mxfp4-16xh200"), read_builtin("name", "qwen3.5-397b-fp8-8xh200")
    for one, copies in ((k3, 16), (qwen, 4)):
        held = one.memory.cache_bytes(one.profile(), 1000)
        assert held == one.state_bytes + copies * 1000 * one.token_bytes
    most: list[int] = []
    for profile in (NAMED, FILE["profiles"]["near"]):
        with pytest.raises(ConfigError, match="give at most") as refused:
            read(profiles__near=profile, hub__0__maxBatch=5000)
        most.append(int(str(refused.value).rpartition(" ")[2]))
    assert most[0] < most[1] / 2


def test_profiles_of_two_models_are_no_plan():
    with pytest.raises(ConfigError) as refused:
        read(
            offloadPools__0__profile={"builtin": "qwen3.5-122b-fp8-2xh200"},
            hub=[{**FILE["hub"][0], "profile": {"builtin": "qwen3.5-397b-fp8-8xh200"}}],
        )
    assert str(refused.value) == (
        "hub.hub.profile is of qwen3.5-397b, and offloadPools.member.profile of qwen3.5-122b: only the model that "
        "computed a cache can read it; give all pools profiles of one"
    )
    with pytest.raises(ConfigError, match=r"profile is of qwen3\.5-397b, and"):
        read(profiles__near=NAMED, offloadPools__0__profile={"builtin": "qwen3.5-122b-fp8-2xh200"})


def test_what_is_estimated_or_assumed_is_said_and_a_step_of_shorter_requests_too():
    assumed, estimated = "qwen3.5-397b-fp8-8xh20-141", "qwen3.5-397b-fp8-8xh200"
    pool = {"name": "hub", "profile": {"builtin": assumed}, "instances": 6, "maxBatch": 32}
    far = {**FILE["offloadPools"][0], "profile": {"builtin": estimated}}
    notes = compare(read(hub=[pool], offloadPools=[far])).notes
    assert any(one.startswith("Prefills of member are estimated from measured kernels") for one in notes)
    assert any(one.startswith("Prefills of hub are assumed: prefills take 2.6") for one in notes)
    assert not any("Memory was not checked" in one or "decode step of" in one for one in notes)
    longer = {"lognormal": {"mu": 10.5, "sigma": 0.5, "minTokens": 128, "maxTokens": 131072}, "outputTokens": 600}
    notes = compare(read(hub=[pool], offloadPools=[far], workload=longer)).notes
    assert any("is that of requests with 8,192 tokens" in one for one in notes)


def test_a_batch_that_no_engine_has_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"hub.hub.maxBatch is 1000000000: no engine decodes more than 16384"):
        read(hub__0__maxBatch=1_000_000_000)
