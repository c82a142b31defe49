"""Proves what a summary says of runs that the simulator made: their figures, the limits, and what does not count."""

import math

import msgspec
import pytest

from prfaas.errors import ConfigError
from prfaas.evaluate.case import compared_load
from prfaas.evaluate.limit import Bounds, ratio_of
from prfaas.evaluate.record import AnsweredRequest, RunKey
from prfaas.evaluate.rows import figures_of
from prfaas.evaluate.steady import find_steady
from prfaas.evaluate.summary import summarise
from prfaas.simulate import setup as setups

from .cases import CASE, LIMIT_SECONDS, invalid, keys, live, simulated

LOADS = (0.5, 0.7, 0.9)


def summary_of(*runs, limit_seconds: float | None = LIMIT_SECONDS, asked=()):
    return summarise(CASE.file, runs, simulated, limit_seconds, asked)


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
    assert low.planned.link_percent == pytest.approx(low.measured.link_percent.value, rel=0.25)
    assert low.measured.link_percent.value == pytest.approx(low.measured.egress_gbps.value)
    assert low.planned.egress_gbps == pytest.approx(low.measured.egress_gbps.value, rel=0.25)
    assert low.planned.offloaded_share == pytest.approx(low.measured.offloaded_share.value, abs=0.1)
    assert high.planned is None


def test_what_a_metric_did_not_say_is_no_figure():
    run = msgspec.structs.replace(live(RunKey("threshold", 0.5, 1)), readings=())
    figures = figures_of(run, find_steady(run, LIMIT_SECONDS), 1000.0)

    assert figures.egress_gbps is None
    assert figures.link_percent is None


def test_parts_add_up_to_the_mean():
    (row,) = summary_of(live(RunKey("threshold", 0.5, 1))).rows

    assert math.fsum(row.result.parts.values()) == pytest.approx(row.measured.ttft_mean_seconds.value)


def test_seeds_of_a_load_are_one_row():
    runs = [live(key) for key in keys("static", 0.7, seeds=3)]
    (row,) = summary_of(*runs).rows
    means = [figures_of(run, find_steady(run, LIMIT_SECONDS), 1000.0).ttft_mean_seconds.value for run in runs]

    assert row.seeds == (1, 2, 3)
    assert row.measured.ttft_mean_seconds.value == pytest.approx(sum(means) / 3)


def test_an_invalid_run_gives_no_figure_and_says_why():
    made = summary_of(invalid(live(RunKey("threshold", 0.5, 1))), live(RunKey("threshold", 0.7, 1)))

    assert [(one.name, "late" in one.why) for one in made.excluded] == [("threshold-50-1", True)]
    assert made.rows[0].measured is None
    assert made.rows[0].simulated is not None
    assert (made.rows[0].seeds, made.rows[0].counted_seeds) == ((1,), ())


def test_an_overloaded_run_gives_no_figure_and_breaks_the_limit():
    run = live(RunKey("homogeneous", 1.6, 1))
    made = summary_of(run)

    assert made.excluded == (), "it says that its load breaks the limit"
    assert made.rows[0].measured is None
    assert "more requests arrive than end" in made.answers["homogeneous"].limit.why_broken
    waited = math.fsum(one.ttft_seconds for one in run.answers) / len(run.answers)
    assert math.fsum(made.rows[0].result.parts.values()) == pytest.approx(waited), "of all its requests"


def test_the_run_that_is_drawn_is_one_that_is_carried_if_there_is_one():
    carried, overloaded = live(RunKey("threshold", 0.5, 1)), live(RunKey("threshold", 1.5, 1))

    assert summary_of(carried, overloaded).shown == carried
    assert summary_of(overloaded).shown == overloaded
    assert summary_of(invalid(carried)).shown is None


def test_lost_requests_and_fallbacks_are_counted():
    run = live(RunKey("threshold", 0.5, 1))
    first, second, *rest = run.answers
    lost = AnsweredRequest(at_seconds=first.at_seconds, prompt_tokens=1, lost="failure", error="503")
    fallen = msgspec.structs.replace(second, fallback=True)
    (row,) = summary_of(msgspec.structs.replace(run, answers=(lost, fallen, *rest))).rows

    assert (row.lost, row.fallbacks) == (1, 1)
    assert row.measured is not None


