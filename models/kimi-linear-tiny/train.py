"""Trains the byte-level Kimi Linear that ships with prfaas: about 1.2 M parameters, minutes on two processor threads.

The layers are those that serve: gradients flow through the worker's own blocks and its chunked KDA kernel, so what is
trained is what runs. The experts' correction biases follow their load, as in the published recipe. Text, tokens and
optimiser are those of all models that ship: `models/training.py`.
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.kimi_linear.checkpoint import expected_shapes
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig, parse_config
from prfaas_worker.models.kimi_linear.layers import MixtureOfExperts
from prfaas_worker.models.kimi_linear.model import KimiLinear

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import BOS, END_OF_TURN, EOS, PAD, Pass, Trainee, main

BIAS_RATE = 0.001

CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "float32",
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 320,
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "model_max_length": 131072,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, END_OF_TURN],
    "pad_token_id": PAD,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 56,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "linear_attn_config": {
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
    },
}


def initial_tensors(config: KimiLinearConfig) -> dict[str, Tensor]:
    """Fresh parameters by public name."""
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("A_log"):
            tensor = torch.empty(shape).uniform_(1, 16).log()
        elif name.endswith("dt_bias"):
            step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            tensor = step + torch.log(-torch.expm1(-step))  # the inverse of softplus
        elif "norm" in name:
            tensor = torch.ones(shape)
        elif "correction_bias" in name:
            tensor = torch.zeros(shape)
        elif "embed_tokens" in name:
            tensor = torch.randn(shape)
        else:
            tensor = torch.randn(shape) * shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight", "lm_head.weight")):
            tensor *= 0.2
        tensors[name] = tensor.requires_grad_("correction_bias" not in name)
    return tensors


def forward(config: KimiLinearConfig, tensors: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, T, vocab] of sequences [B, T] that start from nothing, and how often each layer picks each expert."""
    model = KimiLinear(config, tensors, fingerprint="in training")
    x = F.embedding(tokens, model.embedding)
    loads = []
    for block in model.blocks:
        x = x + block.attention.prefill(block.normed(x))
        normed = block.normed(x)
        if isinstance(block.feed_forward, MixtureOfExperts):
            picked, _ = block.feed_forward.route(normed.detach().flatten(0, 1))
            loads.append(picked.flatten().bincount(minlength=config.num_experts).float())
        x = x + block.feed_forward(normed)
    return model.logits(model.final_norm(x)), loads


def balance(tensors: dict[str, Tensor], loads: list[Tensor]) -> None:
    """Move correction biases against the load: an expert picked less often than others gets easier to pick."""
    biases = [tensor for name, tensor in tensors.items() if "correction_bias" in name]
    for bias, load in zip(biases, loads, strict=True):
        bias.add_((load.mean() - load).sign(), alpha=BIAS_RATE)


class Trained(Trainee):
    """Kimi Linear through the worker's own blocks."""

    def __init__(self):
        self._config = parse_config(CONFIG)
        self.tensors = initial_tensors(self._config)

    def forward(self, tokens: Tensor) -> Pass:
        return Pass(*forward(self._config, self.tensors, tokens))

    def after_step(self, loads: list[Tensor]) -> None:
        balance(self.tensors, loads)

    def write(self, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
        weights = save({name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}, {"format": "pt"})
        (output / "model.safetensors").write_bytes(weights)


if __name__ == "__main__":
    main(__doc__, "kimi-linear-tiny", Trained)
