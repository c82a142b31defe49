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
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from prfaas.errors import ConfigError, MismatchError, PeerError
from prfaas.wire.receive_ledger import ReceiveLedger
from prfaas.wire.transfer import LayerGroup, Manifest
from prfaas_vllm import destination as destination_side
from prfaas_vllm import device
from prfaas_vllm.blocks import VllmGroup, write_blocks
from prfaas_vllm.connector import kv_heads_of
from prfaas_vllm.layout import groups_of
from prfaas_vllm.ranks import RankOf, copies_of
from prfaas_vllm.scheduling import Fetching, LegParams, SourceStart, SourceStep, StepPlan


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
        _, received, failed = destination.transfers.results(set(), is_idle=True)
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


def attention_groups(order: KVCacheLayout, names: Sequence[str]) -> tuple[VllmGroup, ...]:
    """The groups of layers with two heads, in memory as vLLM lays it out."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    memory = KVCacheTensor(BLOCKS * page * len(names), list(names), BLOCKS * page, page)
    config = KVCacheConfig(BLOCKS, [memory], [KVCacheGroupSpec(list(names), spec)])
    return groups_of(config, allocate_kv_cache(config, torch.device("cpu"), order, [16]), "cuda")


def layouts() -> dict[str, str]:
    """How groups are named whose heads are before their tokens in memory, or behind them."""
    orders = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)
    return {order.name: attention_groups(order, ["model.layers.0.attn"])[0].layout.spec for order in orders}


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


def difference(theirs: LayerGroup, ours: LayerGroup) -> str:
    """Return what is reported of two sides with these groups."""
    manifest = Manifest(
        fingerprint="f", transfer_id="t", epoch=1, start_token=0, end_token=4, groups=(ours,), hidden_size=0
    )
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
        "other blocks of states": difference(*state_layouts()[:2]),
        "other states": difference(*state_layouts()[1:]),
        "beside a draft": layers_beside_a_draft(),
        "ranks alike": ranks_alike_beside_a_draft(),
        "unlike layers": unlike_layers(),
        "too few blocks": too_few_blocks(),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
