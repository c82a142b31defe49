"""Keeps the hybrid cache's books, without its bytes: which pages are free, held, or part of a prefix.

Each page is free, held, cached, or part of a state checkpoint. Held pages count their sequences and transfers. Cached
ones have no holders, but a prompt with the same prefix could use them. A *block* is a page of attention rows, named by
the hash of all tokens up to its end. A *checkpoint* is any `pages_per_state` free pages, named like its last block.

The hard part is that a prefix needs both. **A match is the longest n with attention blocks to n and a state at n**. So
one order of eviction holds for both kinds: least recently used first (LRU), and a chain's tail before its head. A
checkpoint is evicted with its block, since no match reaches it any more. A checkpoint that a longer one of its own
sequence has made useless is evicted before all others. Held pages are never evicted.

Where to keep states. A state is right at exactly one length, so it must be where a later prompt parts from this one.
Two such places are known. One is the prompt's end, where a conversation continues. The other is a branch, where an
earlier prompt parted from this one. There attention blocks reach further than any state. States at regular distances
mostly land in tokens that no other prompt has, and give no hits for their room.

A state weighs as much as thousands of tokens of attention (5,380 for Kimi Linear 48B). Even so no high bar pays. On the
conversation trace, asking that a state save 1,024 tokens costs a tenth of the hits at 128 GB and at 512 GB alike.
(`prfaas bench prefix_cache`; the trace cannot resolve less than 512.) So the rule by bytes is a low one: each page that
a state takes must save a token.

Bytes may come from other clusters, which could have forged them. Each block and checkpoint knows these clusters, its
*origins*, as does all that is computed from it. A match holds only what its request's places allow. A block of fewer
origins replaces one of more. Where nobody knows them, UNKNOWN_PLACE stands for them.

Time is the order of calls. Questions that end in None or False change nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from prfaas.errors import InternalError

Key: TypeAlias = Any  # Hashes of blocks here; anything that can be hashed would do.
Origins: TypeAlias = frozenset[str]
"""The other clusters whose bytes something stands on; none: it was made in this cluster. UNKNOWN_PLACE is one, too."""
OWN: Final[Origins] = frozenset()


@dataclass(slots=True, eq=False)
class StateCheckpoint:
    """A state in the pool. `uses` counts the sequences that started from it, plus one if it was made for a branch."""

    key: Key
    pages: tuple[int, ...]
    uses: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's memory: pages in order of its tokens, and its state in a slot, or as long as it has none (-1) in
    `state_pages`; with the origins of what they hold. Only the cache uses the other fields."""

    slot: int
    pages: list[int]
    state_pages: list[int] = field(default_factory=list)
    origins: Origins = OWN
    branch_blocks: int = 0
    published: int = 0
    started_from: StateCheckpoint | None = None
    rolling: StateCheckpoint | None = None
    touched: list[StateCheckpoint] = field(default_factory=list)
    epoch: int = 0

    @property
    def has_slot(self) -> bool:
        return self.slot >= 0

    @property
    def all_pages(self) -> list[int]:
        return [*self.pages, *self.state_pages]


class Match(NamedTuple):
    """The cached part of a prompt: pages of its attention blocks, and its longest state within them, in blocks."""

    pages: list[int]
    state_blocks: int


class Evicted(NamedTuple):
    """An evicted block or checkpoint."""

    key: Key
    is_state: bool = False


