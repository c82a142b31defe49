"""Proves that a checkpoint that cannot be served is refused by name, with the whole list of what is wrong."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3NextConfig

from prfaas.errors import ConfigError
from prfaas_worker.models import load_model
from prfaas_worker.models.qwen3_next.cache import layer_specs
from prfaas_worker.models.qwen3_next.config import check_config
from prfaas_worker.models.qwen3_next.model import _check_fields

from . import tiny

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside third-party imports
        return tiny.save(tiny.build(), tmp_path_factory.mktemp("qwen3_next"))


@pytest.fixture
def edited(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the checkpoint with other fields and tensors; None takes one away."""

    def edit(fields: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor | None] | None = None) -> Path:
        config = json.loads((saved / "config.json").read_text()) | (fields or {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        weights = load_file(saved / "model.safetensors") | (tensors or {})
        kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return edit


def load(directory: Path) -> Any:
    return load_model(str(directory), None)[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"gate_lower_bound": -5.0}, r"config\.json: gate_lower_bound is -5\.0, and this engine does not know"),
        ({"attn_res_block_size": 12}, "attn_res_block_size is 12"),
        ({"qk_norm": False}, "qk_norm is False"),
        ({"attn_output_gate": False}, "attn_output_gate is False; only True is implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "twist": 2}}, r"rope_scaling\.twist is 2"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "twist": 2}},
            r"rope_parameters\.twist is 2",
        ),
    ],
)
def test_a_field_that_transformers_would_ignore_is_refused_by_its_path(edited, fields, named):
    with pytest.raises(ConfigError, match=named):
        load(edited(fields))


def test_what_transformers_ignores_and_changes_nothing_is_served(edited):
    published = {
        "attn_output_gate": True,
        "max_window_layers": 28,
        "full_attention_interval": 4,
        "rope_scaling": None,
        "unsloth_fixed": True,
        "attn_layer_indices": None,
    }
    assert load(edited(published)).vocab_size == tiny.VOCAB


def test_no_field_that_transformers_writes_itself_is_refused(saved):
    _check_fields(saved, Qwen3NextConfig.from_pretrained(saved))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_variants_that_would_be_computed_wrong_are_refused_by_their_field(edited, fields, named):
    with pytest.raises(ConfigError, match=rf"config\.json: .*{named}"):
        load(edited(fields))


def test_fixed_frequencies_are_served(edited):
    check_config(edited({"rope_parameters": {"rope_type": "yarn"}}))


def test_load_model_takes_the_engine_of_the_checkpoints_type(saved):
    model, directory = load_model(str(saved), None)
    assert type(model).__name__ == "Qwen3Next"
    assert directory == saved
    assert type(load_model("builtin:kimi-linear-tiny", None)[0]).__name__ == "KimiLinear"


@pytest.mark.parametrize("model_type", ["lfm2", None, ["qwen3_next"]])
def test_a_checkpoint_of_another_family_is_refused_by_name_with_the_cure(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}/config.json: model_type is {model_type!r}; a worker serves kimi_linear and qwen3_next: serve this "
        "checkpoint with vLLM"
    )


def test_refusals_and_our_own_engine_do_not_load_transformers(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "quantization_config": {}}')
    script = (
        "import sys\n"
        "from prfaas.errors import ConfigError\n"
        "from prfaas_worker.models import load_model\n"
        "load_model('builtin:kimi-linear-tiny', None)\n"
        "try:\n"
        f"    load_model({str(tmp_path)!r}, None)\n"
        "except ConfigError:\n"
        "    sys.exit('transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_beside_a_gpu_it_runs_on_the_cpu_and_hides_gpu_kernels_from_transformers(saved, monkeypatch, caplog, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for package in ("causal_conv1d", "fla"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    assert load_model(str(saved), None, device, "auto")[0].device.type == "cpu"
    assert sys.modules["fla"] is sys.modules["causal_conv1d"] is None
    assert ("only Kimi Linear runs on a GPU" in caplog.text) == (device == "auto")
    with pytest.raises(ConfigError, match="only on the CPU"):
        load_model(str(saved), None, "cuda", "auto")


def test_every_wrong_tensor_is_listed(edited):
    directory = edited(
        tensors={
            "model.layers.0.linear_attn.A_log": None,
            "model.layers.2.linear_attn.A_log": torch.zeros(9),
            "model.layers.3.surprise": torch.zeros(2),
        }
    )
    with pytest.raises(ConfigError) as caught:
        load(directory)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{directory}: the weights do not fit config.json:"
    assert [line.strip() for line in lines[1:]] == [
        "model.layers.0.linear_attn.A_log: missing",
        "model.layers.2.linear_attn.A_log: shape [9], the config asks for [4]",
        "model.layers.3.surprise: not in this architecture",
    ]


def test_a_checkpoint_without_weights_is_refused(edited):
    directory = edited()
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot load the checkpoint"):
        load(directory)


def test_damaged_weights_are_refused(edited):
    directory = edited()
    (directory / "model.safetensors").write_bytes(b"\x07" * 100)
    with pytest.raises(ConfigError, match="fetch them again"):
        load(directory)


@pytest.mark.parametrize(
    ("kinds", "named"),
    [(["linear_attention"] * 4, "rows"), (["linear_attention", "sliding_attention"] * 2, "names sliding_attention")],
)
def test_layers_whose_cache_has_no_form_in_our_memory_are_refused(kinds, named):
    with pytest.raises(ConfigError, match=named):
        layer_specs(SimpleNamespace(**tiny.CONFIG | {"layer_types": kinds}))


def test_facts_of_a_checkpoint_are_those_of_its_configuration(edited):
    directory = edited()
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    model = load(directory)
    assert (model.vocab_size, model.hidden_size, model.max_context) == (tiny.VOCAB, 64, 2048)
    assert model.eos_token_ids == {2, 7}
    assert model.attention_kind == "full_attention"
    assert load(directory).fingerprint == model.fingerprint
    assert len(model.fingerprint) == 64


def test_other_weights_have_another_fingerprint(edited, saved):
    first = load(saved).fingerprint
    assert load(edited(tensors={"model.layers.0.linear_attn.A_log": torch.zeros(4)})).fingerprint != first


def test_the_fingerprint_reads_no_weights_again(edited, saved, monkeypatch):
    from prfaas_worker.models.qwen3_next import model

    directory = edited()

    def load_once(directory: Path) -> Any:
        loaded = load_causal_model(directory)
        (directory / "model.safetensors").unlink()
        return loaded

    load_causal_model = model.load_causal_model
    monkeypatch.setattr(model, "load_causal_model", load_once)
    again = load(directory).fingerprint
    monkeypatch.undo()
    assert again == load(saved).fingerprint


def test_the_same_weights_in_other_files_have_the_same_fingerprint(edited, saved):
    directory = edited()
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, kept in parts.items():
        save_file({name: weights[name] for name in kept}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, kept in parts.items() for name in kept}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(directory).fingerprint == load(saved).fingerprint


def test_a_layer_keeps_a_state_or_rows(saved):
    linear, full = load(saved).layers[:2]
    assert linear.rows == full.state == ()
    assert [(t.name, t.axes[0], t.shape) for t in full.rows] == [("key", "token", (2, 16)), ("value", "token", (2, 16))]
    assert [(t.name, t.shape) for t in linear.state] == [("conv", (128, 4)), ("recurrent", (4, 16, 16))]
