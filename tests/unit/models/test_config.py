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
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id is"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers is '8'"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace is '1'"),
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
        ({"attn_res_block_size": 4}, "attn_res_block_size is 4"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate is True"),
        ({"latent_moe_use_norm": True}, "latent_moe_use_norm is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
    ],
)
def test_a_field_that_changes_the_computation_and_adds_no_tensor_is_refused(fields, complaint):
    with pytest.raises(ConfigError, match=f"{complaint}.*changes the computation"):
        parse_config(PUBLIC | fields)


def test_such_a_field_that_is_off_is_read():
    off = {"mla_use_output_gate": False, "attn_res_block_size": None}
    linear = {"linear_attn_config": LINEAR | {"gate_lower_bound": None}}
    assert parse_config(PUBLIC | off | linear) == parse_config(PUBLIC)


def test_a_whole_number_serves_where_any_number_does():
    assert parse_config(PUBLIC | {"routed_scaling_factor": 2}).routed_scale == 2


def test_the_public_document_is_read():
    assert parse_config(PUBLIC).hidden_size == PUBLIC["hidden_size"]
