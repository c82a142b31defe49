"""The cache as the engine uses it: the bytes that a sequence finds are those that computing them would give."""

import pytest

from prfaas.errors import InternalError
from prfaas.wire.kvevents import AllBlocksCleared, BlockRemoved, BlockStored

A = list(range(100, 121))  # five blocks of four tokens, and one token


def test_a_repeated_prompt_starts_from_its_state_and_rows(rig):
    assert rig.serve(A) == 0
    assert rig.serve(A) == 20


def test_a_whole_prompt_is_never_taken_from_the_cache(rig):
    rig.serve(A[:20])
    assert rig.serve(A[:20]) == 16


def test_a_branch_is_found_from_the_third_prompt_on(rig):
    assert [rig.serve([*A[:12], *range(n, n + 9)]) for n in (0, 20, 40, 60)] == [0, 0, 12, 12]


def test_tenants_find_nothing_of_each_other(rig):
    rig.serve(A, salt="one")
    assert rig.serve(A, salt="two") == 0
    assert rig.serve(A, salt="one") == 20


def test_without_its_state_only_attention_counts(rig):
    rig.serve(A)
    chain = rig.chain([*A[:12], 1, 2, 3, 4, 5])
    opened = rig.cache.reserve(chain.hashes, 17, 16)
    assert (opened.cached_tokens, opened.attention_tokens, opened.checkpoints) == (12, 12, ())
    again = rig.cache.open(chain.hashes, 17, 16)
    assert (again.cached_tokens, again.attention_tokens, again.checkpoints) == (0, 12, (12, 16))


def test_a_fork_shares_pages_and_continues_apart(rig):
    chain = rig.chain(A)
    first = rig.cache.open(chain.hashes, 21, 20).lease
    rig.compute(first.slot, A, 0, 18)
    copy = rig.cache.fork(first, 18)
    assert copy.pages[:4] == first.pages[:4]
    assert copy.pages[4] != first.pages[4]
    other = [*A[:18], 7, 7]
    rig.compute(copy.slot, other, 18, 20)
    rig.compute(first.slot, A, 18, 21)
    rig.check(first.slot, A, 21)
    rig.check(copy.slot, other, 20)
    rig.cache.close(first)
    rig.check(copy.slot, other, 20)
    rig.cache.close(copy)
    rig.cache.check_integrity()


def test_pages_that_others_hold_cost_nothing_and_cached_ones_cost_what_is_free(rig):
    rig.serve(A)
    chain = rig.chain([*A[:20], 1, 2, 3])
    free = rig.cache.free_pages
    assert rig.cache.free_pages_for(chain.hashes, 23, 22) == 6
    first = rig.cache.open(chain.hashes, 23, 22).lease
    assert rig.cache.free_pages == free - 6
    assert rig.cache.free_pages_for(chain.hashes, 23, 22) == 1
    assert rig.cache.open(chain.hashes, 23, 22).lease.pages[:5] == first.pages[:5]
    assert rig.cache.free_pages == free - 7


def test_a_stored_lease_is_forked_later_as_it_was_and_takes_no_slot(rig):
    chain, slots = rig.chain(A), rig.cache.free_slots
    first = rig.cache.open(chain.hashes, 21, 20).lease
    rig.compute(first.slot, A, 0, 18)
    stored = rig.cache.store(first, 18)
    assert rig.cache.free_slots == slots - 1
    rig.cache.check_integrity()
    rig.compute(first.slot, A, 18, 21)
    rig.cache.close(first)
    for other in ([*A[:18], 7, 7], [*A[:18], 9]):
        copy = rig.cache.fork(stored, 18)
        rig.compute(copy.slot, other, 18, len(other))
        rig.check(copy.slot, other, len(other))
        rig.cache.close(copy)
    rig.cache.close(stored)
    rig.cache.check_integrity()
    assert rig.cache.stats().used_pages == 0


def test_a_cache_that_comes_takes_its_slot_when_it_is_there(rig):
    chain, slots, free = rig.chain(A), rig.cache.free_slots, rig.cache.free_pages
    assert rig.cache.free_pages_for(chain.hashes, 21, 20, comes=True) == 6 + 3
    lease = rig.cache.reserve(chain.hashes, 21, 20).lease
    assert (rig.cache.free_slots, rig.cache.free_pages) == (slots, free - 9)
    other = rig.cache.open(rig.chain(A, "other").hashes, 21, 20).lease
    rig.compute(other.slot, A, 0, 20)
    rig.memory.pages[lease.pages] = rig.memory.pages[other.pages]
    rig.memory.save_state(other.slot, lease.state_pages)
    rig.cache.close(other)
    rig.cache.publish(lease, chain, 5)
    assert rig.cache.checkpoint(lease, chain, 5), "others start from what has come, too"
    rig.cache.check_integrity()
    rig.cache.take_slot(lease)
    assert (rig.cache.free_slots, len(lease.state_pages)) == (slots - 1, 0)
    rig.check(lease.slot, A, 20)
    rig.compute(lease.slot, A, 20, 21)
    rig.check(lease.slot, A, 21)
    rig.cache.close(lease)
    assert rig.serve(A) == 20


