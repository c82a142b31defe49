"""Reads a checkpoint in the public safetensors layout, and refuses one whose tensors are not those of its config.

The expected table of names and shapes follows from the config alone, so a wrong checkpoint is answered with the whole
list of differences and nothing is computed with weights that do not fit.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from prfaas.errors import ConfigError
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig

Shape = tuple[int, ...]

_LISTED_DIFFERENCES = 50


def expected_shapes(config: KimiLinearConfig) -> dict[str, Shape]:
    """Public name -> shape of every tensor of a checkpoint with this config."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer, (kind, dense) in enumerate(zip(config.layer_kinds, config.dense_layers, strict=True)):
        prefix = f"model.layers.{layer}."
        attention = _kda_shapes(config) if kind == "linear" else _mla_shapes(config)
        feed_forward = _mlp_shapes("mlp.", hidden, config.intermediate_size) if dense else _moe_shapes(config)
        norms = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        shapes |= {prefix + name: shape for name, shape in {**norms, **attention, **feed_forward}.items()}
    return shapes


def _kda_shapes(config: KimiLinearConfig) -> dict[str, Shape]:
    size, head, hidden = config.kda_size, config.kda_head_size, config.hidden_size
    shapes: dict[str, Shape] = {
        "A_log": (1, 1, config.kda_heads, 1),
        "dt_bias": (size,),
        "f_a_proj.weight": (head, hidden),
        "f_b_proj.weight": (size, head),
        "b_proj.weight": (config.kda_heads, hidden),
        "g_a_proj.weight": (head, hidden),
        "g_b_proj.weight": (size, head),
        "o_norm.weight": (head,),
        "o_proj.weight": (hidden, size),
    }
    for name in ("q", "k", "v"):
        shapes[f"{name}_proj.weight"] = (size, hidden)
        shapes[f"{name}_conv1d.weight"] = (size, 1, config.conv_kernel)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _mla_shapes(config: KimiLinearConfig) -> dict[str, Shape]:
    heads, hidden = config.num_heads, config.hidden_size
    return {
        "self_attn.q_proj.weight": (heads * config.key_size, hidden),
        "self_attn.kv_a_proj_with_mqa.weight": (config.latent_size + config.shared_key_size, hidden),
        "self_attn.kv_a_layernorm.weight": (config.latent_size,),
        "self_attn.kv_b_proj.weight": (heads * (config.nope_size + config.value_size), config.latent_size),
        "self_attn.o_proj.weight": (hidden, heads * config.value_size),
    }


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }


def _moe_shapes(config: KimiLinearConfig) -> dict[str, Shape]:
    hidden, size = config.hidden_size, config.expert_size
    shapes: dict[str, Shape] = {
        "block_sparse_moe.gate.weight": (config.num_experts, hidden),
        "block_sparse_moe.gate.e_score_correction_bias": (config.num_experts,),
        **_mlp_shapes("block_sparse_moe.shared_experts.", hidden, config.shared_experts * size),
    }
    for expert in range(config.num_experts):
        prefix = f"block_sparse_moe.experts.{expert}."
        shapes |= {f"{prefix}w1.weight": (size, hidden), f"{prefix}w3.weight": (size, hidden)}
        shapes[f"{prefix}w2.weight"] = (hidden, size)
    return shapes


def read_weights(directory: Path, config: KimiLinearConfig) -> dict[str, Tensor]:
    """Every tensor of `directory`'s safetensors files by public name, in fp32.

    Raises:
        ConfigError: there is no weights file, one is damaged, or names and shapes are not exactly those of the config.

    """
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise ConfigError(f"{directory}: no model*.safetensors; put the checkpoint's weights there")
    dense_layers = {f"model.layers.{layer}." for layer, dense in enumerate(config.dense_layers) if dense}
    try:
        tensors = {
            _public_name(name, dense_layers): tensor.float() for file in files for name, tensor in _tensors_of(file)
        }
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{directory}: the weights cannot be read, fetch them again: {error}") from error
    differences = describe_differences(expected_shapes(config), {name: tuple(t.shape) for name, t in tensors.items()})
    if differences:
        listed = differences[:_LISTED_DIFFERENCES]
        more = [f"and {len(differences) - len(listed)} more"] if len(differences) > len(listed) else []
        raise ConfigError(f"{directory}: the weights do not fit config.json:\n  " + "\n  ".join(listed + more))
    return tensors


def describe_differences(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[str]:
    """One line per tensor that is missing, unknown or of another shape, sorted by name."""
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            lines.append(f"{name}: missing, shape {list(expected[name])}")
        elif name not in expected:
            lines.append(f"{name}: not in this architecture, shape {list(found[name])}")
        elif found[name] != expected[name]:
            lines.append(f"{name}: shape {list(found[name])}, the config asks for {list(expected[name])}")
    return lines


def fingerprint(directory: Path) -> str:
    """SHA-256, hex, over config.json and every weights file, names included."""
    digest = hashlib.sha256()
    for path in [directory / "config.json", *sorted(directory.glob("model*.safetensors"))]:
        with path.open("rb") as file:
            digest.update(f"{path.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _tensors_of(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as checkpoint:
        for name in checkpoint.keys():  # noqa: SIM118, not a mapping: it cannot be iterated itself
            yield name, checkpoint.get_tensor(name)


def _public_name(name: str, dense_layers: set[str]) -> str:
    """transformers writes a dense layer's MLP as if it were a mixture: block_sparse_moe.gate_proj for mlp.gate_proj."""
    prefix, found, rest = name.partition("block_sparse_moe.")
    return f"{prefix}mlp.{rest}" if found and prefix in dense_layers else name
