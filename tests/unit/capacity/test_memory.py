"""Proves that a plan of instances that cannot hold what they serve is refused, with both figures and what would fit."""

from copy import deepcopy
from typing import Any

import pytest
import yaml

from prfaas.capacity import planfile
from prfaas.capacity.builtin import builtin_names, read_builtin
from prfaas.errors import ConfigError

FILE: dict[str, Any] = yaml.safe_load(
    """
workload: {lognormal: {mu: 9.0, sigma: 1.2, minTokens: 128, maxTokens: 131072}, outputTokens: 600}
profiles:
  far: {model: qwen3.5-397b, tokenSeconds: 0.00003, gpu: h200, gpus: 8, weightsGb: 400}
  near: {model: qwen3.5-397b, tokenSeconds: 0.00008, gpu: h20-141, gpus: 8, weightsGb: 400}
links: [{name: link, capacityMbps: 10000}]
offloadPools: [{name: member, profile: far, instances: 2, link: link}]
hub: [{name: hub, profile: near, instances: 6, maxBatch: 32, stepMillis: 25}]
"""
)


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
        "profiles.far: weights of 1,560 GB do not fit 8 x h200, 1,128 GB of which engines use 90%; "
        "what would fit: 16 x h200 (2 nodes an instance), 8 x b300, 8 x gb300"
    )


def test_weights_that_fit_only_without_the_engines_share_are_refused():
    read(profiles__far__weightsGb=1000)
    with pytest.raises(ConfigError, match=r"weights of 1,100 GB do not fit 8 x h200"):
        read(profiles__far__weightsGb=1100)


def test_the_longest_prompt_has_to_fit_beside_the_weights_where_it_is_prefilled():
    with pytest.raises(ConfigError, match=r"offloadPools.member: the cache of a prompt of 130961 tokens takes 4.2 GB"):
        read(profiles__far__weightsGb=1012)


def test_a_batch_has_to_fit_beside_the_weights_where_it_is_decoded_and_what_fits_is_said():
    with pytest.raises(ConfigError, match=r"hub.hub.maxBatch is 2000: .* give at most (\d+)") as refused:
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
        ({"hub__0__instances": 0}, r"hub has no instances"),
    ],
)
def test_bad_input_is_one_sentence_with_field_value_and_cure(change: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        read(**change)


@pytest.mark.parametrize("part", ["gpu", "gpus", "weightsGb"])
def test_half_a_description_of_the_devices_is_refused(part: str):
    far = {key: value for key, value in FILE["profiles"]["far"].items() if key != part}
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


def test_a_pool_without_instances_is_a_plan():
    system = read(offloadPools__0__instances=0).system
    assert system.offload_instances == 0
