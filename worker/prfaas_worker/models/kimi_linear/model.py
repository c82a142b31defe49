"""Kimi Linear behind the engine's `Model` interface: layer by layer over a sequence's cache, in fp32, no gradients."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas.errors import RequestError
from prfaas_worker.models.base import LayerSpec, SequenceCache, TensorSpec
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig, read_config
from prfaas_worker.models.kimi_linear.layers import (
    DeltaAttention,
    LatentAttention,
    MixtureOfExperts,
    Mlp,
    Weights,
    rms_norm,
)
from prfaas_worker.models.kimi_linear.weights import fingerprint, read_weights


class Layer:
    """Attention of either kind and a feed-forward block, each behind a norm and added to its input."""

    def __init__(self, config: KimiLinearConfig, index: int, weights: Weights):
        self._eps = config.rms_norm_eps
        self._input_norm, self._post_norm = weights["input_layernorm"], weights["post_attention_layernorm"]
        kind = DeltaAttention if config.layer_kinds[index] == "linear" else LatentAttention
        self.attention = kind(config, weights.under("self_attn"))
        if config.dense_layers[index]:
            self.feed_forward: Mlp | MixtureOfExperts = Mlp(weights.under("mlp"))
        else:
            self.feed_forward = MixtureOfExperts(config, weights.under("block_sparse_moe"))

    def attention_input(self, x: Tensor) -> Tensor:
        """What the attention sees of the residual stream."""
        return rms_norm(x, self._input_norm, self._eps)

    def feed_forward_input(self, x: Tensor) -> Tensor:
        """What the feed-forward block sees of the residual stream."""
        return rms_norm(x, self._post_norm, self._eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output to the residual stream x, then the feed-forward block's."""
        x = x + attended
        return x + self.feed_forward(self.feed_forward_input(x))


class KimiLinear:
    """A loaded checkpoint; see `prfaas_worker.models.base.Model` for what each method promises."""

    def __init__(self, config: KimiLinearConfig, tensors: Mapping[str, Tensor], fingerprint: str):
        """Put the layers together from tensors by public name, which must be complete (`read_weights` checks)."""
        weights = Weights(tensors)
        self.config = config
        self.fingerprint = fingerprint
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_context, self.eos_token_ids = config.max_context, config.eos_token_ids
        self.layers = tuple(_layer_spec(config, kind) for kind in config.layer_kinds)
        self.blocks = [Layer(config, i, weights.under(f"model.layers.{i}")) for i in range(len(self.layers))]
        self.embedding = weights["model.embed_tokens"]
        self._norm, self._head = weights["model.norm"], weights["lm_head"]

    @classmethod
    def load(cls, directory: Path) -> "KimiLinear":
        """Read config.json and model*.safetensors; raises ConfigError where they are not a checkpoint that we run."""
        config = read_config(directory)
        return cls(config, read_weights(directory, config), fingerprint(directory))

    def new_cache(self) -> SequenceCache:
        """An empty cache for one sequence."""
        return SequenceCache(self.layers)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, cache: SequenceCache, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Append tokens at `cache.length`; returns the last token's normed hidden state, fp32 [hidden_size]."""
        self._check_tokens(tokens)
        self._check_room(cache, tokens.shape[0])
        x = F.embedding(tokens, self.embedding).unsqueeze(0)
        for index, block in enumerate(self.blocks):
            x = block.finish(x, self._prefill_attention(index, block.attention_input(x), cache))
            if on_layer is not None:
                on_layer(index)
        cache.length += tokens.shape[0]
        return self.final_norm(x[0, -1])

    @torch.inference_mode()
    def decode(self, tokens: Tensor, caches: Sequence[SequenceCache]) -> Tensor:
        """Append one token to each of B sequences; returns logits fp32 [B, vocab_size]."""
        self._check_tokens(tokens)
        for cache in caches:
            self._check_room(cache, 1)
        x = F.embedding(tokens, self.embedding)
        for index, block in enumerate(self.blocks):
            x = block.finish(x, self._decode_attention(index, block.attention_input(x), caches))
        for cache in caches:
            cache.length += 1
        return self.logits(self.final_norm(x))

    def final_norm(self, x: Tensor) -> Tensor:
        """The residual stream after the last layer, normed: what `logits` takes."""
        return rms_norm(x, self._norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states [..., hidden_size]."""
        return F.linear(hidden, self._head)

    def _prefill_attention(self, index: int, x: Tensor, cache: SequenceCache) -> Tensor:
        attention = self.blocks[index].attention
        if isinstance(attention, LatentAttention):
            rows, end = cache.attention(index), cache.length + x.shape[1]
            rows.write(cache.length, attention.rows(x)[0])
            return attention.prefill(x, rows.rows(0, end).unsqueeze(0))
        state = cache.linear(index).tensors
        out, conv, recurrent = attention.prefill(x, state["conv"].unsqueeze(0), state["recurrent"].unsqueeze(0))
        state["conv"].copy_(conv[0])
        state["recurrent"].copy_(recurrent[0])
        return out

    def _decode_attention(self, index: int, x: Tensor, caches: Sequence[SequenceCache]) -> Tensor:
        attention = self.blocks[index].attention
        if isinstance(attention, LatentAttention):
            for row, cache in zip(attention.rows(x), caches, strict=True):
                cache.attention(index).write(cache.length, row.unsqueeze(0))
            return attention.decode(x, [cache.attention(index).rows(0, cache.length + 1) for cache in caches])
        states = [cache.linear(index).tensors for cache in caches]
        out, conv, recurrent = attention.decode(
            x, torch.stack([s["conv"] for s in states]), torch.stack([s["recurrent"] for s in states])
        )
        for state, new_conv, new_recurrent in zip(states, conv, recurrent, strict=True):
            state["conv"].copy_(new_conv)
            state["recurrent"].copy_(new_recurrent)
        return out

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.numel() == 0:
            raise RequestError("there is no token to process: send at least one", param="prompt")
        low, high = tokens.aminmax()
        if low < 0 or high >= self.vocab_size:
            raise RequestError(
                f"token ids must be 0 to {self.vocab_size - 1}, the request has {int(low)} to {int(high)}",
                param="prompt",
            )

    def _check_room(self, cache: SequenceCache, tokens: int) -> None:
        if cache.length + tokens > self.max_context:
            raise RequestError(
                f"the sequence would have {cache.length + tokens} tokens, the model takes {self.max_context}",
                code="context_length_exceeded",
                param="prompt",
            )


def _layer_spec(config: KimiLinearConfig, kind: str) -> LayerSpec:
    """The cache of one layer."""
    if kind == "attention":
        width = config.latent_size + config.shared_key_size
        return LayerSpec("attention", (TensorSpec("latent", ("token", "latent_then_shared_key"), (width,), "float32"),))
    head = config.kda_head_size
    return LayerSpec(
        "linear",
        (
            TensorSpec("conv", ("q_k_v_channel", "tap"), (3 * config.kda_size, config.conv_kernel - 1), "float32"),
            TensorSpec("recurrent", ("head", "key", "value"), (config.kda_heads, head, head), "float32"),
        ),
    )
