"""Who holds which pages and slots: what the engine asks for memory, and gives it back to.

Used from the engine's thread alone. Questions that end in None or False change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prfaas.errors import InternalError
from prfaas.kvindex.blocks import BlockHash
from prfaas.wire.engine import CacheStats
from prfaas_worker.cache.memory import CacheMemory


@dataclass(slots=True)
class Lease:
    """One sequence's memory: a state slot, and pages in order of its tokens."""

    slot: int
    pages: list[int] = field(default_factory=list)


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
    """Pages and slots of one memory."""

    def __init__(self, memory: CacheMemory):
        self._memory = memory
        self._geometry = memory.geometry
        # Taken from the end: memory that was used is used again before new memory is touched.
        self._free_pages = list(range(memory.num_pages - 1, -1, -1))
        self._free_slots = list(range(memory.num_slots - 1, -1, -1))
        self._shares: dict[int, int] = {}

    @property
    def free_pages(self) -> int:
        """Pages that could be had now."""
        return len(self._free_pages)

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

    def open(
        self,
        chain: Sequence[BlockHash],  # noqa: ARG002
        tokens: int,
        most_tokens: int,  # noqa: ARG002
        *,
        use_state: bool = True,  # noqa: ARG002
    ) -> Opened | None:
        """Take a slot, and pages for `tokens` tokens; None when either is short now.

        At most `most_tokens` of them come from the cache. Without `use_state` the state will come from elsewhere, so
        rows alone count as cached.
        """
        wanted = self._geometry.pages_for(tokens)
        if not self._free_slots or wanted > len(self._free_pages):
            return None
        lease = Lease(self._free_slots.pop())
        self._memory.clear_slot(lease.slot)
        self._extend(lease, wanted)
        return Opened(lease, 0, 0, ())

    def grow(self, lease: Lease, tokens: int) -> bool:
        """Take more pages, so that `tokens` tokens fit; False when there are none now."""
        wanted = self._geometry.pages_for(tokens) - len(lease.pages)
        if wanted > len(self._free_pages):
            return False
        self._extend(lease, wanted)
        return True

    def publish(self, lease: Lease, chain: Sequence[BlockHash]) -> None:
        """Let others use the rows of these blocks, which are complete in the lease's pages."""

    def checkpoint(self, lease: Lease, chain: Sequence[BlockHash], blocks: int, *, rolling: bool = False) -> bool:  # noqa: ARG002
        """Keep a copy of the slot's state, which stands for the first `blocks` blocks of chain; False if not kept.

        A rolling checkpoint takes the place of the sequence's last one.
        """
        return False

    def fork(self, lease: Lease, tokens: int) -> Lease | None:
        """Return an independent continuation after `tokens` tokens: full pages are shared, the rest is copied."""
        full, rest = divmod(tokens, self._geometry.page_tokens)
        if not self._free_slots or (rest and not self._free_pages):
            return None
        copy = Lease(self._free_slots.pop(), lease.pages[:full])
        for page in copy.pages:
            self._shares[page] = self._shares.get(page, 1) + 1
        self._memory.set_pages(copy.slot, 0, copy.pages)
        if rest:
            self._extend(copy, 1)
            self._memory.copy_page(lease.pages[full], copy.pages[full])
        self._memory.copy_slot(lease.slot, copy.slot)
        return copy

    def close(self, lease: Lease) -> None:
        """Give slot and pages back."""
        self._free_slots.append(lease.slot)
        for page in reversed(lease.pages):
            shares = self._shares.pop(page, 1) - 1
            if shares > 1:
                self._shares[page] = shares
            elif shares == 0:
                self._free_pages.append(page)
        lease.pages.clear()

    def reset(self) -> int:
        """Forget every prefix that no sequence uses; returns the pages that freed."""
        return 0

    def stats(self) -> CacheStats:
        """Tell how the pool is used; reads counters only, so any thread may ask."""
        total, free = self._memory.num_pages, len(self._free_pages)
        return CacheStats(page_bytes=self._geometry.page_bytes, total_pages=total, used_pages=total - free)

    def check_integrity(self) -> None:
        """Raise InternalError unless every slot and page is free or held; for tests, and when the engine is idle."""
        if len(set(self._free_pages)) != len(self._free_pages) or len(set(self._free_slots)) != len(self._free_slots):
            raise InternalError("a page or slot is free twice")

    def _extend(self, lease: Lease, count: int) -> None:
        if count > 0:
            pages = [self._free_pages.pop() for _ in range(count)]
            self._memory.set_pages(lease.slot, len(lease.pages), pages)
            lease.pages += pages
