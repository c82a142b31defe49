"""The very queries of the scheduler, and the default utilisationQuery, on a real Prometheus that scrapes counters.

What they answer must be what the counters do, and staleness must tell a dead link from blind metrics.
"""

import asyncio
import time

import pytest
from tests.waiting import eventually_async

from prfaas.api.membercluster import DEFAULT_UTILISATION_QUERY
from prfaas.errors import ConfigError
from prfaas_scheduler import observe
from prfaas_scheduler.measure import Measurements, measure
from prfaas_scheduler.prometheus import Prometheus

from .conftest import SCRAPE_MILLIS

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

WINDOW_SECONDS = 3


@pytest.fixture
def ask(site, http, table):
    prometheus = Prometheus(http, site.prometheus_url, 5.0)
    return lambda: measure(prometheus, table(), WINDOW_SECONDS)


async def until(ask, holds, what: str) -> Measurements:
    measured = None

    async def measure_once() -> Measurements | None:
        nonlocal measured
        measured = await ask()
        return measured if holds(measured) else None

    return await eventually_async(measure_once, lambda: f"{what}: {measured}", poll=0.2)


def about(measured: Measurements, **expected: float) -> bool:
    link = measured.samples.get("eu")
    return link is not None and all(
        getattr(link, name) == pytest.approx(value, rel=0.1, abs=0.01) for name, value in expected.items()
    )


async def test_every_figure_is_what_the_counters_do_and_staleness_tells_dead_from_blind(site, ask, table):
    assert table().clusters[0].utilisation_query == DEFAULT_UTILISATION_QUERY
    one, other, hub, stranger = site.workers.values()

    one.move(mbps=20, backlogged_share=0.5)
    other.move(mbps=20, backlogged_share=0.5)
    hub.move(mbps=900, backlogged_share=1.0)  # the hub's own traffic is no part of the link's
    one.unsent_bytes, other.unsent_bytes, hub.unsent_bytes = 100, 23, 7
    one.waiting, other.waiting, hub.waiting = 2, 1, 9
    stranger.waiting, stranger.unsent_bytes = 50, 1000  # its queue is another policy's, its bytes share our link
    # Two instances, each busy half of the time, keep the link busy three quarters of it if they are independent.
    measured = await until(
        ask,
        lambda m: about(m, traffic_mbps=40, backlogged_fraction=0.75, delivery_mbps=40 / 0.75),
        "40 Mbit/s, waiting for three quarters of the time",
    )
    sample = measured.samples["eu"]
    assert (sample.unsent_bytes, sample.waiting_prefills) == (1123, 3)
    assert 0 <= sample.age_seconds < 2
    assert measured.hub_measured
    assert measured.errors == ()
    assert set(measured.samples) == {"eu"}

    one.move(mbps=2.5, backlogged_share=1.0)
    other.move(mbps=2.5, backlogged_share=1.0)
    await until(
        ask,
        lambda m: about(m, traffic_mbps=5, backlogged_fraction=1, delivery_mbps=5),
        "5 Mbit/s with data waiting all the time",
    )

    one.move(mbps=0, backlogged_share=0)
    other.move(mbps=0, backlogged_share=0)
    idle = await until(ask, lambda m: about(m, traffic_mbps=0, backlogged_fraction=0), "idle")
    assert idle.samples["eu"].delivery_mbps is None

    one.answers = stranger.answers = False
    await asyncio.sleep(5 * SCRAPE_MILLIS / 1000)
    await until(ask, lambda m: "eu" in m.samples, "one instance still answers")
    other.answers = False
    dead = await until(ask, lambda m: "eu" not in m.samples, "without a sample of eu")
    assert dead.hub_measured
    hub.answers = False
    blind = await until(ask, lambda m: not m.hub_measured, "without a sample of the hub")
    assert blind.errors == ()

    one.answers = other.answers = hub.answers = stranger.answers = True
    await until(ask, lambda m: m.hub_measured and about(m, traffic_mbps=0), "measured again")


