"""Runs in vLLM's own environment: what the connector does with the memory of an accelerator, where there is none.

Kernels of a GPU run on when Python is through with a step. Here they are a function that is called later. Prints JSON.
"""

import json
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import torch
from kda_caches import BLOCKS, DESTINATION_BLOCKS, GOAL, SOURCE_BLOCKS, Side
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from prfaas.errors import ConfigError, MismatchError, PeerError
from prfaas.wire.prefill import LegParams
from prfaas.wire.receive_ledger import ReceiveLedger
from prfaas.wire.transfer import LayerGroup, Manifest
from prfaas_vllm import destination as destination_side
from prfaas_vllm import device
from prfaas_vllm.blocks import VllmGroup, read_blocks, write_blocks
from prfaas_vllm.connector import kv_heads_of
from prfaas_vllm.layout import groups_of
from prfaas_vllm.ranks import RankOf, copies_of
from prfaas_vllm.scheduling import Fetching, SourceStart, SourceStep, StepPlan


class Kernels:
    """Stands for an event of a GPU's stream, behind kernels that write all of a cache."""

    def __init__(self, side: Side):
        self._side = side
        self._done = threading.Event()

    def synchronize(self) -> None:
        assert self._done.wait(30)

    def run(self) -> None:
        for group in self._side.groups:
            for tensors in group.tensors.values():
                for tensor in tensors:
                    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
        self._done.set()


def blocks_written_after_the_step() -> bool:
    """Whether a destination gets what kernels write after the step's Python has ended."""
    source, destination = Side("eu"), Side("hub")
    leg = {"transfer_id": "0" * 32, "epoch": 7, "token": "secret", "host": "127.0.0.1"}
    to = LegParams(role="destination", port=source.transfers.mover.data_port, **leg)
    destination.step(StepPlan(fetches=[Fetching("d", to, 0, GOAL, (DESTINATION_BLOCKS["kda"], [3, 2, 11, 7]))]))
    kernels = Kernels(source)
    device.started_kernels = lambda _: kernels
    start = SourceStart("s", LegParams(role="source", **leg), GOAL)
    source.step(StepPlan(starts=[start], steps=[SourceStep("s", 0, 128, tuple(SOURCE_BLOCKS.values()))]))
    time.sleep(1)  # enough for a mover that does not wait
    kernels.run()
    source.step(StepPlan(steps=[SourceStep("s", 128, GOAL, tuple(SOURCE_BLOCKS.values()))]))
    received: set[str] = set()
    deadline = time.monotonic() + 30
    while not received and time.monotonic() < deadline:
        time.sleep(0.001)  # as vLLM does where it has nothing to compute
        _, received, failed = destination.transfers.results(set())
    assert not failed
    pages = zip(SOURCE_BLOCKS["mla"], [3, 2, 11, 7], strict=True)
    same = all(source.bytes_of("mla", here) == destination.bytes_of("mla", there) for here, there in pages)
    for side in (source, destination):
        side.transfers.mover.close()
    return bool(received) and same


def fetch_after_a_cache_was_completed() -> list[str]:
    """What happens, in order, when a cache is completed and another one is requested: an accelerator may still write
    the first, whose blocks the second may have."""
    side, happened = Side("hub"), list[str]()

    class Event:
        def synchronize(self) -> None:
            happened.append("completed")

    destination_side.started_kernels = lambda _: Event()
    destination_side.complete = lambda _groups, _own, fetched, _all_ranks: fetched.request_id == "shared"
    side.transfers.mover.fetch = lambda message: happened.append(message.request_id)
    leg = LegParams(role="destination", transfer_id="0" * 32, epoch=7, token="secret", host="127.0.0.1")
    cache = {name: Fetching(name, leg, 0, GOAL, tuple(DESTINATION_BLOCKS.values())) for name in ("shared", "whole")}
    side.step(StepPlan(fetched=[cache["whole"]], fetches=[replace(cache["whole"], request_id="first")]))
    side.step(StepPlan(fetched=[cache["shared"]]))
    side.step(StepPlan(fetches=[replace(cache["whole"], request_id=name) for name in ("second", "third")]))
    side.transfers.mover.close()
    return happened


def devices_waited_for() -> list[str]:
    """The devices whose streams a thread waits for when it has written into memory that is not a CPU's."""
    waited: list[str] = []

    class Stream:
        def __init__(self, device: torch.device | None = None):
            self._device = device

        def synchronize(self) -> None:
            waited.append(str(self._device))

    torch.accelerator.current_stream = Stream
    write_blocks([torch.empty((4, 8), dtype=torch.uint8, device="meta")], [1, 2], memoryview(bytearray(16)))
    return waited


