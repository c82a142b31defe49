"""Proves what the index says of a prompt's bytes: of every instance what a naive reading of its events and map says,
and never more memory than the shares. What a forger gains is in tests/attacks/test_hostile_events.py.
"""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.kvindex.byte_maps import GENERATION_BLOCKS, GENERATION_SECONDS, NO_BLOCK, ByteMap, SentPrompts
from prfaas.kvindex.bytes import BYTE_BLOCK, ByteChain, byte_hashes
from prfaas.kvindex.index import MIN_PAIRS, InstanceIndex, PrefixIndex
from prfaas.kvindex.keys import key_of

BLOCK_BYTES = 100
"""Bytes that make a block of tokens, in these tests."""
BLOCK_TOKENS = 64
CERTAIN_BLOCKS = 38
"""Of the first text: its last whole byte block ends in block 39."""
TEXTS = [b"a" * 4000, b"a" * 1000 + b"b" * 3000, b"a" * 1000 + b"b" * 700 + b"c" * 2300, b"d" * 600]


def chain_of(text: bytes) -> ByteChain:
    return ByteChain(b"root", text)


def keys_of(text: bytes) -> list[int]:
    """Keys of a text's blocks of tokens."""
    ends = range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES)
    return [key_of(hashlib.sha256(text[:end]).digest()) for end in ends]


def teach(index: InstanceIndex, text: bytes) -> None:
    """Say which block of tokens lies in each byte block, less one token."""
    keys = keys_of(text)
    hashes = byte_hashes(b"root", text)
    blocks = [(BYTE_BLOCK * at - 1) // BLOCK_BYTES for at in range(1, len(hashes) + 1)]
    index.bytes.learn(hashes, [keys[block - 1] if block else NO_BLOCK for block in blocks])


def serve(index: InstanceIndex, text: bytes, *states: int) -> None:
    """Do what a prompt does: store its blocks, with states after some of them, and teach its bytes."""
    keys = keys_of(text)
    index.tree.store(keys, None, False, 0)
    for at in states:
        index.tree.store([keys[at - 1]], keys[at - 2] if at > 1 else None, True, 0)
    teach(index, text)


def made(**tokens_of: tuple[int, ...] | None) -> PrefixIndex:
    """An index of instances; each has served the first text with states at these blocks, or nothing."""
    index = PrefixIndex()
    index.set_instances(tokens_of)
    for name, states in tokens_of.items():
        if states is not None:
            serve(index[name], TEXTS[0], *states)
    return index


@settings(max_examples=150, deadline=None)
@given(
    served=st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(0, 4000)), max_size=6),
    evicted=st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(0, 39)), max_size=8),
    prompt=st.tuples(st.sampled_from(TEXTS), st.integers(0, 4000)),
)
def test_attention_matches_are_those_of_a_naive_reading(served, evicted, prompt):
    index, by_own_map, stored = InstanceIndex(10_000, 10_000), set(), set()
    for text, length in served:
        serve(index, text[:length])
        stored |= set(keys_of(text[:length]))
        by_own_map |= set(byte_hashes(b"root", text[:length]))
    removed = {keys_of(text)[at] for text, at in evicted if at < len(keys_of(text))}
    index.tree.remove(removed, False, 0)
    stored -= removed
    # A block is named as long as one behind it is stored. Where nothing is, the match ends with a byte block.
    chains = [keys_of(text[:length]) for text, length in served]
    named = {key for chain in chains for at, key in enumerate(chain) if stored.intersection(chain[at:])}
    text = prompt[0][: prompt[1]]
    keys, blocks = keys_of(text), 0
    for at, byte_hash in enumerate(byte_hashes(b"root", text), 1):
        upto = (BYTE_BLOCK * at - 1) // BLOCK_BYTES
        if byte_hash not in by_own_map or (upto and keys[upto - 1] not in named):
            break
        blocks = upto
    naive = next((at for at, key in enumerate(keys[:blocks]) if key not in stored), blocks)
    assert index.match(chain_of(text), index.bytes) == naive * BLOCK_TOKENS


def test_a_match_needs_a_state_at_its_end():
    for states, blocks in ((), CERTAIN_BLOCKS), ((7,), 7), ((7, 30), 30), ((40,), 40):
        index = made(d=states)
        found = index.match(chain_of(TEXTS[0]), ["d"], [])
        assert found == {"d": blocks * BLOCK_TOKENS}, states


