"""Proves that the cache sizes of known models are those that others publish."""

import pytest
from tests.unit.capacity.systems import no_traces, paper_document

from prfaas.capacity import planfile
from prfaas.capacity.builtin import all_builtins, read_builtin
from prfaas.capacity.models import MODEL_CACHES, MODEL_WEIGHTS_BYTES
from prfaas.errors import ConfigError

LENGTHS = (1024, 8192, 32768, 131072)
# By kvcache-simulator 0.1.3 of KVCache.AI (PyPI): `calculate_cache_size` with linear attention's state, in bytes.
PUBLISHED = {
    "kimi-k3": (477_683_712, 675_864_576, 1_355_341_824, 4_073_250_816),
    "qwen3.5-397b": (223_518_720, 443_719_680, 1_198_694_400, 4_218_593_280),
    "qwen3.5-122b": (178_814_976, 354_975_744, 958_955_520, 3_374_874_624),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_caches_are_as_large_as_their_makers_simulator_says(model):
    cache = MODEL_CACHES[model]
    assert tuple(cache.state_bytes + cache.token_bytes * length for length in LENGTHS) == PUBLISHED[model]


def test_other_sizes_are_those_of_the_public_configurations():
    k3, kimi = MODEL_CACHES["kimi-k3"], MODEL_CACHES["kimi-linear-48b"]
    assert (k3.token_bytes, round(k3.state_bytes / 1e6, 1)) == (27_648, 449.4)
    assert (kimi.token_bytes, round(kimi.state_bytes / 1e6, 1)) == (8_064, 43.4)
    assert MODEL_CACHES["qwen3-next-80b"].token_bytes == 12 * 2 * 2 * 256 * 2


@pytest.mark.parametrize("one", all_builtins(), ids=lambda one: one.name)
def test_caches_of_built_in_profiles_are_those_of_their_models(one):
    cache = MODEL_CACHES[one.cache_model]
    assert (one.state_bytes, one.token_bytes) == (cache.state_bytes, cache.token_bytes)


def test_ranks_without_a_head_of_their_own_hold_a_copy_of_its_rows():
    assert [MODEL_CACHES["qwen3.5-397b"].row_copies(ranks) for ranks in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert [MODEL_CACHES["qwen3.5-27b"].row_copies(ranks) for ranks in (1, 4, 8)] == [1, 1, 2]
    assert MODEL_CACHES["kimi-k3"].row_copies(16) == 16


def test_caches_of_qwen_35b_are_those_that_were_published_with_a_rounded_state():
    cache = MODEL_CACHES["qwen3.5-35b"]
    for tokens, mib in ((8_192, 221.04), (32_768, 701.04)):
        assert (cache.state_bytes + cache.token_bytes * tokens) / 2**20 == pytest.approx(mib, abs=0.4)
    assert cache.token_bytes == 480 * 2**20 / 24_576


@pytest.mark.parametrize(
    ("model", "profile"),
    [
        ("kimi-k3", "kimi-k3-mxfp4-8xb300"),
        ("qwen3.5-397b", "qwen3.5-397b-bf16-8xh200"),
        ("qwen3.5-122b", "qwen3.5-122b-bf16-4xh200"),
        ("qwen3.5-35b", "qwen3.5-35b-bf16-2xh100"),
        ("qwen3.5-27b", "qwen3.5-27b-bf16-1xh200"),
    ],
)
def test_weights_are_those_that_the_outside_tool_counts(model, profile):
    assert MODEL_WEIGHTS_BYTES[model] == pytest.approx(read_builtin("name", profile).weights_bytes, rel=0.02)


def test_of_every_model_the_weights_are_known():
    assert MODEL_WEIGHTS_BYTES.keys() == MODEL_CACHES.keys()


def test_a_file_names_a_model_in_place_of_its_cache_sizes():
    document = paper_document()
    points = [{name: one[name] for name in ("tokens", "seconds")} for one in document["profiles"]["h200"]["points"]]
    document["profiles"]["h200"] = {"model": "kimi-k3", "points": points}
    profile = planfile.read(document, no_traces).system.offload[0].profile
    assert profile.token_bytes == pytest.approx(27_648, abs=1)
    assert profile.state_bytes == pytest.approx(449_372_160, abs=1)
    for more, says in (
        ({"model": "kimi-k4"}, r"profiles\.h200\.model is 'kimi-k4'; there are: kimi-k3, "),
        ({"points": [{"tokens": 1, "seconds": 1, "cacheMib": 3}] * 2}, r"cacheMib is no field here"),
        ({"stateBytes": 3}, r"stateBytes is no field here"),
    ):
        with pytest.raises(ConfigError, match=says):
            planfile.read(document | {"profiles": {"h200": {"model": "kimi-k3", "points": points} | more}}, no_traces)
