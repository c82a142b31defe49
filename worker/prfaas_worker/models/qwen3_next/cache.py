"""Puts the layer objects of transformers' cache over our pages and slots, and states the shapes of Qwen3-Next's cache.

A model of transformers hands each layer's new keys and values, or its new state, to an object of the cache. The model
computes with what that object returns. Ours subclass those objects, as transformers chooses masks by their classes, but
hold nothing. Rows go to the sequence's pages and are gathered from there. States are in its slot. So prefix reuse,
checkpoints and transfers, which know only bytes, work as they do for our own model.

A state at length zero is none: transformers must be told, whatever bytes the slot holds. Decodes of unequal length: all
see as many rows as the longest, so masks hide what is not their own. What is hidden is zero, as uninitialised memory
may hold NaN, which no mask hides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from prfaas.errors import ConfigError
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache_spec import LayerSpec, TensorSpec
from prfaas_worker.models.base import Chunk


class _CacheGroup(NamedTuple):
    """Chunks that go through the model together: one of any length, or several of one token each. `slots` is [B];
    `pages` and `rows`, [B, tokens], are the places of new rows; `held` [B, n] lists the sequences' pages."""

    chunks: Sequence[Chunk]
    slots: Tensor
    starts: Tensor
    pages: Tensor
    rows: Tensor
    held: Tensor

    @property
    def only(self) -> Chunk | None:
        return self.chunks[0] if len(self.chunks) == 1 else None

    @property
    def longest(self) -> int:
        return max(chunk.start for chunk in self.chunks)


def _group_of(chunks: Sequence[Chunk], memory: CacheMemory) -> _CacheGroup:
    size, device = memory.geometry.page_tokens, memory.device
    slots = torch.tensor([chunk.slot for chunk in chunks], device=device)
    starts = torch.tensor([chunk.start for chunk in chunks], device=device)
    positions = starts.unsqueeze(1) + torch.arange(chunks[0].tokens, device=device)
    table = memory.table[slots]
    columns = memory.geometry.pages_for(max(chunk.end for chunk in chunks))
    return _CacheGroup(chunks, slots, starts, table.gather(1, positions // size), positions % size, table[:, :columns])


class _Rows(DynamicLayer):
    """Keys and values of all tokens, in pages."""

    def __init__(self, rows: Mapping[str, Tensor]):
        super().__init__()
        self._key, self._value = rows["key"], rows["value"]
        self.is_initialized = True

    def attach(self, group: _CacheGroup) -> None:
        """Serve these sequences, whose caches hold `starts` tokens."""
        self._group, self._length = group, group.longest

    def finish(self) -> None:
        """Do nothing: rows are written as they come."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new rows [B, head, tokens, dim]; return those of all tokens."""
        for tensor, states in ((self._key, key_states), (self._value, value_states)):
            tensor[self._group.pages, self._group.rows] = states.transpose(1, 2)
        is_whole = self._length == 0
        self._length += key_states.shape[2]
        if is_whole:
            return key_states, value_states
        return self._all_tokens(self._key), self._all_tokens(self._value)

    def get_seq_length(self) -> int:
        return self._length

    def _all_tokens(self, tensor: Tensor) -> Tensor:
        group = self._group
        pages = tensor.index_select(0, group.held.flatten())
        seen = pages.view(len(group.chunks), -1, *pages.shape[2:])[:, : self._length]
        if group.only is None:
            beyond = torch.arange(self._length, device=seen.device) > group.starts.unsqueeze(1)
            seen.masked_fill_(beyond[..., None, None], 0)
        return seen.transpose(1, 2)


class _State(LinearAttentionLayer):
    """Convolution and recurrent state, in the slot. transformers' own code changes a state in place: the state of one
    sequence stays in the slot, those of several are copied together, and back."""

    def __init__(self, states: Mapping[str, Tensor]):
        super().__init__()
        self._states = states["conv"], states["recurrent"]
        self.conv_kernel_size = {0: states["conv"].shape[-1]}
        self.is_conv_states_initialized = {0: True}
        self.is_recurrent_states_initialized = {0: True}

    def attach(self, group: _CacheGroup) -> None:
        """Serve these sequences, whose caches hold `starts` tokens."""
        # A slice gives a view, a tensor of indices a copy.
        only, self._slots = group.only, group.slots
        self._is_copy = only is None
        at = self._slots if only is None else slice(only.slot, only.slot + 1)
        self._attached = [states[at] for states in self._states]
        self.conv_states = {0: self._attached[0]}
        self.recurrent_states = {0: self._attached[1]}
        self.has_previous_state = {0: group.longest > 0}

    def finish(self) -> None:
        """Write copied states to the memory."""
        if self._is_copy:
            for states, copies in zip(self._states, self._attached, strict=True):
                states[self._slots] = copies


class PagedCache(Cache):
    """The cache of a model of transformers: one layer object a layer, all attached to one group."""

    layers: list[Any]

    def __init__(self, memory: CacheMemory):
        specs = enumerate(memory.geometry.layers)
        super().__init__(layers=[_Rows(memory.rows(i)) if spec.rows else _State(memory.states(i)) for i, spec in specs])
        self._memory = memory

    def attach(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Serve one chunk, or several of one token, each with tokens before it; return the model's arguments."""
        group = _group_of(chunks, self._memory)
        for layer in self.layers:
            layer.attach(group)
        # Of one sequence, transformers finds masks and positions by the length of the cache.
        return {} if group.only else {"attention_mask": self._masks(group), "position_ids": group.starts.unsqueeze(1)}

    def finish(self) -> None:
        for layer in self.layers:
            layer.finish()

    def _masks(self, group: _CacheGroup) -> dict[str, Tensor | None]:
        """Masks that hide other sequences' rows from a new token, by transformers' names of layer types. Those of
        attention [B, 1, 1, keys] are added to scores [B, head, query, key]."""
        is_own = torch.arange(group.longest + 1, device=self._memory.device) <= group.starts.unsqueeze(1)
        added = torch.where(is_own, 0.0, torch.finfo(torch.float32).min)[:, None, None]
        return {"linear_attention": None, "full_attention": added}


def layer_specs(config: Any) -> tuple[LayerSpec, ...]:
    """Return each layer's shapes, by transformers' configuration. Raises ConfigError if a layer keeps another cache, or
    no layer keeps rows."""
    specs = {"linear_attention": _state_spec(config), "full_attention": _row_spec(config)}
    if other := set(config.layer_types) - specs.keys():
        raise ConfigError(f"layer_types names {', '.join(sorted(other))}; served are {' and '.join(specs)}")
    if "full_attention" not in config.layer_types:
        raise ConfigError("no layer keeps rows for every token, and pages are made of rows: it cannot be served")
    return tuple(specs[kind] for kind in config.layer_types)


def _row_spec(config: Any) -> LayerSpec:
    axes, shape = ("token", "head", "dim"), (config.num_key_value_heads, config.head_dim)
    return LayerSpec(rows=tuple(TensorSpec(name, axes, shape, "float32") for name in ("key", "value")))


def _state_spec(config: Any) -> LayerSpec:
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key + heads * value
    return LayerSpec(
        state=(
            TensorSpec("conv", ("channel", "tap"), (channels, config.linear_conv_kernel_dim), "float32"),
            TensorSpec("recurrent", ("head", "key", "value"), (heads, key, value), "float32"),
        )
    )
