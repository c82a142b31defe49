"""A run's metrics: lateness is judged in the mean, where it is worst, and what nobody measured is not in time."""

import math
from typing import Any

import pytest
from aiohttp import web
from tests.serving import serving

from prfaas.errors import PeerError
from prfaas_sandbox.demo.install import MEMBER
from prfaas_sandbox.evaluate import readings
from prfaas_sandbox.evaluate.objects import CaseScale
from prfaas_sandbox.evaluate.readings import RunMetrics, clock_off_seconds

from .evaluated import World, lateness

SCALE = CaseScale(stretch=4.0, cache_scale=128)
BUSY, IDLE = "prfaas_emulation_busy_seconds_total", "prfaas_emulation_idle_seconds_total"


@pytest.fixture(autouse=True)
def scraped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "_SCRAPE_SECONDS", 0.0)
    monkeypatch.setattr(readings, "_READ_SECONDS", 0.0)


A_AND_B = lateness("a", "prefill", 100, 0.0) | lateness("b", "decode", 100, 0.0)


async def truth(
    before: dict[Any, float], after: dict[Any, float], instances: int, restarts: int = 0, is_scaled: bool = False
):
    async with World.serving() as world:
        metrics = RunMetrics(world.url, SCALE)
        world.counters = before
        await metrics.begin()
        world.counters, world.restarts = after, restarts
        found = await metrics.machine(instances, is_scaled)
        await metrics.close()
        return found


def at_rest(after: dict[Any, float]) -> dict[Any, float]:
    """The counters of the same instances before all steps."""
    return dict.fromkeys(after, 0.0)


async def test_lateness_is_that_of_the_worst_instance_since_the_run_began():
    before = lateness("a", "prefill", 10, 9.0, 0) | lateness("b", "decode", 0, 0.0) | {(BUSY, "a", "", ""): 5.0}
    after = (
        lateness("a", "prefill", 410, 13.0, 392)
        | lateness("b", "decode", 1000, 15.0)
        | {(BUSY, "a", "", ""): 65.0, (IDLE, "a", "", ""): 20.0}
    )
    found = await truth(before, after, 2)
    assert found.mean_late == pytest.approx(0.015)
    assert found.late_share == pytest.approx(0.02)
    assert found.p99_late == math.inf, "8 of 400 prefills ended later than by any bound"
    assert found.busy_share == pytest.approx(0.75)
    assert not found.why_invalid, "single late steps do not add up"


async def test_one_slow_instance_among_many_makes_a_run_invalid():
    after = lateness("slow", "prefill", 100, 3.0)
    for n in range(9):
        after |= lateness(f"q{n}", "prefill", 1000, 1.0)
    found = await truth(at_rest(after), after, 10)
    assert found.mean_late == pytest.approx(0.03)
    assert "too slow" in found.why_invalid


async def test_many_late_steps_of_one_instance_among_many_make_a_run_invalid():
    after = lateness("slow", "prefill", 400, 4.0, 376)
    for n in range(9):
        after |= lateness(f"q{n}", "prefill", 1000, 1.0)
    found = await truth(at_rest(after), after, 10)
    assert found.late_share == pytest.approx(0.06)
    assert "too slow" in found.why_invalid


async def test_late_steps_of_an_instance_that_has_few_are_judged_by_their_mean():
    after = lateness("few", "prefill", 100, 1.0, 94)
    found = await truth(at_rest(after), after, 1)
    assert found.late_share is None
    assert not found.why_invalid


async def test_one_late_step_of_an_instance_that_has_three_says_nothing():
    """The negative control is the slow instance above, which has enough of them."""
    after = lateness("rare", "prefill", 3, 0.09) | lateness("often", "prefill", 1000, 1.0)
    found = await truth(at_rest(after), after, 2)
    assert found.mean_late == pytest.approx(1.09 / 1003)


