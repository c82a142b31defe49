"""The hybrid prefix cache as the engine sees it: memory for sequences, with what earlier prompts left in it.

`blocks` says who holds which page, `memory` has the bytes, `below` brings what the pool gave up; here the three come
together. What a sequence finds cached are blocks that it shares and a state that
is copied into its slot; what it leaves are blocks that it published and copies of its state at some lengths.

Used from the engine's thread alone. Questions that end in None or False change nothing. Of the disk nothing waits here:
`pending` starts bringing what lies below the device, and the request is opened once that is done.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from prfaas.errors import InternalError
from prfaas.kvindex.blocks import BlockChain, BlockHash
from prfaas.wire.kvevents import AttentionSpecKind, KvEvent
from prfaas.wire.stats import CacheStats
from prfaas_worker.cache.announce import Announcer
from prfaas_worker.cache.below import Below, Loading
from prfaas_worker.cache.blocks import Blocks, Evicted, Match
from prfaas_worker.cache.lease import Lease
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.policy import checkpoint_blocks
from prfaas_worker.cache.tiers import Tiers

log = logging.getLogger(__name__)

MIB: Final = 1 << 20


class Opened(NamedTuple):
    """Memory for a sequence, `cached_tokens` of which stand in it already.

    `attention_tokens` is what attention alone would have given. `checkpoints` are the lengths, ascending and above
    `cached_tokens`, at which the sequence's state should be kept: cut its chunks there and call `checkpoint`.
    """

    lease: Lease
    cached_tokens: int
    attention_tokens: int
    checkpoints: tuple[int, ...]


class HybridCache:
    """Pages and slots of one memory, and the prefixes in them and in the tiers below."""

    def __init__(
        self,
        memory: CacheMemory,
        tiers: Tiers | None = None,
        on_event: Callable[[KvEvent], None] | None = None,
        *,
        attention_kind: AttentionSpecKind = "full_attention",
    ):
        self._memory, self._tiers = memory, tiers
        self._geometry = memory.geometry
        self._announcer = Announcer(on_event, attention_kind) if tiers is not None or on_event is not None else None
        self._blocks = Blocks(memory.num_pages, self._geometry.pages_per_state, self._evicted)
        self._below = Below(memory, self._blocks, tiers, self._announcer) if tiers and self._announcer else None
        # Taken from the end, as pages are: memory that was used is used again.
        self._free_slots = list(range(memory.num_slots - 1, -1, -1))
        self._leases: dict[int, Lease] = {}
        self._query_tokens = self._hit_tokens = self._stateless_tokens = 0

    @property
    def free_pages(self) -> int:
        """Pages that could be had now."""
        return self._blocks.free_pages

    @property
    def free_slots(self) -> int:
        """Slots that could be had now."""
        return len(self._free_slots)

    def pages_wanted(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens takes, if nothing of it is cached."""
        return self._geometry.pages_for(tokens)

    def room(self, lease: Lease) -> int:
        """Tokens that fit into the pages of a lease."""
        return len(lease.pages) * self._geometry.page_tokens

    def pending(self, chain: Sequence[BlockHash], most_tokens: int) -> Loading | None:
        """Start bringing what the tiers below have of a prompt; None when that adds nothing to what the device has.

        Open the prompt when the answer is done, or before, or never.
        """
        if self._below is None:
            return None
        return self._below.pending(chain[: most_tokens // self._geometry.page_tokens])

    def cached_tokens(self, chain: Sequence[BlockHash], most_tokens: int) -> int:
        """Return how many of a prompt's first `most_tokens` tokens are cached on the device with a state at their end.

        Changes nothing.
        """
        size = self._geometry.page_tokens
        return self._blocks.match(chain, most_tokens // size).state_blocks * size

    def open(
        self, chain: Sequence[BlockHash], tokens: int, most_tokens: int, *, use_state: bool = True
    ) -> Opened | None:
        """Take a slot, and pages for `tokens` tokens; None when either is short now.

        At most `most_tokens` of them come from the cache. Without `use_state` the state will come from elsewhere, so
        rows alone count as cached.
        """
        if self._below is not None:
            self._below.adopt_loaded()
        size = self._geometry.page_tokens
        match = self._blocks.match(chain, most_tokens // size)
        shared = match.pages[: match.state_blocks] if use_state else match.pages
        lease = self._lend(chain, match, shared, self._geometry.pages_for(tokens))
        if lease is None:
            return None
        self._query_tokens += most_tokens
        self._hit_tokens += len(shared) * size
        self._stateless_tokens += (len(match.pages) - len(shared)) * size
        places = self._places(lease, match, most_tokens) if use_state else ()
        return Opened(lease, len(shared) * size, len(match.pages) * size, places)

    def open_prefix(self, chain: Sequence[BlockHash], tokens: int) -> Lease | None:
        """Take a slot and the pages of a prompt's first `tokens` tokens, which `cached_tokens` found, state included.

        None when there is no slot now, or they are not cached. It does not count as a lookup.
        """
        blocks = tokens // self._geometry.page_tokens
        match = self._blocks.match(chain, blocks)
        return self._lend(chain, match, match.pages, blocks) if match.state_blocks == blocks else None

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Take more pages, so that `tokens` tokens fit; False when there are none now."""
        had = len(lease.pages)
        if not self._blocks.grow(lease, self._geometry.pages_for(tokens)):
            return False
        self._memory.set_pages(lease.slot, had, lease.pages[had:])
        return True

    def publish(self, lease: Lease, chain: BlockChain, blocks: int) -> None:
        """Let others use the rows of the chain's first `blocks` blocks, which are complete in the lease's pages."""
        new = self._blocks.publish(lease, chain.hashes, blocks)
        if self._announcer is not None and new:
            self._announcer.published(chain, new)

    def checkpoint(self, lease: Lease, chain: Sequence[BlockHash], blocks: int, *, rolling: bool = False) -> bool:
        """Keep a copy of the slot's state, which stands for the first `blocks` blocks of chain; False if not kept.

        Those blocks are published. A rolling checkpoint takes the place of the sequence's last one.
        """
        pages = self._blocks.checkpoint(lease, chain, blocks, rolling=rolling)
        if pages is not None:
            self._memory.save_state(lease.slot, pages)
            if self._announcer is not None:
                self._announcer.kept_state(chain[blocks - 1])
        return self._blocks.has_state(chain[blocks - 1])

    def fork(self, lease: Lease, tokens: int) -> Lease | None:
        """Return an independent continuation after `tokens` tokens: full pages are shared, the rest is copied.

        None when there is no slot, or no page, now.
        """
        full, rest = divmod(tokens, self._geometry.page_tokens)
        copy = self._blocks.fork(lease, full, 1 if rest else 0) if self._free_slots else None
        if copy is None:
            return None
        self._enter(copy, self._free_slots.pop())
        if rest:
            self._memory.copy_page(lease.pages[full], copy.pages[full])
        self._memory.copy_slot(lease.slot, copy.slot)
        return copy

    def close(self, lease: Lease) -> None:
        """Give slot and pages back; what was published stays cached until others need the room."""
        if self._leases.pop(lease.slot, None) is not lease:
            raise InternalError(f"the lease of slot {lease.slot} was closed before")
        self._free_slots.append(lease.slot)
        self._blocks.close(lease)

    def reset(self) -> int:
        """Forget all cached prefixes in all tiers; returns the pages that this freed. Open leases keep their memory."""
        freed = self._blocks.reset()
        if self._below is not None:
            self._below.clear()
        if self._announcer is not None:
            self._announcer.cleared()
        return freed

    def keep(self, seconds_left: Callable[[], float]) -> None:
        """Write what a restart could use to the disk, until no time is left; before the process ends."""
        began = time.monotonic()
        kept = self._below.keep(seconds_left) if self._below is not None else None
        if kept is not None:
            log.info(
                "the disk keeps %d entries of the prefix cache for the next start: %.1f MiB were written in %.1f s, "
                "%d entries are left out",
                kept.entries,
                kept.written_bytes / MIB,
                time.monotonic() - began,
                kept.left_out,
            )

    def stats(self) -> CacheStats:
        """Tell how the cache is used; reads counters only, so any thread may ask."""
        total, below = self._memory.num_pages, self._below
        return CacheStats(
            page_bytes=self._geometry.page_bytes,
            total_pages=total,
            used_pages=total - self._blocks.free_pages,
            cached_pages=self._blocks.cached_pages,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            stateless_tokens=self._stateless_tokens,
            evicted_pages=self._blocks.evicted_pages,
            host_bytes=below.tiers.host_bytes if below else 0,
            disk_bytes=below.tiers.disk_bytes if below else 0,
            host_hit_tokens=below.host_hit_tokens if below else 0,
            disk_hit_tokens=below.disk_hit_tokens if below else 0,
            corrupt_entries=below.tiers.corrupt_entries if below else 0,
            disk_failures=below.tiers.failures if below else 0,
            disk_paused=below.tiers.is_paused if below else False,
        )

    def check_integrity(self) -> None:
        """Raise InternalError unless every slot and page is where the books say; for tests, and an idle engine.

        Takes time in proportion to the pool.
        """
        self._blocks.check_integrity()
        if sorted([*self._free_slots, *self._leases]) != list(range(self._memory.num_slots)):
            raise InternalError("a slot is free and lent, or neither")
        holders = Counter(page for lease in self._leases.values() for page in lease.pages)
        wrong = [page for page, count in enumerate(self._blocks.holders) if count != holders[page]]
        if wrong:
            raise InternalError(f"pages {wrong[:8]} are not held by those who should hold them")

    def _lend(self, chain: Sequence[BlockHash], match: Match, shared: Sequence[int], count: int) -> Lease | None:
        """Take a slot with the state of a match just made, and `count` pages, of which the first are `shared`."""
        if not self._free_slots or not self._blocks.can_open(shared, count):
            return None
        slot = self._free_slots.pop()
        start = chain[match.state_blocks - 1] if match.state_blocks and self._geometry.pages_per_state else None
        if start is None:
            self._memory.clear_slot(slot)
        else:
            self._memory.load_state(self._blocks.state_pages(start), slot)
        lease = self._blocks.open(shared, count, start)
        if lease is None:
            raise InternalError(f"{count} pages were promised and are not there")
        self._enter(lease, slot)
        return lease

    def _enter(self, lease: Lease, slot: int) -> None:
        lease.slot = slot
        self._leases[slot] = lease
        self._memory.set_pages(slot, 0, lease.pages)

    def _places(self, lease: Lease, match: Match, most_tokens: int) -> tuple[int, ...]:
        """Return the lengths at which the state of a prompt that starts from this match should be kept."""
        size = self._geometry.page_tokens
        if len(match.pages) > match.state_blocks:
            lease.branch_blocks = len(match.pages)
        blocks = checkpoint_blocks(
            len(match.pages), match.state_blocks, most_tokens // size, size, self._geometry.pages_per_state
        )
        return tuple(place * size for place in blocks)

    def _evicted(self, gone: list[Evicted]) -> None:
        if self._below is not None:
            self._below.put(gone)
        if self._announcer is not None:
            self._announcer.evicted(gone)
