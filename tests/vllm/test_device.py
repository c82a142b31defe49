"""What the connector does with an accelerator's memory, as far as that can be seen without one."""

import json
from typing import Any

import pytest

from .engines import EngineHost


@pytest.fixture(scope="module")
def facts(engine_host: EngineHost) -> dict[str, Any]:
    return json.loads(engine_host.run("device_caches.py"))


def test_blocks_leave_when_the_kernels_that_write_them_are_done(facts):
    assert facts["written after the step"]


def test_no_cache_comes_while_another_is_completed(facts):
    """An aborted request's blocks may be the next one's while the kernels that complete its cache still run."""
    assert facts["fetched after"] == ["first", "completed", "second", "third"]


def test_a_landed_part_is_waited_for_on_its_own_device(facts):
    assert facts["waited for"] == ["meta"]


def test_a_gpu_reaches_the_memory_of_transfers_by_itself_and_a_refusal_is_said(facts):
    registered, refusal = facts["pinned"]
    assert registered == [True, 3 << 20, 0]
    assert refusal.startswith("prfaas: 3 MiB of host memory cannot be pinned (CUDA error 2), so copies are slower")


def test_a_layout_for_gpus_is_accepted_and_is_not_that_of_cpus(facts):
    """Tokens before heads is what vLLM chooses first where its kernels want nothing else."""
    assert facts["layouts"] == {
        "LBHNC": "FullAttentionSpec 2 heads of 8 bfloat16 2x16x16 cuda",
        "LBNHC": "FullAttentionSpec 2 heads of 8 bfloat16 16x2x16 cuda",
    }


def test_a_cache_of_eight_bits_crosses_with_its_scales_and_is_not_one_without(facts):
    assert facts["quantized"] == {
        "of a tensor": [True, "uint8", "FullAttentionSpec 2 heads of 8 uint8 16x2x16 cuda"],
        "of a token": [True, "uint8", "FullAttentionSpec 2 heads of 8 uint8 16x2x24 cuda"],
    }


def test_how_many_tokens_a_state_stands_for_is_not_compared_and_its_shape_is(facts):
    """Without prefix caching a state's block has as many tokens as the longest prompt: --max-model-len."""
    assert facts["other blocks of states"] == ""
    assert "groups[0].spec is 'MambaSpec MAMBA2 (3, 96) bfloat16 (4, 8, 8) float32 cuda'" in facts["other states"]
    assert "this instance needs 'MambaSpec MAMBA2 (3, 96) bfloat16 (2, 8, 8) float32 cuda'" in facts["other states"]


def test_states_with_room_for_drafts_fit_those_without_where_the_room_is_behind_them(facts):
    """And no byte of the room crosses or is written."""
    drafts = facts["drafts"]
    assert (drafts["behind"], drafts["of ranks"], drafts["arrived"]) == ("", "", [True] * 4)


def test_states_with_room_for_drafts_inside_them_are_refused_in_words_where_the_other_side_drafts_otherwise(facts):
    assert "cuda, with room for 2 drafts', this instance needs 'MambaSpec GDN_ATTN " in facts["drafts"]["between"]
    assert facts["drafts"]["between, alike"] == ""


def test_layers_of_a_draft_model_cross_beside_those_of_the_same_index(facts):
    assert facts["beside a draft"] == [0, 1, 2, 3]


def test_ranks_that_share_a_models_head_may_each_have_one_of_its_draft(facts):
    """vLLM puts layers of one form into one group. A layer that crossed as if two ranks held the same would have one
    rank's heads on both."""
    assert facts["ranks alike"] == [2, 2, 1]


def test_a_group_of_unlike_layers_is_refused_by_name(facts):
    assert facts["unlike layers"].startswith("the caches of model.layers.0.attn and model.layers.0.attn.indexer differ")


def test_a_part_of_which_blocks_are_missing_ends_its_transfer(facts):
    assert facts["too few blocks"] == "the request has 2 of 3 blocks from token 16 on"
