"""The slices in which a cache crosses between instances of several ranks; of equal numbers each rank's own.

A slice that a rank holds together with others is cut out of its blocks, or landed among them. Of layers that are the
same in several slices each is in one of them alone, and crosses once: MLA's latents are the same on all ranks, and a
key-value head is on several where there are fewer heads than ranks. So each rank fetches a *share*, and gives it to the
others, from device to device, by the library with which the ranks compute together. All ranks must do it in the same
order: at the start of a step, which vLLM gives to all of them, and before anything computes on a cache that has come.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from prfaas.errors import ConfigError
from prfaas.wire.transfer import LayerGroup, TensorLayout
from prfaas_transfer.mover.messages import CacheSlice
from prfaas_vllm.blocks import TensorCut, VllmGroup
from prfaas_vllm.ranks import RankOf, bytes_of, copies_of, divides, runs_of, share_of
from prfaas_vllm.scheduling import Fetching

AllRanks = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Gives a tensor to all ranks, and returns those of all, in their order."""
GATHERED_BYTES = 64 << 20
"""Of all ranks, at once."""


class RankSlice(NamedTuple):
    """What one transfer has of a rank's cache; `wire` is None for all of it. `peer_rank` is the other side's."""

    peer_rank: int
    wire: CacheSlice | None = None
    cuts: tuple[tuple[TensorCut, ...], ...] = ()

    def has(self, group: int, layer: int) -> bool:
        """Return whether a layer crosses in it."""
        return self.wire is None or layer in self.wire.groups[group].layers


def slices_of(groups: Sequence[VllmGroup], own: RankOf, other_ranks: int, *, is_source: bool) -> tuple[RankSlice, ...]:
    """Return the transfers between this rank and another instance of so many ranks (0: as many as here); none if other
    slices bring all that this rank holds. Raises ConfigError if the cache does not divide among both."""
    is_equal = other_ranks in (0, own.ranks)
    if is_equal and all(fetched_layers(group, own, own.ranks) == group.layout.layers for group in groups):
        return (RankSlice(own.rank),)
    parts = own.slices(other_ranks or own.ranks)
    if not is_equal:
        _require_divided(groups, parts[0].ranks, (own.ranks, other_ranks) if is_source else (other_ranks, own.ranks))
    found = [_slice(groups, own, part, other_ranks or own.ranks) for part in parts]
    return tuple(each for each in found if each.wire is not None and any(group.layers for group in each.wire.groups))


def fetched_layers(group: VllmGroup, rank: RankOf, other_ranks: int) -> tuple[int, ...]:
    """Return the layers of a group that cross between a rank and another instance; the rest it has from its like."""
    crossing = {layer for part in rank.slices(other_ranks) for layer in _share(group, part)}
    return tuple(sorted(crossing))


def _share(group: VllmGroup, part: RankOf) -> tuple[int, ...]:
    return share_of(group.layout.layers, copies_of(group.heads, part.ranks), part)


def _require_divided(groups: Sequence[VllmGroup], slices: int, ranks: tuple[int, int]) -> None:
    for group in groups:
        if not group.heads or not all(divides(tensor, slices) for tensor in group.heads):
            raise ConfigError(
                f"a source of {ranks[0]} and a destination of {ranks[1]} tensor-parallel ranks cannot divide a cache "
                f"of {group.layout.spec!r}: give both pools the same parallelism.tensor"
            )


def _slice(groups: Sequence[VllmGroup], own: RankOf, part: RankOf, other_ranks: int) -> RankSlice:
    layouts = tuple(_cut_group(group, own, part) for group in groups)
    cuts = () if part == own else tuple(_cuts(group, own, part) for group in groups)
    return RankSlice(part.within(other_ranks).rank, CacheSlice(part.rank, part.ranks, layouts), cuts)


def _cut_group(group: VllmGroup, own: RankOf, part: RankOf) -> LayerGroup:
    """Return a group's layout in a slice, with the layers that it shares out to this one."""
    layers = _share(group, part)
    if part == own:
        return msgspec.structs.replace(group.layout, layers=layers)
    tensors = tuple(
        _cut_tensor(tensor, bytes_of(heads, part))
        for tensor, heads in zip(group.layout.tensors, group.heads, strict=True)
    )
    return msgspec.structs.replace(group.layout, layers=layers, tensors=tensors, spec=group.describe(part))


def _cut_tensor(tensor: TensorLayout, count_bytes: int) -> TensorLayout:
    items = tensor.shape[0] * count_bytes // tensor.nbytes
    return msgspec.structs.replace(tensor, shape=(items,))


def _cuts(group: VllmGroup, own: RankOf, part: RankOf) -> tuple[TensorCut, ...]:
    return tuple(
        TensorCut(runs_of(heads, own, part), runs_of(heads, part, part), bytes_of(heads, part)) for heads in group.heads
    )


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
