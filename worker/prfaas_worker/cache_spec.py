"""Describes the cache of a model, layer by layer: names, axes, shapes and types of its tensors.

A model states these specs, the cache memory and the transfer's manifest are made from them. Axis names belong to every
tensor: where two axes have the same length, a swap would be silent.
"""

import math
from typing import NamedTuple

import torch


class TensorSpec(NamedTuple):
    """One tensor of a layer's cache.

    `axes` names every axis. A row tensor grows along axes[0] == "token", which `shape` leaves out; a state tensor has a
    fixed `shape` with one entry an axis. `dtype` is torch's name, for example "float32".
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of a state tensor, or of one token in a row tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


class LayerSpec(NamedTuple):
    """The cache of one layer: tensors that grow with the tokens, and tensors that stand for all of them."""

    rows: tuple[TensorSpec, ...] = ()
    state: tuple[TensorSpec, ...] = ()
