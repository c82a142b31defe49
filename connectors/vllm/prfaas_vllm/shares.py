"""What several ranks hold alike crosses the link once: each fetches some of the layers, and gives them to the others.

MLA's latents are the same on all ranks; a key-value head is on several where there are fewer heads than ranks. The
layers go from device to device, by the library with which the ranks compute together. All ranks must do it in the same
order: at the start of a step, which vLLM gives to all of them, and before anything computes on a cache that has come.
"""

from collections.abc import Callable, Sequence

import torch

from prfaas_vllm.blocks import VllmGroup
from prfaas_vllm.ranks import RankOf, copies_of
from prfaas_vllm.scheduling import Fetching
from prfaas_vllm.slices import fetched_layers

AllRanks = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Gives a tensor to all ranks, and returns those of all, in their order."""
GATHERED_BYTES = 64 << 20
"""Of all ranks, at once."""


def complete(groups: Sequence[VllmGroup], own: RankOf, fetched: Fetching, all_ranks: AllRanks) -> bool:
    """Complete a cache that has come to all ranks in shares: afterwards each holds all of its layers. Return True if
    anything was missing: then an accelerator may still write it."""
    was_missing = False
    source_ranks = fetched.leg.ranks or own.ranks
    for group in groups:
        shares = [fetched_layers(group, RankOf(rank, own.ranks), source_ranks) for rank in range(own.ranks)]
        if all(len(share) == len(group.layout.layers) for share in shares):  # all ranks decide alike
            continue
        was_missing = True
        blocks = group.blocks_between(fetched.block_ids[group.number], fetched.start, fetched.goal)
        step = max(1, GATHERED_BYTES // (group.layout.nbytes * own.ranks))
        for first in range(0, len(blocks), step):
            _complete_blocks(group, own, shares, blocks[first : first + step], all_ranks)
    return was_missing


def _complete_blocks(
    group: VllmGroup, own: RankOf, shares: Sequence[Sequence[int]], blocks: Sequence[int], all_ranks: AllRanks
) -> None:
    """Have all ranks give a layer of their share in turn; who has none left gives one that nobody takes."""
    copies = copies_of(group.heads, own.ranks)
    alike = [rank for rank in range(own.ranks) if rank // copies == own.rank // copies and rank != own.rank]
    for turn in range(max(map(len, shares))):
        shared = (shares[own.rank][turn:] or group.layout.layers)[0]
        for at, tensor in enumerate(group.tensors[shared]):
            index = torch.tensor(blocks, device=tensor.device)
            gathered = all_ranks(tensor.index_select(0, index))
            for rank in alike:
                for layer in shares[rank][turn : turn + 1]:
                    group.tensors[layer][at].index_copy_(0, index, gathered[rank])
