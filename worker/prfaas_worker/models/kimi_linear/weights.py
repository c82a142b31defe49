"""Weights as the blocks of a layer ask for them: by name under a prefix, several joined into one matrix, scaled.

The matrices that make up the work, *products*, may be bf16 (see `precision`); all others are fp32.
Whatever is joined is made in place, one tensor of the checkpoint at a time, so that no more than a piece of a file
stands in memory beside the weights. The tensors may also be parameters in training: gradients flow to them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from prfaas_worker.models.kimi_linear.checkpoint import Checkpoint


class Weights:
    """Tensors by public name, seen from one prefix: `weights["q_proj"]` is <prefix>q_proj.weight, in fp32."""

    def __init__(
        self, tensors: Mapping[str, Tensor] | Checkpoint, products: torch.dtype = torch.float32, prefix: str = ""
    ):
        self._tensors = tensors
        self._products = products
        self._prefix = prefix

    def under(self, name: str) -> "Weights":
        """The same tensors seen from a deeper prefix."""
        return Weights(self._tensors, self._products, f"{self._prefix}{name}.")

    def raw(self, name: str) -> Tensor:
        """A tensor whose public name does not end in .weight."""
        if not isinstance(self._tensors, Checkpoint):
            return self._tensors[self._prefix + name]
        tensor = torch.empty(self._tensors.shape(self._prefix + name))
        self._tensors.read(self._prefix + name, tensor)
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.raw(f"{name}.weight")

    def product(self, names: Sequence[str], *, columns: Tensor | None = None) -> Tensor:
        """`joined` in the type of products."""
        return self._joined(names, columns, self._products)

    def joined(self, names: Sequence[str], *, columns: Tensor | None = None) -> Tensor:
        """Tensors one after the other along their first axis, their columns multiplied by `columns`."""
        return self._joined(names, columns, torch.float32)

    def _joined(self, names: Sequence[str], columns: Tensor | None, dtype: torch.dtype) -> Tensor:
        shapes = [self._shape(name) for name in names]
        joined = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype)
        for name, part in zip(names, joined.split([shape[0] for shape in shapes]), strict=True):
            self._copy(name, part)
        return joined if columns is None else joined.mul_(columns)

    def experts(self, pairs: Sequence[tuple[str, str]], shared: tuple[str, str], columns: Tensor) -> Tensor:
        """Each expert's two matrices [size, D], one below the other: products [experts, 2 size, D], times `columns`.

        The two `shared` matrices [n size, D] are n experts more, behind the others.
        """
        size, width = self._shape(pairs[0][0])
        count = len(pairs) + self._shape(shared[0])[0] // size
        stacked = torch.empty(count, 2, size, width, dtype=self._products)
        for target, pair in zip(stacked, pairs, strict=False):
            for half, name in zip(target, pair, strict=True):
                self._copy(name, half)
        for half, name in enumerate(shared):
            self._copy(name, stacked[len(pairs) :, half])
        for one in stacked:
            one.mul_(columns)  # one by one, since bf16 is multiplied in an fp32 copy
        return stacked.flatten(1, 2)

    def experts_transposed(self, names: Sequence[str], shared: str, size: int) -> Tensor:
        """Each expert's matrix [D, size], then `shared` [D, n size] as n more: products [experts, size, D]."""
        width, shared_size = self._shape(shared)
        stacked = torch.empty(len(names) * size + shared_size, width, dtype=self._products)
        for target, name in zip(stacked.split(size), names, strict=False):
            self._copy(name, target.T)
        self._copy(shared, stacked[len(names) * size :].T)
        return stacked.view(-1, size, width)

    def _shape(self, name: str) -> tuple[int, ...]:
        full = f"{self._prefix}{name}.weight"
        return self._tensors.shape(full) if isinstance(self._tensors, Checkpoint) else tuple(self._tensors[full].shape)

    def _copy(self, name: str, target: Tensor) -> None:
        """Fill a view of as many numbers as the tensor has."""
        full = f"{self._prefix}{name}.weight"
        if isinstance(self._tensors, Checkpoint):
            self._tensors.read(full, target)
        else:
            target.copy_(self._tensors[full].view(target.shape))
