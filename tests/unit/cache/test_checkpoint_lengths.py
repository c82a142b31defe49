"""Where states are kept: at prompt ends and at branches, where they save enough tokens for the pages that they take."""

import pytest

from prfaas_worker.cache.blocks import checkpoint_blocks, is_spent

PAGES = 85  # a state of Kimi Linear 48B


@pytest.mark.parametrize(
    ("attention", "state", "last", "kept"),
    [
        (0, 0, 100, (100,)),  # a new prompt: its end
        (100, 100, 100, ()),  # the same prompt again: nothing to add
        (40, 40, 100, (100,)),  # a conversation continues
        (40, 0, 100, (40, 100)),  # a prompt parts from an earlier one that left no state there
        (40, 30, 100, (40, 100)),
        (100, 0, 100, (100,)),  # a prompt whose states gave way
        (1, 0, 100, (100,)),  # 64 tokens are less than 85 pages
        (99, 0, 100, (99,)),  # nor does the end add enough to a branch just before it
        (0, 0, 1, ()),
        (0, 0, 2, (2,)),
        (0, 0, 0, ()),
    ],
)
def test_states_stand_at_the_branch_and_at_the_end(attention: int, state: int, last: int, kept: tuple[int, ...]):
    assert checkpoint_blocks(attention, state, last, 64, PAGES) == kept


def test_small_states_are_worth_keeping_for_a_single_block():
    assert checkpoint_blocks(1, 0, 2, 64, 11) == (1, 2)


def test_a_model_without_state_keeps_none():
    assert checkpoint_blocks(3, 0, 9, 64, 0) == ()


def test_a_second_start_makes_a_branch():
    assert is_spent(1)
    assert not is_spent(2)
