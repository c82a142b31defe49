"""The prefix caches of instances: least recently used attention blocks, and linear states at exact lengths.

A match is the longest n with attention blocks up to n and a state at n. A state costs as much as thousands of tokens of
attention. So states are kept where they are likely to be met again. One place is the end of each prompt. Another is a
branch that is seen the second time, where attention blocks match but no state is.

Entries are told apart by the trace's names of blocks, which stand for everything before them too. So the smallest unit
is the trace's block, and a state lies at the last full one of a prompt. Of one prompt the deepest entries are evicted
first, for which attention stays closed under prefixes and its match can be bisected.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from prfaas.names import HUB
from prfaas.simulate.request import Request
from prfaas.simulate.scenario import Scenario
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance

CacheKey = tuple[str, int]


class PrefixCache:
    """One instance's cache. A full block of the trace has `block_tokens`, one linear state `state_bytes`."""

    def __init__(self, capacity_bytes: float, block_tokens: int, token_bytes: int, state_bytes: int):
        self._capacity_bytes = capacity_bytes
        self._block_tokens = block_tokens
        self._bytes = {"attention": block_tokens * token_bytes, "state": state_bytes}
        self._used: OrderedDict[CacheKey, None] = OrderedDict()
        self.used_bytes = 0

    def match(self, blocks: Sequence[int], tokens: int) -> int:
        """Return the tokens of a prompt that are cached, always fewer than it has. Changes nothing."""
        for count in range(self._attention_blocks(blocks, tokens), 0, -1):
            if ("state", blocks[count - 1]) in self._used:
                return count * self._block_tokens
        return 0

    def insert(self, blocks: Sequence[int], tokens: int) -> None:
        """Take in a prompt that was computed or fetched, and mark what it holds as used now."""
        full = min(len(blocks), tokens // self._block_tokens)
        if full == 0:
            return
        branch = self._attention_blocks(blocks, tokens)
        states = {full, branch} - {0}
        for count in range(full, 0, -1):
            if count in states or ("state", blocks[count - 1]) in self._used:
                self._touch(("state", blocks[count - 1]))
            self._touch(("attention", blocks[count - 1]))
        while self.used_bytes > self._capacity_bytes:
            (kind, _), _ = self._used.popitem(last=False)
            self.used_bytes -= self._bytes[kind]

    def clear(self) -> None:
        """Forget everything: the instance's memory is gone."""
        self._used.clear()
        self.used_bytes = 0

    def _attention_blocks(self, blocks: Sequence[int], tokens: int) -> int:
        """Return the number of leading full blocks in the cache, of all but the prompt's last token."""
        full = min(len(blocks), (tokens - 1) // self._block_tokens)
        return bisect_left(blocks, True, hi=full, key=lambda block: ("attention", block) not in self._used)

    def _touch(self, key: CacheKey) -> None:
        if key in self._used:
            self._used.move_to_end(key)
        else:
            self._used[key] = None
            self.used_bytes += self._bytes[key[0]]


class Caches:
    """The caches of all instances; those that a cluster has at the start share its memory equally."""

    def __init__(self, scenario: Scenario, instances: Sequence[Instance], profiles: Mapping[str, Profile]):
        sharing = Counter({HUB: scenario.system.hub_instances})
        for pool in scenario.system.offload:
            sharing[pool.link] += pool.instances
        self._caches = {
            one.name: PrefixCache(
                size_bytes / max(1, sharing[one.cluster]),
                scenario.block_tokens,
                profiles[one.name].token_bytes,
                profiles[one.name].state_bytes,
            )
            for one in instances
            if (size_bytes := scenario.cache_bytes.get(one.cluster, 0.0)) > 0
        }

    def found(self, request: Request) -> dict[str, int]:
        """Return the tokens that are cached of a prompt, by instance; those without any are left out."""
        blocks, tokens = request.arrival.blocks, request.total_tokens
        if not blocks:
            return {}
        return {name: match for name, cache in self._caches.items() if (match := cache.match(blocks, tokens))}

    def match(self, name: str, request: Request) -> int:
        """Return the tokens of a prompt that an instance has."""
        blocks, cache = request.arrival.blocks, self._caches.get(name)
        return cache.match(blocks, request.total_tokens) if blocks and cache is not None else 0

    def insert(self, name: str, request: Request) -> None:
        blocks, cache = request.arrival.blocks, self._caches.get(name)
        if blocks and cache is not None:
            cache.insert(blocks, request.arrival.input_tokens)

    def clear(self, name: str) -> None:
        if name in self._caches:
            self._caches[name].clear()
