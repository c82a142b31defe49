"""A rank's cache groups, and copies between their blocks and plain memory.

Copies take the stream of the thread that makes them, and return when they are made. On an accelerator one block goes
straight between the two memories, so no kernel is started for a state.

Nothing here imports vLLM.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from prfaas.errors import PeerError
from prfaas.wire.transfer import LayerGroup
from prfaas_vllm.device import CopyStream
from prfaas_vllm.ranks import ByteRun, HeadMap, RankOf

FRAME_BYTES = 4 << 20
"""Blocks of one layer leave in frames of about this size at most."""


class TensorCut(NamedTuple):
    """Where a slice's bytes of a tensor lie in a block, and in the slice, which has so many bytes a block."""

    held: Sequence[ByteRun]
    cut: Sequence[ByteRun]
    cut_bytes: int


class VllmGroup(NamedTuple):
    """One transfer group: its number among vLLM's groups, the tokens of its blocks, and of each layer index its tensors
    as [blocks, bytes].

    `heads` tells of each tensor what its bytes are; empty if that is not known. `describe` gives the `spec` of a part.
    """

    number: int
    page_tokens: int
    layout: LayerGroup
    tensors: Mapping[int, Sequence[torch.Tensor]]
    heads: tuple[HeadMap, ...]
    describe: Callable[[RankOf], str]

    def blocks_of(self, block_ids: Sequence[int], start_token: int, tokens: int) -> list[int]:
        """Return the blocks of some rows, or of the state at the end of `start_token` tokens."""
        if self.layout.kind == "linear":
            return [block_ids[min(len(block_ids), -(-start_token // self.page_tokens)) - 1]]
        first, count = start_token // self.page_tokens, tokens // self.page_tokens
        found = list(block_ids[first : first + count])
        if len(found) != count:
            raise PeerError(f"the request has {len(found)} of {count} blocks from token {start_token} on")
        return found

    def blocks_between(self, block_ids: Sequence[int], start_token: int, end_token: int) -> list[int]:
        """Return the blocks of all that crosses for these tokens: their rows', or that of the state at their end."""
        if self.layout.kind == "linear":
            return self.blocks_of(block_ids, end_token, 0)
        first, end = self.layout.rows_span(start_token, end_token)
        return self.blocks_of(block_ids, first, end - first)


class RankCache(NamedTuple):
    """The cache of one rank: its groups, the device that holds them, and the stream of its copies."""

    groups: Sequence[VllmGroup]
    own: RankOf
    device: torch.device
    copies: CopyStream


def rank_cache(groups: Sequence[VllmGroup], own: RankOf) -> RankCache:
    device = next(iter(groups[0].tensors.values()))[0].device
    return RankCache(groups, own, device, CopyStream(device))


def frame_tokens(group: LayerGroup) -> int:
    """Return the most tokens of one frame of an attention group: whole blocks."""
    return max(1, FRAME_BYTES // group.nbytes) * group.row_tokens


def read_blocks(tensors: Sequence[torch.Tensor], blocks: Sequence[int], room: memoryview) -> None:
    """Copy blocks into plain memory, tensor after tensor; returns when they are there."""
    at = 0
    for tensor in tensors:
        target = _host(room, at, len(blocks), tensor.shape[1])
        if tensor.device.type == "cpu":
            torch.index_select(tensor, 0, torch.tensor(blocks), out=target)
        else:
            target.copy_(_picked(tensor, blocks), non_blocking=True)
        at += target.numel()
    _synchronize(tensors[0])


def write_blocks(tensors: Sequence[torch.Tensor], blocks: Sequence[int], received: memoryview) -> None:
    """Copy plain memory into blocks, as `read_blocks` wrote it; returns when they are there."""
    at = 0
    for tensor in tensors:
        source = _host(received, at, len(blocks), tensor.shape[1])
        if len(blocks) == 1:
            tensor[blocks[0]].copy_(source[0], non_blocking=True)
        else:
            index = torch.tensor(blocks, device=tensor.device)
            tensor.index_copy_(0, index, source.to(tensor.device, non_blocking=True))
        at += source.numel()
    _synchronize(tensors[0])


def read_slice(
    tensors: Sequence[torch.Tensor], blocks: Sequence[int], room: memoryview, cuts: Sequence[TensorCut]
) -> None:
    """Copy a slice of blocks into plain memory, tensor after tensor; returns when it is there."""
    at = 0
    for tensor, (held, cut, cut_bytes) in zip(tensors, cuts, strict=True):
        picked = _picked(tensor, blocks)
        made = torch.empty((len(blocks), cut_bytes), dtype=torch.uint8, device=tensor.device)
        for source, target in zip(held, cut, strict=True):
            _run(made, target).copy_(_run(picked, source))
        _host(room, at, len(blocks), cut_bytes).copy_(made, non_blocking=True)
        at += made.numel()
    _synchronize(tensors[0])


def write_slice(
    tensors: Sequence[torch.Tensor], blocks: Sequence[int], received: memoryview, cuts: Sequence[TensorCut]
) -> None:
    """Copy plain memory into a slice of blocks, as `read_slice` wrote it; returns when it is there."""
    at = 0
    for tensor, (held, cut, cut_bytes) in zip(tensors, cuts, strict=True):
        source = _host(received, at, len(blocks), cut_bytes).to(tensor.device, non_blocking=True)
        index = torch.tensor(blocks, device=tensor.device)
        for target, part in zip(held, cut, strict=True):
            _run(tensor, target).index_copy_(0, index, _run(source, part))
        at += len(blocks) * cut_bytes
    _synchronize(tensors[0])


def _host(memory: memoryview, start: int, blocks: int, block_bytes: int) -> torch.Tensor:
    """Return plain memory as so many blocks."""
    return torch.frombuffer(memory[start : start + blocks * block_bytes], dtype=torch.uint8).view(blocks, block_bytes)


def _picked(tensor: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Return some blocks: one as a view, several as a copy on their device."""
    if len(blocks) == 1:
        return tensor[blocks[0] : blocks[0] + 1]
    return tensor.index_select(0, torch.tensor(blocks, device=tensor.device))


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        # Of that device: this thread's own device is another one in all ranks but the first.
        torch.accelerator.current_stream(tensor.device).synchronize()


def _run(blocks: torch.Tensor, run: ByteRun) -> torch.Tensor:
    """Return a run's bytes in each block, as a view."""
    shape, strides = (blocks.shape[0], run.rows, run.width), (blocks.stride(0), run.apart, 1)
    return blocks.as_strided(shape, strides, blocks.storage_offset() + run.first)
