"""Servers that we call want our memory, our time, or our calls to go elsewhere: a member's API server, a Prometheus."""

import asyncio
import re
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.attacks.hostile import (
    MEBIBYTE,
    Answer,
    lists_empty_pages,
    lists_for_ever,
    packed,
    page,
    redirected,
    same,
    text,
)
from tests.serving import serving
from tests.waiting import eventually_async

from prfaas.errors import ConfigError, PrfaasError, ProtocolError, UnreachableError
from prfaas.kube import session
from prfaas.kube.session import MAX_ANSWER_VALUES, KubeSession
from prfaas.kube.watch import WatchEvent
from prfaas_operator.clusters import client as clients
from prfaas_operator.clusters.client import MAX_OBJECTS, ClusterClient
from prfaas_operator.clusters.informer import Informer
from prfaas_operator.clusters.kinds import DEPLOYMENT, POD
from prfaas_operator.errors import ClusterUnreachableError, TooManyObjectsError
from prfaas_scheduler.prometheus import Prometheus

pytestmark = pytest.mark.system


def values(_request: web.Request) -> web.Response:
    """Answer with millions of lists, which take 30 times the bytes that they are written in."""
    return packed(b'{"metadata":{},"items":[' + b",".join([b"[]"] * (5 * MEBIBYTE)) + b"]}")


def nested(chains: int) -> Answer:
    """Return an answer of objects in objects, each of one member: 5 bytes and one mark, but 200 bytes of memory."""
    chain = b'{"":' * 100 + b"{}" + b"}" * 100
    return lambda _: packed(b'{"metadata":{},"items":[' + b",".join([chain] * chains) + b"]}")


JUST_BELOW = nested(MAX_ANSWER_VALUES // 102 - 1)
FORMER = nested(2_000_000 // 102 - 1)


@asynccontextmanager
async def hostile(answer: Answer) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return answer(request)

    async with serving(handle) as url:
        yield url


@asynccontextmanager
async def member(answer: Answer) -> AsyncIterator[ClusterClient]:
    async with hostile(answer) as url:
        client = ClusterClient(KubeSession(url), "ns", "cluster evil")
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def prometheus(answer: Answer, bounds_part: float = 1.0) -> AsyncIterator[Prometheus]:
    async with hostile(answer) as url, aiohttp.ClientSession(trust_env=False) as http:
        yield Prometheus(http, url, 5.0, bounds_part)


async def peak_bytes(answer: Answer, error: type[Exception] | None, calls: int = 1) -> int:
    """Return the most memory that listing pods took, by some calls at once, beside what the server itself holds."""
    async with member(same(answer)) as client:  # packed before memory is measured
        tracemalloc.start()
        try:
            found = await asyncio.gather(*(client.list_all(POD) for _ in range(calls)), return_exceptions=True)
            assert all(isinstance(one, error or list) for one in found)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (text, ClusterUnreachableError),
        (values, ClusterUnreachableError),
        (FORMER, ClusterUnreachableError),
        (JUST_BELOW, None),
    ],
    ids=["400 MiB of text", "millions of values", "millions of objects", "as many objects as are read"],
)
async def test_no_answer_of_a_members_server_fills_the_operators_memory(answer, error):
    assert await peak_bytes(answer, error) < 64 * MEBIBYTE


async def test_control_where_a_packed_piece_is_unpacked_at_once_a_part_of_the_answer_fills_it(monkeypatch):
    monkeypatch.setattr("prfaas.bounds.answers.UNPACKED_BYTES", 1 << 30)
    assert await peak_bytes(text, ClusterUnreachableError) > 64 * MEBIBYTE


async def test_a_server_that_answers_many_calls_at_once_takes_the_memory_of_one_answer():
    assert await peak_bytes(text, ClusterUnreachableError, calls=8) < 48 * MEBIBYTE


async def test_control_where_each_answer_counts_alone_they_take_the_memory_of_all(monkeypatch):
    monkeypatch.setattr("prfaas.kube.session.LONG_ANSWER_BYTES", session.MAX_ANSWER_BYTES)
    assert await peak_bytes(text, ClusterUnreachableError, calls=8) > 80 * MEBIBYTE


async def test_control_a_higher_number_of_values_lets_objects_of_one_member_fill_it(monkeypatch):
    monkeypatch.setattr("prfaas.kube.session.MAX_ANSWER_VALUES", 2_000_000)
    assert await peak_bytes(FORMER, TooManyObjectsError) > 300 * MEBIBYTE


