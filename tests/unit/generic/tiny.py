"""Tiny configurations of every family, random weights for them, and their logits at a scale where errors show."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB = 128
WINDOW = 24
LOGIT_SCALE = 5.0

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
}
_LINEAR_AND_FULL = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_SLIDING_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# By model_type: what differs from _COMMON.
CONFIGS: Mapping[str, dict[str, Any]] = {
    "kimi_linear": _LATENT
    | {
        "num_local_experts": 4,
        "linear_attn_config": {
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
        },
    },
    "bailing_hybrid": _LATENT
    | {
        "num_local_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "layer_types": _LINEAR_AND_FULL,
    },
    "qwen3_next": _DELTA | _EXPERTS | {"layer_types": _LINEAR_AND_FULL},
    "qwen3_5_text": _DELTA | {"layer_types": _LINEAR_AND_FULL},
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"layer_types": _LINEAR_AND_FULL},
    "mimo_v2_flash": {
        "v_head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_AND_FULL,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 32,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": _LINEAR_AND_FULL,
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.3, "key_multiplier": 0.7},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_AND_FULL,
        "final_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "olmo_hybrid": _DELTA | {"layer_types": _LINEAR_AND_FULL, "linear_num_key_heads": 4},
}
WINDOWED = ("gemma3_text", "mimo_v2_flash")


def build(model_type: str) -> Any:
    """transformers' own model with random weights, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(_COMMON | CONFIGS[model_type]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _widen(model)
    with torch.no_grad():
        logits = model(torch.randint(VOCAB, (1, 100))).logits
        model.get_output_embeddings().weight *= LOGIT_SCALE / logits.std()
    return model


def _widen(model: torch.nn.Module) -> None:
    """Weights so wide that every layer matters, decay so slow that a state does after many tokens.

    Embeddings are so wide that the network does not amplify rounding.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "dt_bias" in name:
                parameter.fill_(-3)
            elif parameter.ndim >= 2 and "A_log" not in name:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.uniform_(-0.1, 0.1)


def save(model: Any, directory: Path) -> Path:
    """The model as its save_pretrained writes it."""
    model.save_pretrained(directory)
    return directory


def load_oracle(directory: Path) -> Any:
    """The saved model as transformers alone loads it: its weights lie in memory as ours do, to the same last bits."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
