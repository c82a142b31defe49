"""The loop survives what surrounds it: no gateway yet, a Prometheus that is down or answers garbage, a new policy."""

import contextlib
import json

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tests.clocks import Clock
from tests.serving import serving

from prfaas.wire.control import Counters
from prfaas.wire.routes import Threshold
from prfaas_scheduler.gateway import GatewayClient
from prfaas_scheduler.loop import RETRY_SECONDS, Loop
from prfaas_scheduler.metrics import SchedulerMetrics
from prfaas_scheduler.observe import CounterHistory


@contextlib.asynccontextmanager
async def prometheus_answering(answer):
    """A server at a loopback port whose every answer is `answer(form)`: (status, body)."""

    async def query(request: web.Request) -> web.Response:
        status, body = answer(dict(await request.post()))
        return web.Response(status=status, body=body)

    async with serving(query) as url:
        yield url


@contextlib.asynccontextmanager
async def looping(gateway, clock=None):
    async with gateway.listening(), aiohttp.ClientSession() as session, GatewayClient(gateway.path) as client:
        metrics = SchedulerMetrics()
        yield Loop(client, session, metrics, clock or Clock(1000.0)), metrics


def vector(*elements) -> tuple[int, bytes]:
    result = [{"metric": labels, "value": [1000.0, text]} for labels, text in elements]
    return 200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


def quiet_link(traffic: str):
    """Answers of a Prometheus that measures an idle hub and this traffic on the link."""

    def answer(form):
        if "label_replace" not in form["query"]:
            return vector(({}, traffic))
        return vector(
            ({"cluster": "hub", "figure": "sampled_at_seconds"}, "999.5"),
            ({"cluster": "eu", "figure": "sampled_at_seconds"}, "999.5"),
        )

    return answer


async def test_without_a_gateway_or_its_table_it_tries_again_and_then_pushes(gateway, table):
    async with aiohttp.ClientSession() as session, GatewayClient(gateway.path) as client:
        loop = Loop(client, session, SchedulerMetrics(), Clock(1000.0))
        assert await loop.once() == RETRY_SECONDS
        assert loop.report is None
        async with gateway.listening():
            gateway.table = None
            assert await loop.once() == RETRY_SECONDS
            gateway.table = table(short_interval_seconds=7)
            assert await loop.once() == 7.0
    assert [update.tokens for update in gateway.updates] == [1024]


async def test_a_policy_without_prometheus_pushes_its_own_threshold_and_says_what_is_missing(gateway):
    async with looping(gateway) as (loop, _):
        await loop.once()
    (update,) = gateway.updates
    assert (update.tokens, update.bandwidth, update.offload_clusters) == (1024, "Scarce", ("eu",))
    assert update.expires_seconds == 10
    assert loop.report.conditions["MetricsFresh"][:2] == ("Unknown", "NotConfigured")
    assert loop.report.conditions["LinkHealthy"][:2] == ("True", "AllAlive")


async def test_measured_traffic_moves_the_threshold_and_the_metrics(gateway, table):
    async with prometheus_answering(quiet_link("100")) as url, looping(gateway) as (loop, metrics):
        gateway.table = table(prometheus_url=url)
        await loop.once()
        value = metrics.registry.get_sample_value
        assert gateway.updates[-1].tokens == 1024 + 512
        assert value("prfaas_scheduler_threshold_tokens") == 1536
        assert value("prfaas_scheduler_link_utilisation_percent", {"member_cluster": "eu"}) == 100
        assert value("prfaas_scheduler_link_effective_mbps", {"member_cluster": "eu"}) == 100
        assert value("prfaas_scheduler_step_seconds_count") == 1
        assert loop.report.figures["linkUtilisationPercent"] == 100


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, b""), "AnswerDamaged"),
        ((200, b"<html>login</html>"), "AnswerDamaged"),
        ((200, b'{"status":"success"}'), "QueryRejected"),
        ((200, b'{"status":"success","data":{"resultType":"vector","result":[{"value":[1,2,3]}]}}'), "AnswerDamaged"),
        ((200, b'{"status":"success","data":{"resultType":"scalar","result":[1,"soon"]}}'), "AnswerDamaged"),
        ((200, b'{"status":"success","data":{"resultType":"matrix","result":[]}}'), "QueryRejected"),
        ((400, b'{"status":"error","errorType":"bad_data","error":"parse error"}'), "QueryRejected"),
        ((401, b"who are you"), "AnswerDamaged"),
        ((503, b'{"status":"error","errorType":"timeout","error":"query timed out"}'), "PrometheusUnreachable"),
        ((500, b"oops"), "PrometheusUnreachable"),
        ((200, b'{"status":"success","data":{"resultType":"vector","result":[]}}'), "NoSamples"),
    ],
)
async def test_survives_garbage_holds_and_then_reports_it(gateway, table, answer, reason):
    clock = Clock(1000.0)
    async with prometheus_answering(lambda _: answer) as url, looping(gateway, clock) as (loop, metrics):
        gateway.table = table(prometheus_url=url)
        for _ in range(3):
            assert await loop.once() == 1.0
            clock.seconds += 5.1
    assert [update.tokens for update in gateway.updates] == [1024] * 3
    assert loop.report.conditions["MetricsFresh"][:2] == ("False", reason)
    assert loop.report.figures["linkUtilisationPercent"] is None
    failed = metrics.registry.get_sample_value("prfaas_scheduler_query_errors_total")
    assert failed == (0 if reason == "NoSamples" else 6)
    assert metrics.registry.get_sample_value("prfaas_scheduler_metrics_stale") == 1


