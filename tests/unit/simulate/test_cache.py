"""Proves the promise of a match: the longest n with attention blocks to n and a state at n, less than the prompt.

A plain model, which keeps everything, says what may match where nothing was evicted; where something was, a match may
only be shorter.
"""

from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.simulate.cache import PrefixCache

BLOCK, TOKEN_BYTES, STATE_BYTES = 10, 1, 15


def cache(capacity_bytes: float = 1e9) -> PrefixCache:
    return PrefixCache(capacity_bytes, BLOCK, TOKEN_BYTES, STATE_BYTES)


def test_the_end_of_a_prompt_serves_its_continuation():
    known = cache()
    known.insert([1, 2, 3], 30)
    assert known.match([1, 2, 3, 4], 40) == 30


def test_nothing_matches_all_of_a_prompt():
    known = cache()
    known.insert([1, 2, 3], 30)
    assert known.match([1, 2, 3], 30) == 0
    assert known.match([1, 2, 3, 4], 31) == 30


def test_attention_without_a_state_matches_nothing_until_the_branch_is_seen_the_second_time():
    known = cache()
    known.insert([1, 2, 3], 30)
    assert known.match([1, 2, 8], 30) == 0
    known.insert([1, 2, 8], 30)
    assert known.match([1, 2, 9], 30) == 20


def test_a_last_block_that_is_not_full_is_not_kept():
    known = cache()
    known.insert([1, 2], 15)
    assert (known.match([1, 2, 3], 30), known.used_bytes) == (10, BLOCK * TOKEN_BYTES + STATE_BYTES)


def test_what_was_used_longest_ago_is_evicted_and_of_one_prompt_the_end_first():
    room = cache(2 * (2 * BLOCK * TOKEN_BYTES + STATE_BYTES))
    room.insert([1, 2, 0], 25)
    room.insert([3, 4, 0], 25)
    room.insert([1, 2, 0], 25)
    room.insert([5, 6, 0], 25)
    assert (room.match([1, 2, 0], 30), room.match([3, 4, 0], 30), room.match([5, 6, 0], 30)) == (20, 0, 20)


def test_what_does_not_fit_at_all_leaves_no_more_than_fits():
    room = cache(25)
    room.insert(list(range(50)), 500)
    assert room.used_bytes <= 25


# A prompt is a path in a small tree, so that prefixes are shared: its blocks are named by the path up to them.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def named(path: list[int]) -> list[int]:
    return [int("1" + "".join(map(str, path[: end + 1])), 2) for end in range(len(path))]


@example([[1, 0], [0, 0, 0, 0, 0], [1, 0, 0]], [1, 0], 80)
@given(st.lists(PATHS, max_size=12), PATHS, st.sampled_from([80, 200, 1e9]))
def test_a_match_is_the_longest_with_attention_and_a_state(paths, prompt, capacity_bytes):
    room, attention, states = cache(capacity_bytes), set[int](), set[int]()
    for path in paths:
        blocks = named(path)
        shared = [end for end in range(1, len(blocks)) if blocks[end - 1] in attention]
        attention |= set(blocks)
        # A part that was evicted is no longer shared: then the branch is at an earlier end.
        branches = shared[-1:] if capacity_bytes == 1e9 else shared
        states |= {blocks[-1], *(blocks[end - 1] for end in branches)}
        room.insert(blocks, len(blocks) * BLOCK)
        assert 0 <= room.used_bytes <= capacity_bytes
    blocks, before = named(prompt), room.used_bytes
    possible = [end for end in range(len(blocks)) if end and blocks[end - 1] in attention & states]
    found = room.match(blocks, len(blocks) * BLOCK)
    if capacity_bytes == 1e9:
        assert found == max(possible, default=0) * BLOCK
    assert found in {0, *(end * BLOCK for end in possible)}
    assert room.match(blocks, len(blocks) * BLOCK) == found
    assert room.used_bytes == before
