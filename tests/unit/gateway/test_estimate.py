"""Proves that the length estimate follows a model's bytes per token, and that long prompts teach most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_gateway.state import TokenEstimator


def test_it_begins_with_four_bytes_a_token():
    assert TokenEstimator().tokens(4000) == 1000


def test_one_long_prompt_is_enough_to_learn_a_byte_level_model():
    estimator = TokenEstimator()
    estimator.observe(8000, 7950)
    assert estimator.tokens(8000) == pytest.approx(7950, rel=0.03)


def test_short_prompts_do_not_spoil_what_long_ones_taught():
    estimator = TokenEstimator()
    for _ in range(20):
        estimator.observe(40_000, 10_000)
        estimator.observe(100, 10)  # mostly JSON around the prompt
    assert estimator.tokens(40_000) == pytest.approx(10_000, rel=0.01)


def test_a_worker_that_reports_nothing_useful_teaches_nothing():
    estimator = TokenEstimator()
    estimator.observe(5000, 0)
    assert estimator.bytes_per_token == 4.0


@given(st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 10**6)), max_size=200), st.integers(0, 10**7))
def test_an_estimate_is_never_negative_and_grows_with_the_body(history, body_bytes):
    estimator = TokenEstimator()
    for observed in history:
        estimator.observe(*observed)
    assert 0 <= estimator.tokens(body_bytes) <= estimator.tokens(body_bytes + 1000)
