"""Describes the cache of a model, layer by layer: names, axes, shapes and types of its tensors, and sizes that follow.

A model states these specs, the cache memory and the transfer's manifest are made from them. Axis names belong to every
tensor: where two axes have the same length, a swap would be silent. Nothing here needs torch.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from prfaas.kvindex.blocks import BLOCK_TOKENS
from prfaas.wire.transfer import ITEM_BYTES

# Every tensor in a page or slot starts at a multiple of this, which suits every dtype and vector width.
_ALIGNMENT = 64


class TensorSpec(NamedTuple):
    """One tensor of a layer's cache; `dtype` is torch's name, such as "float32". `axes` names every axis. A row tensor
    grows along axes[0] == "token", which `shape` leaves out; a state tensor has a fixed `shape`."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of a state tensor, or of one token in a row tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class LayerSpec(NamedTuple):
    """The cache of one layer: row tensors, which grow with the tokens, and state tensors of fixed size."""

    rows: tuple[TensorSpec, ...] = ()
    state: tuple[TensorSpec, ...] = ()


class CacheGeometry:
    """Sizes that follow from a model's layers: bytes of a page and of a state, and the tensors' offsets."""

    def __init__(self, layers: Sequence[LayerSpec], page_tokens: int = BLOCK_TOKENS):
        self.layers = tuple(layers)
        self.page_tokens = page_tokens
        self.row_offsets, self.page_bytes = _place([layer.rows for layer in layers], page_tokens)
        self.state_offsets, self.state_bytes = _place([layer.state for layer in layers], 1)
        self.pages_per_state = -(-self.state_bytes // self.page_bytes)

    @property
    def token_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.rows)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a state, and what its last page has left."""
        return self.pages_per_state * self.page_bytes

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def row_places(
        self, layer: int, name: str, pages: Sequence[int], span: tuple[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Yield where a row tensor's tokens span[0] to span[1] lie in the bytes of all pages, one piece a page."""
        at = self.row_offsets[layer, name]
        size = next(tensor.nbytes for tensor in self.layers[layer].rows if tensor.name == name)
        start = span[0]
        while start < span[1]:
            page, first = divmod(start, self.page_tokens)
            count = min(self.page_tokens - first, span[1] - start)
            begin = pages[page] * self.page_bytes + at + first * size
            yield begin, begin + count * size
            start += count

    def state_places(self, layer: int, name: str, pages: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield where a state tensor lies in the bytes of all pages, piece by piece, if these pages have its state."""
        at = self.state_offsets[layer, name]
        end = at + next(tensor.nbytes for tensor in self.layers[layer].state if tensor.name == name)
        while at < end:
            page, first = divmod(at, self.page_bytes)
            count = min(self.page_bytes - first, end - at)
            begin = pages[page] * self.page_bytes + first
            yield begin, begin + count
            at += count


class PagedMemory(Protocol):
    """The bytes of a cache: pages, and slots of sequences. If they are the file of `descriptor`, other
    processes map them."""

    geometry: CacheGeometry
    num_pages: int
    num_slots: int
    descriptor: int | None

    def set_pages(self, slot: int, first: int, pages: Sequence[int], /) -> None:
        """Write pages into a slot's table from column `first` on."""
        ...

    def clear_slot(self, slot: int, /) -> None: ...

    def copy_slot(self, source: int, target: int, /) -> None: ...

    def copy_page(self, source: int, target: int, /) -> None: ...

    def save_state(self, slot: int, pages: Sequence[int], /) -> None: ...

    def load_state(self, pages: Sequence[int], slot: int, /) -> None: ...

    def row_bytes(self, layer: int, name: str, pages: Sequence[int], span: tuple[int, int], /) -> list[memoryview]:
        """Writable bytes of a row tensor's tokens span[0] to span[1], one piece a page. Host memory only."""
        ...

    def state_bytes(self, layer: int, name: str, slot: int, /) -> memoryview:
        """Writable bytes of a state tensor in a slot. Host memory only."""
        ...

    def paged_state_bytes(self, layer: int, name: str, pages: Sequence[int], /) -> list[memoryview]:
        """Writable bytes of a state tensor in pages, piece by piece. Host memory only."""
        ...


def _place(layers: Sequence[tuple[TensorSpec, ...]], copies: int) -> tuple[dict[tuple[int, str], int], int]:
    """Return each tensor's offset by (layer, name), with room for `copies` of each, and the total of bytes."""
    offsets, at = {}, 0
    for index, tensors in enumerate(layers):
        for tensor in tensors:
            offsets[index, tensor.name] = at
            at += -(-copies * tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, at
