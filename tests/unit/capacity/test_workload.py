"""Proves that a workload's shares, means and quantiles are those of its lengths, and that nonsense is refused."""

import math
import random
from bisect import bisect_right
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError

PAPER = Workload.lognormal(9.90, 1.00, 128, 131_072)
lengths = st.lists(st.integers(1, 200_000), min_size=1, max_size=60)


def test_the_papers_workload_has_the_published_shares():
    assert PAPER.mean_tokens == pytest.approx(27_300, rel=0.02)
    assert PAPER.above(19_400).share == pytest.approx(0.496, abs=0.001)
    assert PAPER.above(19_400).mean_tokens == pytest.approx(44_000, rel=0.03)


@pytest.mark.parametrize("threshold", [500, 5_000, 19_400, 100_000])
def test_a_lognormal_keeps_the_partial_moments_of_the_formula(threshold):
    normal = NormalDist(9.90, 1.00)
    lengths = [math.exp(normal.inv_cdf((place + 0.5) / 100_000)) for place in range(100_000)]
    drawn = [length for length in lengths if 128 <= length <= 131_072]
    above = [length for length in drawn if length > threshold]
    found = PAPER.above(threshold)
    assert found.share == pytest.approx(len(above) / len(drawn), abs=0.001)
    assert found.tokens == pytest.approx(sum(above) / len(drawn), rel=0.002)
    assert found.squares == pytest.approx(sum(length**2 for length in above) / len(drawn), rel=0.002)


@given(lengths, st.integers(0, 200_001))
def test_moments_are_those_of_the_lengths_seen(seen, threshold):
    workload = Workload.observed(seen)
    for moments, part in (
        (workload.above(threshold), [length for length in seen if length > threshold]),
        (workload.below(threshold), [length for length in seen if length <= threshold]),
    ):
        for power, found in enumerate(moments):
            whole = sum(length**power for length in seen)
            assert found * len(seen) == pytest.approx(sum(length**power for length in part), abs=1e-9 * whole)
    assert bool(workload.above(threshold)) == (max(seen) > threshold)


@given(lengths, st.floats(0, 1))
def test_a_quantile_is_the_first_length_that_so_many_do_not_exceed(seen, share):
    found = Workload.observed(seen).quantile(share)
    ascending = sorted(seen)
    assert bisect_right(ascending, found) >= share * len(seen) * (1 - 1e-9)
    assert sum(length < found for length in seen) <= share * len(seen) * (1 + 1e-9)


def test_samples_follow_the_distribution_and_the_seed():
    drawn = PAPER.sample(random.Random(1), 50_000)
    assert drawn == PAPER.sample(random.Random(1), 50_000)
    assert sum(drawn) / len(drawn) == pytest.approx(PAPER.mean_tokens, rel=0.02)
    assert sorted(drawn)[45_000] == pytest.approx(PAPER.quantile(0.9), rel=0.03)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Workload.observed([]), "holds no prompts"),
        (lambda: Workload([], []), "at least one prompt"),
        (lambda: Workload([1, 2], [1.0]), "2 lengths but 1 weights"),
        (lambda: Workload([1, 2], [1.0, -1.0]), "no weight below 0"),
        (lambda: Workload([1, 2], [1.0, math.nan]), "no weight below 0"),
        (lambda: Workload([1, 2], [0.0, 0.0]), "total weight 0"),
        (lambda: Workload([2, 1], [1.0, 1.0]), "must ascend"),
        (lambda: Workload.observed([0]), "run from 0"),
        (lambda: Workload.histogram([0, 100], [1, 2]), "one edge more"),
        (lambda: Workload.histogram([100, 50], [1]), "50 follows 100"),
        (lambda: Workload.lognormal(27_000, 1, 128, 131_072), r"mean of ln\(tokens\)"),
        (lambda: Workload.lognormal(9.9, 0, 128, 131_072), "sigma 0"),
        (lambda: Workload.lognormal(math.nan, 1, 128, 131_072), "mu is nan"),
        (lambda: Workload.lognormal(9.9, 1, 500, 128), "minTokens is 500"),
    ],
)
def test_nonsense_is_refused_with_its_value(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
