"""Maps a sequence's cache to the frames of prfaas.wire.transfer: the bytes of each frame.

On a CPU transfers read and write the cache's own memory. An accelerator's goes through `StagedCopies`, for sockets read
and write host memory only. Rows and states travel in the order of a layer's specification, each tensor's bytes
contiguous.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from prfaas.errors import InternalError
from prfaas.wire.frames import FrameHeader, Kind
from prfaas.wire.receive_ledger import LayerRows, LayerState
from prfaas.wire.transfer import LayerGroup, Manifest, TensorLayout
from prfaas_transfer.cache import SharedPlace
from prfaas_transfer.send import Frame
from prfaas_worker.cache_spec import LayerSpec, PagedMemory, TensorSpec

BLOCK_BYTES = 4 << 20
"""Rows of one layer leave in frames of about this size at most: small enough to interleave layers on a slow link."""
MAX_PIECES = 512  # Most pieces of memory in a frame: the kernel takes 1,024 at once.


class TokenSpan(NamedTuple):
    start: int
    end: int


class DeviceMark:
    """A point in the work of the thread that made it: an event of the device, None on a CPU."""

    def __init__(self, event: Any):
        self.event = event


class StagedCopies(Protocol):
    """Moves rows and states of an accelerator's cache. Any thread may use it; each call returns when the copy is
    done."""

    def mark(self) -> DeviceMark:
        """Mark the device's work so far; called in `on_layer`, on the thread that runs the model."""
        ...

    def read_rows(self, layer: int, pages: Sequence[int], span: TokenSpan, after: DeviceMark) -> dict[str, memoryview]:
        """Copy a layer's rows of `span` from `pages`, all pages of the sequence up to `span.end`, once `after` is
        reached. Returns bytes by tensor name, read-only; contiguous, tokens first."""
        ...

    def read_state(self, layer: int, slot: int, after: DeviceMark) -> dict[str, memoryview]:
        """Copy one layer's state in a slot, by tensor name; the sequence may not continue before this returns."""
        ...

    def room(self, nbytes: int) -> memoryview:
        """Pinned host memory to receive into; it lives as long as the view."""
        ...

    def land_rows(self, layer: int, pages: Sequence[int], span: TokenSpan, received: dict[str, memoryview]) -> None:
        """Copy received rows (see `read_rows`) into the pages of a sequence."""
        ...

    def land_state(self, layer: int, slot: int, received: dict[str, memoryview]) -> None: ...

    def land_paged_state(self, layer: int, pages: Sequence[int], received: dict[str, memoryview]) -> None:
        """Copy one layer's state into pages, where a slot can load it from."""
        ...


class CachePlace(NamedTuple):
    """The location of a sequence's cache: its pages in order of its tokens, and its state slot, or the pages that have
    its state. On the CPU transfers read and write that memory itself; an accelerator's goes through `staging`."""

    memory: PagedMemory
    slot: int
    pages: Sequence[int]
    staging: StagedCopies | None = None
    state_pages: Sequence[int] = ()

    @property
    def shared(self) -> SharedPlace | None:
        """The same for the mover, if it has that memory, too."""
        return None if self.staging else SharedPlace(self.slot, self.pages, self.state_pages)

    def held_bytes(self, count_bytes: int) -> int:
        return count_bytes if self.staging else 0

    def room_for(
        self, manifest: Manifest, part: LayerRows | LayerState
    ) -> AbstractContextManager[Sequence[memoryview]]:
        staging = self.staging
        if staging is None:
            return nullcontext(_in_place(manifest, self, part))
        count = part.tokens if isinstance(part, LayerRows) else 1
        return nullcontext([staging.room(count * tensor.nbytes) for tensor in manifest.groups[part.group].tensors])

    def land(self, manifest: Manifest, part: LayerRows | LayerState, received: Sequence[memoryview]) -> None:
        if self.staging is None:
            return
        names = [tensor.name for tensor in manifest.groups[part.group].tensors]
        by_name = dict(zip(names, received, strict=True))
        if isinstance(part, LayerState) and self.state_pages:
            self.staging.land_paged_state(part.layer, self.state_pages, by_name)
        elif isinstance(part, LayerState):
            self.staging.land_state(part.layer, self.slot, by_name)
        else:
            span = TokenSpan(part.start_token, part.start_token + part.tokens)
            self.staging.land_rows(part.layer, self.pages, span, by_name)


