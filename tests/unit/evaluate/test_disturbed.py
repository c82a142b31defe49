"""Proves how disturbances change a case, when a threshold counts as settled, and which one is the best that stays."""

import math
from random import Random

import msgspec
import pytest

from prfaas.capacity import optimum
from prfaas.capacity.optimum import Plan
from prfaas.cli.evaluation.disturbed import disturbed_answer, disturbed_chapter
from prfaas.cli.evaluation.document import document_files
from prfaas.cli.evaluation.report import page_of
from prfaas.errors import ConfigError
from prfaas.evaluate.case import arrivals_of, rate_per_second, scenario_of
from prfaas.evaluate.disturbed import (
    DisturbanceName,
    best_thresholds,
    borne_tokens,
    disturb,
    p90_of,
    settlings_of,
    summarise_disturbed,
)
from prfaas.evaluate.expected import simulated_run
from prfaas.evaluate.record import Reading, Run, RunKey

from .cases import CASE, invalid

LOAD, MBPS = 0.7, 40_000.0
OURS = RunKey("threshold", LOAD, 1)
FALLS = disturb(CASE, "falls", LOAD, MBPS)
FELL, WHOLE = (at for at, _ in scenario_of(FALLS, OURS).conditions["between-datacentres"].schedule)
RATE = rate_per_second(FALLS, OURS)
BORNE_LOW, BORNE_WHOLE = (borne_tokens(FALLS.file, scenario_of(FALLS, OURS), mbps, RATE) for mbps in (MBPS / 5, MBPS))


@pytest.fixture(scope="module")
def run() -> Run:
    return simulated_run(FALLS, OURS, Random)


def following(run: Run, *seen: tuple[float, float]) -> Run:
    """Return the run with a threshold that was so much at these times, and stayed until the next."""
    times = range(math.floor(max(one.at_seconds for one in run.answers)))
    readings = [
        Reading(at_seconds=float(at), threshold_tokens=next(t for begin, t in reversed(seen) if begin <= at))
        for at in times
    ]
    return msgspec.structs.replace(run, readings=tuple(readings))


def test_the_link_falls_after_a_third_and_is_whole_after_two():
    seconds = FALLS.requests / rate_per_second(FALLS, OURS)
    (shape,) = scenario_of(FALLS, OURS).conditions.values()

    assert [mbps for _, mbps in shape.schedule] == [MBPS / 5, MBPS]
    assert [at / seconds for at, _ in shape.schedule] == pytest.approx([1 / 3, 2 / 3], rel=0.02)


def test_the_link_swings_three_times():
    seconds = CASE.requests / rate_per_second(FALLS, OURS)
    (shape,) = scenario_of(disturb(CASE, "swings", LOAD, MBPS), OURS).conditions.values()
    lows = [at for at, mbps in shape.schedule if mbps == pytest.approx(MBPS / 5) and at < seconds]

    assert len(lows) == 3
    assert max(mbps for _, mbps in shape.schedule) == MBPS


def test_bursts_are_twice_as_dense():
    case = disturb(CASE, "bursts", LOAD, MBPS)
    third = CASE.requests / rate_per_second(case, OURS) / 3
    times = [one.at_seconds for one in arrivals_of(case, OURS, Random)]
    dense = sum(at % round(third) < 0.2 * third for at in times) / 0.2
    others = sum(at % round(third) >= 0.2 * third for at in times) / 0.8

    assert dense / others == pytest.approx(2, rel=0.25)


@pytest.mark.parametrize("name", ["falls", "swings", "bursts"])
def test_each_disturbance_is_a_case_of_its_own(name: DisturbanceName):
    made = disturb(CASE, name, LOAD, MBPS)

    assert made.name == f"paper-{name}"
    assert made.digest != CASE.digest
    assert rate_per_second(made, OURS) == pytest.approx(rate_per_second(CASE, OURS), rel=1e-3)


