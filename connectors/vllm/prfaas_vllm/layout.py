"""vLLM's cache groups as groups of a manifest.

A row of an attention group is a block: on CPUs a block has no rows by token. A linear group has a state a layer, in the
block at a page's end. Bytes travel as the device holds them, so a group's `spec` names all that gives them a meaning:
vLLM's class, the kernel's layout and the processor's kind. Two instances that differ there refuse each other. Where a
group's heads are known, any rank's part can be cut out of a block.

An instance with drafts keeps room for them behind each convolution's last inputs. At the end of a prompt only those
inputs are written. Where they lie together in memory they cross alone, and the other side may draft as it likes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final, NamedTuple

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.errors import ConfigError
from prfaas.wire.transfer import ITEM_BYTES, LayerGroup, TensorLayout
from prfaas_vllm.blocks import FRAME_BYTES, VllmGroup
from prfaas_vllm.ranks import HeadMap, HeadRows, HeadSection, RankOf, bytes_of
from prfaas_vllm.views import axes_as_held, by_block

HEAD_AXIS = 1
"""Of vLLM's view of a layer's attention: blocks, heads, rows, columns."""
_KEEP_DRAFTS: Final = frozenset({"GDN_ATTN", "MAMBA2", "SHORT_CONV"})
"""Kinds of states in whose first tensor, the convolution's inputs, vLLM keeps drafts. KDA's is the first of these."""


def groups_of(
    config: KVCacheConfig,
    caches: Mapping[str, Any],
    device_kind: str,
    own: RankOf | None = None,
    kv_heads: int = 0,
    drafts: int = 0,
) -> tuple[VllmGroup, ...]:
    """Return all groups that cross, of this rank; `kv_heads` are the model's, 0 if each rank has its own. `drafts` are
    the tokens that this instance drafts for a step. Raises ConfigError for a kind of cache that cannot cross."""
    own = own or RankOf()
    found = []
    for number in config.transfer_group_ids:
        group = config.kv_cache_groups[number]
        spec, held, kept = _crossing(_spec_of(group.kv_cache_spec), caches, group.layer_names, drafts)
        parts = {
            layer: by_block(name, held[name], config.num_blocks) for name, layer in numbered(group.layer_names).items()
        }
        first = next(iter(parts.values()))
        for name, of_layer in zip(group.layer_names, parts.values(), strict=True):
            if [_form(part) for part in of_layer] != [_form(part) for part in first]:
                raise ConfigError(
                    f"the caches of {group.layer_names[0]} and {name} differ in form within a group, which "
                    "PrfaasConnector cannot carry: use engine.transfer.connector Nixl for this model"
                )
        views = held[group.layer_names[0]]
        views = list(views) if isinstance(views, (list, tuple)) else [views]
        heads = _heads_of(spec, views, config.num_blocks, own, kv_heads)
        if [bytes_of(each, own) for each in heads] != [part.shape[1] * part.element_size() for part in first]:
            heads = ()
        place = f"{device_kind}, with room for {kept} drafts" if kept else device_kind
        describe = partial(_describe, spec, heads, views[0], place)
        tensors = {layer: [part.view(torch.uint8) for part in of_layer] for layer, of_layer in parts.items()}
        kind = "linear" if isinstance(spec, MambaSpec) else "attention"
        axes = ("element",) if kind == "linear" else ("page", "element")
        layouts = tuple(_layout(f"part{at}", axes, part) for at, part in enumerate(first))
        # How many tokens lie between two blocks of states changes no byte of one. It follows from --max-model-len where
        # no prefixes are cached, and the other side need not have as many.
        row_tokens = 1 if kind == "linear" else spec.block_size
        layout = LayerGroup(kind, tuple(sorted(tensors)), layouts, row_tokens, describe(own))
        found.append(VllmGroup(number, spec.block_size, layout, tensors, heads, describe))
    return tuple(found)


def slot_bytes(groups: Sequence[VllmGroup]) -> int:
    """Return the largest part that travels in one frame."""
    largest = max(FRAME_BYTES, *(group.layout.nbytes for group in groups))  # other ranks' frames are full otherwise
    return -(-largest // 4096) * 4096


def numbered(names: Sequence[str]) -> dict[str, int]:
    """Number a group's layers by their indices in the model. A draft model counts its own from 0 again: what has an
    index that is taken comes after all others, in the group's order, which is that of every instance."""
    numbers: dict[str, int] = {}
    for name in names:
        index = extract_layer_index(name)
        numbers[name] = index if index not in numbers.values() else -1
    last = max(numbers.values())
    for name, number in numbers.items():
        if number < 0:
            numbers[name] = last = last + 1
    return numbers


