"""The shape of a family's cache in our memory, found by looking at transformers' own cache after a few tokens."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from prfaas.errors import ConfigError
from prfaas_worker.cache_spec import LayerSpec, TensorSpec
from prfaas_worker.models.generic.cache import OURS, numbered

_ROW_AXES = ("token", "head", "dim")
_WINDOW_AXES = ("window", "head", "dim")
_CONV_AXES = ("channel", "tap")
# What the last two are differs by family (key by value, or channel by state). Two replicas of one fingerprint agree on
# it without a word, and to others nothing may be sent.
_RECURRENT_AXES = ("head", "recurrent_1", "recurrent_2")


def pattern_of(config: Any) -> DynamicCache:
    """transformers' own empty cache for a text model's configuration.

    Raises:
        ConfigError: a layer keeps what we have no place for, or no layer keeps rows.

    """
    pattern = DynamicCache(config=config)
    for index, layer in enumerate(pattern.layers):
        if type(layer) not in OURS:
            kind = type(layer).__name__
            raise ConfigError(f"layer {index} has a cache of the kind {kind}, which has no form in our memory")
    if not any(_keeps_rows(layer) for layer in pattern.layers):
        raise ConfigError("no layer keeps rows for every token, and pages are made of rows: it cannot be served")
    return pattern


def layer_specs(filled: Cache) -> tuple[LayerSpec, ...]:
    """The shape of each layer, from transformers' own cache after it has seen a few tokens.

    Raises:
        ConfigError: the model did not use a layer of its cache.

    """
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
        TensorSpec(numbered(kind, i), axes, tuple(tensor.shape[1:]), _dtype(tensor))
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
    """Heads and width of [1, head, token, dim]."""
    return tensor.shape[1], tensor.shape[3]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
