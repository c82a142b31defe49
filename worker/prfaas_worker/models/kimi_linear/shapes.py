"""Names, shapes and types that a checkpoint in the public layout must have, as they follow from its config alone.

A wrong checkpoint is answered with the whole list of differences, from the headers of its files, before any weight is
read: nothing is computed with weights that do not fit.
"""

from collections.abc import Mapping

from prfaas_worker.models.kimi_linear.config import KimiLinearConfig

Shape = tuple[int, ...]

# safetensors' names of the types that weights may have; all become fp32 without loss.
FLOATS = ("F32", "BF16", "F16")


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


def describe_differences(expected: Mapping[str, Shape], found: Mapping[str, tuple[str, Shape]]) -> list[str]:
    """One line per tensor that is missing, unknown, of another shape or no float, sorted by name.

    `found` has safetensors' name of the type, and the shape.
    """
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            lines.append(f"{name}: missing, shape {list(expected[name])}")
            continue
        dtype, shape = found[name]
        if name not in expected:
            lines.append(f"{name}: not in this architecture, shape {list(shape)}")
        elif shape != expected[name]:
            lines.append(f"{name}: shape {list(shape)}, the config asks for {list(expected[name])}")
        elif dtype not in FLOATS:
            lines.append(f"{name}: type {dtype}, weights may be {', '.join(FLOATS)}")
    return lines


def public_name(name: str, config: KimiLinearConfig) -> str:
    """transformers writes a dense layer's MLP as if it were a mixture: block_sparse_moe.gate_proj for mlp.gate_proj."""
    prefix, found, rest = name.partition("block_sparse_moe.")
    dense = {f"model.layers.{layer}." for layer, dense in enumerate(config.dense_layers) if dense}
    return f"{prefix}mlp.{rest}" if found and prefix in dense else name
