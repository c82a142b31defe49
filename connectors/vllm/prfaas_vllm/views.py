"""vLLM's caches as they lie in a device's memory: a layer's tensors by block, whatever the order of their axes.

Nothing here imports vLLM.
"""

from typing import Any

import torch

from prfaas.errors import ConfigError


def by_block(name: str, cache: Any, num_blocks: int) -> list[torch.Tensor]:
    """Return a layer's tensors as [blocks, elements], views of the same memory."""
    tensors = list(cache) if isinstance(cache, (list, tuple)) else [cache]
    found: list[torch.Tensor] = []
    for tensor in tensors:
        # Some of vLLM's backends put keys and values behind one another on a first axis of two.
        if tensor.shape[0] == 2 and tensor.dim() > 2 and tensor.shape[0] != num_blocks:
            found += list(tensor.unbind(0))  # keys and values apart
        else:
            found.append(tensor)
    return [_flat_by_block(name, tensor, num_blocks) for tensor in found]


def _flat_by_block(name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    if tensor.shape[0] % num_blocks:
        raise ConfigError(f"the cache of {name} has shape {tuple(tensor.shape)} for {num_blocks} blocks")
    held = tensor.permute(0, *axes_as_held(tensor))
    flat = held.flatten(1) if held.dim() > 1 else held.unsqueeze(1)
    if flat.data_ptr() != tensor.data_ptr():
        raise ConfigError(f"the cache of {name} is not contiguous within a block: strides {tensor.stride()}")
    if ratio := tensor.shape[0] // num_blocks - 1:  # the kernel's blocks are smaller than the manager's
        flat = flat.view(num_blocks, (ratio + 1) * flat.shape[1])
    return flat


def axes_as_held(tensor: torch.Tensor) -> list[int]:
    """Return the axes behind the blocks, outermost in memory first: kernels for GPUs want tokens before heads."""
    return sorted(range(1, tensor.dim()), key=lambda axis: -tensor.stride(axis))
