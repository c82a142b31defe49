"""Puts the layer objects of transformers' cache over our pages and slots, and finds the shapes that a family needs.

A model of transformers hands each layer's new keys and values, or its new state, to an object of the cache. The model
computes with what that object returns. Ours subclass those objects, as transformers chooses masks by their classes, but
hold nothing. Rows go to the sequence's pages and are gathered from there. Windows and states are in its slot. So prefix
reuse, checkpoints and transfers, which know only bytes, work for every family.

The hard part is a window that is not full yet. Its state has room for the window - 1 tokens that a next token sees
beside itself, the oldest first. The number of valid ones follows from the sequence's length, which is not stored. A
state at length zero is none: transformers must be told, whatever bytes the slot holds. Decodes of unequal length: all
see as many rows as the longest, so masks hide what is not their own. What is hidden is zero, as uninitialised memory
may hold NaN, which no mask hides.

The shapes are found by looking at transformers' own cache after a few tokens (`pattern_of`, `layer_specs`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from prfaas.errors import ConfigError
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache_spec import LayerSpec, TensorSpec
from prfaas_worker.models.base import Chunk

_ROW_AXES = ("token", "head", "dim")
_WINDOW_AXES = ("window", "head", "dim")
_CONV_AXES = ("channel", "tap")
# The last two differ by family (key by value, or channel by state). Replicas of one fingerprint agree on them,
# and transfers need equal fingerprints.
_RECURRENT_AXES = ("head", "recurrent_1", "recurrent_2")


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


class _Layer:
    """The base of our layers: bound to the memory once, and attached to one group after the other."""

    def bind(self, memory: CacheMemory, index: int) -> None:
        """Keep views of the memory of the model's `index`-th layer."""

    def attach(self, group: _CacheGroup) -> None:
        """Serve these sequences, whose caches hold `starts` tokens."""

    def finish(self) -> None:
        """Write pending rows and states to the memory."""


class _Rows(_Layer):
    """Keys and values of all tokens, in pages."""

    def bind(self, memory: CacheMemory, index: int) -> None:
        super().bind(memory, index)
        rows = memory.rows(index)
        self._tensors = rows["key"], rows["value"]
        self.is_initialized = True

    def attach(self, group: _CacheGroup) -> None:
        super().attach(group)
        self._group, self._length = group, group.longest

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, ...]:
        """Write new rows [B, head, tokens, dim]; return those of all tokens."""
        group, new = self._group, (key_states, value_states)
        for tensor, states in zip(self._tensors, new, strict=True):
            tensor[group.pages, group.rows] = states.transpose(1, 2)
        is_whole = self._length == 0
        self._length += key_states.shape[2]
        return new if is_whole else tuple(map(self._all_tokens, self._tensors))

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


class _Window(_Layer):
    """Keys and values of the last tokens, in the slot."""

    sliding_window: int

    def bind(self, memory: CacheMemory, index: int) -> None:
        super().bind(memory, index)
        states = memory.states(index)
        self._tensors = states["window_key"], states["window_value"]
        self.is_initialized = True

    def attach(self, group: _CacheGroup) -> None:
        super().attach(group)
        self._group, self.cumulative_length = group, group.longest

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, ...]:
        """Keep the last of old and new rows [B, head, tokens, dim]; return all held rows, and the new ones. Of several
        sequences, each gets as many held rows as fit into a window."""
        self.cumulative_length += key_states.shape[2]
        shift = self._shift_one if self._group.only else self._shift_all
        return tuple(map(shift, self._tensors, (key_states, value_states)))

    def _shift_one(self, tensor: Tensor, states: Tensor) -> Tensor:
        chunk, room = self._group.chunks[0], self.sliding_window - 1
        window, held, kept = tensor[chunk.slot], min(chunk.start, room), min(chunk.end, room)
        full = torch.cat([window[:held].transpose(0, 1).unsqueeze(0), states], dim=2)
        window[:kept] = full[0, :, full.shape[2] - kept :].transpose(0, 1)
        return full

    def _shift_all(self, tensor: Tensor, states: Tensor) -> Tensor:
        room, starts, new = self.sliding_window - 1, self._group.starts, states.transpose(1, 2)
        window = tensor[self._group.slots]
        beyond = torch.arange(room, device=window.device) >= starts.unsqueeze(1)
        window.masked_fill_(beyond[..., None, None], 0)
        full = torch.cat([window, new], dim=1)
        is_full = (starts >= room)[:, None, None, None]
        tensor[self._group.slots] = torch.where(is_full, full[:, 1:], window)
        tensor[self._group.slots, starts.clamp(max=room - 1)] = new[:, 0]
        return full.transpose(1, 2)


class _State(_Layer):
    """Convolution and recurrent states, in the slot. transformers' own code changes a state in place: the state of one
    sequence stays in the slot, those of several are copied together, and back."""

    number_of_states: int

    def bind(self, memory: CacheMemory, index: int) -> None:
        super().bind(memory, index)
        states, numbers = memory.states(index), range(self.number_of_states)
        self._convs = {i: states.get(_numbered("conv", i)) for i in numbers}
        self._recurrents = {i: states.get(_numbered("recurrent", i)) for i in numbers}
        self.conv_kernel_size = {i: None if conv is None else conv.shape[-1] for i, conv in self._convs.items()}
        self.is_conv_states_initialized = {i: conv is not None for i, conv in self._convs.items()}
        self.is_recurrent_states_initialized = {i: state is not None for i, state in self._recurrents.items()}

    def attach(self, group: _CacheGroup) -> None:
        super().attach(group)
        # A slice gives a view, a tensor of indices a copy.
        only, self._slots = group.only, group.slots
        self._is_copy = only is None
        at = self._slots if only is None else slice(only.slot, only.slot + 1)
        self.conv_states = {i: None if conv is None else conv[at] for i, conv in self._convs.items()}
        self.recurrent_states = {i: None if state is None else state[at] for i, state in self._recurrents.items()}
        self.has_previous_state = dict.fromkeys(self._convs, group.longest > 0)

    def finish(self) -> None:
        super().finish()
        if self._is_copy:
            for all_slots, copies in ((self._convs, self.conv_states), (self._recurrents, self.recurrent_states)):
                for i, copy in copies.items():
                    if (tensor := all_slots[i]) is not None and copy is not None:
                        tensor[self._slots] = copy


