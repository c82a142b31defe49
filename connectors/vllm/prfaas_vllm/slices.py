"""The slices in which a cache crosses between instances of different tensor parallelism; of equal ones each rank's own.

A slice that a rank holds together with others is cut out of its blocks, or landed among them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from prfaas.errors import ConfigError
from prfaas.wire.transfer import LayerGroup, TensorLayout
from prfaas_transfer.mover.messages import CacheSlice
from prfaas_vllm.layout import TensorCut, VllmGroup
from prfaas_vllm.ranks import RankOf, bytes_of, divides, is_repeated, runs_of


class RankSlice(NamedTuple):
    """What one transfer has of a rank's cache; `wire` is None for all of it. `peer_rank` is the other side's."""

    peer_rank: int
    wire: CacheSlice | None = None
    cuts: tuple[tuple[TensorCut, ...], ...] = ()

    def has(self, group: int) -> bool:
        """Return whether layers of a group cross."""
        return self.wire is None or bool(self.wire.groups[group].layers)


def slices_of(groups: Sequence[VllmGroup], own: RankOf, other_ranks: int, *, is_source: bool) -> tuple[RankSlice, ...]:
    """Return the transfers between this rank and another instance of so many ranks (0: as many as here). Raises
    ConfigError if the cache does not divide among both."""
    if other_ranks in (0, own.ranks):
        return (RankSlice(own.rank),)
    source, destination = (own.ranks, other_ranks) if is_source else (other_ranks, own.ranks)
    parts = own.slices(other_ranks)
    for group in groups:
        if not group.heads or not all(divides(tensor, parts[0].ranks) for tensor in group.heads):
            raise ConfigError(
                f"a source of {source} and a destination of {destination} tensor-parallel ranks cannot divide a cache "
                f"of {group.layout.spec!r}: give both pools the same parallelism.tensor"
            )
    found = [_slice(groups, own, part, destination, other_ranks) for part in parts]
    return tuple(each for each in found if any(each.has(number) for number in range(len(groups))))


def _slice(
    groups: Sequence[VllmGroup], own: RankOf, part: RankOf, destination_ranks: int, other_ranks: int
) -> RankSlice:
    layouts = tuple(_cut_group(group, part, destination_ranks) for group in groups)
    cuts = () if part == own else tuple(_cuts(group, own, part) for group in groups)
    return RankSlice(part.within(other_ranks).rank, CacheSlice(part.rank, part.ranks, layouts), cuts)


def _cut_group(group: VllmGroup, part: RankOf, destination_ranks: int) -> LayerGroup:
    """Return a group's layout in a slice: without layers where the slice before brings the same."""
    tensors = tuple(
        _cut_tensor(tensor, bytes_of(heads, part))
        for tensor, heads in zip(group.layout.tensors, group.heads, strict=True)
    )
    layers = () if is_repeated(group.heads, part, destination_ranks) else group.layout.layers
    return msgspec.structs.replace(group.layout, layers=layers, tensors=tensors, spec=group.describe(part))


def _cut_tensor(tensor: TensorLayout, count_bytes: int) -> TensorLayout:
    items = tensor.shape[0] * count_bytes // tensor.nbytes
    return msgspec.structs.replace(tensor, shape=(items,))


def _cuts(group: VllmGroup, own: RankOf, part: RankOf) -> tuple[TensorCut, ...]:
    return tuple(
        TensorCut(runs_of(heads, own, part), runs_of(heads, part, part), bytes_of(heads, part)) for heads in group.heads
    )
