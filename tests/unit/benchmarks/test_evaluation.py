"""Proves what each part of the evaluation serves, how long it takes, and that a headline without runs is a miss."""

import pytest
from benchmarks.evaluation import disturbed
from benchmarks.evaluation.__main__ import PartName, part_of
from benchmarks.evaluation.compared import ComparedName, figures_of
from benchmarks.evaluation.part import EvaluationPart, simulator_of
from benchmarks.report import Figure
from tests.unit.evaluate.cases import CASE, LIMIT_SECONDS, invalid, live

from prfaas.evaluate.case import compared_load, run_seconds, scenario_of
from prfaas.evaluate.disturbed import summarise_disturbed
from prfaas.evaluate.record import Run, RunKey
from prfaas.evaluate.summary import summarise
from prfaas.simulate.setup import capacity
from prfaas_sandbox.evaluate.objects import check_live

MOST_SECONDS = 3600.0
MINUTES: dict[PartName, float] = {
    "short": 12.8,
    "saturated": 29.3,
    "beside": 43.8,
    "steady": 47.8,
    "falls": 41.4,
    "swings": 41.4,
    "bursts": 41.4,
    "longloop": 21.6,
    "qwen": 41.8,
}
P90 = "P90 of PrfaaS-PD over homogeneous, at 90% of what the plan of that carries"


@pytest.fixture(scope="module")
def parts() -> dict[PartName, EvaluationPart]:
    return {name: part_of(name) for name in MINUTES}


@pytest.mark.parametrize("name", MINUTES)
def test_a_part_takes_an_hour_at_most_with_room_for_a_run_that_is_made_again(name, parts):
    case, runs = parts[name].case, parts[name].runs
    seconds = [run_seconds(case, key) for key in runs]

    assert sum(seconds) / 60 == pytest.approx(MINUTES[name], abs=0.5)
    assert sum(seconds) + max(seconds) < MOST_SECONDS


@pytest.mark.parametrize("name", MINUTES)
def test_every_run_can_be_made_live(name, parts):
    for key in parts[name].runs:
        check_live(parts[name].case, scenario_of(parts[name].case, key))


def test_parts_serve_what_their_headlines_need(parts):
    names: tuple[PartName, ...] = ("saturated", "beside", "steady")
    saturated, beside, steady = ({(key.policy, key.load) for key in parts[name].runs} for name in names)

    assert saturated == {(policy, 1.3) for policy in ("threshold", "naive", "homogeneous")}
    assert beside == {("homogeneous", 0.9), ("threshold", compared_load(parts["beside"].case.file))}
    assert {load for _, load in steady} == {0.5, 0.7, 0.9}


def figures(part: ComparedName, *keys: RunKey) -> dict[str, Figure]:
    made = summarise(CASE.file, [live(key) for key in keys], live, LIMIT_SECONDS)
    return {one.name: one for one in figures_of(made, part)}


def missing(part: ComparedName, *keys: RunKey) -> list[str]:
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
    assert missing("qwen") == missing("saturated")
    assert missing("short") == []


def test_a_case_other_than_the_paper_s_has_no_gain_to_reach_and_stands_beside_its_plan():
    keys = [RunKey(policy, 1.5, 1) for policy in ("threshold", "homogeneous")]
    name = "most requests/s, PrfaaS-PD over homogeneous"
    other, paper = figures("qwen", *keys)[name], figures("saturated", *keys)[name]

    assert (other.reach, paper.reach) == (None, 1.5)
    assert other.value == paper.value
    assert other.rival_value == capacity(CASE.file, "threshold") / capacity(CASE.file, "homogeneous")


@pytest.fixture(scope="module")
def falls(parts) -> EvaluationPart:
    return parts["falls"]


@pytest.fixture(scope="module")
def simulated(falls):
    return simulator_of(falls.case)


def fallen(falls: EvaluationPart, simulated, *runs: Run) -> dict[str, Figure]:
    made = summarise_disturbed(falls.case, runs, simulated, falls.runs)
    return {one.name: one for one in disturbed.figures_of(made, "falls")}


def test_a_disturbed_case_says_how_soon_the_threshold_settles_and_what_it_gains(falls, simulated):
    found = fallen(falls, simulated, *map(simulated, falls.runs))

    assert found["requests lost"].value == found["runs without a figure"].value == 0
    settlings = [one for name, one in found.items() if name.startswith("intervals until")]
    assert [one.value for one in settlings] == [one.rival_value for one in settlings]
    ratios = [one for name, one in found.items() if "over the best threshold that stays" in name]
    assert len(ratios) == 2
    assert found["  the better of both"].value == min(one.value for one in ratios)
    assert not any(name.startswith("there is none") for name in found)


def test_a_disturbed_case_without_all_thresholds_that_stay_has_no_ratio(falls, simulated):
    runs = list(map(simulated, falls.runs))
    for some in (runs[:-1], [*runs[:-1], invalid(runs[-1])]):
        found = fallen(falls, simulated, *some)
        assert found["runs without a figure"].value == 1
        assert "  the better of both" not in found
        assert "there is none: P90 of PrfaaS-PD over the best threshold that stays" in found


def test_an_invalid_moving_threshold_has_settled_nowhere(falls, simulated):
    first, *others = map(simulated, falls.runs)
    found = fallen(falls, simulated, invalid(first), *others)

    assert sum(name.startswith("there is none: intervals until") for name in found) == 2
    assert found["  the better of both"].value == found["P90 of by price over the best threshold that stays"].value