def _spec_of(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if not isinstance(spec, (MambaSpec, FullAttentionSpec)) or isinstance(spec, SlidingWindowSpec):
        raise ConfigError(
            f"a cache of kind {type(spec).__name__} cannot cross by PrfaasConnector, only full attention, MLA and "
            "linear states can: use engine.transfer.connector Nixl for this model"
        )
    return spec


class _Crossing(NamedTuple):
    """What crosses of a group's layers, and room for how many drafts is part of it."""

    spec: KVCacheSpec
    caches: Mapping[str, Any]
    drafts: int = 0


def _crossing(spec: KVCacheSpec, caches: Mapping[str, Any], names: Sequence[str], drafts: int) -> _Crossing:
    """Leave the room for drafts out, if it follows a convolution's inputs in memory. Where it lies between those of two
    channels, all of it crosses, to instances with as many drafts."""
    held = {name: caches[name] for name in names}
    if not isinstance(spec, MambaSpec):
        return _Crossing(spec, held)
    states = {name: _states_of(spec, cache) for name, cache in held.items()}
    if not drafts or spec.mamba_type.name not in _KEEP_DRAFTS:
        return _Crossing(spec, states)
    (tokens, channels), *others = spec.shapes
    if not drafts < tokens < channels or any(len(each) != len(spec.shapes) for each in states.values()):
        return _Crossing(spec, states, drafts)
    inputs = tokens - drafts
    cut = {name: [each[0][:, : each[0].shape[1] // tokens * inputs], *each[1:]] for name, each in states.items()}
    return _Crossing(replace(spec, shapes=((inputs, channels), *others)), cut)


def _states_of(spec: MambaSpec, cache: Any) -> list[torch.Tensor]:
    """Return a layer's states, which vLLM may give as one tensor: in a block they follow one another."""
    states = list(cache) if isinstance(cache, (list, tuple)) else [cache]
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    ends = accumulate(sizes, initial=0)
    if len(states) > 1 or states[0].shape[-1] * states[0].element_size() != sum(sizes):
        return states
    whole = states[0].flatten(1)  # a view: all of a block is in the last axis
    return [whole[:, start // whole.element_size() : end // whole.element_size()] for start, end in pairwise(ends)]


def _heads_of(
    spec: KVCacheSpec, views: Sequence[torch.Tensor], num_blocks: int, own: RankOf, kv_heads: int
) -> tuple[HeadMap, ...]:
    """Return the heads in a block of each of a layer's tensors; nothing if they are not known."""
    if isinstance(spec, MambaSpec):
        states = _heads_of_state(spec, own.ranks)
        return (states,) if len(views) == 1 else tuple((state,) for state in states)
    ratios = [view.shape[0] // num_blocks for view in views]
    if isinstance(spec, MLAAttentionSpec):
        return tuple((_whole(view[0].nbytes * ratio),) for view, ratio in zip(views, ratios, strict=True))
    held = spec.num_kv_heads if isinstance(spec, FullAttentionSpec) else 0
    if any(view.dim() != 4 or view.shape[1] != held for view in views):
        return ()
    heads = kv_heads if 0 < kv_heads < own.ranks else held * own.ranks
    found: list[HeadMap] = []
    for view, ratio in zip(views, ratios, strict=True):
        _, _, rows, columns = view.shape
        rows_a_run = rows if view.stride(1) >= view.stride(2) else 1  # a head's rows together, or a row's heads
        size = rows_a_run * columns * view.element_size()
        found.append((HeadRows(ratio * rows // rows_a_run, (HeadSection(heads, size),)),))
    return tuple(found)


def _heads_of_state(spec: MambaSpec, ranks: int) -> HeadMap:
    """Return the heads of a state: of gated linear attention alone (GDN and KDA), whose convolution is q, k and v."""
    is_known = spec.mamba_type.name == "GDN_ATTN" and [len(shape) for shape in spec.shapes] == [2, 3]
    if spec.tp_replicated or not is_known:
        return ()
    conv, (heads, value_dim, key_dim) = spec.shapes
    rows, channels = min(conv), max(conv)
    keys, rest = divmod(channels - heads * value_dim, 2 * key_dim)
    if rest or keys < 1:
        return ()
    item_bytes, state_bytes = spec.dtypes[0].itemsize, value_dim * key_dim * spec.dtypes[1].itemsize
    is_dim_first = conv[0] == channels
    each = item_bytes * (rows if is_dim_first else 1)
    key, value = HeadSection(keys * ranks, key_dim * each), HeadSection(heads * ranks, value_dim * each)
    return (
        HeadRows(1 if is_dim_first else rows, (key, key, value)),
        HeadRows(1, (HeadSection(heads * ranks, state_bytes),)),
    )


def _whole(count_bytes: int) -> HeadRows:
    """Return what every rank holds whole."""
    return HeadRows(1, (HeadSection(1, count_bytes),))


def _shape_as_held(tensor: torch.Tensor, heads: int) -> tuple[int, ...]:
    """Return the shape of a kernel's block in memory, with so many heads (0: its own) and without axes of one: what its
    bytes mean beside their number."""
    shape = [heads if heads and axis == HEAD_AXIS else tensor.shape[axis] for axis in range(tensor.dim())]
    return tuple(shape[axis] for axis in axes_as_held(tensor) if shape[axis] > 1)


def _form(part: torch.Tensor) -> tuple[int, torch.dtype]:
    return part.shape[1], part.dtype


def _layout(name: str, axes: tuple[str, ...], part: torch.Tensor) -> TensorLayout:
    """Describe a tensor by its numbers' type, which the wire's codec makes use of; an unknown type is bytes."""
    dtype = str(part.dtype).removeprefix("torch.")
    if dtype in ITEM_BYTES:
        return TensorLayout(name, axes, (part.shape[1],), dtype)
    return TensorLayout(name, axes, (part.shape[1] * part.element_size(),), "uint8")


def _describe(spec: KVCacheSpec, tensors: Sequence[HeadMap], view: torch.Tensor, device_kind: str, part: RankOf) -> str:
    """Return a group's `spec` for a rank, or for a slice as a rank with such a share would give it."""
    if isinstance(spec, MambaSpec):
        kind = f"{type(spec).__name__} {spec.mamba_type.name}"
        parts = ", ".join(rows.text for tensor in tensors for rows in tensor)
        shapes = " ".join(f"{tuple(shape)} {dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        described = f"{parts} bytes {' '.join(map(str, spec.dtypes))}" if tensors else shapes
        return f"{kind} {described} {device_kind}".replace("torch.", "")
    is_divided = tensors and not isinstance(spec, MLAAttentionSpec)
    count = part.heads(tensors[0][0].sections[0].heads)[1] if is_divided else 0
    heads = f"{count or getattr(spec, 'num_kv_heads', 1)} heads of {getattr(spec, 'head_size', 0)}"
    blocks = "x".join(map(str, _shape_as_held(view, count)))
    return f"{type(spec).__name__} {heads} {getattr(spec, 'dtype', '')} {blocks} {device_kind}".replace("torch.", "")
