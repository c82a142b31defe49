"""Kimi Linear behind the engine's `Model` interface: layer by layer over one step's batch, on a CPU, no gradients."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas.wire.kvevents import AttentionSpecKind
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.models.base import Batch, LayerSpec, TensorSpec
from prfaas_worker.models.kimi_linear.checkpoint import Checkpoint
from prfaas_worker.models.kimi_linear.compiled import CompiledDecodes, StepShape
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig, read_config
from prfaas_worker.models.kimi_linear.delta import DeltaAttention
from prfaas_worker.models.kimi_linear.latent import LatentAttention
from prfaas_worker.models.kimi_linear.layers import MixtureOfExperts, Mlp, least_norm, norm_scale, unit_rms
from prfaas_worker.models.kimi_linear.precision import Facts, choose, divergence, instructions, speedups
from prfaas_worker.models.kimi_linear.step import Step
from prfaas_worker.models.kimi_linear.weights import Weights
from prfaas_worker.options import Dtype

log = logging.getLogger(__name__)

# Tokens that go through a feed-forward block at once: each expert then multiplies enough of them to be quick.
_FED_FORWARD_AT_ONCE = 2048


class Layer:
    """Attention of either kind and a feed-forward block, each behind a norm and added to its input."""

    def __init__(self, config: KimiLinearConfig, index: int, weights: Weights):
        self._least = least_norm(config.rms_norm_eps, config.hidden_size)
        attention = DeltaAttention if config.layer_kinds[index] == "linear" else LatentAttention
        self.attention = attention(config, weights.under("self_attn"), norm_scale(weights["input_layernorm"]))
        norm = norm_scale(weights["post_attention_layernorm"])
        if config.dense_layers[index]:
            self.feed_forward: Mlp | MixtureOfExperts = Mlp(weights.under("mlp"), norm)
        else:
            self.feed_forward = MixtureOfExperts(config, weights.under("block_sparse_moe"), norm)

    def normed(self, x: Tensor) -> Tensor:
        """What attention and feed-forward block see of the residual stream; the norms' weights are in theirs."""
        return unit_rms(x, self._least)


class KimiLinear:
    """A loaded checkpoint; see `prfaas_worker.models.base.Model` for what each method promises."""

    attention_kind: AttentionSpecKind = "mla_attention"

    def __init__(
        self,
        config: KimiLinearConfig,
        tensors: Mapping[str, Tensor] | Checkpoint,
        fingerprint: str,
        products: torch.dtype = torch.float32,
    ):
        """Put the layers together from tensors by public name, which must be complete and of the config's shapes."""
        weights = Weights(tensors, products)
        self.config = config
        self.fingerprint = fingerprint
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_context, self.eos_token_ids = config.max_context, config.eos_token_ids
        self.layers = tuple(_layer_spec(config, kind) for kind in config.layer_kinds)
        self.blocks = list(_blocks(config, weights))
        self._compiled: CompiledDecodes | None = None
        self.embedding = weights["model.embed_tokens"]
        self._least = least_norm(config.rms_norm_eps, config.hidden_size)
        self._norm, self._head = norm_scale(weights["model.norm"]), weights["lm_head"]

    @classmethod
    def load(cls, directory: Path, dtype: Dtype = "float32") -> "KimiLinear":
        """Read config.json and model*.safetensors; "auto" takes the type of products that `precision` chooses.

        Raises:
            ConfigError: they are not a checkpoint that we run.

        """
        config = read_config(directory)
        checkpoint = Checkpoint(directory, config)
        facts = Facts(dtype, instructions())
        choice = choose(facts)
        if dtype == "auto" and choice.dtype == torch.bfloat16:
            facts = facts._replace(speedups=speedups(config))
            choice = choose(facts)
        model = cls(config, checkpoint, "", choice.dtype)
        if dtype == "auto" and choice.dtype == torch.bfloat16:
            exact = _blocks(config, Weights(checkpoint))
            choice = choose(facts._replace(divergence=divergence(model, exact)))
            if choice.dtype != torch.bfloat16:
                del model  # or both would stand in memory
                model = cls(config, checkpoint, "", choice.dtype)
        log.info("matrix products in %s: %s", str(choice.dtype).removeprefix("torch."), choice.reason)
        model.fingerprint = checkpoint.fingerprint()
        return model

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def bind(self, memory: CacheMemory) -> None:
        """Use this memory for all that follows."""
        self._memory = memory

    @torch.inference_mode()
    def compile_decodes(self, shapes: Sequence[StepShape]) -> None:
        """Compile steps of decodes alone for these shapes; others stay as they are. `bind` comes first.

        Raises:
            ConfigError: there is no C++ compiler, or a shape is too wide.

        """
        self._compiled = CompiledDecodes(self, self._memory, shapes)

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Run one step; returns the normed hidden states of each chunk's last token and of each decode."""
        if self._compiled is not None and on_layer is None and batch.decodes is not None:
            shape = self._compiled.shape_for(batch)
            if shape is not None:
                return self._compiled.forward(batch.tokens, batch.decodes, shape)
        x = F.embedding(batch.tokens, self.embedding)
        step = Step(batch, self._memory)
        for index, block in enumerate(self.blocks):
            if isinstance(block.attention, LatentAttention):
                x += step.latent(block.attention, self._memory.rows(index)["latent"], block.normed(x))
            else:
                states = self._memory.states(index)
                for part in step.parts:
                    x[part.span] += step.delta(block.attention, states, block.normed(x[part.span]), part)
            for tokens in x.split(_FED_FORWARD_AT_ONCE):
                tokens.add_(block.feed_forward(block.normed(tokens)))
            if on_layer is not None:
                on_layer(index)
        return self.final_norm(_last_of_each(x, batch))

    def final_norm(self, x: Tensor) -> Tensor:
        """The residual stream after the last layer, normed: what `logits` takes."""
        return unit_rms(x, self._least) * self._norm

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states [..., hidden_size]."""
        return F.linear(hidden, self._head)


def _blocks(config: KimiLinearConfig, weights: Weights) -> Iterator[Layer]:
    return (Layer(config, i, weights.under(f"model.layers.{i}")) for i in range(len(config.layer_kinds)))


def _last_of_each(x: Tensor, batch: Batch) -> Tensor:
    """Of x [N, D] the last token of each chunk and every decode: [outputs, D]."""
    ends = list(accumulate(chunk.tokens for chunk in batch.chunks))
    return torch.cat([x[[end - 1 for end in ends]], x[ends[-1] :]]) if ends else x


def _layer_spec(config: KimiLinearConfig, kind: str) -> LayerSpec:
    """The cache of one layer."""
    if kind == "attention":
        width = config.latent_size + config.shared_key_size
        return LayerSpec(rows=(TensorSpec("latent", ("token", "latent_then_shared_key"), (width,), "float32"),))
    head = config.kda_head_size
    return LayerSpec(
        state=(
            TensorSpec("conv", ("q_k_v_channel", "tap"), (3 * config.kda_size, config.conv_kernel - 1), "float32"),
            TensorSpec("recurrent", ("head", "key", "value"), (config.kda_heads, head, head), "float32"),
        ),
    )
