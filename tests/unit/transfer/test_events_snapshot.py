"""A follower that comes too late for the events knows what one knows that read them all, whatever the order in which
blocks came and went.
"""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from prfaas.wire.kvevents import (
    MEDIUM_DEVICE,
    MEDIUM_HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    attention_stored,
    join_events,
    read_events,
    state_stored,
)
from prfaas_transfer.events.log import CachedBlocks

from ...event_reader import cached_after


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(first: int, last: int) -> BlockStored:
    """Blocks of one chain, in which each is the next one's parent."""
    parent = key(first - 1) if first else None
    return attention_stored([key(n) for n in range(first, last)], parent, 2, "mla_attention")


def state(number: int) -> BlockStored:
    return state_stored(key(number), key(number - 1) if number else None, 2)


def salted(first: int, last: int) -> BlockStored:
    """Blocks as vLLM names those of another medium, with a salt."""
    return BlockStored(
        [key(n) for n in range(first, last)],
        key(first - 1) if first else None,
        bytes(n for n in range(first, last) for _ in range(8)),
        2,
        medium=MEDIUM_HOST,
        lora_name="adapter",
        extra_keys=[("salt", n) for n in range(first, last)],
        group_idx=0,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=128,
    )


def take_snapshot(events: list[KvEvent]) -> list[BlockStored]:
    kept = CachedBlocks()
    kept.apply(events)
    return list(read_events(join_events(0.0, kept.events())))  # type: ignore[arg-type]


chains = st.tuples(st.integers(0, 7), st.integers(1, 4)).map(lambda at: (at[0], at[0] + at[1]))
changes = st.one_of(
    st.builds(lambda at: stored(*at), chains),
    st.builds(lambda at: salted(*at), chains),
    st.builds(state, st.integers(0, 9)),
    st.builds(
        lambda at, medium, group: BlockRemoved([key(n) for n in range(*at)], medium, group),
        chains,
        st.sampled_from([MEDIUM_DEVICE, MEDIUM_HOST]),
        st.sampled_from([0, 1]),
    ),
    st.just(AllBlocksCleared()),
)


@given(st.lists(changes, max_size=30))
def test_a_snapshot_leads_to_what_all_events_lead_to_with_parents_and_rows_first(events: list[KvEvent]):
    found = take_snapshot(events)
    assert cached_after(found) == cached_after(events)
    order = [(event.group_idx, event.block_hashes[0]) for event in found]
    for place, event in enumerate(found):
        assert (event.group_idx, event.parent_block_hash) not in order[place:]
    for before, after in pairwise(found):
        assert (before.group_idx or 0) <= (after.group_idx or 0)


def test_states_come_last_whatever_their_groups_number():
    states = [BlockStored([key(1)], None, [1, 1], 2, group_idx=0, kv_cache_spec_kind="mamba")]
    rows = [BlockStored([key(1)], None, [1, 1], 2, group_idx=n, kv_cache_spec_kind="full_attention") for n in (2, 1)]
    assert [event.group_idx for event in take_snapshot([*states, *rows])] == [1, 2, 0]


def test_a_name_without_tokens_comes_behind_the_block_that_has_them():
    bare = BlockStored([key(0)], None, [], 2, medium=MEDIUM_HOST, group_idx=0, kv_cache_spec_kind="mla_attention")
    whole = replace(bare, token_ids=b"a digest", medium=MEDIUM_DEVICE)
    assert take_snapshot([bare, whole]) == [whole, bare]
