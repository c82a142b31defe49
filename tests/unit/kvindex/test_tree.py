"""Proves that the tree of an instance's blocks answers exactly what a naive reading of its events does: the longest n
with attention rows up to n and a state at n, whatever is evicted where, and that it grows no further than its bound.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.kvindex.byte_maps import last_where
from prfaas.kvindex.keys import NONE, key_of
from prfaas.kvindex.tree import BlockTree

CHAINS = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 13, 14, 15], [0, 1, 2, 13, 24, 25], [30, 31, 32]]
PARENTS = {block: parent for chain in CHAINS for parent, block in zip([None, *chain], chain, strict=False)}
KEYS = {block: key_of(block) for block in PARENTS}


@dataclass
class Naive:
    """Sets of blocks by group and medium. Unknown parents are as in the tree: what has no way to it is left out."""

    held: set[tuple[bool, int, int]] = field(default_factory=set)
    had_states: bool = False

    def known(self, block: int) -> bool:
        """A block is known while it, or one that comes behind it, holds anything."""
        return any(one == block or (one in PARENTS and self._is_before(block, one)) for _, _, one in self.held)

    def _is_before(self, block: int, other: int) -> bool:
        above = PARENTS[other]
        return above is not None and (above == block or self._is_before(block, above))

    def store(self, blocks: list[int], is_state: bool, medium: int) -> None:
        for block in blocks:
            parent = PARENTS[block]
            if self.known(block) or parent is None or self.known(parent):
                self.held.add((is_state, medium, block))
        self.had_states |= is_state

    def remove(self, blocks: list[int], is_state: bool, medium: int) -> None:
        self.held -= {(is_state, medium, block) for block in blocks}

    def match(self, chain: list[int]) -> int:
        rows, states = ({block for kind, _, block in self.held if kind is one} for one in (False, True))
        whole = next((at for at, block in enumerate(chain) if block not in rows), len(chain))
        if not self.had_states:
            return whole
        return max((at for at in range(1, whole + 1) if chain[at - 1] in states), default=0)


def match(tree: BlockTree, chain: list[int]) -> int:
    last = last_where(len(chain), lambda at: tree.find(KEYS[chain[at]]) != NONE)
    return tree.usable(tree.find(KEYS[chain[last]])) if last >= 0 else 0


segments = st.sampled_from(CHAINS).flatmap(
    lambda chain: st.tuples(st.integers(0, len(chain) - 1), st.integers(1, 4)).map(
        lambda cut: chain[cut[0] : cut[0] + cut[1]]
    )
)
steps = st.tuples(st.sampled_from(["store", "store", "remove", "clear"]), segments, st.booleans(), st.integers(0, 1))


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=40))
def test_matches_are_those_of_a_naive_reading_after_any_evictions(done):
    tree, naive = BlockTree(1000), Naive()
    for what, blocks, is_state, medium in done:
        keys, parent = [KEYS[block] for block in blocks], PARENTS[blocks[0]]
        if what == "store":
            tree.store(keys, None if parent is None else KEYS[parent], is_state, medium)
            naive.store(blocks, is_state, medium)
        elif what == "remove":
            tree.remove(keys, is_state, medium)
            naive.remove(blocks, is_state, medium)
        else:
            tree.clear()
            naive = Naive(had_states=naive.had_states)
        assert len(tree) == sum(map(naive.known, PARENTS))
        for chain in CHAINS:
            assert match(tree, chain) == naive.match(chain)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(segments, st.booleans()), max_size=20), st.integers(0, 6))
def test_a_tree_never_exceeds_its_bound_and_takes_beginnings_first(done, bound):
    tree = BlockTree(bound)
    for blocks, is_state in done:
        parent = PARENTS[blocks[0]]
        tree.store([KEYS[block] for block in blocks], None if parent is None else KEYS[parent], is_state, 0)
        assert len(tree) <= bound
        for block, parent in PARENTS.items():
            known = tree.find(KEYS[block]) != NONE
            assert not known or parent is None or tree.find(KEYS[parent]) != NONE


def test_a_state_counts_a_little_further_on_but_behind_no_branch_and_no_gap():
    def made() -> BlockTree:
        tree = BlockTree(100)
        tree.store([KEYS[block] for block in CHAINS[0]], None, False, 0)
        tree.store([KEYS[4]], KEYS[3], True, 0)
        return tree

    tree = made()
    at = tree.find(KEYS[2])
    assert [tree.usable(at, ahead) for ahead in (0, 1, 2, 3)] == [0, 0, 5, 5]
    tree.remove([KEYS[3]], False, 0)
    assert tree.usable(at, 2) == 0
    tree = made()
    tree.store([KEYS[13]], KEYS[2], False, 0)
    tree.store([KEYS[13]], KEYS[2], True, 0)
    assert tree.usable(tree.find(KEYS[2]), 1) == 0, "a branch has not the next number"
    assert tree.usable(tree.find(KEYS[13])) == 4


def test_long_chains_that_came_in_pieces_and_lost_a_block_are_matched_up_to_it():
    tree, keys = BlockTree(10_000), [key_of(number) for number in range(5000)]
    for start in range(0, 5000, 7):
        tree.store(keys[start : start + 7], keys[start - 1] if start else None, False, 0)
    tree.store([keys[99]], keys[98], True, 0)
    tree.store([keys[3999]], keys[3998], True, 0)
    assert tree.usable(tree.find(keys[-1])) == 4000
    tree.remove([keys[2500]], False, 0)
    assert tree.usable(tree.find(keys[-1])) == 100
    tree.store([keys[2500]], keys[2499], False, 1)
    assert tree.usable(tree.find(keys[-1])) == 4000


def test_reused_numbers_make_no_run_of_blocks_that_do_not_follow_each_other():
    tree = BlockTree(100)
    tree.store([KEYS[block] for block in CHAINS[0][:4]], None, False, 0)
    tree.store([KEYS[30]], None, False, 0)
    for block in (3, 30):
        tree.remove([KEYS[block]], False, 0)
    tree.store([KEYS[13]], KEYS[2], False, 0)
    tree.store([KEYS[14]], KEYS[13], False, 0)
    assert tree.find(KEYS[14]) < tree.find(KEYS[13]), "otherwise this proves nothing"
    tree.remove([KEYS[13]], False, 0)
    assert tree.usable(tree.find(KEYS[14])) == 3


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_last_place_is_found_in_few_questions(count, answer):
    places = []
    found = last_where(count, lambda at: places.append(at) or at < answer)
    assert found == min(count, answer) - 1
    assert len(places) <= 2 * (answer + 1).bit_length() + 2