class Blocks:
    """The pool's pages, the blocks and checkpoints in them, and the order of eviction."""

    def __init__(
        self, num_pages: int, pages_per_state: int, on_evicted: Callable[[list[Evicted]], None] = lambda _: None
    ):
        self.num_pages, self.pages_per_state = num_pages, pages_per_state
        self.cached_pages = 0  # those in the two orders, which only the prefix cache holds
        self.evicted_pages = 0
        self.holders = [0] * num_pages
        self._on_evicted = on_evicted
        # Taken from the end: memory that was used is used again before new memory is touched.
        self._free = list(range(num_pages - 1, -1, -1))
        self._key_of: list[Key | None] = [None] * num_pages
        self._page_of: dict[Key, int] = {}
        self._origins: dict[int, Origins] = {}  # of blocks and checkpoints that have any, by their first pages
        self._states: dict[Key, StateCheckpoint] = {}
        self._state_at: dict[int, StateCheckpoint] = {}  # by its first page, its key in the orders
        self._order: OrderedDict[int, None] = OrderedDict()
        self._spent: OrderedDict[int, None] = OrderedDict()
        self._epoch = 0

    @property
    def free_pages(self) -> int:
        return len(self._free) + self.cached_pages

    def has_state(self, key: Key) -> bool:
        return key in self._states

    def match(self, chain: Sequence[Key], max_blocks: int, places: Collection[str] | None = None) -> Match:
        """Return the cached part of a prompt with this chain, at most so many blocks, and only what was made in this
        cluster or in `places` (None: anywhere). Changes nothing."""
        page_of, states = self._page_of, self._states
        # Most caches have nothing of other clusters, and prompts have thousands of blocks.
        foreign, allowed = ({}, ()) if places is None else (self._origins, places)
        pages: list[int] = []
        state_blocks = 0
        for key in chain[:max_blocks]:
            page = page_of.get(key)
            if page is None or (foreign and not foreign.get(page, OWN).issubset(allowed)):
                break
            pages.append(page)
            if key in states and not (foreign and not self._origins_of(states[key]).issubset(allowed)):
                state_blocks = len(pages)
        return Match(pages, state_blocks if self.pages_per_state else len(pages))

    def free_pages_for(self, shared: Sequence[int], count: int) -> int:
        """Return how many of the free pages `open` would take: cached ones are free until somebody holds them."""
        return count - sum(self.holders[page] > 0 for page in shared)

    def can_open(self, shared: Sequence[int], count: int) -> bool:
        return self.free_pages_for(shared, count) <= self.free_pages

    def open(self, shared: Sequence[int], count: int, start: Key | None = None) -> Lease | None:
        """Lend `count` pages, first these of a fresh match; None if there are too few. Copy the state of the checkpoint
        `start` before: its pages may be among those lent if the pool is nearly full."""
        if not self.can_open(shared, count):
            return None
        lease = Lease(-1, [*shared], published=len(shared), epoch=self._epoch)
        lease.origins = OWN.union(*(self._origins.get(page, OWN) for page in shared)) if self._origins else OWN
        if start is not None:
            lease.started_from = self._states[start]
            lease.origins |= self._origins_of(lease.started_from)
            lease.started_from.uses += 1
            self._touch(lease, lease.started_from)
        self.hold(shared)
        lease.pages += self._allocate(count - len(shared))
        return lease

    def state_pages(self, key: Key) -> tuple[int, ...]:
        return self._states[key].pages

    def grow(self, lease: Lease, count: int) -> bool:
        """Lend more pages, until there are `count`; False when there are too few."""
        new = count - len(lease.pages)
        if new > self.free_pages:
            return False
        lease.pages += self._allocate(new)
        return True

    def fork(self, lease: Lease, shared: int, more: int) -> Lease | None:
        """Lend a lease's first pages to a second one, with `more` of its own; None if there are too few."""
        if more > self.free_pages:
            return None
        self.hold(lease.pages[:shared])
        pages = [*lease.pages[:shared], *self._allocate(more)]
        return Lease(-1, pages, origins=lease.origins, published=min(lease.published, shared), epoch=lease.epoch)

    def lend_state_pages(self, lease: Lease) -> bool:
        """Lend a lease pages for its state; False if there are too few."""
        if self.pages_per_state > self.free_pages:
            return False
        lease.state_pages = self._allocate(self.pages_per_state)
        return True

    def return_state_pages(self, lease: Lease) -> None:
        self.release(lease.state_pages)
        lease.state_pages = []

    def publish(self, lease: Lease, chain: Sequence[Key], blocks: int) -> list[int]:
        """Name the lease's first `blocks` pages, whose rows are complete; return the indices of new blocks. The page of
        a block that exists stays private, unless the existing one has more origins, or as many and the cache alone."""
        new: list[int] = []
        # A reset came in between: nothing of the lease is found in the cache any more, and its rows get no names.
        if lease.epoch != self._epoch:
            return new
        page_of, key_of, pages = self._page_of, self._key_of, lease.pages
        for index in range(lease.published, blocks):
            key, page = chain[index], pages[index]
            known = page_of.get(key)
            if known is None:
                new.append(index)
            elif not self._gives_way(known, page, lease.origins):
                continue
            elif self.holders[known]:
                self._forget_name(known)
            else:
                self._drop_page(known)
            page_of[key] = page
            key_of[page] = key
            if lease.origins:
                self._origins[page] = lease.origins
        lease.published = max(lease.published, blocks)
        return new

    def checkpoint(
        self, lease: Lease, chain: Sequence[Key], blocks: int, *, rolling: bool = False
    ) -> tuple[int, ...] | None:
        """Keep the state after `blocks` blocks. Return pages to copy it into now; None if it exists with no more
        origins, its block is missing, or there is no room. A rolling one replaces the lease's last, unless a sequence
        started from that."""
        if lease.epoch != self._epoch or not self.pages_per_state:
            return None
        key = chain[blocks - 1]
        if (known := self._states.get(key)) is not None:
            if not lease.origins < self._origins_of(known):
                self._touch(lease, known)
                return None
            self._free += self._drop_state(known)
        if key not in self._page_of:
            return None
        if rolling and lease.rolling is not None:
            self._replace(lease, lease.rolling)
        made = self._new_state(key)
        if made is None:
            return None
        made.uses = int(blocks == lease.branch_blocks)
        if lease.origins:
            self._origins[made.pages[0]] = lease.origins
        self._touch(lease, made)
        self._retire(lease)
        if rolling:
            lease.rolling = made
        return made.pages

    def close(self, lease: Lease) -> None:
        """Release a lease's pages. Blocks stay cached; other pages become free."""
        # A state is evicted just before the tail of its chain.
        for state in lease.touched:
            page = state.pages[0]
            if self._is_cached(state) and page in self._order:
                self._order.move_to_end(page)
        self.return_state_pages(lease)
        self.release(lease.pages)
        lease.pages.clear()
        lease.touched.clear()
        lease.started_from = lease.rolling = None

    def hold(self, pages: Sequence[int]) -> None:
        """Count one more holder of each of these pages, which are held or cached."""
        holders, order, idle = self.holders, self._order, 0
        for page in pages:
            if not holders[page]:
                del order[page]
                idle += 1
            holders[page] += 1
        self.cached_pages -= idle

    def release(self, pages: Sequence[int]) -> None:
        """Count one holder less. A block without holders is cached; the last of `pages` is evicted first."""
        holders, key_of, order, free, idle = self.holders, self._key_of, self._order, self._free, 0
        for page in reversed(pages):
            left = holders[page] = holders[page] - 1
            if left > 0:
                continue
            if left < 0:
                raise InternalError(f"page {page} was released more often than it was held")
            if key_of[page] is None:
                free.append(page)
            else:
                order[page] = None
                idle += 1
        self.cached_pages += idle

    def reset(self) -> int:
        """Forget all names, also of held pages, which their holders keep. Return the number of pages freed."""
        before = len(self._free)
        for state in self._states.values():
            self._free += state.pages
        for page in self._page_of.values():
            self._key_of[page] = None
            if not self.holders[page]:
                self._free.append(page)
        for forgotten in (self._states, self._state_at, self._page_of, self._origins, self._order, self._spent):
            forgotten.clear()
        self.cached_pages = 0
        self._epoch += 1
        return len(self._free) - before

    def check_integrity(self) -> None:
        """Raise InternalError unless every page is in exactly one place and every index agrees with the other."""
        held = [page for page in range(self.num_pages) if self.holders[page]]
        in_states = [page for state in self._states.values() for page in state.pages]
        idle = [page for page in self._page_of.values() if not self.holders[page]]
        places = [*self._free, *held, *in_states, *idle]
        in_order = {*idle, *self._state_at}
        checks = (
            (sorted(places) == list(range(self.num_pages)), "a page is in no place, or in two"),
            (self.cached_pages == len(idle) + len(in_states), "the count of cached pages is wrong"),
            (all(self._key_of[page] == key for key, page in self._page_of.items()), "a name leads to the wrong page"),
            (
                sum(key is not None for key in self._key_of) == len(self._page_of),
                "a page has a name that leads nowhere",
            ),
            (self._states.keys() <= self._page_of.keys(), "a checkpoint has no block"),
            (self._origins.keys() <= {*self._page_of.values(), *self._state_at}, "a page without a name has origins"),
            ({s.pages[0]: s for s in self._states.values()} == self._state_at, "checkpoints are indexed wrongly"),
            (in_order == {*self._order, *self._spent}, "what is cached and what can give way differ"),
            (not self._order.keys() & self._spent.keys(), "a page gives way twice"),
        )
        for holds, message in checks:
            if not holds:
                raise InternalError(f"page pool: {message}")

    def _is_cached(self, state: StateCheckpoint) -> bool:
        return self._state_at.get(state.pages[0]) is state

    def _touch(self, lease: Lease, state: StateCheckpoint) -> None:
        page = state.pages[0]
        self._spent.pop(page, None)
        self._order[page] = None
        self._order.move_to_end(page)
        if state not in lease.touched:
            lease.touched.append(state)

    def _retire(self, lease: Lease) -> None:
        """Mark the state that a lease started from as spent, now that it kept a later one."""
        state = lease.started_from
        if state is not None and is_spent(state.uses) and self._is_cached(state):
            self._order.pop(state.pages[0], None)
            self._spent[state.pages[0]] = None

    def _replace(self, lease: Lease, state: StateCheckpoint) -> None:
        lease.rolling = None
        if not state.uses and self._is_cached(state):
            lease.touched.remove(state)
            self._free += self._drop_state(state)
            self._on_evicted([Evicted(state.key, is_state=True)])

    def _new_state(self, key: Key) -> StateCheckpoint | None:
        if self.pages_per_state > self.free_pages:
            return None
        block = self._page_of[key]
        pages = self._allocate(self.pages_per_state)
        for page in pages:
            self.holders[page] = 0
        if self._page_of.get(key) != block:  # the block itself was evicted
            self._free += pages
            return None
        made = self._states[key] = self._state_at[pages[0]] = StateCheckpoint(key, tuple(pages))
        self._order[pages[0]] = None
        self.cached_pages += len(pages)
        return made

    def _allocate(self, count: int) -> list[int]:
        """Take pages that `free_pages` counted; each has one holder."""
        if count <= 0:
            return []
        if count > len(self._free):
            self._evict(count)
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        holders = self.holders
        for page in pages:
            holders[page] = 1
        return pages

    def _evict(self, count: int) -> None:
        evicted: list[Evicted] = []
        free_before = len(self._free)
        while len(self._free) < count:
            page, _ = (self._spent or self._order).popitem(last=False)
            state = self._state_at.get(page)
            if state is None:
                key = self._key_of[page]
                state = self._states.get(key)
                del self._page_of[key]
                self._forget_name(page)
                self.cached_pages -= 1
                self._free.append(page)
                evicted.append(Evicted(key))
            if state is not None:
                self._free += self._drop_state(state)
                evicted.append(Evicted(state.key, is_state=True))
        self.evicted_pages += len(self._free) - free_before
        self._on_evicted(evicted)

    def _drop_state(self, state: StateCheckpoint) -> tuple[int, ...]:
        """Forget a checkpoint and return its pages, which nothing owns then."""
        del self._states[state.key], self._state_at[state.pages[0]]
        self._origins.pop(state.pages[0], None)
        self._order.pop(state.pages[0], None)
        self._spent.pop(state.pages[0], None)
        self.cached_pages -= len(state.pages)
        return state.pages

    def _drop_page(self, page: int) -> None:
        """Free the page of a block that is kept in another page."""
        del self._order[page]
        self._forget_name(page)
        self.cached_pages -= 1
        self._free.append(page)

    def _gives_way(self, known: int, page: int, origins: Origins) -> bool:
        """Return whether a block in the page `known` is better kept in another page, of these origins."""
        if self.holders[known]:
            return origins < self._origins.get(known, OWN)
        return known != page and origins <= self._origins.get(known, OWN)

    def _origins_of(self, state: StateCheckpoint) -> Origins:
        return self._origins.get(state.pages[0], OWN)

    def _forget_name(self, page: int) -> None:
        self._key_of[page] = None
        self._origins.pop(page, None)


def checkpoint_blocks(
    attention_blocks: int, state_blocks: int, last_block: int, tokens_per_block: int, pages_per_state: int
) -> tuple[int, ...]:
    """Return the lengths, in blocks and ascending, at which to keep the state of a prompt that is to be computed.

    Attention blocks of the prompt are cached up to `attention_blocks`, and a state at `state_blocks`, from where it is
    computed. `last_block` is the last full block that a repetition of the prompt could start from.
    """
    if not pages_per_state:
        return ()
    kept: list[int] = []
    reached = state_blocks
    for blocks in (attention_blocks, last_block):
        if (blocks - reached) * tokens_per_block >= pages_per_state:
            kept.append(blocks)
            reached = blocks
    return tuple(kept)


def is_spent(uses: int) -> bool:
    """Return True if a state is useless once a sequence that started from it has kept a later one. The next turn of a
    conversation starts from the later state. A state with two users is a branch, and more may follow."""
    return uses < 2
