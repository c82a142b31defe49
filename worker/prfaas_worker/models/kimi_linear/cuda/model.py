"""Kimi Linear behind the engine's `Model` interface on a GPU: bf16, with fp32 where rounding would add up.

fp32 are the residual stream, S, gates, router scores, softmax sums and logits. A step of decodes alone is a captured
graph; any other runs eagerly, all tokens together through projections and experts.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas.errors import ConfigError
from prfaas.wire.kvevents import AttentionSpecKind
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.models.base import Batch, LayerSpec, TensorSpec
from prfaas_worker.models.kimi_linear.checkpoint import Checkpoint
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig, read_config
from prfaas_worker.models.kimi_linear.cuda.blocks import (
    DeltaAttention,
    LatentAttention,
    MixtureOfExperts,
    Mlp,
    Place,
    linear_fp32,
)
from prfaas_worker.models.kimi_linear.cuda.chunked import ChunkRule, chunk_rule
from prfaas_worker.models.kimi_linear.cuda.graphs import DecodeGraphs
from prfaas_worker.models.kimi_linear.cuda.norms import add_rms_norm
from prfaas_worker.models.kimi_linear.cuda.sources import Source
from prfaas_worker.models.kimi_linear.cuda.step import Step, decode_step, plan_step
from prfaas_worker.models.kimi_linear.cuda.weights import (
    DeltaWeights,
    ExpertWeights,
    LatentWeights,
    Loader,
    MlpWeights,
)

# The smallest side of a matrix product on the tensor cores.
_LEAST_TILE = 16


class Layer:
    """Attention of either kind and a feed-forward block, each behind a norm and added to the residual stream."""

    def __init__(self, loader: Loader, config: KimiLinearConfig, index: int, rule: ChunkRule):
        self._eps = config.rms_norm_eps
        self._input_norm, self._post_norm = (
            loader.one(f"{name}_layernorm.weight") for name in ("input", "post_attention")
        )
        if config.layer_kinds[index] == "linear":
            self._attention: DeltaAttention | LatentAttention = DeltaAttention(
                DeltaWeights.load(loader.under("self_attn"), config), config, rule
            )
        else:
            self._attention = LatentAttention(LatentWeights.load(loader.under("self_attn"), config), config)
        if config.dense_layers[index]:
            self._feed_forward: Mlp | MixtureOfExperts = Mlp(MlpWeights.load(loader.under("mlp")))
        else:
            weights = ExpertWeights.load(loader.under("block_sparse_moe"), config)
            self._feed_forward = MixtureOfExperts(weights, config)

    def attend(self, residual: Tensor, step: Step, place: Place, dtype: torch.dtype) -> Tensor:
        """What the attention adds to the residual stream [N, D]."""
        return self._attention(add_rms_norm(residual, None, self._input_norm, self._eps, dtype), step, place)

    def feed_forward(self, residual: Tensor, attended: Tensor) -> None:
        """Add what the attention gave, then the feed-forward block, to the residual stream fp32 [N, D]."""
        x = add_rms_norm(residual, attended, self._post_norm, self._eps, attended.dtype)
        self._feed_forward(x, residual)


class KimiLinearCuda:
    """A loaded checkpoint; see `prfaas_worker.models.base.Model` for what each method promises."""

    attention_kind: AttentionSpecKind = "mla_attention"
    _memory: CacheMemory

    def __init__(self, config: KimiLinearConfig, loader: Loader, fingerprint: str):
        """Fill all layers.

        Raises:
            ConfigError: the kernels cannot run these sizes, or are not installed.

        """
        _check_sizes(config)
        self.config, self.fingerprint = config, fingerprint
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_context, self.eos_token_ids = config.max_context, config.eos_token_ids
        self._embedding = loader.one("model.embed_tokens.weight")
        self._norm, self._head = loader.one("model.norm.weight"), loader.one("lm_head.weight")
        self._dtype = self._embedding.dtype
        self.layers = tuple(_layer_spec(config, kind, self._dtype) for kind in config.layer_kinds)
        rule = chunk_rule(self.device)
        self._blocks = [
            Layer(loader.under(f"model.layers.{i}"), config, i, rule) for i in range(len(config.layer_kinds))
        ]
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(cls, directory: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> "KimiLinearCuda":
        """Read config.json and model*.safetensors; raises ConfigError where they are not a checkpoint that we run."""
        config = read_config(directory)
        checkpoint = Checkpoint(directory, config)
        model = cls.build(config, checkpoint, device, dtype, "")
        model.fingerprint = checkpoint.fingerprint()
        return model

    @classmethod
    @torch.inference_mode()
    def build(
        cls, config: KimiLinearConfig, source: Source, device: torch.device, dtype: torch.dtype, fingerprint: str
    ) -> "KimiLinearCuda":
        """Make a replica of weights from any source."""
        return cls(config, Loader.of(source, config, device, dtype), fingerprint)

    @property
    def device(self) -> torch.device:
        """Where weights and cache live."""
        return self._embedding.device

    def bind(self, memory: CacheMemory) -> None:
        """Use this memory for all that follows, and capture the decoding steps over it."""
        self._memory = memory
        if self.device.type == "cuda":
            self._graphs = DecodeGraphs(self._decode, memory)

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Run one step; returns the normed hidden states of each chunk's last token and of each decode.

        `on_layer(i)` is called when layer i has been given to the device, on its current stream; of a captured graph,
        when all layers have.
        """
        tokens = batch.tokens.to(self.device, non_blocking=True)
        if batch.chunks or batch.decodes is None:
            return self._run(tokens, plan_step(batch._replace(tokens=tokens)), on_layer)
        if self._graphs is None or not self._graphs.takes(batch.decodes):
            return self._run(tokens, decode_step(batch.decodes), on_layer)
        hidden = self._graphs.run(tokens, batch.decodes)
        if on_layer is not None:
            for index in range(len(self._blocks)):
                on_layer(index)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits fp32 [..., vocab_size] of normed hidden states [..., hidden_size]."""
        flat = hidden.reshape(-1, self.hidden_size).to(self._dtype)
        return linear_fp32(flat, self._head).view(*hidden.shape[:-1], self.vocab_size)

    def _decode(self, tokens: Tensor, step: Step) -> Tensor:
        return self._run(tokens, step, None)

    def _run(self, tokens: Tensor, step: Step, on_layer: Callable[[int], None] | None) -> Tensor:
        # A token outside the table would end the whole process on a GPU, not only its own sequence.
        residual = F.embedding(tokens.clamp(0, self.vocab_size - 1), self._embedding).float()
        last = len(self._blocks) - 1
        for index, block in enumerate(self._blocks):
            attended = block.attend(residual, step, Place(self._memory, index), self._dtype)
            if index == last and step.outputs is not None:
                # Nothing after the last attention is asked of the other tokens.
                residual, attended = residual[step.outputs], attended[step.outputs]
            block.feed_forward(residual, attended)
            if on_layer is not None:
                on_layer(index)
        return add_rms_norm(residual, None, self._norm, self.config.rms_norm_eps, torch.float32)


def _layer_spec(config: KimiLinearConfig, kind: str, dtype: torch.dtype) -> LayerSpec:
    """The cache of one layer."""
    name = str(dtype).removeprefix("torch.")
    if kind == "attention":
        width = config.latent_size + config.shared_key_size
        return LayerSpec(rows=(TensorSpec("latent", ("token", "latent_then_shared_key"), (width,), name),))
    head = config.kda_head_size
    conv = TensorSpec("conv", ("q_k_v_channel", "tap"), (3 * config.kda_size, config.conv_kernel - 1), name)
    recurrent = TensorSpec("recurrent", ("head", "key", "value"), (config.kda_heads, head, head), "float32")
    return LayerSpec(state=(conv, recurrent))


def _check_sizes(config: KimiLinearConfig) -> None:
    """Kernels hold whole heads and latents in registers, so their sizes are powers of two."""
    sizes = {
        "kv_lora_rank": config.latent_size,
        "qk_rope_head_dim": config.shared_key_size,
        "linear_attn_config.head_dim": config.kda_head_size,
    }
    for name, size in sizes.items():
        if size < _LEAST_TILE or size & (size - 1):
            raise ConfigError(f"{name} is {size}; on a GPU it must be a power of two from {_LEAST_TILE} on")
    if not config.shared_key_size <= config.value_size <= config.key_size:
        raise ConfigError(
            f"v_head_dim is {config.value_size}; on a GPU it must lie between qk_rope_head_dim, "
            f"{config.shared_key_size}, and the key's width, {config.key_size}"
        )
