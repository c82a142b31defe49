"""Proves that estimates follow the exact lengths of a client's prompts, and that each observation is bounded."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.routing.estimate import RATIOS, TokenEstimator
from prfaas.routing.prompt_size import PromptSize, Unit


def size_of(**counts: int) -> PromptSize:
    return PromptSize(tuple(counts.get(unit.name, 0) for unit in Unit))


def test_one_long_prompt_is_enough_to_learn_a_byte_level_model():
    estimator = TokenEstimator()
    estimator.observe(size_of(LETTER=8000), 7950)
    assert estimator.tokens(size_of(LETTER=8000)) == pytest.approx(7950, rel=0.03)


def test_short_prompts_do_not_spoil_what_long_ones_taught():
    estimator = TokenEstimator()
    for _ in range(20):
        estimator.observe(size_of(LETTER=40_000), 10_000)
        estimator.observe(size_of(LETTER=100), 50)
    assert estimator.tokens(size_of(LETTER=40_000)) == pytest.approx(10_000, rel=0.01)


def test_what_a_prompt_does_not_have_it_does_not_change():
    estimator = TokenEstimator()
    chinese = size_of(CJK=4000)
    before = estimator.tokens(chinese)
    estimator.observe(size_of(LETTER=40_000, SPACE=8000), 40_000)
    assert estimator.tokens(chinese) == before
    estimator.observe(chinese, 8000)
    assert estimator.tokens(chinese) == pytest.approx(8000, rel=0.02)


def test_token_ids_are_counted_and_never_estimated():
    estimator = TokenEstimator()
    for exact in (1, 10**9):
        estimator.observe(size_of(TOKEN=1000), exact)
        assert estimator.tokens(size_of(TOKEN=1000)) == 1000


def test_tools_that_a_template_leaves_out_count_for_nothing_after_a_few_prompts():
    estimator = TokenEstimator()
    with_tools = size_of(LETTER=100, MESSAGE=2, TOOL_BYTE=6000)
    assert estimator.tokens(with_tools) > 1000
    for _ in range(5):
        estimator.observe(with_tools, 30)
    assert estimator.tokens(with_tools) < 100


def test_a_prompt_that_is_known_in_part_teaches_nothing():
    estimator, whole = TokenEstimator(), size_of(LETTER=1000)
    before = estimator.tokens(whole)
    estimator.observe(whole._replace(is_whole=False), 90_000)
    estimator.observe(whole._replace(most_tokens=7), 7)
    estimator.observe(whole, 0)
    estimator.observe(size_of(), 5)
    assert estimator.tokens(whole) == before
    assert estimator.tokens(whole._replace(most_tokens=7)) == 7


COUNTS = st.tuples(*(st.integers(0, 10**7) for _ in Unit))


@given(st.lists(st.tuples(COUNTS, st.integers(0, 10**9)), max_size=60), COUNTS)
def test_no_history_moves_an_estimate_beyond_what_is_possible(history, counts):
    estimator = TokenEstimator()
    for observed, exact in history:
        estimator.observe(PromptSize(observed), exact)
    least, most = (sum(RATIOS[unit][at] * counts[unit] for unit in Unit) for at in (0, 2))
    assert 0.999 * least <= estimator.tokens(PromptSize(counts)) <= 1.001 * most + 1


EACH = PromptSize(tuple(1000 for _ in Unit))


@pytest.fixture(scope="module")
def learnt() -> TokenEstimator:
    estimator = TokenEstimator()
    for _ in range(4000):
        estimator.observe(EACH, 1_000_000)
    return estimator


@given(counts=COUNTS, exact=st.integers(1, 10**9))
def test_one_observation_is_a_ninth_of_what_a_ratio_is_learnt_from(learnt, counts, exact):
    estimator = deepcopy(learnt)
    before = estimator.tokens(EACH)
    estimator.observe(PromptSize(counts), exact)
    most = sum(1000 * ratio.most for ratio in RATIOS.values())
    assert before * 8 / 9 - 1 <= estimator.tokens(EACH) <= before + (most - before) / 9 + 1
