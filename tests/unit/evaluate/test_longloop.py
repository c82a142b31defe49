"""Proves what is said of a long loop: conversions, instances within bounds, and whether the threshold comes down."""

import msgspec
import pytest
from benchmarks.evaluation import longloop as bench
from benchmarks.report import Figure

from prfaas.cli.evaluation.longloop import long_loop_answer, long_loop_chapter
from prfaas.cli.evaluation.report import page_of
from prfaas.errors import ConfigError
from prfaas.evaluate.case import Case, longest_tokens, shift_of
from prfaas.evaluate.longloop import LongLoopSeen, long_loop_of
from prfaas.evaluate.record import AnsweredRequest, Reading, Run, RunKey

from .cases import CASE, invalid, live

LONG_LOOP = bench.FORM.case()
SHIFTED = shift_of(LONG_LOOP, bench.RUN).at_seconds
END = 600.0


def seen(*readings: tuple[float, float, float, float]) -> LongLoopSeen:
    """Return what a run shows whose threshold, prefills and offload instances were so from each of these times on."""
    return long_loop_of(LONG_LOOP, run_of(*readings))


def run_of(*readings: tuple[float, float, float, float]) -> Run:
    run = live(RunKey("threshold", 0.5, 1))
    values = [(at, next(one for one in reversed(readings) if one[0] <= at)) for at in range(round(END))]
    return msgspec.structs.replace(
        run,
        key=bench.RUN,
        answers=(*run.answers[:50], AnsweredRequest(at_seconds=END, prompt_tokens=1, lost="refused")),
        readings=tuple(
            Reading(at_seconds=float(at), threshold_tokens=tokens, hub_prefills=prefills, offload_instances=away)
            for at, (_, tokens, prefills, away) in values
        ),
    )


WELL = ((0, 20_000, 3, 2), (SHIFTED + 50, 40_000, 4, 2), (300, 50_000, 5, 2), (400, 30_000, 5, 4))


def test_conversions_and_instances_are_counted_and_the_threshold_is_the_median_of_some_time():
    found = seen(*WELL)

    assert (found.conversions, found.started, found.beyond_bounds) == (2, 2, 0)
    assert (found.height_tokens, found.end_tokens) == (50_000, 30_000)
    assert found.end_over_height == pytest.approx(0.6)
    assert found.lost == 1


def test_what_was_before_the_change_is_no_height_and_no_conversion():
    found = seen((0, 90_000, 2, 2), (SHIFTED - 50, 20_000, 3, 2), (SHIFTED + 50, 30_000, 3, 2))

    assert (found.conversions, found.height_tokens, found.end_over_height) == (0, 30_000, 1.0)


def test_a_moment_s_threshold_is_no_height():
    found = seen((0, 20_000, 3, 2), (300, 131_072, 3, 2), (305, 20_000, 3, 2))

    assert found.height_tokens == 20_000


def test_more_or_fewer_instances_than_the_bounds_allow_are_counted():
    assert seen((0, 20_000, 3, 2), (300, 20_000, 3, 5), (310, 20_000, 3, 4)).beyond_bounds == 10
    assert seen((0, 20_000, 3, 2), (300, 20_000, 3, 0), (303, 20_000, 3, 2)).beyond_bounds == 3


def test_what_metrics_did_not_say_is_not_known():
    found = long_loop_of(LONG_LOOP, msgspec.structs.replace(run_of(*WELL), readings=()))

    assert (found.height_tokens, found.end_over_height, found.started) == (None, None, 0)


def test_a_case_whose_requests_stay_has_no_answer():
    with pytest.raises(ConfigError, match=r"paper has no simulation\.shift and longLoop for threshold"):
        long_loop_of(CASE, live(RunKey("threshold", 0.5, 1)))


def test_requests_may_become_longer_than_before_or_shorter():
    before = longest_tokens(CASE, bench.RUN)
    assert longest_tokens(shifting_to(2 * before), bench.RUN) > 1.9 * before
    assert longest_tokens(shifting_to(before // 2), bench.RUN) == before


def shifting_to(most_tokens: int) -> Case:
    lengths = {"mu": 9.9, "sigma": 1.0, "minTokens": 128, "maxTokens": most_tokens}
    simulation = {"shift": {"atSeconds": 9, "lognormal": lengths, "outputTokens": 1}}
    return msgspec.structs.replace(CASE, file=msgspec.structs.replace(CASE.file, simulation=simulation))


def figures(run: Run | None) -> dict[str, Figure]:
    expected = seen(*WELL)
    found = long_loop_of(LONG_LOOP, run) if run is not None else None
    return {one.name: one for one in bench.figures_of(run, found, expected)}


def missed(found: dict[str, Figure]) -> list[str]:
    return [
        name
        for name, one in found.items()
        if one.reach is not None and (one.value < one.reach if one.better == "higher" else one.value > one.reach)
    ]


def test_figures_reach_what_a_long_loop_is_for_and_miss_it_without():
    assert missed(figures(run_of(*WELL))) == ["requests lost"], "of which there is one"
    still = figures(run_of((0, 20_000, 3, 2), (300, 50_000, 3, 2)))
    assert missed(still) == ["requests lost", *bench.FIGURES[:2], bench.FALLS]


@pytest.mark.parametrize("run", [None, invalid(run_of(*WELL))], ids=["missing", "invalid"])
def test_a_run_that_is_invalid_or_missing_gives_no_figure(run: Run | None):
    found = figures(run)

    assert all(name.startswith("there is none: ") for name in found)
    assert missed(found) == list(found)


def test_the_page_draws_instances_over_time_only_for_a_run_that_counts():
    run, found = run_of(*WELL), seen(*WELL)

    def page_with(one: Run) -> str:
        return page_of(long_loop_chapter(LONG_LOOP, one, found, found, "prfaas bench evaluation"))

    assert "Instances</h3>" in page_with(run)
    assert "1 to 4 of prfaas" in page_with(run)
    page = page_with(invalid(run))
    assert "<svg" not in page
    assert "gives no figure" in page


@pytest.mark.parametrize(("conversions", "times"), [(0, "never"), (1, "once"), (2, "2 times")])
def test_the_answer_says_how_often_roles_changed(conversions: int, times: str):
    found = msgspec.structs.replace(seen(*WELL), conversions=conversions)

    assert f"prefill instances changed {times}, and the member cluster got 2 more" in long_loop_answer(found)


def test_simulated_the_long_loop_converts_and_scales_and_the_threshold_comes_down():
    found = long_loop_of(LONG_LOOP, bench.simulator_of(LONG_LOOP)(bench.RUN))

    assert found.conversions >= 1
    assert found.started == 2
    assert (found.beyond_bounds, found.lost) == (0, 0)
    assert found.end_over_height < bench.REACH_END