def plan_over(mbps: float) -> Plan:
    links = tuple(msgspec.structs.replace(link, capacity_mbps=mbps) for link in FALLS.file.system.links)
    system = msgspec.structs.replace(FALLS.file.system, links=links)
    return optimum.plan_for(system, FALLS.file.workload, {"pd": 3.0})


def test_a_link_bears_the_planner_s_threshold_at_the_use_that_the_policy_asks_for():
    middle = plan_over(0.65 * MBPS / 5)
    borne = borne_tokens(FALLS.file, scenario_of(FALLS, OURS), MBPS / 5, 0.99 * middle.lambda_max)

    assert borne == middle.threshold_tokens
    assert plan_over(0.65 * MBPS).threshold_tokens == BORNE_WHOLE


def test_where_the_hub_would_carry_less_than_arrives_a_link_bears_what_uses_all_of_it():
    middle, whole = plan_over(0.65 * MBPS / 5), plan_over(MBPS / 5)

    assert middle.lambda_max < RATE <= whole.lambda_max, "the middle leaves the hub too much, and the whole does not"
    assert BORNE_LOW == whole.threshold_tokens < middle.threshold_tokens
    assert borne_tokens(FALLS.file, scenario_of(FALLS, OURS), MBPS / 5, 1.01 * middle.lambda_max) == BORNE_LOW


def test_a_link_that_carries_nothing_bears_no_threshold():
    with pytest.raises(ConfigError, match="has no threshold"):
        borne_tokens(FALLS.file, scenario_of(FALLS, OURS), 1e-6, RATE)


@pytest.mark.parametrize(
    ("seen", "intervals"),
    [
        (((0, BORNE_WHOLE), (FELL + 7, BORNE_LOW), (WHOLE, BORNE_WHOLE)), (7, 0)),
        (((0, BORNE_WHOLE), (FELL, BORNE_LOW), (WHOLE + 9, BORNE_WHOLE)), (0, 9)),
        (((0, BORNE_WHOLE), (FELL + 2, BORNE_LOW), (FELL + 9, 9), (FELL + 12, BORNE_LOW), (WHOLE, 9)), (12, None)),
        (((0, BORNE_WHOLE),), (None, 0)),
        (((0, BORNE_LOW),), (0, None)),
        (((0, BORNE_WHOLE), (FELL + 2, 1.35 * BORNE_LOW), (FELL + 5, 1.3 * BORNE_LOW), (WHOLE, BORNE_WHOLE)), (5, 0)),
        (
            ((0, 9), (FELL + 2, BORNE_LOW), (FELL + 9, BORNE_WHOLE), (FELL + 12, BORNE_LOW), (WHOLE, BORNE_WHOLE)),
            (2, 0),
        ),
        (((0, BORNE_LOW), (WHOLE, 0.7 * BORNE_WHOLE), (WHOLE + 3, 0.8 * BORNE_WHOLE)), (0, 3)),
        (((0, BORNE_WHOLE), (FELL + 2, BORNE_LOW), (FELL + 5, BORNE_WHOLE)), (None, 0)),
        (
            (
                (0, BORNE_WHOLE),
                (FELL + 1, BORNE_LOW),
                (FELL + 2, BORNE_WHOLE),
                (WHOLE - 8, BORNE_LOW),
                (WHOLE, BORNE_WHOLE),
            ),
            (WHOLE - 8 - FELL, 0),
        ),
    ],
    ids=[
        *("after the fall", "after the return", "not while it leaves again", "it stays low", "it stays high"),
        *("high", "back for a moment, and close", "low", "back for good", "late, after a moment"),
    ],
)
def test_a_threshold_is_settled_when_it_is_close_and_stays_until_the_next_change(run, seen, intervals):
    found = settlings_of(FALLS, following(run, *seen))

    assert 0.75 * BORNE_LOW < BORNE_WHOLE < BORNE_LOW, "one that stays is close, too"
    assert tuple(one.intervals for one in found) == intervals
    end = max(one.at_seconds for one in run.answers)
    assert [one.most_intervals for one in found] == [WHOLE - FELL, math.floor(end - WHOLE)]


