"""Puts Kimi Linear behind the engine's `Model` interface: layer by layer over one step's batch, without gradients.

One model serves every device. Its weights and its cache lie where `load` is told. All arithmetic is plain torch (on an
NVIDIA GPU the delta rule may be fla's, see `delta_rule`). The cache is fp32 everywhere, so instances on different
devices take each other's caches. CPUs are what it is measured and tuned on. On a GPU it is meant to be right, not fast,
and has not been run.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas.wire.kvevents import AttentionSpecKind
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache_spec import LayerSpec, TensorSpec
from prfaas_worker.memory import check_weights_fit
from prfaas_worker.models.base import Batch
from prfaas_worker.models.kimi_linear.checkpoint import SafetensorsCheckpoint, Weights, weight_bytes
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig, read_config
from prfaas_worker.models.kimi_linear.delta_rule import TORCH_RULE, DeltaRule, choose_rule
from prfaas_worker.models.kimi_linear.kda import DeltaAttention
from prfaas_worker.models.kimi_linear.layers import MixtureOfExperts, Mlp, least_norm, norm_scale, unit_rms
from prfaas_worker.models.kimi_linear.mla import LatentAttention
from prfaas_worker.models.kimi_linear.paged_batch import PagedBatch
from prfaas_worker.options import Dtype

# Tokens that go through a feed-forward block at once: each expert then multiplies enough of them to be quick.
_FED_FORWARD_AT_ONCE = 2048


class Layer:
    """Attention of either kind and a feed-forward block, each behind a norm and added to its input."""

    attention: DeltaAttention | LatentAttention
    feed_forward: Mlp | MixtureOfExperts

    def __init__(self, config: KimiLinearConfig, index: int, weights: Weights, rule: DeltaRule):
        self._least = least_norm(config.rms_norm_eps, config.hidden_size, weights.device)
        norm = norm_scale(weights["input_layernorm"])
        if config.layer_kinds[index] == "linear":
            self.attention = DeltaAttention(config, weights.under("self_attn"), norm, rule)
        else:
            self.attention = LatentAttention(config, weights.under("self_attn"), norm)
        norm = norm_scale(weights["post_attention_layernorm"])
        if config.dense_layers[index]:
            self.feed_forward = Mlp(weights.under("mlp"), norm)
        else:
            self.feed_forward = MixtureOfExperts(config, weights.under("block_sparse_moe"), norm)

    def normed(self, x: Tensor) -> Tensor:
        """Norm the residual stream; the next matrices hold the norm's weight."""
        return unit_rms(x, self._least)


class KimiLinear:
    """A loaded checkpoint; `prfaas_worker.models.base.Model` documents each method."""

    attention_kind: AttentionSpecKind = "mla_attention"

    def __init__(
        self,
        config: KimiLinearConfig,
        tensors: Mapping[str, Tensor] | SafetensorsCheckpoint,
        fingerprint: str,
        products: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        """Build the layers from tensors by public name, which must be complete and of the config's shapes."""
        weights = Weights(tensors, products, device)
        self.config = config
        self.fingerprint = fingerprint
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_context, self.eos_token_ids = config.max_context, config.eos_token_ids
        self.layers = tuple(_layer_spec(config, kind) for kind in config.layer_kinds)
        self._products, self.rule = products, choose_rule(weights.device, products)
        self.blocks = [
            Layer(config, index, weights.under(f"model.layers.{index}"), self.rule)
            for index in range(len(config.layer_kinds))
        ]
        self.embedding = weights["model.embed_tokens"]
        self._least = least_norm(config.rms_norm_eps, config.hidden_size, weights.device)
        self._norm, self._head = norm_scale(weights["model.norm"]), weights["lm_head"]

    @classmethod
    def load(cls, directory: Path, dtype: Dtype = "float32", device: str = "cpu") -> "KimiLinear":
        """Read config.json and model*.safetensors onto a torch device. Raises ConfigError if the checkpoint is not
        supported."""
        config = read_config(directory)
        checkpoint = SafetensorsCheckpoint(directory, config)
        products = products_type(dtype, device)
        if device == "cpu":
            check_weights_fit(weight_bytes(config, products))
        model = cls(config, checkpoint, "", products, device)
        model.fingerprint = checkpoint.fingerprint()
        return model

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def arithmetic(self) -> str:
        kernels = "plain torch" if self.rule is TORCH_RULE else "fla's kernels"
        return f"{str(self._products).removeprefix('torch.')} products, delta rule by {kernels}"

    def use_rule(self, rule: DeltaRule) -> None:
        """Compute the delta rule of every layer by `rule` from now on."""
        self.rule = rule
        for block in self.blocks:
            if isinstance(block.attention, DeltaAttention):
                block.attention.rule = rule

    def bind(self, memory: CacheMemory) -> None:
        self._memory = memory

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        x = F.embedding(batch.tokens.to(self.device), self.embedding)
        paged = PagedBatch(batch, self._memory)
        for index, block in enumerate(self.blocks):
            if isinstance(block.attention, LatentAttention):
                x += paged.latent(block.attention, self._memory.rows(index)["latent"], block.normed(x))
            else:
                states = self._memory.states(index)
                for part in paged.parts:
                    x[part.span] += paged.delta(block.attention, states, block.normed(x[part.span]), part)
            for tokens in x.split(_FED_FORWARD_AT_ONCE):
                tokens.add_(block.feed_forward(block.normed(tokens)))
            if on_layer is not None:
                on_layer(index)
        return self.final_norm(_last_of_each(x, batch))

    def final_norm(self, x: Tensor) -> Tensor:
        return unit_rms(x, self._least) * self._norm

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head)


def products_type(wanted: Dtype, device: str) -> torch.dtype:
    """Return the type of matrix products: "auto" is fp32 on a CPU, which may have no instructions for bf16."""
    if wanted == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, wanted)


def _last_of_each(x: Tensor, batch: Batch) -> Tensor:
    """Of x [N, D] the last token of each chunk and every decode: [outputs, D]."""
    ends = list(accumulate(chunk.tokens for chunk in batch.chunks))
    return torch.cat([x[torch.tensor(ends, device=x.device) - 1], x[ends[-1] :]]) if ends else x


def _layer_spec(config: KimiLinearConfig, kind: str) -> LayerSpec:
    if kind == "attention":
        width = config.latent_size + config.shared_key_size
        return LayerSpec(rows=(TensorSpec("latent", ("token", "latent_then_shared_key"), (width,), "float32"),))
    head = config.kda_head_size
    return LayerSpec(
        state=(
            TensorSpec("conv", ("q_k_v_channel", "tap"), (3 * config.kda_size, config.conv_kernel - 1), "float32"),
            TensorSpec("recurrent", ("head", "key", "value"), (config.kda_heads, head, head), "float32"),
        )
    )
