"""Puts Kimi Linear behind the engine's `Model` interface: layer by layer over one step's batch, without gradients.

One model serves every device. Its weights and its cache lie where `load` is told. All arithmetic is plain torch (on an
NVIDIA GPU the delta rule may be fla's, see `delta_rule`). The cache is fp32 everywhere, so instances on different
devices take each other's caches. CPUs are what it is measured and tuned on. On a GPU it is meant to be right, not fast,
and has not been run.

On a CPU a small model spends most of a decode step on calling small operations. So steps of decodes alone can be
compiled for a few fixed shapes: a number of sequences, and of tokens of each. The compiled part is a function without
side effects, from gathered rows and states to new ones. A step that is smaller than its shape is filled up with copies
of its first sequence, whose results go nowhere.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas.errors import ConfigError
from prfaas.wire.kvevents import AttentionSpecKind
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache_spec import LayerSpec, TensorSpec
from prfaas_worker.memory import check_weights_fit
from prfaas_worker.models.base import Batch, Decodes
from prfaas_worker.models.kimi_linear.checkpoint import SafetensorsCheckpoint, Weights
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig, read_config
from prfaas_worker.models.kimi_linear.delta_rule import TORCH_RULE, DeltaRule, choose_rule
from prfaas_worker.models.kimi_linear.kda import DeltaAttention
from prfaas_worker.models.kimi_linear.layers import DENSE_PAIRS, MixtureOfExperts, Mlp, least_norm, norm_scale, unit_rms
from prfaas_worker.models.kimi_linear.mla import LatentAttention
from prfaas_worker.models.kimi_linear.paged_batch import PagedBatch
from prfaas_worker.models.kimi_linear.precision import (
    PrecisionFacts,
    choose,
    divergence,
    instructions,
    probe_tokens,
    speedups,
    weight_bytes,
)
from prfaas_worker.options import Dtype

log = logging.getLogger(__name__)

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


class StepShape(NamedTuple):
    """The most sequences, and the most tokens of each, of a compiled step."""

    sequences: int
    tokens: int


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
        self.blocks = list(_blocks(config, weights, self.rule))
        self._compiled: _CompiledDecodes | None = None
        self.embedding = weights["model.embed_tokens"]
        self._least = least_norm(config.rms_norm_eps, config.hidden_size, weights.device)
        self._norm, self._head = norm_scale(weights["model.norm"]), weights["lm_head"]

    @classmethod
    def load(cls, directory: Path, dtype: Dtype = "float32", device: str = "cpu") -> "KimiLinear":
        """Read config.json and model*.safetensors onto a torch device. Raises ConfigError if the checkpoint is not
        supported. With dtype "auto", `precision` chooses the type of products: measured on a CPU, else bfloat16."""
        config = read_config(directory)
        checkpoint = SafetensorsCheckpoint(directory, config)
        measured = dtype == "auto" and device == "cpu"
        facts = PrecisionFacts(dtype, instructions() if device == "cpu" else frozenset({f"the device is {device}"}))
        choice = choose(facts)
        if measured and choice.dtype == torch.bfloat16:
            facts = facts._replace(speedups=speedups(config))
            choice = choose(facts)
        if device == "cpu":
            check_weights_fit(weight_bytes(config, choice.dtype))
        model = cls(config, checkpoint, "", choice.dtype, device)
        if measured and choice.dtype == torch.bfloat16:
            exact = _blocks(config, Weights(checkpoint), choose_rule(model.device, torch.float32))
            choice = choose(facts._replace(divergence=model.divergence_from(exact)))
            if choice.dtype != torch.bfloat16:
                del model  # or both would be in memory
                check_weights_fit(weight_bytes(config, choice.dtype))
                model = cls(config, checkpoint, "", choice.dtype, device)
        log.info("matrix products in %s: %s", str(choice.dtype).removeprefix("torch."), choice.reason)
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
    def compile_decodes(self, shapes: Sequence[StepShape]) -> None:
        """Compile steps of decodes alone for these shapes, after `bind`; about 20 seconds a shape. Does nothing off the
        CPU. Raises ConfigError if there is no C++ compiler, or a shape is too wide."""
        if self.device.type != "cpu":
            log.warning("decode steps are compiled only on a CPU, and this model runs on %s", self.device)
            return
        self._compiled = _CompiledDecodes(self, self._memory, shapes)

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        if self._compiled is not None and on_layer is None and batch.decodes is not None:
            shape = self._compiled.shape_for(batch)
            if shape is not None:
                return self._compiled.forward(batch.tokens, batch.decodes, shape)
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

    @torch.inference_mode()
    def divergence_from(self, layers: Iterable[Layer]) -> float:
        """Mean divergence, in nats, of this model's next tokens when `layers` replace its own. Layers are taken one at
        a time, so that both types need not fit into memory together."""
        expected, found = (self._next_tokens(each) for each in (layers, self.blocks))
        return divergence(expected, found)

    def _next_tokens(self, layers: Iterable[Layer]) -> Tensor:
        """Log probabilities after each token of the probe [PROBE_TOKENS, vocab_size]."""
        x = F.embedding(probe_tokens(self.vocab_size).unsqueeze(0), self.embedding)
        for layer in layers:
            x = x + layer.attention.prefill(layer.normed(x))
            x = x + layer.feed_forward(layer.normed(x))
        return self.logits(self.final_norm(x))[0].log_softmax(-1)


class _CompiledDecodes:
    def __init__(self, model: KimiLinear, memory: CacheMemory, shapes: Sequence[StepShape]):
        """Compile every shape. Raises ConfigError without a C++ compiler, or for a shape with too many sequences."""
        if not (shutil.which("g++") or shutil.which("clang++")):
            raise ConfigError("decode steps cannot be compiled: install g++, or leave compilation out")
        most = DENSE_PAIRS // model.config.num_experts
        if (widest := max(shape.sequences for shape in shapes)) > most:
            raise ConfigError(f"decode steps can be compiled for up to {most} sequences of this model, not {widest}")
        self._model, self._memory = model, memory
        page_tokens = memory.geometry.page_tokens
        self._shapes = sorted(StepShape(s, -(-t // page_tokens) * page_tokens) for s, t in shapes)
        self._latent = [i for i, block in enumerate(model.blocks) if isinstance(block.attention, LatentAttention)]
        self._delta = [i for i in range(len(model.blocks)) if i not in self._latent]
        self._run = torch.compile(self._layers, dynamic=False, fullgraph=True)
        for shape in self._shapes:
            # Not one tensor twice: that would be compiled as another case.
            tokens, lengths = (torch.zeros(shape.sequences, dtype=torch.int64) for _ in range(2))
            self._run(tokens, lengths, *self._gathered(tokens, lengths, shape))

    def shape_for(self, batch: Batch) -> StepShape | None:
        """The smallest shape that fits this batch of decodes."""
        if batch.chunks or batch.decodes is None:
            return None
        count, tokens = batch.decodes.slots.shape[0], batch.decodes.max_length + 1
        fitting = (shape for shape in self._shapes if count <= shape.sequences and tokens <= shape.tokens)
        return next(fitting, None)

    def forward(self, tokens: Tensor, decodes: Decodes, shape: StepShape) -> Tensor:
        count = tokens.shape[0]
        fill = torch.arange(shape.sequences)
        fill[count:] = 0
        slots, lengths = decodes.slots[fill], decodes.lengths[fill]
        hidden, rows, states = self._run(tokens[fill], lengths, *self._gathered(slots, lengths, shape))
        slots, lengths = decodes.slots, decodes.lengths
        page_tokens = self._memory.geometry.page_tokens
        own = self._memory.table[slots, lengths // page_tokens]
        for layer, new in zip(self._latent, rows, strict=True):
            self._memory.rows(layer)["latent"][own, lengths % page_tokens] = new[:count]
        for layer, (conv, recurrent) in zip(self._delta, states, strict=True):
            self._memory.states(layer)["conv"].index_copy_(0, slots, conv[:count])
            self._memory.states(layer)["recurrent"].index_copy_(0, slots, recurrent[:count])
        return hidden[:count]

    def _gathered(self, slots: Tensor, lengths: Tensor, shape: StepShape) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Rows [B, N, width] of each MLA layer, zeros where a sequence has none, and both states of each KDA layer."""
        columns = shape.tokens // self._memory.geometry.page_tokens
        table = self._memory.table[slots, :columns].flatten()
        absent = (torch.arange(shape.tokens) >= lengths.unsqueeze(1)).unsqueeze(2)
        rows = []
        for layer in self._latent:
            pages = self._memory.rows(layer)["latent"]
            seen = pages.index_select(0, table).view(len(slots), shape.tokens, -1)
            rows.append(seen.masked_fill_(absent, 0))
        states = [
            [self._memory.states(layer)[name].index_select(0, slots) for name in ("conv", "recurrent")]
            for layer in self._delta
        ]
        return rows, states

    def _layers(
        self, tokens: Tensor, lengths: Tensor, rows: list[Tensor], states: list[list[Tensor]]
    ) -> tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Run all layers, as they are compiled: hidden states, new rows of MLA layers, new states of KDA layers."""
        x = F.embedding(tokens, self._model.embedding)
        places = torch.arange(rows[0].shape[1]) if rows else torch.arange(0)
        own = (places == lengths.unsqueeze(1)).unsqueeze(2)
        beyond = ((places > lengths.unsqueeze(1)) * -1e30).unsqueeze(1)
        new_rows, new_states = [], []
        for block in self._model.blocks:
            attention, normed = block.attention, block.normed(x)
            if isinstance(attention, LatentAttention):
                q, row = attention.project_step(normed)
                seen = torch.where(own, row.unsqueeze(1), rows[len(new_rows)])
                attended = attention.output_step(attention.weighted(attention.scores(q, seen, beyond), seen))
                new_rows.append(row)
            else:
                conv, recurrent = (state.clone() for state in states[len(new_states)])
                projected = attention.project(normed)
                attended = attention.output(attention.mix_step(projected, conv, recurrent), projected.gate)
                new_states.append((conv, recurrent))
            x = x + attended
            x = x + block.feed_forward(block.normed(x))
        return self._model.final_norm(x), new_rows, new_states


def _blocks(config: KimiLinearConfig, weights: Weights, rule: DeltaRule) -> Iterator[Layer]:
    return (Layer(config, i, weights.under(f"model.layers.{i}"), rule) for i in range(len(config.layer_kinds)))


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
