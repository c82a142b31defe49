"""vLLM's cache groups as groups of a manifest, and copies between their blocks and plain memory.

A row of an attention group is a block: on CPUs a block has no rows by token. A linear group has a state a layer, in the
block at a page's end. Bytes travel as the device holds them, so a group's `spec` names all that gives them a meaning:
vLLM's class, the kernel's layout and the processor's kind. Two instances that differ there refuse each other.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.errors import ConfigError, PeerError
from prfaas.wire.transfer import ITEM_BYTES, LayerGroup, TensorLayout

FRAME_BYTES = 4 << 20
"""Blocks of one layer leave in frames of about this size at most."""


class VllmGroup(NamedTuple):
    """One transfer group: its number among vLLM's groups, and of each layer index its tensors as [blocks, bytes]."""

    number: int
    layout: LayerGroup
    tensors: Mapping[int, Sequence[torch.Tensor]]

    @property
    def page_tokens(self) -> int:
        return self.layout.row_tokens

    def blocks_of(self, block_ids: Sequence[int], start_token: int, tokens: int) -> list[int]:
        """Return the blocks of some rows, or of the state at the end of `start_token` tokens."""
        if self.layout.kind == "linear":
            return [block_ids[min(len(block_ids), -(-start_token // self.page_tokens)) - 1]]
        first, count = start_token // self.page_tokens, tokens // self.page_tokens
        found = list(block_ids[first : first + count])
        if len(found) != count:
            raise PeerError(f"the request has {len(found)} of {count} blocks from token {start_token} on")
        return found


def groups_of(config: KVCacheConfig, caches: Mapping[str, Any], device_kind: str) -> tuple[VllmGroup, ...]:
    """Return all groups that cross. Raises ConfigError for a kind of cache that cannot."""
    found = []
    for number in config.transfer_group_ids:
        group = config.kv_cache_groups[number]
        spec = _spec_of(group.kv_cache_spec)
        parts = {
            layer: _by_block(name, caches[name], config.num_blocks)
            for name, layer in numbered(group.layer_names).items()
        }
        first = next(iter(parts.values()))
        for name, of_layer in zip(group.layer_names, parts.values(), strict=True):
            if [_form(part) for part in of_layer] != [_form(part) for part in first]:
                raise ConfigError(
                    f"the caches of {group.layer_names[0]} and {name} differ in form within a group, which "
                    "PrfaasConnector cannot carry: use engine.transfer.connector Nixl for this model"
                )
        tensors = {layer: [part.view(torch.uint8) for part in of_layer] for layer, of_layer in parts.items()}
        kind = "linear" if isinstance(spec, MambaSpec) else "attention"
        axes = ("element",) if kind == "linear" else ("page", "element")
        layouts = tuple(_layout(f"part{at}", axes, part) for at, part in enumerate(first))
        name = _describe(spec, device_kind, _shape_as_held(caches[group.layer_names[0]]))
        layout = LayerGroup(kind, tuple(sorted(tensors)), layouts, spec.block_size, name)
        found.append(VllmGroup(number, layout, tensors))
    return tuple(found)


def frame_tokens(group: LayerGroup) -> int:
    """Return the most tokens of one frame of an attention group: whole blocks."""
    return max(1, FRAME_BYTES // group.nbytes) * group.row_tokens


def slot_bytes(groups: Sequence[VllmGroup]) -> int:
    """Return the largest part that travels in one frame."""
    largest = [
        group.layout.nbytes if group.layout.kind == "linear" else group.layout.rows_bytes(frame_tokens(group.layout))
        for group in groups
    ]
    return -(-max(largest) // 4096) * 4096


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


def started_kernels(device: torch.device) -> torch.Event | None:
    """Return an event after all that this thread has started on the device; None for CPUs, which compute at once."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def read_blocks(tensors: Sequence[torch.Tensor], blocks: Sequence[int], room: memoryview) -> None:
    """Copy blocks into plain memory, tensor after tensor; returns when they are there."""
    at = 0
    for tensor in tensors:
        count = len(blocks) * tensor.shape[1]
        target = torch.frombuffer(room[at : at + count], dtype=torch.uint8).view(len(blocks), tensor.shape[1])
        index = torch.tensor(blocks, device=tensor.device)
        if tensor.device.type == "cpu":
            torch.index_select(tensor, 0, index, out=target)
        else:
            target.copy_(tensor.index_select(0, index))
        at += count


def write_blocks(tensors: Sequence[torch.Tensor], blocks: Sequence[int], received: memoryview) -> None:
    """Copy plain memory into blocks, as `read_blocks` wrote it; returns when they are there."""
    at = 0
    for tensor in tensors:
        count = len(blocks) * tensor.shape[1]
        source = torch.frombuffer(received[at : at + count], dtype=torch.uint8).view(len(blocks), tensor.shape[1])
        index = torch.tensor(blocks, device=tensor.device)
        tensor.index_copy_(0, index, source.to(tensor.device))
        at += count
    if tensors[0].device.type != "cpu":
        # Of that device: this thread's own device is another one in all ranks but the first.
        torch.accelerator.current_stream(tensors[0].device).synchronize()


def _spec_of(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if not isinstance(spec, (MambaSpec, FullAttentionSpec)) or isinstance(spec, SlidingWindowSpec):
        raise ConfigError(
            f"a cache of kind {type(spec).__name__} cannot cross by PrfaasConnector, only full attention, MLA and "
            "linear states can: use engine.transfer.connector Nixl for this model"
        )
    return spec


def _by_block(name: str, cache: Any, num_blocks: int) -> list[torch.Tensor]:
    """Return a layer's tensors as [blocks, elements], views of the same memory."""
    tensors = list(cache) if isinstance(cache, (list, tuple)) else [cache]
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.shape[0] == 2 and tensor.dim() > 2 and tensor.shape[0] != num_blocks:
            found += list(tensor.unbind(0))  # keys and values apart
        else:
            found.append(tensor)
    return [_flat_by_block(name, tensor, num_blocks) for tensor in found]


def _flat_by_block(name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    if tensor.shape[0] % num_blocks:
        raise ConfigError(f"the cache of {name} has shape {tuple(tensor.shape)} for {num_blocks} blocks")
    held = tensor.permute(0, *_axes_as_held(tensor))
    flat = held.flatten(1) if held.dim() > 1 else held.unsqueeze(1)
    if flat.data_ptr() != tensor.data_ptr():
        raise ConfigError(f"the cache of {name} is not contiguous within a block: strides {tensor.stride()}")
    if ratio := tensor.shape[0] // num_blocks - 1:  # the kernel's blocks are smaller than the manager's
        flat = flat.view(num_blocks, (ratio + 1) * flat.shape[1])
    return flat


def _axes_as_held(tensor: torch.Tensor) -> list[int]:
    """Return the axes behind the blocks, outermost in memory first: kernels for GPUs want tokens before heads."""
    return sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)


def _shape_as_held(cache: Any) -> tuple[int, ...]:
    """Return the shape of a kernel's block in memory, without axes of one: what its bytes mean beside their number."""
    tensor = cache[0] if isinstance(cache, (list, tuple)) else cache
    return tuple(tensor.shape[axis] for axis in _axes_as_held(tensor) if tensor.shape[axis] > 1)


def _form(part: torch.Tensor) -> tuple[int, torch.dtype]:
    return part.shape[1], part.dtype


def _layout(name: str, axes: tuple[str, ...], part: torch.Tensor) -> TensorLayout:
    """Describe a tensor by its numbers' type, which the wire's codec makes use of; an unknown type is bytes."""
    dtype = str(part.dtype).removeprefix("torch.")
    if dtype in ITEM_BYTES:
        return TensorLayout(name, axes, (part.shape[1],), dtype)
    return TensorLayout(name, axes, (part.shape[1] * part.element_size(),), "uint8")


def _describe(spec: KVCacheSpec, device_kind: str, held: tuple[int, ...]) -> str:
    if isinstance(spec, MambaSpec):
        shapes = " ".join(f"{tuple(shape)} {dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        return f"{type(spec).__name__} {spec.mamba_type.name} {shapes} {device_kind}".replace("torch.", "")
    heads = f"{getattr(spec, 'num_kv_heads', 1)} heads of {getattr(spec, 'head_size', 0)}"
    blocks = "x".join(map(str, held))
    return f"{type(spec).__name__} {heads} {getattr(spec, 'dtype', '')} {blocks} {device_kind}".replace("torch.", "")