def test_what_was_asked_for_and_is_not_there_is_missing():
    there, not_there = keys("threshold", 0.5, 0.7)

    assert summary_of(live(there), asked=[there, not_there]).missing == (not_there,)


def test_without_the_other_system_nothing_is_compared():
    made = summary_of(live(RunKey("threshold", 0.5, 1)))

    assert made.ratios == {}
    assert made.beside is None
    assert made.shown.key == RunKey("threshold", 0.5, 1)


def test_no_runs_are_no_rows():
    made = summary_of()

    assert (made.rows, made.answers, made.shown) == ((), {}, None)


def test_a_limit_has_to_be_there():
    with pytest.raises(ConfigError, match=r"slo\.ttftMillis"):
        summary_of(limit_seconds=None)


def test_what_holds_and_what_breaks_bound_the_limit_and_the_ratio():
    made = whole()
    ours, alone = made.answers["threshold"].limit.bounds, made.answers["homogeneous"].limit.bounds

    assert made.ratios["homogeneous"].limit == ratio_of(ours, alone)
    assert alone.high is not None, "homogeneous breaks the limit"
    assert made.answers["threshold"].limit_planned > made.answers["homogeneous"].limit_planned


def refusing(run):
    refused = [msgspec.structs.replace(one, ttft_seconds=None, lost="refused") for one in run.answers[:20]]
    return msgspec.structs.replace(run, answers=(*run.answers[20:], *refused))


@pytest.mark.parametrize(("overloaded", "outcome"), [(0, "held"), (1, "open"), (2, "broken"), (3, "broken")])
def test_a_load_of_which_most_runs_are_overloaded_breaks_the_limit(overloaded, outcome):
    runs = [live(key) for key in keys("threshold", 0.5, seeds=3)]
    (row,) = summary_of(*map(refusing, runs[:overloaded]), *runs[overloaded:], limit_seconds=60.0).rows

    assert row.result.verdict.outcome == outcome
    assert (row.measured is None) == (overloaded > 0), "the others are no figure of the load"
    assert (f"in {overloaded} of 3 runs 20 of 400 requests were refused" in row.result.verdict.why) == (overloaded > 0)


def growing(run):
    """The same run, but each answer takes the longer, the later it is."""
    slower = [msgspec.structs.replace(one, seconds=one.seconds + one.at_seconds / 2) for one in run.answers]
    return msgspec.structs.replace(run, answers=tuple(slower))


@pytest.mark.parametrize(("grows", "outcome"), [(0, "held"), (1, "open"), (2, "broken"), (3, "broken")])
def test_a_run_that_grows_by_chance_counts_among_others_that_do_not(grows, outcome):
    runs = [live(key) for key in keys("threshold", 0.5, seeds=3)]
    (row,) = summary_of(*map(growing, runs[:grows]), *runs[grows:], limit_seconds=60.0).rows
    (plain,) = summary_of(*runs, limit_seconds=60.0).rows

    assert row.result.verdict.outcome == outcome
    assert ("more requests arrive than end" in row.result.verdict.why) == (grows > 0)
    if grows < 2:
        assert row.measured.ttft_p90_seconds == plain.measured.ttft_p90_seconds, "of all three seeds"
        assert row.result.parts == plain.result.parts
    else:
        assert row.measured is None


def test_a_load_with_a_run_that_grows_breaks_a_limit_that_all_runs_exceed():
    first, *others = (live(key) for key in keys("threshold", 0.5, seeds=3))
    (row,) = summary_of(growing(first), *others, limit_seconds=0.01).rows

    assert row.result.verdict.outcome == "broken"


def test_one_of_two_runs_that_grows_is_as_many_as_does_not():
    first, second = (live(key) for key in keys("threshold", 0.5, seeds=2))
    (row,) = summary_of(growing(first), second, limit_seconds=60.0).rows

    assert (row.result.verdict.outcome, row.measured) == ("open", None)


def unsteady(run):
    """The same run, but first tokens take the longer, the later they are: no cut leaves a steady part."""
    last = max(one.at_seconds for one in run.answers)
    rising = [msgspec.structs.replace(one, ttft_seconds=one.seconds * one.at_seconds / last) for one in run.answers]
    return msgspec.structs.replace(run, answers=tuple(rising))