def pinned_memory() -> list[object]:
    """What CUDA is asked for when transfers begin on a CPU and on a GPU, and what is logged if it refuses."""
    calls: list[object] = []
    memory = memoryview(bytearray(3 << 20))

    def register(address: int, count_bytes: int, flags: int) -> int:
        calls.append((address == torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), count_bytes, flags))
        return 2

    with (
        patch.object(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register)),
        patch.object(torch.cuda, "device", lambda _device: nullcontext()),
        patch.object(device.log, "warning", lambda text, *values: calls.append(text % values)),
    ):
        device.pin(memory, torch.device("cpu"))
        device.pin(memory, torch.device("cuda", 1))
    return calls


TWO_HEADS = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


def attention_groups(
    order: KVCacheLayout, names: Sequence[str], spec: FullAttentionSpec = TWO_HEADS
) -> tuple[VllmGroup, ...]:
    """The groups of layers of one kind, in memory as vLLM lays it out."""
    page = spec.page_size_bytes
    memory = KVCacheTensor(BLOCKS * page * len(names), list(names), BLOCKS * page, page)
    config = KVCacheConfig(BLOCKS, [memory], [KVCacheGroupSpec(list(names), spec)])
    return groups_of(config, allocate_kv_cache(config, torch.device("cpu"), order, [16]), "cuda")


def layouts() -> dict[str, str]:
    """How groups are named whose heads are before their tokens in memory, or behind them."""
    orders = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)
    return {order.name: attention_groups(order, ["model.layers.0.attn"])[0].layout.spec for order in orders}


def quantized() -> dict[str, tuple[bool, str, str]]:
    """Of caches with numbers of 8 bits: whether all of a page crosses, scales included, of which type, and its name."""
    of_tensor, of_token = KVQuantMode.FP8_PER_TENSOR, KVQuantMode.FP8_PER_TOKEN_HEAD
    scaled_bytes = 2 * (TWO_HEADS.head_size + torch.float32.itemsize)
    found = {}
    for name, mode, content_bytes in (("of a tensor", of_tensor, None), ("of a token", of_token, scaled_bytes)):
        spec = replace(TWO_HEADS, dtype=torch.uint8, kv_quant_mode=mode, state_content_bytes=content_bytes)
        layout = attention_groups(KVCacheLayout.LBNHC, ["model.layers.0.attn"], spec)[0].layout
        (part,) = layout.tensors
        found[name] = layout.nbytes == spec.unpadded_page_size_bytes, part.dtype, layout.spec
    return found


def state_layouts() -> list[LayerGroup]:
    """How states are described whose blocks hold 64 tokens, as where prefixes are cached, and 4096; and others."""
    names = ["model.layers.0.linear_attn"]
    found = []
    for block_tokens, heads in ((64, 4), (4096, 4), (64, 2)):
        shapes, dtypes = ((3, 96), (heads, 8, 8)), (torch.bfloat16, torch.float32)
        spec = MambaSpec(block_size=block_tokens, shapes=shapes, dtypes=dtypes)
        caches = [torch.zeros((BLOCKS, *shape), dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        (group,) = groups_of(KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)]), {names[0]: caches}, "cuda")
        assert group.blocks_between([3, 1, 2], 0, 128) == [1 if block_tokens == 64 else 3]
        found.append(group.layout)
    return found


def state_group(drafts: int, *, is_token_first: bool = True) -> VllmGroup:
    """A group with a state of an instance that drafts so many tokens. Its convolution's inputs have them behind."""
    tokens, name = 3 + drafts, "model.layers.0.linear_attn"
    conv = (tokens, 96) if is_token_first else (96, tokens)
    spec = MambaSpec(
        block_size=64,
        shapes=(conv, (4, 8, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        num_speculative_blocks=drafts,
    )
    raw = torch.randint(0, 256, (BLOCKS, spec.page_size_bytes), dtype=torch.uint8)
    states, at = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = torch.Size(shape).numel() * dtype.itemsize
        states.append(raw[:, at : at + size].view(dtype).unflatten(1, shape))
        at += size
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([name], spec)])
    (group,) = groups_of(config, {name: states}, "cuda", drafts=drafts)
    return group