def test_a_cache_that_does_not_come_leaves_nothing(rig):
    lease = rig.cache.reserve(rig.chain(A).hashes, 21, 20).lease
    rig.cache.close(lease)
    rig.cache.check_integrity()
    assert rig.cache.stats().used_pages == 0
    with pytest.raises(InternalError, match="closed before"):
        rig.cache.close(lease)


def test_a_cache_that_comes_has_its_pages_or_none(new_rig):
    rig = new_rig(pages=8, slots=2)
    assert rig.cache.reserve(rig.chain(A).hashes, 21, 20) is None, "six of rows and three of state"
    assert (rig.cache.free_slots, rig.cache.free_pages) == (2, 8)
    assert rig.cache.reserve(rig.chain(A).hashes, 20, 19) is not None
    rig.cache.check_integrity()


def test_decoding_leaves_one_state_that_the_next_turn_starts_from(rig):
    chain = rig.chain(A)
    lease = rig.cache.open(chain.hashes, 21, 20).lease
    tokens = [*A, *range(15)]
    rig.compute(lease.slot, tokens, 0, 21)
    for end in (24, 28, 32):
        assert rig.cache.grow(lease, end)
        rig.compute(lease.slot, tokens, end - 4 if end > 24 else 21, end)
        chain.extend(tokens[chain.tokens : end])
        rig.cache.publish(lease, chain, end // 4)
        assert rig.cache.checkpoint(lease, chain, end // 4, rolling=True)
    rig.cache.close(lease)
    assert rig.cache.stats().cached_pages == 8 + 3
    assert rig.serve([*tokens, 1, 2, 3]) == 32


def test_too_little_memory_changes_nothing(new_rig):
    rig = new_rig(pages=6, slots=2)
    lease = rig.cache.open(rig.chain(A).hashes, 21, 20).lease
    assert rig.cache.open(rig.chain([9]).hashes, 1, 0) is None
    assert not rig.cache.grow(lease, 25)
    assert rig.cache.fork(lease, 19) is None
    assert (rig.cache.free_slots, rig.cache.free_pages) == (1, 0)
    rig.cache.check_integrity()


def test_a_lease_is_closed_once(rig):
    lease = rig.cache.open([], 4, 0).lease
    rig.cache.close(lease)
    with pytest.raises(InternalError, match="closed before"):
        rig.cache.close(lease)


def test_finds_a_page_without_a_known_holder(rig):
    lease = rig.cache.open([], 8, 0).lease
    lease.pages.pop()
    with pytest.raises(InternalError, match="do not match the leases"):
        rig.cache.check_integrity()


def test_a_reset_forgets_everything_and_counts_what_it_frees(rig):
    rig.serve(A)
    assert rig.cache.reset() == 5 + 3
    assert rig.serve(A) == 0
    assert AllBlocksCleared() in rig.events


def test_routers_get_blocks_and_states_apart(rig):
    rig.serve(A)
    chain = rig.chain(A)
    stored = [event for event in rig.events if isinstance(event, BlockStored)]
    attention, state = stored
    assert (attention.block_hashes, attention.parent_block_hash) == (chain.hashes, None)
    assert (attention.token_ids, attention.block_size, attention.medium) == ([], 4, "GPU"), "no prompt"
    assert (attention.group_idx, attention.kv_cache_spec_kind) == (0, "mla_attention")
    assert (state.block_hashes, state.parent_block_hash) == (chain.hashes[4:], chain.hashes[3])
    assert (state.token_ids, state.group_idx, state.kv_cache_spec_kind) == ([], 1, "mamba")
    rig.events.clear()
    rig.fill()
    assert rig.events == [BlockRemoved([chain.hashes[4]], "GPU", 1), BlockRemoved(chain.hashes[::-1], "GPU", 0)]


def test_the_counts_tell_hits_from_attention_without_a_state(rig):
    rig.serve(A)
    rig.serve([*A[:12], *range(9)])
    rig.serve(A)
    stats = rig.cache.stats()
    assert (stats.query_tokens, stats.hit_tokens, stats.stateless_tokens) == (60, 20, 12)
    assert stats.total_pages == 64
    assert stats.used_pages == 0
