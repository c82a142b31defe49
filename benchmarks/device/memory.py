"""Host memory as an engine shares it with its mover."""

import mmap
import os
from typing import Final

import torch

from prfaas_vllm.device import pin

_PINNED: Final = list[mmap.mmap]()
"""A driver keeps the pages of what it has pinned: another mapping at the same address would not be reached."""


def shared_memory(count_bytes: int, device: torch.device | None = None) -> mmap.mmap:
    """Return a mapping of a file in memory; the device reaches it by itself if one is given."""
    descriptor = os.memfd_create("prfaas-bench")
    try:
        os.ftruncate(descriptor, count_bytes)
        made = mmap.mmap(descriptor, count_bytes)
    finally:
        os.close(descriptor)
    if device is not None:
        _PINNED.append(made)
        pin(memoryview(made), device)
    return made


def synchronize(device: torch.device) -> None:
    """Wait for all that this thread has started on the device."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
