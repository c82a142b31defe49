"""The seam between a transfer and an engine's memory: all that this package knows of a cache.

An engine implements `DestinationCache` for the caches that it receives, and makes frames whose payload it loads itself.
So neither the shape of its memory nor the library behind it is known here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import msgspec

from prfaas.errors import InternalError
from prfaas.wire.frames import Address, FrameHeader, Kind
from prfaas.wire.receive_ledger import LayerRows, LayerState
from prfaas.wire.transfer import LayerGroup, Manifest


class DestinationCache(Protocol):
    """The cache of one sequence at the destination. The threads of connections call it, one a part."""

    def held_bytes(self, count_bytes: int, /) -> int:
        """Return the memory that a part of so many bytes takes outside the cache, until it landed."""
        ...

    def room_for(
        self, manifest: Manifest, part: LayerRows | LayerState
    ) -> AbstractContextManager[Sequence[memoryview]]:
        """Give memory to receive rows or a state into, for a block; in manifest order, in any number of pieces."""
        ...

    def land(self, manifest: Manifest, part: LayerRows | LayerState, received: Sequence[memoryview], /) -> None:
        """Move the contents of `room_for` into the cache, unless that is the cache's memory."""
        ...


class SharedPlace(NamedTuple):
    """Where one sequence's cache lies in memory that several processes have: its pages in order, and its state slot or
    the pages that have its state."""

    slot: int
    pages: Sequence[int]
    state_pages: Sequence[int] = ()


class CacheMap(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cache's rows and states lie in memory that the mover has, too: pages from the beginning, then slots.

    `offsets` are those of each tensor in a page, or in a state, which lies in a slot or in pages: by group, by layer in
    the group's order, by tensor.
    """

    page_tokens: int
    page_bytes: int
    pages: int
    slot_bytes: int
    slots: int
    offsets: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes + self.slots * self.slot_bytes


class EngineCache(Protocol):
    """What a mover has of its engine's memory."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory budget that a loaded frame holds."""
        ...

    def load(
        self,
        key: str,
        group: LayerGroup,
        header: FrameHeader,
        place: SharedPlace | None,
        show_life: Callable[[], None],
        /,
    ) -> AbstractContextManager[Sequence[memoryview]]:
        """Give a frame's payload for a block; `key` is the engine's name of the offer. While it waits for its engine it
        calls `show_life`."""
        ...

    def cache(self, key: str, place: SharedPlace | None, /) -> DestinationCache:
        """Return the cache of a fetch, which the engine calls `key`."""
        ...


class MappedMemory:
    """An engine's cache that is in our address space, too."""

    held_bytes = 0

    def __init__(self, memory: memoryview, cache_map: CacheMap):
        self._view, self._map = memory, cache_map

    def load(
        self, _key: str, group: LayerGroup, header: FrameHeader, place: SharedPlace | None, _show_life: object = None
    ) -> AbstractContextManager[Sequence[memoryview]]:
        part = (
            LayerRows(header.group, header.layer, header.start_token, header.tokens)
            if header.kind == Kind.BLOCK
            else LayerState(header.group, header.layer)
        )
        return nullcontext(self.pieces(group, place, part))

    def cache(self, _key: str, place: SharedPlace | None) -> "MappedCache":
        return MappedCache(self, place)

    def pieces(self, group: LayerGroup, place: SharedPlace | None, part: LayerRows | LayerState) -> list[memoryview]:
        """Return a part's memory, tensor by tensor: a piece a page, or the whole state in a slot."""
        if place is None:
            raise InternalError("the engine's cache is mapped, and it did not say where in it")
        found = self._map
        offsets = found.offsets[part.group][group.layers.index(part.layer)]
        if isinstance(part, LayerState):
            ends = [(at, at + tensor.nbytes) for at, tensor in zip(offsets, group.tensors, strict=True)]
            return [piece for at, end in ends for piece in self._state_pieces(place, at, end)]
        end = part.start_token + part.tokens
        if end > len(place.pages) * found.page_tokens:
            raise InternalError(f"rows up to {end} requested from a sequence with {len(place.pages)} pages")
        spans = list(_page_spans(part.start_token, end, found.page_tokens))
        pieces = []
        for at, tensor in zip(offsets, group.tensors, strict=True):
            for page, first, count in spans:
                begin = place.pages[page] * found.page_bytes + at + first * tensor.nbytes
                pieces.append(self._view[begin : begin + count * tensor.nbytes])
        return pieces

    def _state_pieces(self, place: SharedPlace, at: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes from `at` to `end` of a state."""
        found = self._map
        if not place.state_pages:
            slot = found.pages * found.page_bytes + place.slot * found.slot_bytes
            yield self._view[slot + at : slot + end]
            return
        for page, first, count in _page_spans(at, end, found.page_bytes):
            begin = place.state_pages[page] * found.page_bytes + first
            yield self._view[begin : begin + count]


class MappedCache:
    """The cache of one request at the destination, in the engine's memory itself."""

    def __init__(self, memory: MappedMemory, place: SharedPlace | None):
        self._memory, self._place = memory, place

    def held_bytes(self, _count_bytes: int, /) -> int:
        return 0

    def room_for(
        self, manifest: Manifest, part: LayerRows | LayerState
    ) -> AbstractContextManager[Sequence[memoryview]]:
        return nullcontext(self._memory.pieces(manifest.groups[part.group], self._place, part))

    def land(self, _manifest: Manifest, _part: LayerRows | LayerState, _received: Sequence[memoryview], /) -> None:
        """Nothing is left to do: it was received into the cache."""


def _page_spans(start: int, end: int, page_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield each page's index, its first token or byte and how many of its are in the range."""
    while start < end:
        page, first = divmod(start, page_size)
        count = min(page_size - first, end - start)
        yield page, first, count
        start += count


class CacheLayout(NamedTuple):
    """The shape of a model's caches: all that two instances must agree on."""

    fingerprint: str
    groups: tuple[LayerGroup, ...]
    rank: int = 0
    ranks: int = 1

    def manifest(self, address: Address, start_token: int, end_token: int, prompt: str = "") -> Manifest:
        return Manifest(
            fingerprint=self.fingerprint,
            transfer_id=address.transfer_id,
            epoch=address.epoch,
            start_token=start_token,
            end_token=end_token,
            groups=self.groups,
            rank=self.rank,
            ranks=self.ranks,
            prompt=prompt,
        )
