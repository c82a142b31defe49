"""Describes the cache of a model, layer by layer: names, axes, shapes and types of its tensors.

A model states these specs, the cache memory and the transfer's manifest are made from them. Axis names belong to every
tensor: where two axes have the same length, a swap would be silent.
"""

import math
from typing import NamedTuple

import torch


class TensorSpec(NamedTuple):
    """One tensor of a layer's cache; `dtype` is torch's name, such as "float32". `axes` names every axis. A row tensor
    grows along axes[0] == "token", which `shape` leaves out; a state tensor has a fixed `shape`."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of a state tensor, or of one token in a row tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


class LayerSpec(NamedTuple):
    """The cache of one layer: row tensors, which grow with the tokens, and state tensors of fixed size."""

    rows: tuple[TensorSpec, ...] = ()
    state: tuple[TensorSpec, ...] = ()
