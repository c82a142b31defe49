"""A memory small enough to look at: pages of 4 tokens, a state of 3 pages, and sequences that write what they are."""

import pytest
import torch

from prfaas.kvindex.blocks import BlockChain, chain_root
from prfaas.wire.kvevents import KvEvent
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache_spec import CacheGeometry, LayerSpec, TensorSpec

PAGE_TOKENS = 4
FINGERPRINT = "ab" * 32
LAYERS = (
    LayerSpec(rows=(TensorSpec("kv", ("token", "channel"), (8,), "float32"),)),
    LayerSpec(state=(TensorSpec("s", ("channel",), (80,), "float32"),)),
)


class Rig:
    """A cache, its memory, and an engine that computes by writing the hash of a prefix into rows and state."""

    def __init__(self, pages: int = 64, slots: int = 4):
        geometry = CacheGeometry(LAYERS, PAGE_TOKENS)
        assert geometry.pages_per_state == 3
        self.memory = CacheMemory(geometry, num_pages=pages, num_slots=slots, max_context=256)
        self.events: list[KvEvent] = []
        self.cache = HybridCache(self.memory, self.events.append, attention_kind="mla_attention")

    def chain(self, tokens: list[int], salt: str = "") -> BlockChain:
        chain = BlockChain(chain_root(FINGERPRINT, salt), PAGE_TOKENS)
        chain.extend(tokens)
        return chain

    def serve(self, tokens: list[int], salt: str = "") -> int:
        """Prefill a prompt as the engine does and close it; returns how many tokens were cached.

        Checks that what the cache handed over is what a computation from the beginning would have written.
        """
        chain = self.chain(tokens, salt)
        opened = self.cache.open(chain.hashes, len(tokens), len(tokens) - 1)
        assert opened is not None
        lease, done = opened.lease, opened.cached_tokens
        self.check(lease.slot, tokens, done)
        for end in (*opened.checkpoints, len(tokens)):
            self.compute(lease.slot, tokens, done, end)
            done = end
            self.cache.publish(lease, chain, end // PAGE_TOKENS)
            if end in opened.checkpoints:
                assert self.cache.checkpoint(lease, chain, end // PAGE_TOKENS)
        self.check(lease.slot, tokens, done)
        self.cache.close(lease)
        self.cache.check_integrity()
        return opened.cached_tokens

    def compute(self, slot: int, tokens: list[int], start: int, end: int) -> None:
        rows, state = self.memory.rows(0)["kv"], self.memory.states(1)["s"]
        for at in range(start, end):
            page = int(self.memory.table[slot, at // PAGE_TOKENS])
            rows[page, at % PAGE_TOKENS] = value(tokens[: at + 1])
            state[slot] = value(tokens[: at + 1])

    def check(self, slot: int, tokens: list[int], upto: int) -> None:
        rows, state = self.memory.rows(0)["kv"], self.memory.states(1)["s"]
        assert torch.equal(state[slot], torch.full((80,), value(tokens[:upto])))
        for at in range(upto):
            page = int(self.memory.table[slot, at // PAGE_TOKENS])
            assert torch.equal(rows[page, at % PAGE_TOKENS], torch.full((8,), value(tokens[: at + 1])))

    def fill(self) -> None:
        """Make the pool give up everything that is not held."""
        chain = self.chain([])
        opened = self.cache.open(chain.hashes, self.cache.free_pages * PAGE_TOKENS, 0)
        assert opened is not None
        self.cache.close(opened.lease)


def value(prefix: list[int]) -> float:
    """What stands for a prefix in rows and state; nothing for the empty one, as in a cleared slot."""
    return float(hash(tuple(prefix)) % 999983) + 1.0 if prefix else 0.0


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def new_rig() -> type[Rig]:
    return Rig
