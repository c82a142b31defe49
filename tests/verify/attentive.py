"""Tiny checkpoints whose answers depend on all of their context: weights scaled so that what a prompt left in either
kind of cache outweighs the last token. One is a Kimi Linear, for our worker; the other a Qwen3-Next, for vLLM.

Plain random weights keep what attention and the linear state say far below a token's own embedding. A model of such
weights answers almost the same without its context, so that lost caches look like rounding.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from prfaas_worker.assets import model_directory
from prfaas_worker.models.kimi_linear.checkpoint import Shape, expected_shapes
from prfaas_worker.models.kimi_linear.config import read_config

_BUILTIN: Final = "builtin:kimi-linear-tiny"
_LINEAR, _ATTENTION = (0, 2), (1, 3)
_SCALES: Final = {
    **{
        f"layers.{layer}.self_attn.{name}": scale
        for layer in _LINEAR
        # Through silu small numbers keep their signs, so that the state does not sum up what all tokens share.
        for name, scale in {"q_proj": 0.25, "k_proj": 0.25, "v_proj": 0.25, "o_proj": 8.0}.items()
    },
    # Some tokens weigh more than others, so that none is lost in the mean.
    **{f"layers.{layer}.self_attn.q_proj": 4.0 for layer in _ATTENTION},
    "layers.1.self_attn.o_proj": 16.0,
    "layers.3.self_attn.o_proj": 32.0,
    "lm_head": 4.0,
}
_DECAYS: Final = (-3.0, -7.0)
"""Logarithms of the first and the last head's rate: their memory fades after dozens, and after thousands of tokens."""
_QWEN_SCALES: Final = {
    "self_attn.o_proj": 32.0,
    "linear_attn.out_proj": 4.0,
    "conv1d": 0.25,
    "mlp.gate.": 0.0,  # All experts are equal: no rounding sends a token to another one.
    "down_proj": 0.5,
    "lm_head": 2.0,
}
_QWEN_VALUES: Final = {"self_attn.q_norm": 1.0, "linear_attn.A_log": -7.0}


def make_attentive_model(directory: Path, seed: int = 0) -> Path:
    """Write a checkpoint of four layers, linear and full attention in turns, into a directory, and return it."""
    builtin = model_directory(_BUILTIN)
    config: dict[str, Any] = json.loads((builtin / "config.json").read_text())
    # Without experts no rounding sends a token to another one.
    config |= {"first_k_dense_replace": config["num_hidden_layers"], "intermediate_size": config["hidden_size"]}
    config["linear_attn_config"] |= {
        "full_attn_layers": [layer + 1 for layer in _ATTENTION],
        "kda_layers": [layer + 1 for layer in _LINEAR],
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(builtin / name, directory)
    random = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(read_config(directory))
    tensors = {name: _tensor(name, shape, random) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def make_attentive_qwen3_next(directory: Path) -> Path:
    """Write a checkpoint made of the built-in one, which was trained on letters nearby, and return its directory."""
    builtin = model_directory("builtin:qwen3-next-tiny")
    shutil.copytree(builtin, directory)
    tensors = load_file(builtin / "model.safetensors")
    for name, tensor in tensors.items():
        tensor.mul_(next((scale for part, scale in _QWEN_SCALES.items() if part in name), 1.0))
        if (value := next((value for part, value in _QWEN_VALUES.items() if part in name), None)) is not None:
            tensor.fill_(value)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _tensor(name: str, shape: Shape, random: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("dt_bias"):
        return torch.zeros(shape)
    if name.endswith("A_log"):
        return torch.linspace(*_DECAYS, shape[2]).view(shape)
    scale = next((scale for part, scale in _SCALES.items() if part in name), 1.0)
    return torch.randn(shape, generator=random) * scale * shape[-1] ** -0.5
