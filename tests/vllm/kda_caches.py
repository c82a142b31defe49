"""Runs in vLLM's own environment: caches of Kimi Linear's kinds (KDA and MLA), which vLLM computes only on GPUs.

Their groups are made by vLLM's own classes, their memory as vLLM lays it out: one buffer, padded pages, states as
strided views. Random bytes cross from one to the other through two movers. Prints JSON: what was compared.
"""

import json
import secrets
import time

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec

from prfaas.wire.prefill import LegParams
from prfaas_transfer.mover.messages import MoverOptions
from prfaas_vllm.layout import groups_of, slot_bytes
from prfaas_vllm.scheduling import Fetching, SourceStart, SourceStep, StepPlan
from prfaas_vllm.transfers import RankTransfers

BLOCKS, PAGE_TOKENS, GOAL = 12, 64, 256
LAYERS = {"kda": (0, 1, 2, 4), "mla": (3, 5)}
SOURCE_BLOCKS = {"kda": [1, 2, 3, 4], "mla": [5, 6, 7, 8]}
DESTINATION_BLOCKS = {"kda": [0, 0, 0, 9], "mla": [3, 2, 11, 7]}


def config() -> KVCacheConfig:
    kda = MambaSpec(
        block_size=PAGE_TOKENS,
        shapes=MambaStateShapeCalculator.kda_state_shape(1, num_heads=4, head_dim=32),
        dtypes=MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto"),
        mamba_cache_mode="align",
    )
    mla = MLAAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    groups = [
        KVCacheGroupSpec([f"model.layers.{layer}.self_attn" for layer in LAYERS[kind]], spec)
        for kind, spec in (("kda", kda), ("mla", mla))
    ]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def caches_of(found: KVCacheConfig) -> dict[str, object]:
    """Random memory: of each layer a buffer of equal pages, as large as the larger kind's."""
    page_bytes = max(group.kv_cache_spec.page_size_bytes for group in found.kv_cache_groups)
    caches: dict[str, object] = {}
    for group in found.kv_cache_groups:
        for name in group.layer_names:
            raw = torch.randint(0, 256, (BLOCKS, page_bytes), dtype=torch.uint8)
            spec = group.kv_cache_spec
            if isinstance(spec, MambaSpec):
                states, at = [], 0
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
                    size = torch.Size(shape).numel() * dtype.itemsize
                    states.append(raw[:, at : at + size].view(dtype).unflatten(1, shape))
                    at += size
                caches[name] = states
            else:
                caches[name] = raw[:, : spec.page_size_bytes].view(spec.dtype).unflatten(1, (PAGE_TOKENS, 576))
    return caches


class Side:
    def __init__(self, cluster: str):
        self.config = config()
        self.groups = groups_of(self.config, caches_of(self.config), "cpu")
        options = MoverOptions(
            host="127.0.0.1",
            data_port=0,
            cluster=cluster,
            fingerprint="same",
            groups=tuple(group.layout for group in self.groups),
            slot_bytes=slot_bytes(self.groups),
        )
        self.transfers = RankTransfers(self.groups, options, list)  # one rank never exchanges

    def step(self, plan: StepPlan) -> None:
        self.transfers.revoke(plan)
        self.transfers.begin(plan)
        self.transfers.fetch(plan)
        self.transfers.end_step(plan)

    def bytes_of(self, kind: str, block: int) -> list[bytes]:
        group = self.groups[list(LAYERS).index(kind)]
        return [bytes(part[block].numpy()) for layer in LAYERS[kind] for part in group.tensors[layer]]


def main() -> None:
    source, destination = Side("eu"), Side("hub")
    leg = {"transfer_id": secrets.token_hex(16), "epoch": 7, "token": "secret", "host": "127.0.0.1"}
    start = SourceStart("s", LegParams(role="source", **leg), GOAL)
    to = LegParams(role="destination", port=source.transfers.mover.data_port, **leg)
    destination.step(
        StepPlan(
            fetches=[Fetching("d", to, PAGE_TOKENS, GOAL, tuple(DESTINATION_BLOCKS.values()))]
        )  # one page is there
    )
    blocks = tuple(SOURCE_BLOCKS.values())
    source.step(StepPlan(starts=[start], steps=[SourceStep("s", 0, 128, blocks)]))
    source.step(StepPlan(steps=[SourceStep("s", 128, GOAL, blocks)]))
    received: set[str] = set()
    deadline = time.monotonic() + 30
    while not received and time.monotonic() < deadline:
        time.sleep(0.001)  # as vLLM does where it has nothing to compute
        _, received, failed = destination.transfers.results(set())
    same = {
        "state": source.bytes_of("kda", 4) == destination.bytes_of("kda", 9),
        "pages": [
            source.bytes_of("mla", 5 + at) == destination.bytes_of("mla", block)
            for at, block in enumerate(DESTINATION_BLOCKS["mla"])
        ],
        "others": source.bytes_of("kda", 3) == destination.bytes_of("kda", 3),
    }
    groups = [(one.layout.kind, one.layout.spec, [part.dtype for part in one.layout.tensors]) for one in source.groups]
    print(json.dumps({"received": sorted(received), "failed": sorted(failed), "same": same, "groups": groups}))
    for side in (source, destination):
        side.transfers.mover.close()


if __name__ == "__main__":
    main()