def test_a_run_that_grows_and_has_nothing_to_count_leaves_its_load_without_figures():
    first, *others = (live(key) for key in keys("threshold", 0.5, seeds=3))
    (row,) = summary_of(growing(unsteady(first)), *others, limit_seconds=60.0).rows

    assert (row.result.verdict.outcome, row.measured) == ("open", None)


def test_a_run_that_grows_counts_for_half_where_another_has_no_steady_part():
    """Of three runs two say something of the load, and one of these grows."""
    first, second, third = (live(key) for key in keys("threshold", 0.5, seeds=3))
    (row,) = summary_of(growing(first), unsteady(second), third, limit_seconds=60.0).rows
    (plain,) = summary_of(unsteady(second), first, third, limit_seconds=60.0).rows

    assert row.measured is None
    assert plain.measured is not None, "the negative control: an unsteady run alone is left out"


def test_an_invalid_run_has_no_voice_whether_a_load_breaks_the_limit():
    first, *others = (live(key) for key in keys("threshold", 0.5, seeds=3))
    (row,) = summary_of(invalid(refusing(first)), *others, limit_seconds=60.0).rows

    assert (row.result.verdict.outcome, row.counted_seeds) == ("held", (2, 3))


def test_a_run_whose_requests_fail_breaks_no_limit_and_says_nothing():
    """The negative control are those above, whose requests were refused."""
    run = live(RunKey("threshold", 0.5, 1))
    failed = [
        msgspec.structs.replace(one, ttft_seconds=None, lost="failure", error="502: gone") for one in run.answers[:20]
    ]
    made = summary_of(msgspec.structs.replace(run, answers=(*failed, *run.answers[20:])))

    assert made.rows[0].result.verdict.outcome == "open"
    assert [one.why for one in made.excluded] == ["20 of 400 requests failed: 502: gone"]


def test_a_machine_that_is_too_slow_breaks_no_limit():
    """The negative control: the same run, on a machine that kept the time, does."""
    run = live(RunKey("homogeneous", 1.6, 1))

    assert summary_of(run).answers["homogeneous"].limit.bounds.high == pytest.approx(run.rate_per_second)
    assert summary_of(invalid(run)).answers["homogeneous"].limit.bounds == Bounds(None, None)
    assert [one.name for one in summary_of(invalid(run)).excluded] == ["homogeneous-160-1"]


def test_saturated_systems_are_compared_with_the_plan_and_the_simulator():
    made = summary_of(*(live(RunKey(policy, 1.5, 1)) for policy in ("threshold", "homogeneous", "naive")))
    ratio, ours = made.ratios["homogeneous"], made.answers["threshold"]

    assert ratio.saturated.low < ratio.saturated.value < ratio.saturated.high
    assert ratio.saturated_simulated == ratio.saturated
    assert ratio.saturated.value == pytest.approx(ratio.saturated_planned, rel=0.06)
    assert (ours.saturated_load, ours.saturated_planned) == (1.5, setups.capacity(CASE.file, "threshold"))


def test_a_load_below_the_limit_says_nothing_of_the_most():
    assert summary_of(live(RunKey("threshold", 0.5, 1))).answers["threshold"].saturated is None


def test_a_summary_without_the_simulator_has_the_same_verdicts():
    run = live(RunKey("threshold", 0.5, 1))
    made = summarise(CASE.file, [run], None, LIMIT_SECONDS)

    assert made.rows[0].simulated is None
    assert made.rows[0].result == summary_of(run).rows[0].result


def test_first_tokens_of_both_systems_are_compared_at_the_same_rate():
    ours, theirs = RunKey("threshold", compared_load(CASE.file), 1), RunKey("homogeneous", 0.9, 1)
    beside = summary_of(live(ours), live(theirs)).beside

    assert beside.rate_per_second == pytest.approx(0.9 * setups.capacity(CASE.file, "homogeneous"))
    assert beside.of_plan == pytest.approx(0.9)
    assert beside.ratio.value == pytest.approx(beside.ours.value / beside.homogeneous.value)
    assert beside.ratio.low < beside.ratio.value < beside.ratio.high < 1
    assert beside.simulated == beside.ratio.value
    assert beside.planned == pytest.approx(beside.simulated, rel=0.5)
    assert summary_of(live(RunKey("threshold", 0.5, 1)), live(theirs)).beside is None, "another rate"
