"""Runs in vLLM's own environment: caches that cross between instances of other numbers of tensor-parallel ranks.

Each rank's memory is cut out of one model's by its axes, as vLLM lays it out on GPUs: KDA, GDN with channels first in
its convolution, attention with the heads inside a row and fewer of them than ranks, and MLA, which all ranks hold.
Prints JSON: of each pair of numbers the groups that arrived otherwise than the destination's engine would have them.
"""

import json
import secrets
import time
from collections.abc import Callable

import msgspec
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec

from prfaas_transfer.mover.messages import MoverOptions
from prfaas_vllm.layout import groups_of, slot_bytes
from prfaas_vllm.ranks import RankOf
from prfaas_vllm.scheduling import Fetching, LegParams, SourceStart, SourceStep, StepPlan
from prfaas_vllm.transfers import Transfers

BLOCKS, PAGE_TOKENS, GOAL = 6, 16, 64
SOURCE_BLOCKS, DESTINATION_BLOCKS = [1, 2, 3, 4], [5, 3, 1, 2]
KV_HEADS = 2
PAIRS = [(1, 2), (2, 1), (4, 1), (1, 4), (4, 2), (2, 2)]

KDA = torch.randn(BLOCKS, 3, 3, 4, 8).bfloat16(), torch.randn(BLOCKS, 4, 8, 8)  # rows, q k v, heads, channels
GDN = (  # q k, heads, channels, rows; v's heads; states
    torch.randn(BLOCKS, 2, 4, 8, 3).bfloat16(),
    torch.randn(BLOCKS, 8, 16, 3).bfloat16(),
    torch.randn(BLOCKS, 8, 16, 8),
)
ATTENTION = torch.randn(BLOCKS, PAGE_TOKENS, KV_HEADS, 24).bfloat16()
MLA = torch.randn(BLOCKS, PAGE_TOKENS, 40).bfloat16()


def share(axis: torch.Tensor, dim: int, rank: RankOf) -> torch.Tensor:
    """A rank's heads along an axis."""
    heads = axis.shape[dim]
    if heads >= rank.ranks:
        return axis.chunk(rank.ranks, dim)[rank.rank]
    return axis.narrow(dim, rank.rank // (rank.ranks // heads), 1)


def kda(rank: RankOf) -> list[torch.Tensor]:
    return [share(KDA[0], 3, rank).flatten(2), share(KDA[1], 1, rank)]


def gdn(rank: RankOf) -> list[torch.Tensor]:
    q_k, value = share(GDN[0], 2, rank).flatten(1, 3), share(GDN[1], 1, rank).flatten(1, 2)
    return [torch.cat([q_k, value], 1), share(GDN[2], 1, rank)]


def attention(rank: RankOf) -> torch.Tensor:
    return share(ATTENTION, 2, rank).contiguous().transpose(1, 2)  # vLLM's view of it: heads, rows


def mla(_rank: RankOf) -> torch.Tensor:
    return MLA.unsqueeze(1)


KINDS: dict[str, Callable[[RankOf], object]] = {"kda": kda, "gdn": gdn, "attention": attention, "mla": mla}


def spec_of(kind: str, memory: object):
    if isinstance(memory, list):
        return MambaSpec(
            block_size=PAGE_TOKENS,
            shapes=tuple(tuple(part.shape[1:]) for part in memory),
            dtypes=tuple(part.dtype for part in memory),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode="align",
        )
    if kind == "mla":
        return MLAAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=40, dtype=torch.bfloat16)
    heads = memory.shape[1]
    return FullAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=heads, head_size=12, dtype=torch.bfloat16)


class Rank:
    """One rank with the model's memory, or with none of it."""

    def __init__(self, rank: RankOf, *, is_empty: bool):
        self.rank = rank
        memory = {name: make(rank) for name, make in KINDS.items()}
        self.caches = {f"layers.{at}": self._own(memory[name], is_empty) for at, name in enumerate(KINDS)}
        specs = [KVCacheGroupSpec([f"layers.{at}"], spec_of(name, memory[name])) for at, name in enumerate(KINDS)]
        config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=specs)
        self.groups = groups_of(config, self.caches, "gpu", rank, KV_HEADS)
        options = MoverOptions(
            host="127.0.0.1",
            data_port=0,
            fingerprint="same",
            groups=tuple(group.layout for group in self.groups),
            slot_bytes=slot_bytes(self.groups),
            rank=rank.rank,
            ranks=rank.ranks,
            transfer_memory_mib=16,
        )
        self.transfers = Transfers(self.groups, options)

    @staticmethod
    def _own(memory: object, is_empty: bool) -> object:
        if isinstance(memory, list):
            return [Rank._own(part, is_empty) for part in memory]
        order = sorted(range(memory.dim()), key=lambda axis: -memory.stride(axis))
        made = memory.permute(order).clone(memory_format=torch.contiguous_format)
        return (torch.zeros_like(made) if is_empty else made).permute([order.index(at) for at in range(memory.dim())])

    def step(self, plan: StepPlan) -> None:
        self.transfers.begin(plan)
        self.transfers.fetch(plan)
        self.transfers.end_step(plan)

    def wrong(self) -> list[str]:
        """The groups whose blocks are not those of the model's memory."""
        found = []
        for (name, make), cache in zip(KINDS.items(), self.caches.values(), strict=True):
            wanted, is_state = make(self.rank), isinstance(cache, list)
            pairs = list(zip(cache, wanted, strict=True)) if is_state else [(cache, wanted)]
            blocks = list(zip(SOURCE_BLOCKS, DESTINATION_BLOCKS, strict=True))[-1 if is_state else 0 :]
            if not all(torch.equal(got[to], want[of]) for got, want in pairs for of, to in blocks):
                found.append(name)
        return found


def cross(sources: int, destinations: int) -> dict[str, object]:
    givers = [Rank(RankOf(at, sources), is_empty=False) for at in range(sources)]
    takers = [Rank(RankOf(at, destinations), is_empty=True) for at in range(destinations)]
    assert all(one.wrong() for one in takers)
    leg = {"transfer_id": secrets.token_hex(16), "epoch": 7, "token": "secret", "host": "127.0.0.1"}
    start = SourceStart("s", LegParams(role="source", ranks=destinations, **leg), GOAL)
    step = SourceStep("s", 0, GOAL, (SOURCE_BLOCKS,) * len(KINDS))
    for giver in givers:
        giver.step(StepPlan(starts=[start], steps=[step]))
    ports = [giver.transfers.mover.data_port for giver in givers]
    for taker in takers:
        send = taker.transfers.mover.fetch
        to = LegParams(role="destination", ranks=sources, **leg)
        # A leg has port 0, so a message's is the source's rank.
        taker.transfers.mover.fetch = lambda message, send=send: send(
            msgspec.structs.replace(message, port=ports[message.port])
        )
        taker.step(StepPlan(fetches=[Fetching("d", to, 0, GOAL, (DESTINATION_BLOCKS,) * len(KINDS))]))
    failed: set[str] = set()
    for taker in takers:
        received: set[str] = set()
        deadline = time.monotonic() + 30
        while not received and time.monotonic() < deadline:
            _, received, in_vain = taker.transfers.results(set(), is_idle=True)
            failed |= in_vain
    wrong = [one.wrong() for one in takers]
    for one in (*givers, *takers):
        one.transfers.mover.close()
    return {"pair": [sources, destinations], "failed": sorted(failed), "wrong": wrong}


def main() -> None:
    print(json.dumps([cross(*pair) for pair in PAIRS]))


if __name__ == "__main__":
    main()
