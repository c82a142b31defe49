"""The hybrid prefix cache of one engine: memory for sequences, and the prefixes that earlier prompts left in it.

`Blocks` knows who holds which page, and a `PagedMemory` has the bytes. A sequence finds cached blocks, which it shares,
and a state, which is copied into its slot. It leaves blocks, which it published, and copies of its state at some
lengths. What is not to be computed yet has its state in pages, and no slot: a cache that comes from another instance
(`reserve`), and a prompt that further choices wait for (`store`).

Used from the engine's thread only. Questions that end in None or False change nothing.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from prfaas.errors import InternalError
from prfaas.kvindex.blocks import BlockChain, BlockHash
from prfaas.wire.kvevents import AttentionSpecKind, KvEvent
from prfaas.wire.stats import CacheStats
from prfaas_worker.cache.blocks import Blocks, Lease, Match, checkpoint_blocks
from prfaas_worker.cache.kv_events import CacheEventRecorder
from prfaas_worker.cache_spec import PagedMemory

AllowedPlaces: TypeAlias = Collection[str] | None
"""The other clusters whose bytes a request may use; None: all."""


class Opened(NamedTuple):
    """Memory for a sequence, of which `cached_tokens` are filled (`attention_tokens` without regard to state). The
    caller cuts its chunks at `checkpoints`, ascending lengths above that, and calls `checkpoint` there."""

    lease: Lease
    cached_tokens: int
    attention_tokens: int
    checkpoints: tuple[int, ...]


class HybridCache:
    """Pages and slots of one memory, and the prefixes in them."""

    def __init__(
        self,
        memory: PagedMemory,
        on_event: Callable[[KvEvent], None] | None = None,
        *,
        attention_kind: AttentionSpecKind = "full_attention",
    ):
        self._memory = memory
        self._geometry = memory.geometry
        self._events = CacheEventRecorder(on_event, attention_kind)
        self._blocks = Blocks(memory.num_pages, self._geometry.pages_per_state, self._events.record_evicted)
        # Taken from the end, as pages are: memory that was used is used again.
        self._free_slots = list(range(memory.num_slots - 1, -1, -1))
        self._leases: dict[int, Lease] = {}
        self._slotless: set[Lease] = set()
        self._query_tokens = self._hit_tokens = self._stateless_tokens = 0

    @property
    def free_pages(self) -> int:
        return self._blocks.free_pages

    @property
    def num_pages(self) -> int:
        return self._memory.num_pages

    @property
    def num_slots(self) -> int:
        return self._memory.num_slots

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def pages_for(self, tokens: int) -> int:
        return self._geometry.pages_for(tokens)

    def capacity_tokens(self, lease: Lease) -> int:
        return len(lease.pages) * self._geometry.page_tokens

    def cached_tokens(self, chain: Sequence[BlockHash], max_tokens: int, places: AllowedPlaces = None) -> int:
        """Return how many of a prompt's first `max_tokens` tokens are cached, with a state."""
        size = self._geometry.page_tokens
        return self._blocks.match(chain, max_tokens // size, places).state_blocks * size

    def open(
        self, chain: Sequence[BlockHash], tokens: int, max_tokens: int, *, places: AllowedPlaces = None
    ) -> Opened | None:
        """Take a slot, and pages for `tokens` tokens; None if either is short now. At most `max_tokens` come from the
        cache."""
        size = self._geometry.page_tokens
        match = self._blocks.match(chain, max_tokens // size, places)
        shared = match.pages[: match.state_blocks]
        lease = self._take_lease(chain, match, shared, self._geometry.pages_for(tokens))
        if lease is None:
            return None
        self._count(max_tokens, shared, match)
        lengths = self._checkpoint_lengths(lease, match, max_tokens)
        return Opened(lease, len(shared) * size, len(match.pages) * size, lengths)

    def reserve(
        self, chain: Sequence[BlockHash], tokens: int, max_tokens: int, *, places: AllowedPlaces = None
    ) -> Opened | None:
        """Take pages for a cache of `tokens` tokens that comes with its state, and no slot; None without free pages. At
        most `max_tokens` rows come from the cache."""
        size = self._geometry.page_tokens
        match = self._blocks.match(chain, max_tokens // size, places)
        count = self._geometry.pages_for(tokens)
        if not self._blocks.can_open(match.pages, count + self._geometry.pages_per_state):
            return None
        lease = self._blocks.open(match.pages, count)
        if lease is None or not self._blocks.lend_state_pages(lease):
            raise InternalError(f"{count} promised pages are missing")
        self._slotless.add(lease)
        self._count(max_tokens, match.pages, match)
        cached_tokens = len(match.pages) * size
        return Opened(lease, cached_tokens, cached_tokens, ())

    def take_slot(self, lease: Lease) -> None:
        """Move the state of a reserved lease into a slot, which must be free."""
        slot = self._free_slots.pop()
        if self._geometry.pages_per_state:
            self._memory.load_state(lease.state_pages, slot)
        self._blocks.return_state_pages(lease)
        self._slotless.remove(lease)
        self._assign_slot(lease, slot)

    def free_pages_for(
        self,
        chain: Sequence[BlockHash],
        tokens: int,
        max_tokens: int,
        *,
        comes: bool = False,
        places: AllowedPlaces = None,
    ) -> int:
        """Return how many of the free pages `open` would take, or `reserve` if the cache `comes`. Changes nothing."""
        match = self._blocks.match(chain, max_tokens // self._geometry.page_tokens, places)
        count = self._geometry.pages_for(tokens)
        if comes:
            return self._blocks.free_pages_for(match.pages, count + self._geometry.pages_per_state)
        return self._blocks.free_pages_for(match.pages[: match.state_blocks], count)

    def open_prefix(self, chain: Sequence[BlockHash], tokens: int, places: AllowedPlaces = None) -> Lease | None:
        """Take a slot and the pages of a prompt's first `tokens` tokens, which `cached_tokens` found, with the state.
        Returns None if there is no slot, or they are not cached. This is not counted as a lookup."""
        blocks = tokens // self._geometry.page_tokens
        match = self._blocks.match(chain, blocks, places)
        return self._take_lease(chain, match, match.pages, blocks) if match.state_blocks == blocks else None

    def receive(self, lease: Lease, origins: Iterable[str]) -> None:
        """Note that bytes of these clusters are in a lease: all that it publishes from now on stands on them."""
        lease.origins |= frozenset(origins)

    def grow(self, lease: Lease, tokens: int) -> bool:
        had = len(lease.pages)
        if not self._blocks.grow(lease, self._geometry.pages_for(tokens)):
            return False
        self._memory.set_pages(lease.slot, had, lease.pages[had:])
        return True

    def publish(self, lease: Lease, chain: BlockChain, blocks: int) -> None:
        """Share the rows of the chain's first `blocks` blocks, which are complete in the lease's pages."""
        self._events.record_published(chain, self._blocks.publish(lease, chain.hashes, blocks))

    def checkpoint(self, lease: Lease, chain: BlockChain, blocks: int, *, rolling: bool = False) -> bool:
        """Keep a copy of the state after `blocks` published blocks, see `Blocks`; False if it is not kept."""
        pages = self._blocks.checkpoint(lease, chain.hashes, blocks, rolling=rolling)
        if pages is not None:
            self._copy_state(lease, pages)
            self._events.record_checkpoint(chain, blocks - 1)
        return self._blocks.has_state(chain.hashes[blocks - 1])

    def store(self, lease: Lease, tokens: int) -> Lease | None:
        """Return a lease without a slot, to be forked later; None without free pages. It shares full pages."""
        full, rest = divmod(tokens, self._geometry.page_tokens)
        own_pages = 1 if rest else 0
        if self._blocks.free_pages < own_pages + self._geometry.pages_per_state:
            return None
        copy = self._blocks.fork(lease, full, own_pages)
        if copy is None or not self._blocks.lend_state_pages(copy):
            raise InternalError(f"{own_pages} promised pages and those of a state are missing")
        if rest:
            self._memory.copy_page(lease.pages[full], copy.pages[full])
        if self._geometry.pages_per_state:
            self._copy_state(lease, copy.state_pages)
        self._slotless.add(copy)
        return copy

    def fork(self, lease: Lease, tokens: int) -> Lease | None:
        """Return an independent continuation that shares full pages; None without a free slot or page. The lease may be
        a stored one, of as many tokens."""
        full, rest = divmod(tokens, self._geometry.page_tokens)
        copy = self._blocks.fork(lease, full, 1 if rest else 0) if self._free_slots else None
        if copy is None:
            return None
        self._assign_slot(copy, self._free_slots.pop())
        if rest:
            self._memory.copy_page(lease.pages[full], copy.pages[full])
        if lease.has_slot:
            self._memory.copy_slot(lease.slot, copy.slot)
        elif self._geometry.pages_per_state:
            self._memory.load_state(lease.state_pages, copy.slot)
        return copy

    def close(self, lease: Lease) -> None:
        if lease in self._slotless:
            self._slotless.remove(lease)
        elif self._leases.pop(lease.slot, None) is lease:
            self._free_slots.append(lease.slot)
        else:
            raise InternalError(f"the lease of slot {lease.slot} was closed before")
        self._blocks.close(lease)

    def reset(self) -> int:
        """Forget all cached prefixes; return the pages freed. Open leases keep their memory."""
        freed = self._blocks.reset()
        self._events.record_cleared()
        return freed

    def stats(self) -> CacheStats:
        """Return counters; any thread may call."""
        return CacheStats(
            page_bytes=self._geometry.page_bytes,
            total_pages=self._memory.num_pages,
            used_pages=self._memory.num_pages - self._blocks.free_pages,
            cached_pages=self._blocks.cached_pages,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            stateless_tokens=self._stateless_tokens,
            evicted_pages=self._blocks.evicted_pages,
        )

    def check_integrity(self) -> None:
        """Raise InternalError unless all books agree on slots and pages. Takes time in proportion to the pool."""
        self._blocks.check_integrity()
        if sorted([*self._free_slots, *self._leases]) != list(range(self._memory.num_slots)):
            raise InternalError("a slot is both free and in use, or neither")
        holders = Counter(page for lease in [*self._leases.values(), *self._slotless] for page in lease.all_pages)
        wrong = [page for page, count in enumerate(self._blocks.holders) if count != holders[page]]
        if wrong:
            raise InternalError(f"the holders of pages {wrong[:8]} do not match the leases")

    def _take_lease(self, chain: Sequence[BlockHash], match: Match, shared: Sequence[int], count: int) -> Lease | None:
        if not self._free_slots or not self._blocks.can_open(shared, count):
            return None
        slot = self._free_slots.pop()
        start = chain[match.state_blocks - 1] if match.state_blocks and self._geometry.pages_per_state else None
        if start is None:
            self._memory.clear_slot(slot)
        else:
            # Before `open`, which may evict this checkpoint for the pages that it lends.
            self._memory.load_state(self._blocks.state_pages(start), slot)
        lease = self._blocks.open(shared, count, start)
        if lease is None:
            raise InternalError(f"{count} promised pages are missing")
        self._assign_slot(lease, slot)
        return lease

    def _copy_state(self, lease: Lease, pages: Sequence[int]) -> None:
        if lease.has_slot:
            self._memory.save_state(lease.slot, pages)
            return
        for source, target in zip(lease.state_pages, pages, strict=True):
            self._memory.copy_page(source, target)

    def _count(self, query_tokens: int, shared: Sequence[int], match: Match) -> None:
        size = self._geometry.page_tokens
        self._query_tokens += query_tokens
        self._hit_tokens += len(shared) * size
        self._stateless_tokens += (len(match.pages) - len(shared)) * size

    def _assign_slot(self, lease: Lease, slot: int) -> None:
        lease.slot = slot
        self._leases[slot] = lease
        self._memory.set_pages(slot, 0, lease.pages)

    def _checkpoint_lengths(self, lease: Lease, match: Match, max_tokens: int) -> tuple[int, ...]:
        size = self._geometry.page_tokens
        if len(match.pages) > match.state_blocks:
            lease.branch_blocks = len(match.pages)
        blocks = checkpoint_blocks(
            len(match.pages), match.state_blocks, max_tokens // size, size, self._geometry.pages_per_state
        )
        return tuple(count * size for count in blocks)
