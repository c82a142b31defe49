"""Proves that every example of a plan says on top how to plan it and what it gains, and that offloading pays in it."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from prfaas.capacity.builtin import read_builtin
from prfaas.capacity.comparison import Comparison, compare
from prfaas.cli.plan import load

ROOT = Path(__file__).parents[3]
PAGE = " ".join((ROOT / "docs/understand/capacity.md").read_text().split())
PLANS = [
    path
    for path in sorted((ROOT / "examples").glob("*.yaml"))
    if "offloadPools" in (first := next(yaml.safe_load_all(path.read_text()))) and "simulation" not in first
]
GAIN = re.compile(r"^# Plans (\d+)% more than (the hub alone|as many instances in the hub)\b", re.MULTILINE)
DERIVED = [
    ("qwen3.5-397b-two-nodes", "h200", "qwen3.5-397b-fp8-8xh200", 1.0),
    ("qwen3.5-397b-two-nodes", "h20", "qwen3.5-397b-fp8-8xh20-141", 1.0),
    ("kimi-linear-48b", "h200", "qwen3.5-35b-bf16-2xh200", 1.0),
    ("kimi-linear-48b", "h20", "qwen3.5-35b-bf16-2xh200", 2.6),
]
"""An example's profile, the built-in one whose prefill times it has, and how many times as long they are."""

each_plan = pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)


@cache
def planned(path: Path) -> Comparison:
    return compare(load(path))


def head_of(path: Path) -> str:
    return path.read_text().partition("\nworkload:")[0]


def test_both_models_of_the_examples_with_pools_have_a_plan():
    assert {"qwen3.5-397b-two-nodes", "kimi-linear-48b"} <= {path.stem for path in PLANS}


@each_plan
def test_the_head_of_a_plan_says_what_it_gains(path):
    gain, base = GAIN.search(head_of(path)).groups()
    assert f"prfaas plan -f examples/{path.name}" in head_of(path)
    assert gain == f"{100 * planned(path).verdict.gain:.0f}"
    assert (base == "the hub alone") == (planned(path).hub_alone is not None)


@each_plan
def test_an_example_pays_and_stays_within_its_link(path):
    result = planned(path)
    assert result.verdict.gain > 0.3
    assert result.prfaas_pd
    assert result.prfaas_pd.egress_gbps <= load(path).system.links[0].capacity_mbps / 1000 + 1e-6


def test_the_papers_case_gains_57_percent_over_as_many_instances():
    path = ROOT / "examples" / "paper.yaml"
    ours, as_many = planned(path).prfaas_pd, planned(path).homogeneous
    assert f"{100 * ours.lambda_max / as_many.lambda_max - 100:.0f}% more than the 96." in head_of(path)


def test_the_lab_with_idle_gpus_gains_38_percent_over_what_it_has():
    verdict = planned(ROOT / "examples" / "idle-l40s.yaml").verdict
    assert verdict.sentence.startswith("PrfaaS-PD serves 38% more than the hub alone")
    assert "serves 38 % more than its four pairs" in PAGE
    assert "times as long to its first token" in verdict.sentence


@pytest.mark.parametrize(("example", "profile", "builtin", "times"), DERIVED)
def test_prefill_times_are_those_of_the_built_in_profile_that_the_head_names(example, profile, builtin, times):
    path = ROOT / "examples" / f"{example}.yaml"
    known = {one.tokens: times * one.seconds for one in read_builtin("name", builtin).points}
    points = yaml.safe_load(path.read_text())["profiles"][profile]["points"]
    assert builtin in head_of(path)
    assert all(one["seconds"] == pytest.approx(known[one["tokens"]]) for one in points)
