"""Proves what a summary says of runs that the simulator made: their figures, the limits, and what does not count."""

import math

import msgspec
import pytest

from prfaas.errors import ConfigError
from prfaas.evaluate.record import AnsweredRequest, RunKey
from prfaas.evaluate.steady import Sampled, find_steady
from prfaas.evaluate.summary import HighestRate, RateRatio, figures_of, find_highest, summarise, value_at

from .cases import CASE, LIMIT_SECONDS, invalid, keys, live, simulated

LOADS = (0.5, 0.7, 0.9)


def summary_of(*runs, limit_seconds: float | None = LIMIT_SECONDS, asked=()):
    return summarise(CASE.file, runs, simulated, limit_seconds, asked)


def exact(*points: tuple[float, float]) -> list[tuple[float, Sampled]]:
    return [(rate, Sampled(p90, p90, p90)) for rate, p90 in points]


def whole():
    return summary_of(*(live(key) for policy in ("threshold", "naive", "homogeneous") for key in keys(policy, *LOADS)))


def test_a_run_like_the_simulator_s_has_its_figures():
    made = summary_of(live(RunKey("threshold", 0.7, 1)))

    (row,) = made.rows
    assert row.measured.ttft_p90_seconds == row.simulated.ttft_p90_seconds
    assert row.rate_per_second == pytest.approx(0.7 * 3.2, rel=0.05)
    assert row.seeds == (1,)
    assert (row.requests, row.lost, row.fallbacks) == (400, 0, 0)


def test_a_live_run_that_is_slower_differs_from_the_simulator_by_as_much():
    (row,) = summary_of(live(RunKey("threshold", 0.5, 1), seconds_more=0.25)).rows

    assert row.measured.ttft_mean_seconds.value == pytest.approx(row.simulated.ttft_mean_seconds.value + 0.25)


def test_the_plan_stands_beside_a_load_that_it_carries():
    low, high = summary_of(*(live(key) for key in keys("static", 0.5, 1.0))).rows

    assert low.planned.ttft_p90_seconds == pytest.approx(low.measured.ttft_p90_seconds.value, rel=0.2)
    assert low.planned.utilisation_percent == pytest.approx(low.measured.utilisation_percent.value, rel=0.25)
    assert low.planned.egress_gbps == pytest.approx(low.measured.egress_gbps.value, rel=0.25)
    assert low.planned.offloaded_share == pytest.approx(low.measured.offloaded_share.value, abs=0.1)
    assert high.planned is None


def test_what_a_metric_did_not_say_is_no_figure():
    run = msgspec.structs.replace(live(RunKey("threshold", 0.5, 1)), readings=())
    figures = figures_of(run, find_steady(run))

    assert figures.egress_gbps is None
    assert figures.utilisation_percent is None


def test_parts_add_up_to_the_mean():
    (row,) = summary_of(live(RunKey("threshold", 0.5, 1))).rows

    assert math.fsum(row.measured.parts.values()) == pytest.approx(row.measured.ttft_mean_seconds.value)


def test_seeds_of_a_load_are_one_row():
    runs = [live(key) for key in keys("static", 0.7, seeds=3)]
    (row,) = summary_of(*runs).rows
    means = [figures_of(run, find_steady(run)).ttft_mean_seconds.value for run in runs]

    assert row.seeds == (1, 2, 3)
    assert row.measured.ttft_mean_seconds.value == pytest.approx(sum(means) / 3)


def test_an_invalid_run_gives_no_figure_and_says_why():
    made = summary_of(invalid(live(RunKey("threshold", 0.5, 1))), live(RunKey("threshold", 0.7, 1)))

    assert [(one.name, "late" in one.why) for one in made.excluded] == [("threshold-50-1", True)]
    assert made.rows[0].measured is None
    assert made.rows[0].simulated is not None
    assert made.answers["threshold"].measured.rate_per_second == made.rows[1].rate_per_second


def test_an_overloaded_run_gives_no_figure_and_says_why():
    run = live(RunKey("homogeneous", 1.6, 1))
    made = summary_of(run)

    assert [one.name for one in made.excluded] == ["homogeneous-160-1"]
    assert made.rows[0].measured is None
    assert made.answers["homogeneous"].measured is None