# By transformers' class, which must be it exactly: a subclass may keep more.
_KEPT: dict[type, tuple[type[_Layer], ...]] = {
    DynamicLayer: (_Rows,),
    DynamicSlidingWindowLayer: (_Window,),
    LinearAttentionLayer: (_State,),
    LinearAttentionAndFullAttentionLayer: (_State, _Rows),
    LinearAttentionAndSlidingWindowAttentionLayer: (_State, _Window),
    DummyLayer: (_Layer,),
}
_OURS = {theirs: type(f"Paged{theirs.__name__}", (*ours, theirs), {}) for theirs, ours in _KEPT.items()}


class PagedCache(Cache):
    """The cache of a model of transformers: one layer object a layer, all attached to one group."""

    layers: list[Any]

    def __init__(self, pattern: Cache, memory: CacheMemory):
        """Take the kinds and sizes of layers from `pattern`, transformers' own cache of the same model."""
        super().__init__(layers=[_ours(layer) for layer in pattern.layers])
        self._memory = memory
        for index, layer in enumerate(self.layers):
            layer.bind(memory, index)

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
        """Masks that hide other sequences' rows from a new token, by transformers' names of layer types."""
        starts, device = group.starts.unsqueeze(1), self._memory.device
        masks: dict[str, Tensor | None] = {"linear_attention": None, "conv": None, "sliding_attention": None}
        masks["full_attention"] = _additive(torch.arange(group.longest + 1, device=device) <= starts)
        if windows := [layer.sliding_window for layer in self.layers if isinstance(layer, _Window)]:
            at = torch.arange(windows[0], device=device)
            masks["sliding_attention"] = _additive((at < starts) | (at == windows[0] - 1))
        return masks


def _numbered(kind: str, index: int) -> str:
    """Name of a layer's state; further states of a kind get a number."""
    return kind if index == 0 else f"{kind}_{index}"


def _ours(layer: Any) -> Any:
    sizes = {name: getattr(layer, name) for name in ("sliding_window", "number_of_states") if hasattr(layer, name)}
    return _OURS[type(layer)](**sizes)


def _additive(is_seen: Tensor) -> Tensor:
    """A mask [B, keys] in the form of transformers' attention: added to scores [B, head, query, key]."""
    return torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[:, None, None]


def pattern_of(config: Any) -> DynamicCache:
    """Return transformers' own empty cache for a text model's configuration. Raises ConfigError if a layer keeps an
    unsupported cache, or no layer keeps rows."""
    pattern = DynamicCache(config=config)
    for index, layer in enumerate(pattern.layers):
        if type(layer) not in _OURS:
            kind = type(layer).__name__
            raise ConfigError(f"layer {index} has a cache of the kind {kind}, which has no form in our memory")
    if not any(_keeps_rows(layer) for layer in pattern.layers):
        raise ConfigError("no layer keeps rows for every token, and pages are made of rows: it cannot be served")
    return pattern


def layer_specs(filled: Cache) -> tuple[LayerSpec, ...]:
    """Return each layer's shapes, from transformers' own cache after a few tokens. Raises ConfigError if the model did
    not use a layer of its cache."""
    return tuple(_layer_spec(index, layer) for index, layer in enumerate(filled.layers))


def _keeps_rows(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)


def _layer_spec(index: int, layer: Any) -> LayerSpec:
    rows, state = [], []
    if isinstance(layer, LinearAttentionLayer):
        state += _state_specs(index, layer)
    if isinstance(layer, DynamicSlidingWindowLayer):
        room = layer.sliding_window - 1
        state += [
            TensorSpec(f"window_{name}", _WINDOW_AXES, (room, *_row_shape(tensor)), _dtype(tensor))
            for name, tensor in _keys_and_values(index, layer)
        ]
    if _keeps_rows(layer):
        rows += [
            TensorSpec(name, _ROW_AXES, _row_shape(tensor), _dtype(tensor))
            for name, tensor in _keys_and_values(index, layer)
        ]
    return LayerSpec(tuple(rows), tuple(state))


def _state_specs(index: int, layer: LinearAttentionLayer) -> list[TensorSpec]:
    kinds = (("conv", _CONV_AXES, layer.conv_states), ("recurrent", _RECURRENT_AXES, layer.recurrent_states))
    specs = [
        TensorSpec(_numbered(kind, i), axes, tuple(tensor.shape[1:]), _dtype(tensor))
        for kind, axes, tensors in kinds
        for i, tensor in tensors.items()
        if tensor is not None
    ]
    if not specs:
        raise ConfigError(f"layer {index} should keep a state, and the model gave it none")
    return specs


def _keys_and_values(index: int, layer: Any) -> Sequence[tuple[str, Tensor]]:
    if layer.keys is None or layer.values is None:
        raise ConfigError(f"layer {index} should keep keys and values, and the model gave it none")
    return ("key", layer.keys), ("value", layer.values)


def _row_shape(tensor: Tensor) -> tuple[int, ...]:
    return tensor.shape[1], tensor.shape[3]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
