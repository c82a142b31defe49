"""Proves that a checkpoint is read in both public spellings, and that a wrong config is refused by field."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prfaas.errors import ConfigError
from prfaas_worker.models import load_model
from prfaas_worker.models.kimi_linear.config import read_config
from prfaas_worker.models.kimi_linear.model import KimiLinear
from prfaas_worker.models.solo import Solo

LAYER_0 = "model.layers.0."


@pytest.fixture
def rewritten(checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint with other weights or config fields (a field set to None is removed)."""

    def write(weights: dict[str, torch.Tensor] | None = None, **fields) -> Path:
        config = json.loads((checkpoint / "config.json").read_text()) | fields
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        save_file(
            load_file(checkpoint / "model.safetensors") if weights is None else weights, tmp_path / "model.safetensors"
        )
        return tmp_path

    return write


def test_both_spellings_of_the_dense_layer_are_one_model(checkpoint, rewritten, weights, model):
    assert f"{LAYER_0}block_sparse_moe.gate_proj.weight" in weights, "transformers writes this spelling"
    public = {name.replace(f"{LAYER_0}block_sparse_moe.", f"{LAYER_0}mlp."): tensor for name, tensor in weights.items()}
    assert public.keys() != weights.keys()
    other = KimiLinear.load(rewritten(public))
    assert torch.equal(*(solo.prefill(torch.arange(50), solo.new()) for solo in (Solo(other), Solo(model))))
    assert other.fingerprint == model.fingerprint


def test_decay_rates_may_be_flat(rewritten, weights, model):
    """Newer tools write A_log so; it is the same model, and a wrong number of heads is not."""
    flat = {name: tensor.flatten() if name.endswith("A_log") else tensor for name, tensor in weights.items()}
    assert flat["model.layers.0.self_attn.A_log"].shape == (4,)
    other = KimiLinear.load(rewritten(flat))
    assert torch.equal(*(solo.prefill(torch.arange(50), solo.new()) for solo in (Solo(other), Solo(model))))
    assert other.fingerprint == model.fingerprint
    flat["model.layers.0.self_attn.A_log"] = torch.zeros(5)
    with pytest.raises(ConfigError, match=r"A_log: shape \[5\], the config asks for \[1, 1, 4, 1\]"):
        KimiLinear.load(rewritten(flat))


def test_absent_weights_are_refused(rewritten):
    directory = rewritten()
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no model\*\.safetensors"):
        KimiLinear.load(directory)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"num_key_value_heads": 2}, "MLA needs them equal"),
        ({"hidden_size": ...}, "the field 'hidden_size'"),
        ({"linear_attn_config": {"full_attn_layers": [0, 4], "kda_layers": [1, 2, 3, 5, 6, 7]}}, "1-based"),
        ({"mlp_layer_types": ["dense"] * 7}, "mlp_layer_types must hold 8 words"),
    ],
)
def test_a_config_that_we_do_not_implement_is_refused_by_field(rewritten, fields, complaint):
    with pytest.raises(ConfigError, match=complaint) as refused:
        KimiLinear.load(rewritten(**fields))
    assert "config.json" in str(refused.value)


def test_layer_lists_are_one_based_and_mlp_types_may_replace_the_dense_count(rewritten):
    types = ["sparse", "dense", "dense", *["sparse"] * 5]
    config = read_config(rewritten(mlp_layer_types=types, first_k_dense_replace=...))
    assert [i for i, kind in enumerate(config.layer_kinds) if kind == "attention"] == [3, 7]
    assert [i for i, dense in enumerate(config.dense_layers) if dense] == [1, 2]


def test_the_fingerprint_follows_the_config(rewritten, model, checkpoint):
    assert KimiLinear.load(checkpoint).fingerprint == model.fingerprint
    assert KimiLinear.load(rewritten(model_max_length=4096)).fingerprint != model.fingerprint


def test_sources_that_name_no_model_say_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match=r"built-in models are: .*kimi-linear-tiny"):
        load_model("builtin:gpt", None)
    with pytest.raises(ConfigError, match=r"no config\.json in .*nowhere"):
        load_model(str(tmp_path / "nowhere"), None)


@pytest.mark.parametrize(
    ("text", "advice"), [("{", "is not JSON"), ("[]", "holds a list"), ("{}", "model_type is None")]
)
def test_a_config_that_is_no_config_is_refused_by_name(tmp_path, text, advice):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.json: .*{advice}"):
        load_model(str(tmp_path), None)