def layer_groups(layers: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """Group layers with equal caches, in order of first appearance; a layer with rows and state is in two groups."""
    members: dict[tuple[Literal["attention", "linear"], tuple[TensorSpec, ...]], list[int]] = {}
    for index, spec in enumerate(layers):
        if spec.rows:
            members.setdefault(("attention", spec.rows), []).append(index)
        if spec.state:
            members.setdefault(("linear", spec.state), []).append(index)
    return tuple(
        LayerGroup(kind, tuple(indices), tuple(TensorLayout(*tensor) for tensor in tensors))
        for (kind, tensors), indices in members.items()
    )


def block_frames(
    manifest: Manifest, place: CachePlace, layer: int, span: tuple[int, int], after: DeviceMark | None = None
) -> Iterator[Frame]:
    """Frames for a layer's rows of tokens span[0] to span[1], limited to the manifest's range. With staging the rows
    are ready `after` that mark. A layer without rows has no frames."""
    group = _group_of(manifest, layer, "attention")
    if group is None:
        return
    layout = manifest.groups[group]
    # One less: rows that begin in the middle of a page reach into one page more.
    pages = MAX_PIECES // len(layout.tensors) - 1
    step = max(1, min(BLOCK_BYTES // layout.nbytes, pages * place.memory.geometry.page_tokens))
    for start in range(max(span[0], manifest.start_token), span[1], step):
        tokens = min(step, span[1] - start)
        where = {"group": group, "layer": layer, "start_token": start, "tokens": tokens}
        header = FrameHeader(Kind.BLOCK, manifest.address, tokens * layout.nbytes, **where)
        yield _frame(header, place, layout, partial(_payload, manifest, place, after))


def state_frames(manifest: Manifest, place: CachePlace, layer: int, after: DeviceMark | None = None) -> Iterator[Frame]:
    """The frame of a layer's state, if it has one. The sequence may not continue until it is sent."""
    group = _group_of(manifest, layer, "linear")
    if group is not None:
        header = FrameHeader(Kind.STATE, manifest.address, manifest.groups[group].nbytes, group=group, layer=layer)
        load = partial(_payload, manifest, place, after)
        yield _frame(header, place, manifest.groups[group], load)


def prefix_frames(manifest: Manifest, place: CachePlace) -> Iterator[Frame]:
    """Frames for all that a manifest covers, of a computed cache."""
    mark = place.staging.mark() if place.staging else None
    for layer in range(len(place.memory.geometry.layers)):
        yield from block_frames(manifest, place, layer, (manifest.start_token, manifest.end_token), mark)
        yield from state_frames(manifest, place, layer, mark)


def _frame(
    header: FrameHeader, place: CachePlace, layout: LayerGroup, load: Callable[[FrameHeader], tuple[memoryview, ...]]
) -> Frame:
    copied_bytes = header.payload_bytes if place.staging else 0

    def load_one(header: FrameHeader, _show_life: object = None) -> AbstractContextManager[tuple[memoryview, ...]]:
        return nullcontext(load(header))

    return Frame(header, load_one, copied_bytes, layout.tensors, header.tokens or 1, place.shared)


def _payload(
    manifest: Manifest, place: CachePlace, after: DeviceMark | None, header: FrameHeader
) -> tuple[memoryview, ...]:
    """Return a frame's payload, by its header: where a destination has the beginning of its rows, that is cut off."""
    part: LayerRows | LayerState = LayerState(header.group, header.layer)
    if header.kind == Kind.BLOCK:
        part = LayerRows(header.group, header.layer, header.start_token, header.tokens)
    if place.staging is None:
        return _in_place(manifest, place, part)
    if after is None:
        raise InternalError("staged rows were not marked when they were computed")
    if isinstance(part, LayerState):
        found = place.staging.read_state(part.layer, place.slot, after)
    else:
        span = TokenSpan(part.start_token, part.start_token + part.tokens)
        found = place.staging.read_rows(part.layer, place.pages, span, after)
    return tuple(found[tensor.name] for tensor in manifest.groups[part.group].tensors)


def _in_place(manifest: Manifest, place: CachePlace, part: LayerRows | LayerState) -> tuple[memoryview, ...]:
    tensors = manifest.groups[part.group].tensors
    if isinstance(part, LayerState) and (pages := place.state_pages):
        return tuple(
            piece for tensor in tensors for piece in place.memory.paged_state_bytes(part.layer, tensor.name, pages)
        )
    if isinstance(part, LayerState):
        return tuple(place.memory.state_bytes(part.layer, tensor.name, place.slot) for tensor in tensors)
    end = part.start_token + part.tokens
    if end > len(place.pages) * place.memory.geometry.page_tokens:
        raise InternalError(f"rows up to {end} requested from a sequence with {len(place.pages)} pages")
    span = part.start_token, end
    return tuple(
        piece for tensor in tensors for piece in place.memory.row_bytes(part.layer, tensor.name, place.pages, span)
    )


def _group_of(manifest: Manifest, layer: int, kind: str) -> int | None:
    return next((i for i, group in enumerate(manifest.groups) if group.kind == kind and layer in group.layers), None)