def test_lost_requests_and_fallbacks_are_counted():
    run = live(RunKey("threshold", 0.5, 1))
    first, second, *rest = run.answers
    lost = AnsweredRequest(at_seconds=first.at_seconds, prompt_tokens=1, error="503")
    fallen = msgspec.structs.replace(second, fallback=True)
    (row,) = summary_of(msgspec.structs.replace(run, answers=(lost, fallen, *rest))).rows

    assert (row.lost, row.fallbacks) == (1, 1)
    assert row.measured is not None


def test_what_was_asked_for_and_is_not_there_is_missing():
    there, not_there = keys("threshold", 0.5, 0.7)

    assert summary_of(live(there), asked=[there, not_there]).missing == (not_there,)


def test_systems_are_compared():
    made = whole()
    ours, alone = made.answers["threshold"], made.answers["homogeneous"]

    assert made.ratios["homogeneous"].value == pytest.approx(
        ours.measured.rate_per_second / alone.measured.rate_per_second
    )
    assert made.beside.rate_per_second == pytest.approx(0.9 * alone.measured.rate_per_second)
    assert made.beside.ours_seconds < made.beside.homogeneous_seconds
    assert made.beside.ours_bound == "at most", "PrfaaS-PD was measured at higher rates only"
    assert ours.planned > alone.planned
    assert made.shown.key == RunKey("threshold", 0.9, 1)


def test_without_the_other_system_nothing_is_compared():
    made = summary_of(live(RunKey("threshold", 0.5, 1)))

    assert made.ratios == {}
    assert made.beside is None


def test_no_runs_are_no_rows():
    made = summary_of()

    assert (made.rows, made.answers, made.shown) == ((), {}, None)


def test_a_limit_has_to_be_there():
    with pytest.raises(ConfigError, match=r"slo\.ttftMillis"):
        summary_of(limit_seconds=None)


def test_the_highest_rate_lies_on_the_line_between_two_loads():
    found = find_highest([(1.0, Sampled(2.0, 1.0, 3.0)), (2.0, Sampled(6.0, 4.0, 8.0))], 4.0)

    assert found == HighestRate(rate_per_second=1.5, low=pytest.approx(1.2), high=None)


@pytest.mark.parametrize(
    ("points", "rate", "bound"),
    [
        ([(1.0, 2.0), (2.0, 3.0)], 2.0, "at least"),
        ([(1.0, 5.0), (2.0, 6.0)], 1.0, "at most"),
        ([(1.0, 2.0), (2.0, 6.0), (3.0, 3.0)], 1.5, ""),
    ],
)
def test_a_limit_that_no_load_reaches_is_a_bound(points, rate, bound):
    found = find_highest(exact(*points), 4.0)

    assert (found.rate_per_second, found.bound) == (rate, bound)


def test_without_any_load_there_is_no_highest_rate():
    assert find_highest([], 4.0) is None


@pytest.mark.parametrize(
    ("ours", "alone", "ratio"),
    [(LOADS, LOADS, ""), ((0.5,), LOADS, "at least"), (LOADS, (0.5,), "at most"), ((0.5,), (0.5,), None)],
)
def test_a_ratio_of_bounds_is_a_bound_or_nothing(ours, alone, ratio):
    """Both break the limit at their highest load, if it was measured."""
    late = {max(LOADS): LIMIT_SECONDS}
    runs = [live(key, late.get(key.load, 0.0)) for key in (*keys("threshold", *ours), *keys("homogeneous", *alone))]
    found = summary_of(*runs, limit_seconds=LIMIT_SECONDS).ratios.get("homogeneous")

    assert (found.bound if isinstance(found, RateRatio) else None) == ratio


def test_a_value_outside_of_what_was_measured_is_none():
    points = [(1.0, 2.0), (2.0, 4.0)]

    assert value_at(points, 1.25) == 2.5
    assert value_at(points, 0.9) is None
    assert value_at(points, 2.1) is None
