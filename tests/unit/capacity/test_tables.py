"""Proves what docs/understand/capacity.md says: every figure follows from profiles that ship here.

That the tables of the page are what docs/capacity_tables.py computes is held by the test of the reference.
"""

from pathlib import Path

import pytest
from docs import capacity_tables as tables

from prfaas.capacity import optimum
from prfaas.capacity.builtin import read_builtin
from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.cli.plan import load
from prfaas.wire.profile import Profile

ROOT = Path(__file__).parents[3]
PAGE = " ".join((ROOT / "docs/understand/capacity.md").read_text().split())
GUESS = Profile(state_bytes=0, token_bytes=1, fixed_seconds=0.1, token_seconds=2.86e-5, squared_seconds=2.07e-10)
"""What examples/qwen3.5-397b.yaml once said of 8 x H200."""


def example(name: str):
    return load(ROOT / "examples" / f"{name}.yaml")


@pytest.mark.parametrize(
    ("profile", "rate"),
    [(read_builtin("name", name).profile(), rate) for name in tables.AT_HOME[:3] for rate in (1e9, 5e9, 1e10)]
    + [(Profile(state_bytes=100, token_bytes=1, fixed_seconds=1e-3, token_seconds=1e-9), 1e3)],
)
def test_the_shortest_prompt_pays_and_no_shorter_one_does(profile, rate):
    found = tables.shortest(profile, rate)
    tried = range(1, found or 3_000)
    assert not any(8 * cache_bytes(profile, one) / rate <= prefill_seconds(profile, one) for one in tried)
    if found:
        assert 8 * cache_bytes(profile, found) / rate <= prefill_seconds(profile, found)


def test_what_the_page_says_of_claims_that_fell_is_so():
    for precision, words in (("bf16", "1.6 to 2.5 times too long for bf16"), ("fp8", "1.9 to 3.2 times for fp8")):
        real = read_builtin("name", f"qwen3.5-397b-{precision}-8xh200").points
        ratios = [prefill_seconds(GUESS, one.tokens) / one.seconds for one in real if one.tokens >= 1024]
        assert f"{min(ratios):.1f} to {max(ratios):.1f} times" in words
        assert words in PAGE
    file = example("qwen3.5-397b")
    served, same = tables.changed(file.system, 10, 1.0), optimum.homogeneous(file.system)
    gain = optimum.best(served, file.workload).lambda_max / optimum.best(same, file.workload).lambda_max
    assert f"serves {gain:.2f} times as much as eight H20 instances, not 1.15" in PAGE
    tokens = tables.shortest(read_builtin("name", "qwen3.5-397b-fp8-8xh20-141").profile(), 1e10)
    assert f"has {tokens:,} tokens, not 1,065" in PAGE


def test_half_the_bytes_are_worth_a_link_twice_as_fast():
    file = example("qwen3.5-397b")
    half, fast = (tables.changed(file.system, *changes) for changes in ((5, 0.5), (10, 1.0)))
    served = [optimum.best(one, file.workload).lambda_max for one in (half, fast)]
    assert served[0] == pytest.approx(served[1], rel=1e-3)