async def test_an_endless_answer_is_cut_off(gateway, table):
    async with prometheus_answering(lambda _: (200, b" " * 5_000_000)) as url, looping(gateway) as (loop, metrics):
        gateway.table = table(prometheus_url=url)
        await loop.once()
        assert metrics.registry.get_sample_value("prfaas_scheduler_query_errors_total") == 2


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://", "http://[::1", "http://no-such-host.invalid"])
async def test_survives_an_address_that_does_not_answer(gateway, table, url):
    async with looping(gateway) as (loop, _):
        gateway.table = table(prometheus_url=url)
        assert await loop.once() == 1.0
    assert len(gateway.updates) == 1


async def test_a_policy_whose_threshold_changed_starts_from_its_own_tokens(gateway, table):
    async with prometheus_answering(quiet_link("65")) as url, looping(gateway) as (loop, _):
        for tokens in (1024, 4096):
            threshold = Threshold(mode="Auto", tokens=tokens, min_tokens=512, max_tokens=32768)
            gateway.table = table(prometheus_url=url, threshold=threshold)
            await loop.once()
    assert [update.tokens for update in gateway.updates] == [1024, 4096]


async def test_the_link_of_a_forbidden_datacenter_is_neither_measured_nor_used(gateway, table):
    (eu,) = (msgspec.structs.replace(one, datacenter="eu") for one in table().clusters)
    abroad = type(eu)(name="abroad", datacenter="x", capacity_mbps=1, utilisation_query="vector(1000)")
    async with prometheus_answering(quiet_link("65")) as url, looping(gateway) as (loop, metrics):
        gateway.table = table(prometheus_url=url, clusters=(eu, abroad), forbid_datacenters=("x",))
        await loop.once()
        links = {"member_cluster": "abroad"}
        assert metrics.registry.get_sample_value("prfaas_scheduler_link_alive", links) is None
    assert gateway.updates[-1].offload_clusters == ("eu",)
    assert loop.report.conditions["LinkHealthy"].status == "True"


def counted(offloaded: int, local: int) -> Counters:
    return Counters(offloaded=offloaded, local=local, failed_offloads=0)


def test_the_offloaded_share_is_of_the_last_minute():
    history = CounterHistory()
    assert history.offloaded_percent() is None
    history.add(0.0, counted(0, 0))
    assert history.offloaded_percent() is None, "no request is no share"
    history.add(10.0, counted(3, 1))
    assert history.offloaded_percent() == 75
    history.add(65.0, counted(3, 5))
    assert history.offloaded_percent() == 0, "what was counted before the minute began is dropped"


def test_distinguishes_offloads_within_the_window_from_older_ones():
    history = CounterHistory()
    assert history.offloads_since(0.0) is None
    for second, offloaded in enumerate([0, 2, 2, 2, 2]):
        history.add(float(second), counted(offloaded, 0))
    assert history.offloads_since(0.0) == 2
    assert history.offloads_since(1.0) == 0


def test_a_restarted_gateway_counts_from_zero():
    history = CounterHistory()
    history.add(0.0, counted(1000, 10))
    history.add(1.0, counted(0, 0))
    history.add(2.0, counted(1, 1))
    assert history.offloaded_percent() == 50
    assert history.offloads_since(0.0) == 1