async def test_control_without_a_number_of_values_small_ones_take_many_times_their_bytes(monkeypatch):
    monkeypatch.setattr("prfaas.kube.session.MAX_ANSWER_VALUES", 1 << 40)
    assert await peak_bytes(values, Exception) > 300 * MEBIBYTE


async def test_an_operator_with_less_memory_reads_less_of_a_members_server():
    async with hostile(JUST_BELOW) as url, KubeSession(url, bounds_part=0.5) as half:
        with pytest.raises(ClusterUnreachableError, match=f"JSON of more than {MAX_ANSWER_VALUES // 2} values"):
            await ClusterClient(half, "ns", "cluster evil").list_all(POD)
    async with hostile(lists_for_ever) as url, KubeSession(url, bounds_part=0.1) as tenth:
        with pytest.raises(TooManyObjectsError, match=f"lists more than {MAX_OBJECTS // 10} objects"):
            await ClusterClient(tenth, "ns", "cluster evil").list_all(POD)


@pytest.mark.parametrize("answer", [lists_for_ever, lists_empty_pages])
async def test_no_list_goes_on_for_ever(answer):
    async with member(answer) as client:
        with pytest.raises(TooManyObjectsError, match="cluster evil lists more than"):
            await client.list_all(POD)


async def test_control_without_bounds_a_list_goes_on(monkeypatch):
    monkeypatch.setattr(clients, "MAX_OBJECTS", 1 << 40)
    listed = 0
    async with member(lists_for_ever) as client:
        async for items, _ in client.pages(POD):
            listed += len(items)
            if listed > 25_000:
                break
    assert listed > 25_000


def lists(pages: int) -> Answer:
    """Return answers with so many pages of 500 pods."""

    def answer(request: web.Request) -> web.Response:
        number = int(request.query.get("continue") or "1")
        return page(*(f"pod-{number}-{one}" for one in range(500)), after=str(number + 1) if number < pages else "")

    return answer


async def test_the_hubs_own_server_may_list_what_it_has():
    pages = MAX_OBJECTS // 500 + 1
    async with hostile(lists(pages)) as url:
        client = ClusterClient(KubeSession(url), "ns", "hub", is_trusted=True)
        try:
            assert len(await client.list_all(POD)) == 500 * pages > MAX_OBJECTS
        finally:
            await client.close()


@pytest.mark.parametrize(("kind", "found"), [(DEPLOYMENT, TooManyObjectsError), (POD, list)], ids=["others", "its own"])
async def test_all_kinds_of_a_member_have_one_bound(kind, found):
    async with member(lists(2)) as client:
        assert len(await client.list_all(POD)) == 1000
        client.kept[kind] = MAX_OBJECTS - 999
        again = await asyncio.gather(client.list_all(POD), return_exceptions=True)
        assert type(again[0]) is found


class Telling(ClusterClient):
    """A cluster whose list is empty, and whose watch tells of one new pod after the other."""

    async def pages(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield [], "1"

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[WatchEvent]:
        for number in range(1000):
            yield WatchEvent("ADDED", {"metadata": {"name": f"pod-{number}", "resourceVersion": "7"}})
        await asyncio.Event().wait()


async def keep_what_it_tells(most: int, others: int) -> int:
    """Return how many pods are kept of a thousand that a watch tells of, beside so many objects of other kinds."""
    cluster = Telling(KubeSession("http://127.0.0.1:9"), "ns", "cluster evil")
    cluster.kept[DEPLOYMENT] = others
    informer = Informer(cluster, POD, "", lambda pod: pod["metadata"]["name"], lambda _: None)
    running = asyncio.ensure_future(informer.run())
    await eventually_async(lambda: len(informer.items) >= most, "the watch is read")
    await asyncio.sleep(0)
    running.cancel()
    return len(informer.items)


async def test_what_a_watch_tells_of_is_kept_to_a_bound_and_the_log_says_so_once(caplog):
    assert await keep_what_it_tells(300, MAX_OBJECTS - 300) == 300
    assert [one.message for one in caplog.records] == ["pods informer: too many objects, only 300 are followed"]


async def test_control_where_there_is_room_all_of_it_is_kept(caplog):
    assert await keep_what_it_tells(1000, MAX_OBJECTS - 1000) == 1000
    assert not caplog.records


async def read_a_long_log() -> int:
    """Return how many bytes are read of a pod's log of 8 MiB."""
    async with member(lambda _: web.Response(body=b"x" * (8 * MEBIBYTE))) as client:
        return len(await client.log("pod"))


async def test_a_pods_log_is_read_to_a_bound():
    assert clients.MAX_LOG_BYTES < await read_a_long_log() < 4 * MEBIBYTE


async def test_control_without_the_bound_all_of_a_log_is_read(monkeypatch):
    monkeypatch.setattr(clients, "MAX_LOG_BYTES", 1 << 40)
    assert await read_a_long_log() == 8 * MEBIBYTE


def vector(_request: web.Request) -> web.Response:
    result = [{"metric": {}, "value": [1.0, "7"]}]
    return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})


