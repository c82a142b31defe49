"""Kimi Linear behind the engine's `Model` interface: layer by layer over one step's batch, in fp32, no gradients."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.models.base import AttentionKind, Batch, Chunk, LayerSpec, TensorSpec
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig, read_config
from prfaas_worker.models.kimi_linear.layers import (
    DeltaAttention,
    LatentAttention,
    MixtureOfExperts,
    Mlp,
    Projected,
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

    attention_kind: AttentionKind = "mla_attention"

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

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def bind(self, memory: CacheMemory) -> None:
        """Use this memory for all that follows."""
        self._memory = memory

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Run one step; returns the normed hidden states of each chunk's last token and of each decode."""
        x = F.embedding(batch.tokens, self.embedding)
        for index, block in enumerate(self.blocks):
            x = block.finish(x, self._attend(index, block.attention_input(x), batch))
            if on_layer is not None:
                on_layer(index)
        return self.final_norm(_last_of_each(x, batch))

    def final_norm(self, x: Tensor) -> Tensor:
        """The residual stream after the last layer, normed: what `logits` takes."""
        return rms_norm(x, self._norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states [..., hidden_size]."""
        return F.linear(hidden, self._head)

    def _attend(self, index: int, x: Tensor, batch: Batch) -> Tensor:
        attention = self.blocks[index].attention
        if isinstance(attention, LatentAttention):
            return self._attend_latent(attention, self._memory.rows(index)["latent"], x, batch)
        return self._attend_delta(attention, self._memory.states(index), x, batch)

    def _attend_delta(self, kda: DeltaAttention, states: Mapping[str, Tensor], x: Tensor, batch: Batch) -> Tensor:
        """KDA over a batch [N, D]; states are changed in place."""
        projected, outputs = kda.project(x), []
        conv, recurrent = states["conv"], states["recurrent"]
        for chunk, span in _spans(batch):
            one = Projected(*(part.unsqueeze(0) for part in projected.of(span)))
            slot = slice(chunk.slot, chunk.slot + 1)
            o, conv[slot], recurrent[slot] = kda.mix_chunk(one, conv[slot], recurrent[slot])
            outputs.append(o[0])
        if (decodes := batch.decodes) is not None:
            rest = projected.of(slice(x.shape[0] - decodes.slots.shape[0], None))
            o, conv[decodes.slots], recurrent[decodes.slots] = kda.mix_step(
                rest, conv[decodes.slots], recurrent[decodes.slots]
            )
            outputs.append(o)
        return kda.output(outputs[0] if len(outputs) == 1 else torch.cat(outputs), projected.gate)

    def _attend_latent(self, mla: LatentAttention, pages: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """MLA over a batch [N, D]; the new rows are written into pages [num_pages, page_tokens, width]."""
        q, rows, outputs = mla.queries(x), mla.rows(x), []
        for chunk, span in _spans(batch):
            table = self._memory.table[chunk.slot, : self._memory.geometry.pages_for(chunk.end)]
            self._write(pages, table, chunk.start, rows[span])
            seen = pages[table].flatten(0, 1)[: chunk.end]
            outputs.append(mla.attend_chunk(q[span].unsqueeze(0), seen.unsqueeze(0))[0])
        if (decodes := batch.decodes) is not None:
            count = decodes.slots.shape[0]
            columns = self._memory.geometry.pages_for(decodes.max_length + 1)
            table = self._memory.table[decodes.slots, :columns]
            page_tokens = pages.shape[1]
            own = table.gather(1, (decodes.lengths // page_tokens).unsqueeze(1)).squeeze(1)
            pages[own, decodes.lengths % page_tokens] = rows[x.shape[0] - count :]
            seen = pages[table].flatten(1, 2)
            outputs.append(mla.attend_step(q[x.shape[0] - count :], seen, decodes.lengths + 1))
        return mla.output(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def _write(self, pages: Tensor, table: Tensor, start: int, rows: Tensor) -> None:
        """Put rows [T, width] at tokens `start` onwards of the sequence with this page table."""
        at = torch.arange(start, start + rows.shape[0], device=rows.device)
        pages[table[at // pages.shape[1]], at % pages.shape[1]] = rows


def _spans(batch: Batch) -> Iterator[tuple[Chunk, slice]]:
    """Each chunk with its place among the batch's tokens."""
    at = 0
    for chunk in batch.chunks:
        yield chunk, slice(at, at + chunk.tokens)
        at += chunk.tokens


def _last_of_each(x: Tensor, batch: Batch) -> Tensor:
    """Of x [N, D] the last token of each chunk and every decode: [outputs, D]."""
    ends = [span.stop - 1 for _, span in _spans(batch)]
    return torch.cat([x[ends], x[ends[-1] + 1 :]]) if ends else x


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
