"""Runs in vLLM's own environment: caches that cross between instances of other numbers of tensor-parallel ranks.

Each rank's memory is cut out of one model's by its axes, as vLLM lays it out on GPUs: KDA, GDN with channels first in
its convolution, attention with the heads inside a row and fewer of them than ranks, and MLA, which all ranks hold.
Prints JSON: of each pair of numbers the groups that arrived otherwise than the destination's engine would have them,
before the ranks have exchanged their shares and after, and how often each layer has crossed.
"""

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec

from prfaas.wire.prefill import LegParams
from prfaas_transfer.mover.messages import CopyPart, MoverOptions
from prfaas_vllm import slices
from prfaas_vllm.layout import groups_of, slot_bytes
from prfaas_vllm.ranks import RankOf
from prfaas_vllm.scheduling import Fetching, SourceStart, SourceStep, StepPlan
from prfaas_vllm.slices import AllRanks
from prfaas_vllm.transfers import RankTransfers

BLOCKS, PAGE_TOKENS, GOAL = 6, 16, 64
SOURCE_BLOCKS, DESTINATION_BLOCKS = [1, 2, 3, 4], [5, 3, 1, 2]
KV_HEADS = 2
PAIRS = [(1, 2), (2, 1), (4, 1), (1, 4), (4, 2), (2, 4), (2, 2), (4, 4)]

KDA = torch.randn(BLOCKS, 3, 3, 4, 8).bfloat16(), torch.randn(BLOCKS, 4, 8, 8)  # rows, q k v, heads, channels
GDN = (  # q k, heads, channels, rows; v's heads; states
    torch.randn(BLOCKS, 2, 4, 8, 3).bfloat16(),
    torch.randn(BLOCKS, 8, 16, 3).bfloat16(),
    torch.randn(BLOCKS, 8, 16, 8),
)
ATTENTION = torch.randn(BLOCKS, PAGE_TOKENS, KV_HEADS, 24).bfloat16()
MLA = torch.randn(BLOCKS, PAGE_TOKENS, 40).bfloat16()
slices.GATHERED_BYTES = 3 * 2 * MLA[0].nbytes  # of two ranks three blocks at once, of four one: not all in one call


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
LAYERS = {"kda": 1, "gdn": 1, "attention": 1, "mla": 3}


def memory_of(kind: str, number: int, rank: RankOf) -> object:
    """What a rank holds of a kind's layer, of which no two are the same."""
    found = KINDS[kind](rank)
    return [part + number for part in found] if isinstance(found, list) else found + number


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

    def __init__(self, rank: RankOf, all_ranks: AllRanks, *, is_empty: bool):
        self.rank = rank
        self.caches: dict[str, dict[str, object]] = {}
        specs = []
        for kind, layers in LAYERS.items():
            names = {f"layers.{10 * len(specs) + at}": memory_of(kind, at, rank) for at in range(layers)}
            specs.append(KVCacheGroupSpec(list(names), spec_of(kind, next(iter(names.values())))))
            self.caches[kind] = {name: self._own(memory, is_empty) for name, memory in names.items()}
        config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=specs)
        caches = {name: cache for of_kind in self.caches.values() for name, cache in of_kind.items()}
        self.groups = groups_of(config, caches, "gpu", rank, KV_HEADS)
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
        self.transfers = RankTransfers(self.groups, options, all_ranks)

    @staticmethod
    def _own(memory: object, is_empty: bool) -> object:
        if isinstance(memory, list):
            return [Rank._own(part, is_empty) for part in memory]
        order = sorted(range(memory.dim()), key=lambda axis: -memory.stride(axis))
        made = memory.permute(order).clone(memory_format=torch.contiguous_format)
        return (torch.zeros_like(made) if is_empty else made).permute([order.index(at) for at in range(memory.dim())])

    def step(self, plan: StepPlan) -> None:
        self.transfers.revoke(plan)
        self.transfers.begin(plan)
        self.transfers.fetch(plan)
        self.transfers.end_step(plan)

    def wrong(self) -> list[str]:
        """The kinds whose blocks are not those of the model's memory."""
        return [kind for kind in KINDS if not self._is_right(kind)]

    def _is_right(self, kind: str) -> bool:
        for number, cache in enumerate(self.caches[kind].values()):
            wanted, is_state = memory_of(kind, number, self.rank), isinstance(cache, list)
            pairs = list(zip(cache, wanted, strict=True)) if is_state else [(cache, wanted)]
            blocks = list(zip(SOURCE_BLOCKS, DESTINATION_BLOCKS, strict=True))[-1 if is_state else 0 :]
            if not all(torch.equal(got[to], want[of]) for got, want in pairs for of, to in blocks):
                return False
        return True


class Gathering:
    """Stands for the library of a GPU's ranks: each gives a tensor, and gets those of all."""

    def __init__(self, ranks: int):
        self._tensors: list[torch.Tensor | None] = [None] * ranks
        self._all_gave, self._all_took = threading.Barrier(ranks, timeout=10), threading.Barrier(ranks, timeout=10)

    def gather(self, rank: int, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        self._tensors[rank] = tensor
        self._all_gave.wait()
        found = torch.stack(self._tensors).unbind()
        self._all_took.wait()
        return found


def refuse_exchange(_tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    raise AssertionError("a source, or one rank alone, has nothing to exchange")


def count_landed(taker: Rank, crossed: Counter[tuple[int, int]]) -> None:
    """Count the layers that come to a rank."""
    land = taker.transfers.land

    def counted(key: str, part: CopyPart, received: memoryview) -> None:
        crossed[part.group, part.layer] += 1
        land(key, part, received)

    taker.transfers.land = counted


def cross(sources: int, destinations: int) -> dict[str, object]:
    gathering, crossed = Gathering(destinations), Counter[tuple[int, int]]()
    gather = (lambda at: partial(gathering.gather, at)) if destinations > 1 else lambda _: refuse_exchange
    givers = [Rank(RankOf(at, sources), refuse_exchange, is_empty=False) for at in range(sources)]
    takers = [Rank(RankOf(at, destinations), gather(at), is_empty=True) for at in range(destinations)]
    assert all(one.wrong() == list(KINDS) for one in takers)
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
        count_landed(taker, crossed)
        fetching = Fetching("d", to, 0, GOAL, (DESTINATION_BLOCKS,) * len(KINDS))
        taker.step(StepPlan(fetches=[fetching]))
    failed: set[str] = set()
    for taker in takers:
        received: set[str] = set()
        deadline = time.monotonic() + 30
        while not received and time.monotonic() < deadline:
            time.sleep(0.001)  # as vLLM does where it has nothing to compute
            _, received, in_vain = taker.transfers.results(set())
            failed |= in_vain
    before = [one.wrong() for one in takers]
    with ThreadPoolExecutor(destinations) as pool:
        list(pool.map(lambda taker: taker.transfers.begin(StepPlan(fetched=[fetching])), takers))
    wrong = [one.wrong() for one in takers]
    for one in (*givers, *takers):
        one.transfers.mover.close()
    times = {kind: sorted({crossed[key] for key in crossed if key[0] == at}) for at, kind in enumerate(KINDS)}
    return {"pair": [sources, destinations], "failed": sorted(failed), "before": before, "wrong": wrong, "times": times}


def main() -> None:
    print(json.dumps([cross(*pair) for pair in PAIRS]))


if __name__ == "__main__":
    main()
