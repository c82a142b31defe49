"""Proves that a watch of one object survives what API servers do, resumes where it was, and loses no change."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import nullcontext

import pytest
from aiohttp import web
from tests.waiting import eventually_async

from prfaas.errors import ProtocolError
from prfaas.kube import KubeSession, ObjectRef, watch, watch_object
from prfaas.kube.session import CONFIG_MAP, MAX_ANSWER_VALUES
from prfaas.kube.watch import ExpiredError, WatchEvent, list_and_watch, watch_events

pytestmark = pytest.mark.system

REF = ObjectRef(CONFIG_MAP, "n", "p-routes")
DAMAGED_EVENTS = [
    b"not json\n",
    b"[]\n",
    b"\xff\n",
    b'{"type":"MODIFIED"}\n',
    b'{"type":"MODIFIED","object":{}}\n',
    b'{"type":"ERROR","object":{}}\n',
]


class Watching:
    """A running watch whose values a test takes one by one."""

    def __init__(self, session: KubeSession):
        self._values: asyncio.Queue = asyncio.Queue()
        self._task = asyncio.create_task(self._run(session))

    async def _run(self, session):
        async for current in watch_object(session, REF):
            self._values.put_nowait(current)

    async def next(self):
        await eventually_async(lambda: not self._values.empty(), "the watch yields an object", poll=0.002)
        return self._values.get_nowait()

    async def until(self, value: int) -> None:
        """Take values until the object's own `value` is this."""
        while ((await self.next()) or {}).get("value") != value:
            pass

    async def stop(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(watch, "MAX_PAUSE_SECONDS", 0.05)


@pytest.fixture
async def watching(api, session) -> AsyncIterator[Watching]:
    made = Watching(session)
    yield made
    await made.stop()


async def test_a_watch_yields_the_object_and_then_every_change(api, watching):
    api.put(REF, value=1)
    assert (await watching.next())["value"] == 1
    await eventually_async(lambda: api.open_watches, "a watch is open")
    api.put(REF, value=2)
    assert (await watching.next())["value"] == 2
    api.delete(REF)
    assert await watching.next() is None
    api.put(REF, value=3)
    assert (await watching.next())["value"] == 3


async def test_an_object_that_is_made_later_appears(api, watching):
    assert await watching.next() is None
    await eventually_async(lambda: api.open_watches, "a watch is open")
    api.put(REF, value=1)
    await watching.until(1)


async def test_the_watch_requests_only_one_name(api, watching):
    await watching.next()
    await eventually_async(lambda: api.watches, "a watch is open")
    assert api.watches[0]["fieldSelector"] == "metadata.name=p-routes"
    assert api.requests[1][1].startswith("/api/v1/namespaces/n/configmaps?watch=1")


async def test_a_watch_that_ends_in_peace_resumes_where_it_was(api, watching):
    api.put(REF, value=1)
    await watching.next()
    await eventually_async(lambda: api.open_watches, "a watch is open")
    seen = api.put(REF, value=2)["metadata"]["resourceVersion"]
    await watching.next()
    api.end_watches()
    await eventually_async(lambda: len(api.watches) == 2, "a second watch is open")
    assert api.watches[1]["resourceVersion"] == seen
    assert [method for method, path, _, _ in api.requests if "watch" not in path] == ["GET"]  # the object was read once


async def test_a_dropped_connection_loses_no_change(api, watching):
    api.put(REF, value=1)
    await watching.next()
    for value in (2, 3, 4):
        await eventually_async(lambda: api.open_watches, "a watch is open")
        api.drop_watches()
        api.put(REF, value=value)
        await watching.until(value)


async def test_an_expired_version_is_answered_by_reading_again(api, watching):
    api.put(REF, value=1)
    await watching.next()
    await eventually_async(lambda: api.open_watches, "a watch is open")
    expired = {"kind": "Status", "code": 410, "reason": "Expired"}
    for queue, _ in api.open_watches:
        queue.put_nowait(json.dumps({"type": "ERROR", "object": expired}).encode() + b"\n")
    assert (await watching.next())["value"] == 1
    await eventually_async(lambda: api.open_watches, "a watch is open")
    api.put(REF, value=2)
    await watching.until(2)


async def test_reads_ever_more_seldom_from_a_server_whose_versions_expire_each_time(monkeypatch):
    monkeypatch.setattr(watch, "FIRST_PAUSE_SECONDS", 0.001)
    reads, pauses = 0, []

    async def read() -> tuple[int, str]:
        nonlocal reads
        reads += 1
        return reads, "7"

    async def expired(version: str) -> AsyncIterator[WatchEvent]:
        raise ExpiredError(f"{version} is too old")
        yield

    def failed(error: Exception, pause_seconds: float) -> float:
        pauses.append(pause_seconds)
        return 0.0

    async for found in list_and_watch(read, expired, failed):
        if found == 6:
            break
    longest = [0.002, 0.004, 0.008, 0.016]
    assert all(longest / 2 <= pause <= longest for pause, longest in zip(pauses, longest, strict=True))


@pytest.mark.parametrize("line", DAMAGED_EVENTS)
async def test_survives_damaged_events(api, watching, line):
    api.put(REF, value=1)
    await watching.next()
    await eventually_async(lambda: api.open_watches, "a watch is open")
    for queue, _ in api.open_watches:
        queue.put_nowait(line)
    await watching.until(1)
    await eventually_async(lambda: api.open_watches, "a watch is open")
    api.put(REF, value=2)
    await watching.until(2)


async def all_events(api, session, body: bytes) -> list[str]:
    """Return the values that a watch tells of, if its server answers with a packed body."""

    async def answer(_request):
        return web.Response(body=gzip.compress(body), headers={"Content-Encoding": "gzip"})

    api.misbehave.append(answer)
    return [event.object["value"] async for event in watch_events(session, REF.path, {}, "1")]


async def test_a_watch_that_is_packed_is_read(api, session):
    lines = [f'{{"type":"ADDED","object":{{"value":"{value}"}}}}\n'.encode() for value in ("a", "b", "x" * 200_000)]
    assert await all_events(api, session, b"".join(lines)) == ["a", "b", "x" * 200_000]


@pytest.mark.parametrize(("lists", "is_read"), [(MAX_ANSWER_VALUES + 1, False), (MAX_ANSWER_VALUES // 3, True)])
async def test_an_event_of_too_many_values_is_refused(api, session, lists, is_read):
    line = b'{"type":"ADDED","object":{"value":"a","x":[' + b",".join([b"[]"] * lists) + b"]}}\n"
    with nullcontext() if is_read else pytest.raises(ProtocolError, match=f"of more than {MAX_ANSWER_VALUES} values"):
        assert await all_events(api, session, line) == ["a"]


async def test_a_watch_that_unpacks_to_a_line_without_an_end_is_refused(api, session):
    with pytest.raises(ProtocolError, match="a watch event exceeds"):
        await all_events(api, session, b" " * (1 << 26))


async def test_a_bookmark_moves_the_version_and_is_not_a_change(api, watching):
    api.put(REF, value=1)
    await watching.next()
    await eventually_async(lambda: api.open_watches, "a watch is open")
    api.tell("BOOKMARK", {"metadata": {"resourceVersion": "99"}})
    api.end_watches()
    await eventually_async(lambda: len(api.watches) == 2, "a second watch is open")
    assert api.watches[1]["resourceVersion"] == "99"


async def test_a_server_that_falls_silent_is_left_after_the_window(api, session, monkeypatch):
    monkeypatch.setattr(watch, "WINDOW_SECONDS", 0.1)
    monkeypatch.setattr(watch, "WINDOW_SLACK_SECONDS", 0)
    api.put(REF, value=1)
    watching = Watching(session)
    await watching.next()
    await eventually_async(lambda: len(api.watches) >= 2, "a second watch is open")
    await watching.stop()


async def test_survives_refusals_and_an_absent_server(api, watching):
    async def forbid(_request):
        return web.json_response({"kind": "Status", "reason": "Forbidden"}, status=403)

    async def hang_up(request):
        request.transport.abort()
        return web.Response()

    async def no_list(_request):
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": 7})

    api.misbehave[:] = [forbid, hang_up, no_list, None, forbid, forbid]
    api.put(REF, value=1)
    await watching.until(1)
    await eventually_async(lambda: api.open_watches, "a watch is open")
    api.put(REF, value=2)
    await watching.until(2)
