"""A frame's tensors as pieces of memory, and each as one array for the codecs.

Gathering costs a copy. It buys few, long operations. Each gives the interpreter's lock away and must ask for it again.
A thread that computes in Python lets go of it once in 5 ms.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prfaas.errors import InternalError
from prfaas.wire.transfer import ITEM_BYTES, Buffer, TensorLayout

Words = NDArray[np.unsignedinteger]
STRIP_ELEMENTS = 1 << 18
WORDS = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class Tensor(NamedTuple):
    """One tensor of a frame. Its `pieces` hold whole items, as bytes, in order, or whole elements of its only item."""

    layout: TensorLayout
    items: int
    pieces: Sequence[memoryview]

    @property
    def word(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integer of an element's size."""
        return WORDS[ITEM_BYTES[self.layout.dtype]]

    @property
    def channels(self) -> int:
        return self.layout.nbytes // self.word.itemsize

    @property
    def elements(self) -> int:
        return self.items * self.channels

    def gather(self) -> Words:
        """Elements as integers, [elements]; a single piece is not copied, so callers must not change it."""
        whole = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        return np.frombuffer(whole, self.word)

    def scatter(self, words: Words) -> None:
        left = words.data.cast("B")
        for piece in self.pieces:
            piece[:], left = left[: piece.nbytes], left[piece.nbytes :]


def size_bytes(layouts: Sequence[TensorLayout], items: int) -> int:
    """Return the bytes of a frame's tensors."""
    return items * sum(layout.nbytes for layout in layouts)


def cut(layouts: Sequence[TensorLayout], items: int, parts: Sequence[Buffer]) -> list[Tensor]:
    """Assign the parts to their tensors. Raises InternalError if they do not fit or there are no items."""
    if items < 1:
        raise InternalError(f"a frame of {items} items")
    left = [memoryview(part).cast("B") for part in reversed(parts)]
    tensors = []
    for layout in layouts:
        pieces, missing = [], items * layout.nbytes
        while missing > 0 and left:
            pieces.append(left.pop())
            missing -= pieces[-1].nbytes
        unit = layout.nbytes if items > 1 else ITEM_BYTES[layout.dtype]
        if missing or any(piece.nbytes % unit for piece in pieces):
            raise InternalError(f"memory of {items} x {layout.name} is in pieces of other sizes")
        tensors.append(Tensor(layout, items, pieces))
    if left:
        raise InternalError(f"{len(left)} pieces of memory beyond those of {len(layouts)} tensors")
    return tensors