def test_the_state_of_the_last_turn_counts_although_the_next_turn_shares_no_whole_byte_block_more():
    index = PrefixIndex()
    index.set_instances(["d"])
    serve(index["d"], TEXTS[0][:2500], 24)
    assert index.match(chain_of(TEXTS[0][:2500] + b"x" * 1000), ["d"], []) == {"d": 24 * BLOCK_TOKENS}
    # 2304 bytes surely hold 23 blocks; a state four blocks further on is beyond what they could share.
    index = PrefixIndex()
    index.set_instances(["d"])
    serve(index["d"], TEXTS[0], 28)
    assert index.match(chain_of(TEXTS[0][:2304] + b"x" * 1000), ["d"], []) == {}


def test_what_begins_otherwise_matches_nothing_and_hashes_one_block():
    index = made(d=(7,))
    chain = chain_of(b"z" * 100_000)
    assert index.match(chain, ["d"], []) == {}
    assert len(chain._hashes) == 1
    assert index.match(chain_of(b"short"), ["d"], []) == {}


def test_judges_an_instance_that_sees_only_tokens_by_what_others_teach():
    index = made(d=None, p=None)
    index["p"].tree.store(keys_of(TEXTS[0]), None, False, 0)
    assert index.match(chain_of(TEXTS[0]), ["d"], ["p"]) == {}
    teach(index["d"], TEXTS[0])
    assert index.match(chain_of(TEXTS[0]), ["d"], ["p"]) == {"p": CERTAIN_BLOCKS * BLOCK_TOKENS}
    assert index.match(chain_of(TEXTS[0]), ["d", "p"], []) == {}, "who is taught itself is judged by its own map"


def test_shares_shrink_as_instances_come_and_larger_ones_are_forgotten():
    index = PrefixIndex(max_blocks=100, max_pairs=10)
    assert index.set_instances(["a"]) == []
    index["a"].tree.store(list(range(70)), None, False, 0)
    assert index.set_instances(["a", "b"]) == ["a"]
    assert (index.blocks, index["a"].tree.max_blocks) == (0, 50)
    index["a"].tree.store(list(range(70)), None, False, 0)
    assert (index.blocks, index.refused_blocks) == (50, 20)
    assert index.set_instances(["b"]) == []
    assert (index.blocks, "a" in index, index["b"].tree.max_blocks) == (0, False, 100)


def test_a_map_forgets_the_oldest_generation_but_not_what_is_read():
    index = InstanceIndex(1000, 2 * MIN_PAIRS)
    serve(index, TEXTS[0])
    wanted, other = chain_of(TEXTS[0]), chain_of(TEXTS[3])
    teach(index, TEXTS[3])

    def fill(generation: int) -> None:
        for start in range(0, MIN_PAIRS + 1, 1000):
            index.bytes.learn([generation << 32 | start + n for n in range(1000)], [NO_BLOCK] * 1000)
        assert len(index.bytes) <= 2 * MIN_PAIRS + 2000

    for generation in range(1, 6):
        fill(generation)
        assert index.match(wanted, index.bytes) == CERTAIN_BLOCKS * BLOCK_TOKENS
    assert index.bytes.get(other[0]) is None


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=50))
def test_a_map_keeps_the_latest_word(hashes):
    byte_map = ByteMap(1000)
    byte_map.learn(hashes, range(len(hashes)))
    byte_map.learn(hashes, range(1, len(hashes) + 1))
    assert [byte_map.get(one) for one in hashes] == list(range(1, len(hashes) + 1))


@pytest.mark.parametrize(("seconds", "kept"), [(GENERATION_SECONDS, True), (2 * GENERATION_SECONDS, False)])
def test_what_was_sent_is_forgotten_after_a_while(seconds, kept):
    sent = SentPrompts(0.0)
    sent.add(chain_of(TEXTS[1]), 1.0)
    assert sent.match(chain_of(TEXTS[2]), 2.0) == 1700 // BYTE_BLOCK * BYTE_BLOCK
    assert sent.match(chain_of(TEXTS[1]), seconds + 2) == (4000 // BYTE_BLOCK * BYTE_BLOCK if kept else 0)


def test_what_was_sent_is_bounded():
    sent = SentPrompts(0.0)
    for number in range(40):
        sent.add(ByteChain(str(number).encode(), bytes(BYTE_BLOCK * 1000)), 0.0)
        assert len(sent) <= 2 * (GENERATION_BLOCKS + 1000)
    sent.add(ByteChain(b"huge", bytes(BYTE_BLOCK * 3 * GENERATION_BLOCKS)), 0.0)
    assert len(sent) <= 4 * GENERATION_BLOCKS
