"""Whatever is done to the page pool, in any order, its books stay whole and it agrees with a naive model.

The model knows what was published and kept, and what the pool gave up; a match is found by trying every length.
It also writes in every page what stands there, as the engine would, and looks again before each use: a page that was
freed while a sequence relied on it shows at once.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.errors import InternalError
from prfaas_worker.cache.blocks import Blocks, Evicted, Lease

from .test_blocks import take

PAGES, PAGES_PER_STATE = 14, 3
Prompt = tuple[int, ...]
# Few and alike, so that they meet.
prompts = st.sampled_from([(), (0,), (0, 0, 0), (0, 0, 0, 0, 0), (0, 0, 1, 0), (1, 1, 1, 1, 1, 1)])
counts = st.integers(0, 7)
numbers = st.integers(0, 99)


def chain_of(prompt: Prompt) -> list[Prompt]:
    """A block's name is all that stands before its end."""
    return [prompt[: i + 1] for i in range(len(prompt))]


class Machine(RuleBasedStateMachine):
    pages_per_state = PAGES_PER_STATE

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(PAGES, self.pages_per_state, self.forget)
        self.known: set[Prompt] = set()
        self.states: set[Prompt] = set()
        self.content: dict[int, object] = {}
        self.open_leases: list[tuple[Lease, list[Prompt]]] = []
        self.transfers: list[list[int]] = []

    def forget(self, removed: list[Evicted]) -> None:
        for one in removed:
            (self.states if one.is_state else self.known).remove(one.key)

    def held(self) -> Counter[int]:
        pages = [lease.all_pages for lease, _ in self.open_leases] + self.transfers
        return Counter(page for some in pages for page in some)

    def expected_match(self, prompt: Prompt, most: int) -> tuple[int, int]:
        lengths = [n for n in range(min(most, len(prompt)) + 1) if all(k in self.known for k in chain_of(prompt[:n]))]
        with_state = [n for n in lengths if not n or prompt[:n] in self.states or not self.pages_per_state]
        return max(lengths), max(with_state)

    def pick(self, number: int) -> tuple[Lease, list[Prompt]]:
        return self.open_leases[number % len(self.open_leases)]

    @rule(prompt=prompts, most=counts, more=st.integers(0, 3), use_state=st.booleans())
    def open(self, prompt: Prompt, most: int, more: int, use_state: bool):
        chain = chain_of(prompt)
        match = self.blocks.match(chain, most)
        attention, state = self.expected_match(prompt, most)
        assert (len(match.pages), match.state_blocks) == (attention, state)
        for page, key in zip(match.pages, chain, strict=False):
            assert self.content[page] == (key, False)
        shared = match.pages[:state] if use_state else match.pages  # without it another instance sends the state
        start = chain[state - 1] if use_state and state and self.pages_per_state else None
        if start is not None:
            assert {self.content[page] for page in self.blocks.state_pages(start)} == {(start, True)}
        free, count = self.blocks.free_pages, len(prompt) + more
        possible = self.blocks.can_open(shared, count)
        lease = self.blocks.open(shared, count, start)
        assert (lease is not None) == possible
        if lease is None:
            assert self.blocks.free_pages == free
            return
        for page in lease.pages[len(shared) :]:
            self.content[page] = None
        assert lease.pages[: len(shared)] == shared
        self.open_leases.append((lease, chain))
        lease.branch_blocks = attention if attention > state else 0

    @precondition(lambda self: self.open_leases)
    @rule(number=numbers, upto=counts)
    def compute_and_publish(self, number: int, upto: int):
        lease, chain = self.pick(number)
        upto = min(upto, len(chain), len(lease.pages))
        for index in range(upto):
            page = lease.pages[index]
            if self.content[page] is None:
                self.content[page] = (chain[index], False)
        new = self.blocks.publish(lease, chain, upto)
        assert not self.known & {chain[index] for index in new}
        self.known |= {chain[index] for index in new}

    @precondition(lambda self: self.open_leases)
    @rule(number=numbers, at=counts, rolling=st.booleans())
    def checkpoint(self, number: int, at: int, rolling: bool):
        lease, chain = self.pick(number)
        if not chain:
            return
        at = max(1, min(at, len(chain)))
        known, had = chain[at - 1] in self.known, chain[at - 1] in self.states
        pages = self.blocks.checkpoint(lease, chain, at, rolling=rolling)
        if pages is not None:
            assert known
            assert not had
            assert len(pages) == PAGES_PER_STATE
            self.states.add(chain[at - 1])
            self.content.update(dict.fromkeys(pages, (chain[at - 1], True)))

    @precondition(lambda self: self.open_leases)
    @rule(number=numbers, first=st.integers(1, 3))
    def decode(self, number: int, first: int):
        lease, chain = self.pick(number)
        for at in range(first, min(len(chain), len(lease.pages)) + 1):
            self.compute_and_publish(number, at)
            self.checkpoint(number, at, True)

    @rule(prompt=prompts, most=counts)
    def serve(self, prompt: Prompt, most: int):
        before = len(self.open_leases)
        self.open(prompt, most, 0, True)
        if len(self.open_leases) > before:
            self.compute_and_publish(before, len(prompt))
            self.checkpoint(before, len(prompt), False)
            self.close(before)

    @precondition(lambda self: self.open_leases)
    @rule(number=numbers, more=counts)
    def grow(self, number: int, more: int):
        lease, _ = self.pick(number)
        had, free = len(lease.pages), self.blocks.free_pages
        grown = self.blocks.grow(lease, had + more)
        assert grown == (more <= free)
        self.content.update(dict.fromkeys(lease.pages[had:]))

    @precondition(lambda self: self.open_leases)
    @rule(number=numbers, shared=counts, more=st.integers(0, 1))
    def fork(self, number: int, shared: int, more: int):
        lease, chain = self.pick(number)
        shared = min(shared, len(lease.pages))
        copy = self.blocks.fork(lease, shared, more)
        if copy is not None:
            assert copy.pages[:shared] == lease.pages[:shared]
            self.content.update(dict.fromkeys(copy.pages[shared:]))
            self.open_leases.append((copy, chain[:shared]))

    @precondition(lambda self: self.open_leases)
    @rule(number=numbers)
    def lend_state_pages(self, number: int):
        lease, _ = self.pick(number)
        if lease.state_pages:
            self.blocks.return_state_pages(lease)
            return
        possible = self.blocks.free_pages >= self.pages_per_state
        assert self.blocks.lend_state_pages(lease) == possible
        assert len(lease.state_pages) == (self.pages_per_state if possible else 0)
        self.content.update(dict.fromkeys(lease.state_pages, "a state"))

    @precondition(lambda self: self.open_leases)
    @rule(number=numbers)
    def close(self, number: int):
        self.blocks.close(self.open_leases.pop(number % len(self.open_leases))[0])

    @precondition(lambda self: self.open_leases)
    @rule(number=numbers)
    def send_pages_of_a_lease(self, number: int):
        pages = list(self.pick(number)[0].pages)
        self.blocks.hold(pages)
        self.transfers.append(pages)

    @rule(count=st.integers(0, PAGES + 1))
    def take(self, count: int):
        free = self.blocks.free_pages
        pages = take(self.blocks, count)
        assert (pages is not None) == (count <= free)
        if pages is not None:
            self.content.update(dict.fromkeys(pages, "in transfer"))
            self.transfers.append(pages)

    @precondition(lambda self: self.transfers)
    @rule(number=numbers)
    def release(self, number: int):
        self.blocks.release(self.transfers.pop(number % len(self.transfers)))

    @rule()
    def reset(self):
        free = PAGES - len(self.held())
        self.blocks.reset()
        self.known.clear()
        self.states.clear()
        assert self.blocks.free_pages == free
        assert self.blocks.cached_pages == 0

    @invariant()
    def books_are_whole(self):
        self.blocks.check_integrity()
        held = self.held()
        assert list(self.blocks.holders) == [held[page] for page in range(PAGES)]
        assert self.blocks.free_pages == PAGES - len(held)

    @invariant()
    def rows_of_open_sequences_stand_where_they_were(self):
        for lease, chain in self.open_leases:
            for index, page in enumerate(lease.pages[: len(chain)]):
                assert self.content[page] in (None, (chain[index], False))


class AttentionAlone(Machine):
    pages_per_state = 0


TestHybrid = Machine.TestCase
TestHybrid.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAttentionAlone = AttentionAlone.TestCase
TestAttentionAlone.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_the_check_finds_a_page_that_is_lost():
    blocks = Blocks(4, 1)
    blocks._free.pop()
    with pytest.raises(InternalError, match="in no place"):
        blocks.check_integrity()


def test_a_page_freed_twice_is_an_error():
    blocks = Blocks(4, 1)
    pages = take(blocks, 2)
    assert pages is not None
    blocks.release(pages)
    with pytest.raises(InternalError, match="more often"):
        blocks.release(pages)