def test_what_metrics_did_not_say_is_not_settled(run):
    (first, second) = settlings_of(FALLS, msgspec.structs.replace(run, readings=()))

    assert (first.intervals, second.intervals) == (None, None)


def test_nothing_settles_where_the_link_swings_or_the_threshold_stays(run):
    swings = disturb(CASE, "swings", LOAD, MBPS)

    assert settlings_of(swings, run) == ()
    assert settlings_of(FALLS, msgspec.structs.replace(run, key=RunKey("static", LOAD, 1, 20_000))) == ()


def test_a_threshold_that_stays_is_the_run_s_own():
    key = RunKey("static", LOAD, 1, 24_000)
    threshold = scenario_of(FALLS, key).policy.threshold

    assert (threshold.mode, threshold.tokens) == ("Fixed", 24_000)
    assert scenario_of(FALLS, RunKey("static", LOAD, 1)).policy.threshold.tokens != 24_000
    assert key.name == "static-at-24000-70-1"


def test_the_best_thresholds_are_those_of_the_least_p90():
    p90s: dict[int, float] = {}

    def simulated(key: RunKey) -> Run:
        made = simulated_run(FALLS, key, Random)
        p90s[key.threshold_tokens] = p90_of(made)
        return made

    best = best_thresholds(FALLS, LOAD, 1, simulated, 2)

    assert [p90s[key.threshold_tokens] for key in best] == sorted(p90s.values())[:2]
    assert len(p90s) == 8


def test_a_lost_request_has_no_first_token_ever(run):
    lost = [
        msgspec.structs.replace(one, ttft_seconds=None, lost="refused") for one in run.answers[: CASE.requests // 5]
    ]

    assert p90_of(msgspec.structs.replace(run, answers=(*lost, *run.answers[len(lost) :]))) == math.inf
    assert p90_of(run) < math.inf


def test_the_page_has_the_ratios_and_draws_what_the_link_bears(run):
    static = RunKey("static", LOAD, 1, 24_000)
    runs = [run, simulated_run(FALLS, static, Random)]
    found = summarise_disturbed(FALLS, runs, lambda key: simulated_run(FALLS, key, Random), [OURS, static])
    chapter = disturbed_chapter(FALLS, runs, found, "prfaas bench evaluation --part falls")
    page, (document, *pictures) = page_of(chapter), document_files([chapter]).items()

    assert f"PrfaaS-PD {p90_of(runs[0]) / p90_of(runs[1]):.2f}" in page
    assert page.count("what the link bears</text>") == 1, "of the threshold that moves"
    assert f"<td>{BORNE_WHOLE:,}</td><td>{BORNE_LOW:,}</td>" in page
    assert "uses all of the link" in page
    assert f"| {BORNE_WHOLE:,} | {BORNE_LOW:,} |" in document[1]
    assert len(pictures) == page.count("<svg") == 4, "two of each run"


def test_an_invalid_run_has_no_figure_and_no_chart(run):
    static = RunKey("static", LOAD, 1, 24_000)
    runs = [run, invalid(simulated_run(FALLS, static, Random))]
    found = summarise_disturbed(FALLS, runs, lambda key: simulated_run(FALLS, key, Random), [OURS, static])

    assert "no answer" in disturbed_answer(found)
    assert found.runs[0].p90_seconds is None
    assert found.over_best("threshold") is None
    assert page_of(disturbed_chapter(FALLS, runs, found, "")).count("over time") == 1


def test_where_nothing_settles_nobody_says_what_a_link_bears(run):
    bursts = disturb(CASE, "bursts", LOAD, MBPS)
    found = summarise_disturbed(bursts, [run], lambda _: run, [OURS])

    assert "bears" not in page_of(disturbed_chapter(bursts, [run], found, ""))