@pytest.mark.parametrize(
    ("before", "after", "restarts"),
    [
        ({}, {}, 0),
        (at_rest(lateness("a", "prefill", 9, 0.0)), lateness("a", "prefill", 100, 0.0), 0),
        (at_rest(A_AND_B), at_rest(A_AND_B), 0),
        (at_rest(A_AND_B), lateness("a", "prefill", 99, 0.0) | lateness("b", "decode", 99, 0.0), 0),
        (at_rest(A_AND_B), lateness("a", "prefill", 100, 0.0) | lateness("c", "decode", 100, 0.0), 0),
        (at_rest(A_AND_B), A_AND_B, 1),
    ],
    ids=["nothing scraped", "an instance not scraped", "no step", "few", "an instance replaced", "restarted"],
)
async def test_what_nobody_measured_is_invalid_and_not_in_time(
    before: dict[Any, float], after: dict[Any, float], restarts: int
):
    found = await truth(before, after, 2, restarts)
    assert found.mean_late is None
    assert found.p99_late is None
    assert found.why_invalid


async def test_instances_that_scaling_added_count_and_none_of_the_beginning_may_be_missing():
    """The negative control is the instance that is replaced above, where nothing is scaled."""
    came = lateness("c", "prefill", 100, 5.0)
    assert (await truth(at_rest(A_AND_B), A_AND_B | came, 2, is_scaled=True)).mean_late == pytest.approx(0.05)
    left = lateness("a", "prefill", 100, 0.0) | came
    assert (await truth(at_rest(A_AND_B), left, 2, is_scaled=True)).mean_late is None


async def test_instances_that_ran_all_the_time_are_measured():
    """The negative control of those above."""
    assert not (await truth(at_rest(A_AND_B), A_AND_B, 2)).why_invalid


@pytest.mark.parametrize(("at_begin", "at_end", "off"), [(-40.0, 0.0, 40.0), (0.0, 40.0, 40.0), (0.0, 0.0, 0.0)])
async def test_a_run_in_which_prometheus_had_another_time_is_invalid(at_begin: float, at_end: float, off: float):
    async with World.serving() as world:
        metrics = RunMetrics(world.url, SCALE)
        world.counters, world.clock_ahead_seconds = at_rest(A_AND_B), at_begin
        await metrics.begin()
        world.counters, world.clock_ahead_seconds = A_AND_B, at_end
        found = await metrics.machine(2)
        await metrics.close()
    assert found.clock_off_seconds == pytest.approx(off, abs=10.0)
    assert ("Prometheus' clock was" in found.why_invalid) == bool(off)


@pytest.mark.parametrize(("theirs", "off"), [(10.5, 0.0), (6.1, 0.0), (14.9, 0.0), (5.9, 4.1), (15.1, 4.1)])
def test_a_clock_may_be_off_by_an_interval_beside_the_time_of_the_answer(theirs: float, off: float):
    assert clock_off_seconds(10.0, theirs, 11.0, 4.0) == pytest.approx(off)


async def test_readings_are_in_the_times_and_rates_of_the_case():
    async with World.serving() as world:
        metrics = RunMetrics(world.url, SCALE)
        await metrics.begin()
        found = await metrics.readings()
        await metrics.close()
    assert [one.at_seconds for one in found] == pytest.approx([0.0, 2.0, 4.0], abs=0.01)
    assert {one.threshold_tokens for one in found} == {10.0}
    assert {one.link_mbps for one in found} == {one.egress_mbps for one in found} == {10.0 * 128 * 4}
    sent = next(asked["query"] for asked in world.ranges if "sent_bytes" in asked["query"])
    assert f'cluster="{MEMBER}"' in sent
    assert 'peer=~"hub|"' in sent, "what members send to each other does not cross this link"
    assert "[20s]" in sent, "a rate over five seconds of the case"
    counted = [asked["query"] for asked in world.ranges if "prfaas_role" in asked["query"]]
    assert len(counted) == 2
    assert all("by (pod)" in one and "[12s]" in one for one in counted), "an answer that comes late is no instance less"


async def test_a_prometheus_that_does_not_answer_is_said():
    async def fail(_: web.Request) -> web.Response:
        return web.Response(status=500)

    async with serving(fail) as url:
        metrics = RunMetrics(url, SCALE)
        with pytest.raises(PeerError, match="Prometheus does not answer"):
            await metrics.begin()
        await metrics.close()
