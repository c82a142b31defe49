"""A config.json with a field of a wrong type or size is refused by that field, not by the tensors that then misfit."""

import json

import pytest

from prfaas.errors import ConfigError
from prfaas_worker.assets import model_directory
from prfaas_worker.models.kimi_linear.config import parse_config

PUBLIC = json.loads((model_directory("builtin:kimi-linear-tiny") / "config.json").read_text())
LINEAR = PUBLIC["linear_attn_config"]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"hidden_size": "256"}, "hidden_size is '256', a str; it must be a whole number"),
        ({"hidden_size": 256.0}, "hidden_size is 256.0, a float; it must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True, a bool; it must be a whole number"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', a str; it must be a number"),
        ({"moe_renormalize": "yes"}, "moe_renormalize is 'yes', a str; it must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id is"),
        ({"mlp_layer_types": "dense"}, "mlp_layer_types is 'dense', a str; it must be a list"),
        ({"mlp_layer_types": [["dense"]] * PUBLIC["num_hidden_layers"]}, "must hold"),
        ({"linear_attn_config": []}, "linear_attn_config is .*it must be an object"),
        ({"linear_attn_config": LINEAR | {"head_dim": "32"}}, "head_dim is '32'"),
        ({"linear_attn_config": LINEAR | {"full_attn_layers": "4"}}, "full_attn_layers is '4'"),
        ({"linear_attn_config": LINEAR | {"kda_layers": [1, "2"]}}, "kda_layers is .*only whole numbers"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused_by_name(fields, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_config(PUBLIC | fields)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"linear_attn_config": LINEAR | {"gate_lower_bound": -5.0}}, r"linear_attn_config\.gate_lower_bound is -5\.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; only 0 "),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc' "),
        ({"swiglu_limit": 10.0}, r"swiglu_limit is 10\.0, and this engine does not know the field"),
        ({"clip_qkv": False}, "clip_qkv is False"),
        ({"linear_attn_config": LINEAR | {"conv_bias": True}}, r"linear_attn_config\.conv_bias is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 32.0}}, r"rope_scaling\.type is 'yarn'; only 'default'"),
        ({"rope_scaling": {"rope_type": "default", "mscale_all_dim": 1.0}}, r"rope_scaling\.mscale_all_dim is 1\.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, r"rope_parameters\.rope_type is 'linear'"),
    ],
)
def test_a_field_that_changes_the_computation_and_adds_no_tensor_is_refused(fields, complaint):
    with pytest.raises(ConfigError, match=f"{complaint}.*changes the computation"):
        parse_config(PUBLIC | fields)


PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""The 48B model's config.json."""


def test_what_changes_nothing_is_read_in_every_spelling():
    published = parse_config(PUBLISHED)
    assert (len(published.layer_kinds), published.kda_size, published.key_size) == (27, 4096, 192)
    # What vLLM's class of this configuration has besides, with the values that it gives by itself.
    of_vllm = {
        "attn_res_block_size": None,
        "latent_moe_use_norm": False,
        "mla_use_output_gate": False,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "routed_expert_hidden_size": None,
        "topk_method": "noaux_tc",
    }
    assert parse_config(PUBLISHED | of_vllm) == published
    off = {"linear_attn_config": LINEAR | {"gate_lower_bound": None}}
    assert parse_config(PUBLIC | off) == parse_config(PUBLIC)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["full_attention"] * PUBLIC["num_hidden_layers"]},
        {"linear_head_dim": LINEAR["head_dim"] + 1},
        {"linear_num_heads": LINEAR["num_heads"] + 1},
        {"linear_conv_kernel_dim": LINEAR["short_conv_kernel_size"] + 1},
        {"qk_head_dim": 1},
    ],
)
def test_a_field_that_repeats_others_may_not_contradict_them(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} is .*; by the other fields it is "):
        parse_config(PUBLIC | fields)


def test_a_whole_number_serves_where_any_number_does():
    assert parse_config(PUBLIC | {"routed_scaling_factor": 2}).routed_scale == 2
