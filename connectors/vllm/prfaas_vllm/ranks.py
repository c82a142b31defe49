"""How heads of a cache divide among tensor-parallel ranks, and where those of one rank lie in another's memory.

The side with more ranks sets the slices: slice s of n holds what its rank s of n holds. A rank of the other side holds
several slices, and gives or takes each in its own transfer. Heads divide into equal shares; of fewer heads than
ranks, neighbouring ranks hold the same one. A memory that all ranks hold whole, as MLA's latents, has one head here.
What several ranks hold crosses once: each of its layers in one of their slices.

Nothing here imports torch or vLLM: a tensor is known by the heads in its bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from prfaas.errors import ConfigError


class RankOf(NamedTuple):
    """One of an instance's tensor-parallel ranks, or one of a transfer's slices."""

    rank: int = 0
    ranks: int = 1

    def heads(self, heads: int) -> tuple[int, int]:
        """Return the first of its heads, and how many it has, of so many in the model."""
        return self.rank * heads // self.ranks, max(1, heads // self.ranks)

    def slices(self, other_ranks: int) -> "tuple[RankOf, ...]":
        """Return what it holds of the slices between its instance and one of so many ranks. Raises ConfigError."""
        most, least = max(self.ranks, other_ranks), min(self.ranks, other_ranks)
        if most % least:
            raise ConfigError(
                f"the other instance has {other_ranks} tensor-parallel ranks and this one {self.ranks}: give both "
                "pools' parallelism.tensor values of which one is a multiple of the other"
            )
        each = most // self.ranks
        return tuple(RankOf(self.rank * each + at, most) for at in range(each))

    def within(self, ranks: int) -> "RankOf":
        """Return the rank, of so many, that holds this slice."""
        return RankOf(self.rank * ranks // self.ranks, ranks)


class HeadSection(NamedTuple):
    """Bytes of equal heads, side by side; `heads` are those of all ranks together."""

    heads: int
    head_bytes: int


class HeadRows(NamedTuple):
    """Equal rows, each with these sections."""

    rows: int
    sections: tuple[HeadSection, ...]

    @property
    def text(self) -> str:
        return f"{self.rows} x ({' + '.join(f'{heads} x {head_bytes}' for heads, head_bytes in self.sections)})"


HeadMap = tuple[HeadRows, ...]
"""The bytes that a tensor has of a block: rows after rows."""


class ByteRun(NamedTuple):
    """Bytes in a block: `rows` of `width`, the first at `first`, each `apart` from the next."""

    first: int
    rows: int
    apart: int
    width: int


def bytes_of(tensor: HeadMap, rank: RankOf) -> int:
    """Return the bytes that a rank holds of a tensor's block."""
    return sum(
        part.rows * sum(rank.heads(each.heads)[1] * each.head_bytes for each in part.sections) for part in tensor
    )


def runs_of(tensor: HeadMap, holder: RankOf, part: RankOf) -> list[ByteRun]:
    """Return where a slice's bytes lie in the memory of the rank that holds it; in its own if that is the holder."""
    found: list[ByteRun] = []
    start = 0
    for rows, sections in tensor:
        row_bytes = sum(holder.heads(each.heads)[1] * each.head_bytes for each in sections)
        at = start
        for heads, head_bytes in sections:
            (held_from, held), (first, count) = holder.heads(heads), part.heads(heads)
            found.append(ByteRun(at + (first - held_from) * head_bytes, rows, row_bytes, count * head_bytes))
            at += held * head_bytes
        start += rows * row_bytes
    return found


def divides(tensor: HeadMap, ranks: int) -> bool:
    """Return whether so many ranks have equal shares of each section."""
    return all(not (each.heads % ranks and ranks % each.heads) for part in tensor for each in part.sections)


def copies_of(tensors: tuple[HeadMap, ...], ranks: int) -> int:
    """Return how many neighbours of so many ranks hold the same heads of all tensors."""
    sections = [section for tensor in tensors for rows in tensor for section in rows.sections]
    return min((max(1, ranks // section.heads) for section in sections), default=1)


def share_of(layers: Sequence[int], copies: int, part: RankOf) -> tuple[int, ...]:
    """Return the layers that cross in a slice of which there are copies: together these have each layer once."""
    return tuple(layers[part.rank % copies :: copies])
