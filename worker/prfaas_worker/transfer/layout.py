"""Between a model's cache and the frames of prfaas.wire.transfer: which bytes stand where."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from prfaas.wire.receipt import Rows, State
from prfaas.wire.transfer import FrameHeader, Kind, LayerGroup, Manifest, TensorLayout
from prfaas_worker.models.base import LayerSpec, SequenceCache

BLOCK_BYTES = 4 << 20
"""Rows of one layer leave in frames of about this size at most: small enough to interleave layers on a slow link."""


class Frame(NamedTuple):
    """A frame to send. The payload views the cache's own memory, which they keep alive."""

    header: FrameHeader
    payload: tuple[memoryview, ...]


def layer_groups(layers: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """Group layers with equal caches, in order of first appearance."""
    members: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(layers):
        members.setdefault(spec, []).append(index)
    return tuple(
        LayerGroup(spec.kind, tuple(indices), tuple(TensorLayout(*tensor) for tensor in spec.tensors))
        for spec, indices in members.items()
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """View a contiguous tensor's memory as bytes, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def block_frames(manifest: Manifest, cache: SequenceCache, layer: int, span: tuple[int, int]) -> Iterator[Frame]:
    """Frames for an attention layer's rows of tokens span[0] up to span[1], as far as the manifest asks for them."""
    group = _group_of(manifest, layer)
    token_bytes = manifest.groups[group].nbytes
    step = max(1, BLOCK_BYTES // token_bytes)
    for start in range(max(span[0], manifest.start_token), span[1], step):
        tokens = min(step, span[1] - start)
        place = {"group": group, "layer": layer, "start_token": start, "tokens": tokens}
        header = FrameHeader(Kind.BLOCK, manifest.address, tokens * token_bytes, **place)
        yield Frame(header, (bytes_of(cache.attention(layer).rows(start, start + tokens)),))


def state_frame(manifest: Manifest, cache: SequenceCache, layer: int) -> Frame:
    """Return the frame of a linear layer's state. Nothing may be appended to the cache until it is sent."""
    group = _group_of(manifest, layer)
    header = FrameHeader(Kind.STATE, manifest.address, manifest.groups[group].nbytes, group=group, layer=layer)
    return Frame(header, destination_bytes(manifest, cache, State(group, layer)))


def hidden_frame(manifest: Manifest, hidden: torch.Tensor) -> Frame:
    """Return the frame of the last hidden state, fp32 [hidden_size]."""
    payload = bytes_of(hidden.contiguous())
    return Frame(FrameHeader(Kind.HIDDEN, manifest.address, len(payload)), (payload,))


def destination_bytes(manifest: Manifest, cache: SequenceCache, place: Rows | State) -> tuple[memoryview, ...]:
    """Writable memory of the cache for a claimed place, in manifest order. Rows must have been reserved."""
    if isinstance(place, Rows):
        end = place.start_token + place.tokens
        return (bytes_of(cache.attention(place.layer).rows(place.start_token, end)),)
    tensors = cache.linear(place.layer).tensors
    return tuple(bytes_of(tensors[layout.name]) for layout in manifest.groups[place.group].tensors)


def _group_of(manifest: Manifest, layer: int) -> int:
    return next(index for index, group in enumerate(manifest.groups) if layer in group.layers)