def of_result(result: bytes) -> bytes:
    return b'{"status":"success","data":{"resultType":"vector","result":[' + result + b"]}}"


def spaces(_request: web.Request) -> web.Response:
    """Answer with 64 MiB of spaces before the JSON, in 64 KiB."""
    return packed(b" " * (64 * MEBIBYTE) + of_result(b""))


def elements(_request: web.Request) -> web.Response:
    """Answer with elements that take many times the bytes that they are written in."""
    return packed(of_result(b",".join([b'{"metric":{},"value":[1,"1"]}'] * 120_000)))


async def query_peak_bytes(answer: Answer, refusal: str = "") -> int:
    """Return the most memory that a query took. Its answer is refused with these words, or read if there are none."""
    async with prometheus(same(answer)) as client:
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match=refusal) if refusal else nullcontext():
                await client.vector("up")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [(spaces, "answers more than"), (elements, "answers JSON of more than")],
    ids=["64 MiB", "many elements"],
)
async def test_no_answer_of_prometheus_fills_the_schedulers_memory(answer, refusal):
    assert await query_peak_bytes(answer, refusal) < 16 * MEBIBYTE


@pytest.mark.parametrize(
    ("answer", "bound"), [(spaces, "BYTES"), (elements, "VALUES")], ids=["64 MiB", "many elements"]
)
async def test_control_without_its_bound_an_answer_of_prometheus_is_read_and_fills_it(answer, bound, monkeypatch):
    monkeypatch.setattr(f"prfaas_scheduler.prometheus.MAX_ANSWER_{bound}", 1 << 40)
    assert await query_peak_bytes(answer) > 24 * MEBIBYTE


@pytest.mark.parametrize(("part", "refusal"), [(1.0, ""), (0.01, "answers more than 41943 bytes")])
async def test_a_scheduler_with_less_memory_reads_less_of_prometheus(part: float, refusal: str):
    async with prometheus(lambda _: packed(of_result(b"") + b" " * 50_000), part) as client:
        with pytest.raises(ProtocolError, match=refusal) if refusal else nullcontext():
            assert await client.vector("up") == []


async def test_a_redirect_of_prometheus_is_not_followed():
    asked: list[str] = []

    def elsewhere(request: web.Request) -> Any:
        asked.append(request.path)
        return vector(request)

    async with hostile(elsewhere) as url, prometheus(redirected(url)) as client:
        with pytest.raises(ConfigError, match="redirect"):
            await client.value("up")
    assert asked == []


async def test_control_a_client_that_follows_redirects_believes_the_answer():
    async with hostile(vector) as url, prometheus(redirected(url)) as client:
        post = client._http.post
        client._http.post = lambda *args, **sent: post(*args, **sent | {"allow_redirects": True})  # pyright: ignore
        assert await client.value("up") == 7.0


async def error_of(url: str) -> str:
    async with aiohttp.ClientSession(trust_env=False) as http:
        with pytest.raises(PrfaasError) as refused:
            await Prometheus(http, url, 5.0).value("up")
    assert isinstance(refused.value, (UnreachableError, ConfigError))
    return str(refused.value)


each_address = pytest.mark.parametrize(
    "url", ["http://scraper:S3cret@127.0.0.1:1", "http://scraper:S3cret@[::1", "scraper:S3cret@p"]
)


@each_address
async def test_no_error_repeats_a_password_of_the_address(url):
    assert "S3cret" not in await error_of(url)


@each_address
async def test_control_an_address_that_is_shown_whole_has_it(url, monkeypatch):
    monkeypatch.setattr("prfaas_scheduler.prometheus._CREDENTIALS", re.compile("()(?!)"))  # finds none
    assert "S3cret" in await error_of(url)