async def test_reports_a_cache_that_was_refused_lately_with_its_reason(site, ask):
    one, other, hub, stranger = site.workers.values()
    now = time.time()
    hub.mismatch, hub.mismatched_at = "groups[1] is 16, this instance needs 64", now
    one.mismatch, one.mismatched_at = "mended since", now - 700
    stranger.mismatch, stranger.mismatched_at = "groups[1] is 16, this instance needs 64", now - 5
    measured = await until(ask, lambda m: m.mismatches, "a mismatch")
    assert measured.mismatches == (("hub", "groups[1] is 16, this instance needs 64"),)
    assert set(measured.samples) == {"eu"}
    for worker in (one, other, hub, stranger):
        worker.mismatch = ""
    await until(ask, lambda m: not m.mismatches, "silent again")


async def test_the_samples_time_moves_with_every_scrape_and_not_with_every_question(ask):
    async def sampled_at() -> float:
        return (await ask()).samples["eu"].sampled_at_seconds

    async def is_the_same_twice() -> bool:
        return await sampled_at() == await sampled_at()

    await eventually_async(is_the_same_twice, "two questions between two scrapes get the same time")
    first = await sampled_at()
    await until(ask, lambda m: m.samples["eu"].sampled_at_seconds > first, "newer")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("sum(rate(", "parse error"),
        ("prfaas_prefills_waiting", "4 values"),
        ("prfaas_prefills_waiting[5s]", "a matrix where one value is needed"),
        ("sum(prfaas_prefills_waiting) + on() group_left() prfaas_prefills_waiting", "many-to-many"),
    ],
)
async def test_a_query_that_answers_no_single_value_is_the_users_and_says_why(site, http, query, message):
    with pytest.raises(ConfigError, match=message) as error:
        await Prometheus(http, site.prometheus_url, 5.0).value(query)
    assert query in str(error.value)


async def test_scalars_absence_and_invalid_numbers_are_answers(site, http):
    prometheus = Prometheus(http, site.prometheus_url + "/", 5.0)
    assert await prometheus.value("42") == 42
    assert await prometheus.value("sum(no_such_metric)") is None
    assert str(await prometheus.value("0/0")) == "nan"
    assert await prometheus.value("vector(1/0)") == float("inf")


async def test_names_with_characters_that_mean_something_in_promql_are_only_names(site, http, table):
    prometheus = Prometheus(http, site.prometheus_url, 5.0)
    cluster = table().clusters[0]
    awkward = [type(cluster)(name='a"b\\c.*', capacity_mbps=1, utilisation_query="vector(1)")]
    measured = await measure(prometheus, table(clusters=tuple(awkward)), WINDOW_SECONDS)
    assert measured.errors == ()
    assert measured.samples.keys() == {'a"b\\c.*'}
    sample = measured.samples['a"b\\c.*']
    assert (sample.traffic_mbps, sample.instances_age_seconds) == (1.0, None), "its query answers, no instance is there"


async def test_the_long_loops_query_answers_with_what_decoding_takes_and_what_waits(site, http, table):
    prometheus = Prometheus(http, site.prometheus_url, 5.0)
    for waiting, worker in enumerate(site.workers.values()):  # 0 + 1 of offload, 2 of decode, 3 of another policy
        worker.waiting = waiting
    figures = None

    async def summary() -> dict | None:
        nonlocal figures
        figures = await prometheus.vector(observe.query_of(table()))
        found = observe.summarise(observe.SummaryInputs((), 0.0, (), {}), figures, "2026-02-03T04:05:06Z")
        waiting = {pool["name"]: pool["waitingPrefills"] for pool in found["pools"]}
        return found if "outputMilliTokens" in found and waiting == {"decode": 2, "offload": 1} else None

    found = await eventually_async(summary, lambda: f"all is measured: {figures}", poll=0.2)
    assert found["outputMilliTokens"] == pytest.approx(75_000, rel=0.02)
    assert found["decodeStepMicros"] == pytest.approx(30_000, rel=0.02)
    assert found["decodeBatch"] == 8
