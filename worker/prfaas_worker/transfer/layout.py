"""Between a sequence's cache and the frames of prfaas.wire.transfer: which bytes stand where."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch

from prfaas.errors import InternalError
from prfaas.wire.frames import Address, FrameHeader, Kind
from prfaas.wire.receipt import Rows, State
from prfaas.wire.transfer import LayerGroup, Manifest, TensorLayout
from prfaas_worker.cache.memory import CacheMemory, bytes_of
from prfaas_worker.cache_spec import LayerSpec, TensorSpec
from prfaas_worker.transfer.outgoing import Frame
from prfaas_worker.transfer.staging import Mark, Span, Staging

BLOCK_BYTES = 4 << 20
"""Rows of one layer leave in frames of about this size at most: small enough to interleave layers on a slow link."""
MAX_PIECES = 512
"""Most pieces of memory in a frame: the kernel takes 1,024 at once."""


class CacheLayout(NamedTuple):
    """How a model's caches look: all that two instances must agree on."""

    fingerprint: str
    groups: tuple[LayerGroup, ...]
    hidden_size: int

    def manifest(self, address: Address, start_token: int, end_token: int, *, is_prefix: bool) -> Manifest:
        """Describe a transfer of the rows from `start_token` on; a prefix ends without a hidden state."""
        return Manifest(
            fingerprint=self.fingerprint,
            transfer_id=address.transfer_id,
            epoch=address.epoch,
            start_token=start_token,
            end_token=end_token,
            groups=self.groups,
            hidden_size=0 if is_prefix else self.hidden_size,
        )


class Place(NamedTuple):
    """Where a sequence's cache stands: its state slot and its pages in order of its tokens.

    On the CPU transfers read and write that memory itself; an accelerator's goes through `staging`.
    """

    memory: CacheMemory
    slot: int
    pages: Sequence[int]
    staging: Staging | None = None


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
    manifest: Manifest, place: Place, layer: int, span: tuple[int, int], after: Mark | None = None
) -> Iterator[Frame]:
    """Frames for a layer's rows of tokens span[0] up to span[1], as far as the manifest asks for them.

    With staging the rows stand there `after` that mark. A layer without rows has no frames.
    """
    group = _group_of(manifest, layer, "attention")
    if group is None:
        return
    layout = manifest.groups[group]
    pages = MAX_PIECES // len(layout.tensors) - 1
    step = max(1, min(BLOCK_BYTES // layout.nbytes, pages * place.memory.geometry.page_tokens))
    for start in range(max(span[0], manifest.start_token), span[1], step):
        tokens = min(step, span[1] - start)
        rows = Rows(group, layer, start, tokens)
        where = {"group": group, "layer": layer, "start_token": start, "tokens": tokens}
        header = FrameHeader(Kind.BLOCK, manifest.address, tokens * layout.nbytes, **where)
        yield _frame(header, place, layout, partial(_outgoing, manifest, place, rows, after))


def state_frames(manifest: Manifest, place: Place, layer: int, after: Mark | None = None) -> Iterator[Frame]:
    """The frame of a layer's state, if it has one. The sequence may not go on until it is sent."""
    group = _group_of(manifest, layer, "linear")
    if group is not None:
        header = FrameHeader(Kind.STATE, manifest.address, manifest.groups[group].nbytes, group=group, layer=layer)
        load = partial(_outgoing, manifest, place, State(group, layer), after)
        yield _frame(header, place, manifest.groups[group], load)


def prefix_frames(manifest: Manifest, place: Place) -> Iterator[Frame]:
    """Frames for all that a manifest without a hidden state asks for, of a cache that is computed."""
    mark = place.staging.mark() if place.staging else None
    for layer in range(len(place.memory.geometry.layers)):
        yield from block_frames(manifest, place, layer, (manifest.start_token, manifest.end_token), mark)
        yield from state_frames(manifest, place, layer, mark)


def hidden_frame(manifest: Manifest, hidden: torch.Tensor) -> Frame:
    """Return the frame of the last hidden state, fp32 [hidden_size]."""
    payload = bytes_of(hidden.contiguous())
    return Frame(FrameHeader(Kind.HIDDEN, manifest.address, len(payload)), lambda: (payload,))


def room_for(manifest: Manifest, place: Place, part: Rows | State) -> tuple[memoryview, ...]:
    """Memory to receive rows or a state into, in manifest order, in as many pieces as it takes; `land` follows."""
    if place.staging is None:
        return _in_place(manifest, place, part)
    count = part.tokens if isinstance(part, Rows) else 1
    return tuple(place.staging.room(count * tensor.nbytes) for tensor in manifest.groups[part.group].tensors)


def land(manifest: Manifest, place: Place, part: Rows | State, received: Sequence[memoryview]) -> None:
    """Put what was received into `room_for` where it belongs, if it does not stand there already."""
    if place.staging is None:
        return
    names = [tensor.name for tensor in manifest.groups[part.group].tensors]
    by_name = dict(zip(names, received, strict=True))
    if isinstance(part, State):
        place.staging.land_state(part.layer, place.slot, by_name)
    else:
        span = Span(part.start_token, part.start_token + part.tokens)
        place.staging.land_rows(part.layer, place.pages, span, by_name)


def _frame(header: FrameHeader, place: Place, layout: LayerGroup, load: Callable[[], tuple[memoryview, ...]]) -> Frame:
    copied_bytes = header.payload_bytes if place.staging else 0
    return Frame(header, load, copied_bytes, layout.tensors, header.tokens or 1)


def _outgoing(manifest: Manifest, place: Place, part: Rows | State, after: Mark | None) -> tuple[memoryview, ...]:
    if place.staging is None:
        return _in_place(manifest, place, part)
    if after is None:
        raise InternalError("staged rows were not marked when they were computed")
    if isinstance(part, State):
        found = place.staging.read_state(part.layer, place.slot, after)
    else:
        span = Span(part.start_token, part.start_token + part.tokens)
        found = place.staging.read_rows(part.layer, place.pages, span, after)
    return tuple(found[tensor.name] for tensor in manifest.groups[part.group].tensors)


def _in_place(manifest: Manifest, place: Place, part: Rows | State) -> tuple[memoryview, ...]:
    """The cache's own memory for rows or a state."""
    tensors = manifest.groups[part.group].tensors
    if isinstance(part, State):
        return tuple(place.memory.state_bytes(part.layer, tensor.name, place.slot) for tensor in tensors)
    end = part.start_token + part.tokens
    if end > len(place.pages) * place.memory.geometry.page_tokens:
        raise InternalError(f"rows up to {end} asked of a sequence with {len(place.pages)} pages")
    span = part.start_token, end
    return tuple(
        piece for tensor in tensors for piece in place.memory.row_bytes(part.layer, tensor.name, place.pages, span)
    )


def _group_of(manifest: Manifest, layer: int, kind: str) -> int | None:
    """The group of this kind that a layer is in, if there is one."""
    return next((i for i, group in enumerate(manifest.groups) if group.kind == kind and layer in group.layers), None)
