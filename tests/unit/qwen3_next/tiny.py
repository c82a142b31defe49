"""A tiny Qwen3-Next with random weights, and its logits at a scale where errors show."""

from pathlib import Path
from typing import Any

import torch

VOCAB = 128
LOGIT_SCALE = 5.0

CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def build(**fields: Any) -> Any:
    """transformers' own model with random weights, in fp32, of CONFIG and other fields."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG | fields)).eval()
    _widen(model)
    with torch.no_grad():
        logits = model(torch.randint(VOCAB, (1, 100))).logits
        model.lm_head.weight *= LOGIT_SCALE / logits.std()
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


def save(model: Any, directory: Path) -> Path:
    """The model as its save_pretrained writes it."""
    model.save_pretrained(directory)
    return directory


def load_oracle(directory: Path) -> Any:
    """The saved model as transformers alone loads it: its weights lie in memory as ours do, to the same last bits."""
    from transformers import Qwen3NextForCausalLM

    return Qwen3NextForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