def states_beside_drafts() -> dict[str, object]:
    """What is reported of states with and without room for drafts, by where the room is; and whether the first arrive
    as they are, on both sides, and write into no room."""
    with_room, without = state_group(2), state_group(0)
    arrived = []
    for source, destination in ((with_room, without), (without, with_room)):
        wire = memoryview(bytearray(source.layout.nbytes))
        room = [bytes(part[3].numpy()) for part in room_behind(destination)]
        read_blocks(source.tensors[0], [1], wire)
        write_blocks(destination.tensors[0], [3], wire)
        pairs = zip(source.tensors[0], destination.tensors[0], strict=True)
        arrived.append(all(bytes(here[1].numpy()) == bytes(there[3].numpy()) for here, there in pairs))
        arrived.append(room == [bytes(part[3].numpy()) for part in room_behind(destination)])
    first_rank = [each.describe(RankOf(0, 2)) for each in (with_room, without)]
    return {
        "behind": difference(with_room.layout, without.layout),
        "of ranks": difference(*(msgspec.structs.replace(without.layout, spec=spec) for spec in first_rank)),
        "between": difference(*(state_group(drafts, is_token_first=False).layout for drafts in (2, 0))),
        "between, alike": difference(*(state_group(2, is_token_first=False).layout for _ in range(2))),
        "arrived": arrived,
    }


def room_behind(group: VllmGroup) -> list[torch.Tensor]:
    """The bytes of a block between its convolution's inputs and the next tensor."""
    conv, state = group.tensors[0]
    first, end = conv.storage_offset() + conv.shape[1], state.storage_offset()
    return [conv.as_strided((BLOCKS, end - first), (conv.stride(0), 1), first)]


def difference(theirs: LayerGroup, ours: LayerGroup) -> str:
    """Return what is reported of two sides with these groups."""
    manifest = Manifest(fingerprint="f", transfer_id="t", epoch=1, start_token=0, end_token=4, groups=(ours,))
    try:
        ReceiveLedger(manifest).require_manifest(msgspec.structs.replace(manifest, groups=(theirs,)))
    except MismatchError as error:
        return str(error)
    return ""


def layers_beside_a_draft() -> tuple[int, ...]:
    """The numbers of two layers and of the two of a draft model, in one group."""
    names = [f"{model}.layers.{layer}.attn" for model in ("model", "draft_model.model") for layer in (0, 1)]
    return attention_groups(KVCacheLayout.LBNHC, names)[0].layout.layers


def ranks_alike_beside_a_draft() -> list[int]:
    """How many of four ranks hold the same of a group: of a model with two heads only, and with a draft of four."""

    class Model(NamedTuple):
        heads: int

        def get_total_num_kv_heads(self) -> int:
            return self.heads

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    names = ["model.layers.0.attn", "draft_model.layers.0.attn"]
    caches = {name: torch.zeros((BLOCKS, 1, 16, 16), dtype=torch.bfloat16) for name in names}
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)])
    found = []
    for draft in (None, SimpleNamespace(draft_model_config=None), SimpleNamespace(draft_model_config=Model(4))):
        heads = kv_heads_of(SimpleNamespace(model_config=Model(2), speculative_config=draft))
        (group,) = groups_of(config, caches, "cuda", RankOf(0, 4), heads)
        found.append(copies_of(group.heads, 4))
    return found


def unlike_layers() -> str:
    """What is reported of a group that holds layers of two sizes, as sparse attention's indexer makes one."""
    names = ["model.layers.0.attn", "model.layers.0.attn.indexer"]
    specs = [
        FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=8, dtype=torch.bfloat16) for heads in (2, 4)
    ]
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict(zip(names, specs, strict=True)))
    caches = {name: torch.zeros((BLOCKS, 16, spec.num_kv_heads, 16)) for name, spec in zip(names, specs, strict=True)}
    try:
        groups_of(KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, both)]), caches, "cuda")
    except ConfigError as error:
        return str(error)
    return ""


def too_few_blocks() -> str:
    """What is reported of a part with more tokens than the request's blocks have."""
    (group,) = attention_groups(KVCacheLayout.LBNHC, ["model.layers.0.attn"])
    assert group.blocks_of([3, 1, 2], 16, 32) == [1, 2]
    try:
        group.blocks_of([3, 1, 2], 16, 48)
    except PeerError as error:
        return str(error)
    return ""


def main() -> None:
    results = {
        "written after the step": blocks_written_after_the_step(),
        "fetched after": fetch_after_a_cache_was_completed(),
        "waited for": devices_waited_for(),
        "pinned": pinned_memory(),
        "layouts": layouts(),
        "quantized": quantized(),
        "other blocks of states": difference(*state_layouts()[:2]),
        "other states": difference(*state_layouts()[1:]),
        "drafts": states_beside_drafts(),
        "beside a draft": layers_beside_a_draft(),
        "ranks alike": ranks_alike_beside_a_draft(),
        "unlike layers": unlike_layers(),
        "too few blocks": too_few_blocks(),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
