"""The model that prefill is measured with: 69 M random parameters in the public layout; and what its products count."""

import math

import torch
from torch import Tensor

from prfaas_worker.models.kimi_linear.checkpoint import expected_shapes
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig, parse_config

CONFIG = {
    "model_type": "kimi_linear",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "rms_norm_eps": 1e-5,
    "model_max_length": 131_072,
    "eos_token_id": 2,
    "num_attention_heads": 8,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 512,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "head_dim": 64,
        "num_heads": 8,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
    },
}


def random_model() -> tuple[KimiLinearConfig, dict[str, Tensor]]:
    """Return the configuration and tensors by public name, with gates as training begins with them."""
    config = parse_config(CONFIG)
    generator = torch.Generator().manual_seed(0)
    return config, {name: _tensor(name, shape, generator) for name, shape in expected_shapes(config).items()}


def _tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=generator).log()
    if name.endswith("dt_bias"):
        step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    if "norm" in name:
        return torch.ones(shape)
    if "correction_bias" in name:
        return torch.zeros(shape)
    return torch.randn(shape, generator=generator) * (1.0 if "embed" in name else shape[-1] ** -0.5)


def prefill_flops(config: KimiLinearConfig, tokens: int) -> float:
    """Count linear and attention operations of a prompt: two for each weight that a token meets, attention as causal.

    Experts count as often as they are used, the head for the last token alone, and softmax attention over the keys up
    to each token, with the key's and the value's own width. What the delta rule, convolutions, norms and gates need
    counts nothing.
    """
    active = 0
    for name, shape in expected_shapes(config).items():
        if len(shape) != 2 or "embed" in name or "lm_head" in name:
            continue
        share = config.experts_per_token / config.num_experts if ".experts." in name else 1.0
        active += share * math.prod(shape)
    widths = config.num_heads * (config.key_size + config.value_size)
    attention = config.layer_kinds.count("attention") * widths * tokens * (tokens + 1)
    return 2.0 * active * tokens + attention + 2.0 * config.vocab_size * config.hidden_size
