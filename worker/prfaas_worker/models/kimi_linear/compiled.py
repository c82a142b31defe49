"""Decode steps of a few fixed shapes, compiled: small models spend most of a step on calling small operations.

A shape is a number of sequences and of tokens. The compiled part is a function without side effects, from gathered rows
and states to new ones; a step that is smaller than its shape is filled up with copies of its first sequence, whose
results go nowhere. Compilation takes some 20 seconds a shape and a C++ compiler, so it is asked for, and done at once.
"""

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas.errors import ConfigError
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.models.base import Batch, Decodes
from prfaas_worker.models.kimi_linear.latent import LatentAttention
from prfaas_worker.models.kimi_linear.layers import DENSE_PAIRS

if TYPE_CHECKING:
    from prfaas_worker.models.kimi_linear.model import KimiLinear


class StepShape(NamedTuple):
    """The most sequences and the most tokens of each that a compiled step takes."""

    sequences: int
    tokens: int


class CompiledDecodes:
    """Compiled steps over one memory."""

    def __init__(self, model: "KimiLinear", memory: CacheMemory, shapes: Sequence[StepShape]):
        """Compile every shape.

        Raises:
            ConfigError: there is no C++ compiler, or a shape has more sequences than go through all experts at once.

        """
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
        """The smallest shape that takes this batch, which must be of decodes alone."""
        if batch.chunks or batch.decodes is None:
            return None
        count, tokens = batch.decodes.slots.shape[0], batch.decodes.max_length + 1
        fitting = (shape for shape in self._shapes if count <= shape.sequences and tokens <= shape.tokens)
        return next(fitting, None)

    def forward(self, tokens: Tensor, decodes: Decodes, shape: StepShape) -> Tensor:
        """Run decodes that the shape takes, as `KimiLinear.forward` does."""
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
        """What is compiled: hidden states, each MLA layer's new rows and each KDA layer's new states."""
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
