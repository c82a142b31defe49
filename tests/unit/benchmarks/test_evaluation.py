"""Proves what each part of the evaluation serves, how long it takes, and that a headline without runs is a miss."""

import pytest
from benchmarks.evaluation import PAPER, PartName, figures_of, runs_of_part
from benchmarks.report import Figure
from tests.unit.evaluate.cases import CASE, LIMIT_SECONDS, live

from prfaas.evaluate.case import compared_load, run_seconds
from prfaas.evaluate.record import RunKey
from prfaas.evaluate.summary import summarise
from prfaas_sandbox.demo.install import repository_root
from prfaas_sandbox.evaluate.campaign import read_case

PARTS = ("saturated", "beside", "steady")
P90 = "P90 of PrfaaS-PD over homogeneous, at 90% of what the plan of that carries"


@pytest.fixture(scope="module")
def paper():
    return read_case(repository_root() / PAPER.file, PAPER.requests, PAPER.stretch, PAPER.cache_scale)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_takes_at_most_an_hour_with_room_for_runs_that_are_made_again(part, paper):
    assert sum(run_seconds(paper, key) for key in runs_of_part(part, paper)) < 3000


def test_parts_serve_what_their_headlines_need(paper):
    saturated, beside, steady = ({(key.policy, key.load) for key in runs_of_part(part, paper)} for part in PARTS)

    assert saturated == {(policy, 1.3) for policy in ("threshold", "naive", "homogeneous")}
    assert beside == {("homogeneous", 0.9), ("threshold", compared_load(paper.file))}
    assert {load for _, load in steady} == {0.5, 0.7, 0.9}


def figures(part: PartName, *keys: RunKey) -> dict[str, Figure]:
    made = summarise(CASE.file, [live(key) for key in keys], live, LIMIT_SECONDS)
    return {one.name: one for one in figures_of(made, part)}


def missing(part: PartName, *keys: RunKey) -> list[str]:
    return [
        name.removeprefix("there is none: ")
        for name, one in figures(part, *keys).items()
        if name.startswith("there is none") and one.reach is not None and one.value > one.reach
    ]


def test_a_headline_that_the_runs_of_its_part_do_not_give_misses():
    ours, theirs = RunKey("threshold", compared_load(CASE.file), 1), RunKey("homogeneous", 0.9, 1)

    assert missing("beside", ours) == [P90]
    assert missing("beside", ours, theirs) == []
    assert P90 in figures("beside", ours, theirs)
    assert missing("beside", RunKey("threshold", 0.5, 1), theirs) == [P90], "another rate"
    assert missing("saturated") == [
        "most requests/s, PrfaaS-PD over homogeneous",
        "most requests/s, PrfaaS-PD over naive",
    ]
    assert missing("short") == []
