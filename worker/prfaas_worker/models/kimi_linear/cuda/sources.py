"""Where weights come from: a checkpoint's files, tensors in memory, or chance. Each fills memory that is there
already."""

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

# As the layer is initialised for training: A is spread over [1, 16], softplus(dt_bias) over [0.001, 0.1].
_DECAY_RATES = (1.0, 16.0)
_TIME_STEPS = (1e-3, 1e-1)


class Source(Protocol):
    """Gives every tensor by its public name, as a `Checkpoint` does."""

    def read(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target`, which has its shape, on any device and in any float type."""
        ...


class MemorySource:
    """Tensors that are in memory, by public name."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    def read(self, name: str, target: Tensor) -> None:
        """Copy a tensor."""
        target.copy_(self._tensors[name])


class RandomSource:
    """Weights by chance, of the size that training begins with: for measuring, where no checkpoint is at hand."""

    def __init__(self, device: torch.device, seed: int = 0):
        self._generator = torch.Generator(device).manual_seed(seed)

    def read(self, name: str, target: Tensor) -> None:
        """Draw a tensor; the device of `target` must be that of this source."""
        if name.endswith("A_log"):
            target.uniform_(*_DECAY_RATES, generator=self._generator).log_()
        elif name.endswith("dt_bias"):
            low, high = (math.log(math.expm1(step)) for step in _TIME_STEPS)
            target.uniform_(low, high, generator=self._generator)
        elif "norm" in name:
            target.fill_(1.0)
        elif name.endswith("bias"):
            target.zero_()
        else:
            target.normal_(0.0, 1.0 if "embed_tokens" in name else target.shape[-1] ** -0.5, generator=self._generator)
