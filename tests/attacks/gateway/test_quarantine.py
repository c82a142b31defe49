"""A request that kills whichever engine gets it wants to kill them all, by the gateway's own retries."""

import asyncio
import errno
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.tables import make_instance
from tests.unit.gateway.conftest import QUICK, Answered
from tests.unit.gateway.speaker import BODY, WHOLE, Speaker, read, speak, stream_of

from prfaas.errors import BadInputError, LostError, UnreachableError
from prfaas.routing import quarantine
from prfaas.routing.quarantine import PROBATION_SECONDS, QUARANTINE_SECONDS, SAME_LOSS_SECONDS
from prfaas.wire import headers
from prfaas_gateway import attempts
from prfaas_gateway.limits import Limits
from prfaas_gateway.stream import AnswerStream, BrokenOffError
from prfaas_gateway.upstream import Upstream

ENGINES = ("d0", "d1", "d2", "d3")
MARK = "deadly"
KEY = "sk-mallory-0123456789abcdef"
BEARER = {"Authorization": f"Bearer {KEY}"}
NO_SECOND_TRY = QUICK._replace(eject_seconds=30, eject_max_seconds=30)
"""An engine that died is not tried again at once."""
FAILED = b'data: {"error": {"message": "the engine ended", "type": "server_error", "code": "engine_failed"}}\n\n'
"""The last words of a front whose engine died."""


def body(word: str, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": word}], **fields}).encode()


async def start(world, dies, keys: Path | None = None) -> list[str]:
    """Start engines that die of a request with the mark, and start again; return the list of their deaths."""
    await world.start(*ENGINES, limits=NO_SECOND_TRY, keys_dir=keys)
    deaths: list[str] = []
    for name in ENGINES:
        healthy = world.workers[name].reply

        async def reply(request: web.Request, sent: bytes, name: str = name, healthy: Any = healthy):
            if MARK.encode() not in sent:
                return await healthy(request, sent)
            deaths.append(name)
            return await dies(request)

        world.workers[name].reply = reply
    return deaths


async def at_once(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError


async def after_its_head(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"half')
    return await at_once(request)


@pytest.mark.parametrize("dies", [at_once, after_its_head])
async def test_it_kills_two_and_no_third_one(world, dies):
    deaths = await start(world, dies)
    got = await world.post(body(MARK))
    assert (got.status, got.json["error"]["code"], len(deaths)) == (503, "request_quarantined", 2)
    assert 0 < int(got.headers["retry-after"]) <= QUARANTINE_SECONDS
    assert "2 engines failed or were lost" in got.json["error"]["message"]
    again = await world.post(body(MARK))
    assert (again.status, again.json["error"]["code"], len(deaths)) == (503, "request_quarantined", 2)
    assert (await world.post(body("harmless"))).status == 200


async def in_its_first_event(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(FAILED)
    return response


async def test_what_kills_the_engine_behind_a_front_kills_two_and_no_third_one(world):
    deaths = await start(world, in_its_first_event)
    world.change_instances(engine="vllm-nixl")
    got = await world.post(body(MARK))
    assert (got.status, got.json["error"]["code"], len(deaths)) == (503, "request_quarantined", 2)


async def test_it_may_come_back_after_a_minute(world):
    deaths = await start(world, at_once)
    await world.post(body(MARK))
    clock = world.state.clock
    world.state.clock = lambda: clock() + QUARANTINE_SECONDS + 1
    await world.post(body(MARK))
    assert len(deaths) == 4


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "mallory").write_text(KEY)
    return folder


async def post_with_letters(world, count: int) -> list[Answered]:
    """Post what kills engines with another letter each time, and each time later than what counts as one loss."""
    clock, got = world.state.clock, []
    for number in range(count):
        world.state.clock = lambda number=number: clock() + number * (SAME_LOSS_SECONDS + 1)
        got.append(await world.post(body(f"{MARK} {number}"), headers=BEARER))
    return got


async def test_one_letter_more_does_not_get_a_client_the_other_engines(world, keys):
    deaths = await start(world, at_once, keys)
    got = await post_with_letters(world, 3)
    assert [one.json["error"]["code"] for one in got] == ["request_quarantined"] * 3
    assert (len(deaths), "of this key" in got[2].json["error"]["message"]) == (4, True)
    assert (await world.post(body("harmless"), headers=BEARER)).json["error"]["code"] == "request_quarantined"


async def test_control_without_the_count_by_client_each_letter_costs_engines(world, keys, monkeypatch):
    monkeypatch.setattr(quarantine, "CLIENT_LOSSES", 1000)
    deaths = await start(world, at_once, keys)
    await post_with_letters(world, 3)
    assert len(deaths) > 4


async def test_without_keys_an_address_is_not_refused_since_all_clients_may_have_it(world):
    await start(world, at_once)
    await post_with_letters(world, 2)
    assert (await world.post(body("harmless"))).status == 200


async def test_an_engine_that_refuses_connections_is_no_loss(world):
    await start(world, at_once)
    for name in ENGINES[:3]:
        await world.workers[name].stop()
    assert (await world.post(body("harmless"))).status == 200


async def test_silent_instances_are_no_losses_of_a_request_that_waited_there(world):
    await world.start(*ENGINES, limits=QUICK._replace(liveness_interval_seconds=0.05, liveness_timeout_seconds=0.5))

    async def freeze(_request: web.Request, _sent: bytes) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    for name in ENGINES[:3]:
        world.workers[name].reply = freeze
    got = await world.post(body("harmless"))
    assert (got.status, got.headers[headers.DECODE_INSTANCE]) == (200, "d3")


@pytest.mark.parametrize(
    ("ended", "is_lost"),
    [
        (aiohttp.ClientOSError(errno.ETIMEDOUT, "timed out"), False),
        (aiohttp.ClientOSError(errno.EHOSTUNREACH, "no route"), False),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), True),
        (aiohttp.ServerDisconnectedError(), True),
    ],
)
async def test_only_a_connection_that_its_engine_closed_is_lost(ended, is_lost, monkeypatch):
    async def post(*_: Any, **__: Any) -> None:
        raise ended

    async with Upstream(Limits()) as upstream:
        monkeypatch.setattr(upstream._session, "post", post)
        with pytest.raises(UnreachableError) as found:
            await upstream.post(make_instance("d0"), "/v1/completions", {}, b"{}")
    assert isinstance(found.value, LostError) == is_lost


async def test_control_without_the_quarantine_it_kills_them_all(world, monkeypatch):
    monkeypatch.setattr(attempts, "LOSSES", 1000)
    deaths = await start(world, at_once)
    await world.post(body(MARK))
    assert set(deaths) == set(ENGINES)


# Of streams


class Deadly(Speaker):
    """All engines: so many of them die behind the first event of a stream, once each may."""

    def __init__(self, *death: Any, deaths: int = 1000):
        super().__init__(None, *death)
        self.may_die = asyncio.Semaphore(1000)
        self._left = deaths

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        self._left -= 1
        self.dies_at = speak(stream_of(body)).index(b"\n\n") + 2 if self._left >= 0 else None
        return await super().__call__(request, body)

    async def _die(self, request: web.Request, response: web.StreamResponse) -> None:
        await self.may_die.acquire()
        await super()._die(request, response)


async def start_streams(world, deadly: Deadly) -> None:
    await world.start(*ENGINES, limits=NO_SECOND_TRY._replace(recover_seconds=0.3))
    for worker in world.workers.values():
        worker.reply = deadly


def end_of(stream: bytes) -> str:
    """Return the code of the error that a stream ends with."""
    event = stream.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    return json.loads(event.removeprefix(b"data: "))["error"]["code"]


@pytest.mark.parametrize("death", [("resets",), ("ends", FAILED)], ids=["it closes", "its front says so"])
async def test_what_kills_at_token_2_kills_two_and_no_third_one(world, death):
    deadly = Deadly(*death)
    await start_streams(world, deadly)
    got = await world.post(BODY)
    assert (got.status, end_of(got.body), len(deadly.streams)) == (200, "request_quarantined", 2)
    again = await world.post(BODY)
    assert (again.status, again.json["error"]["code"], len(deadly.streams)) == (503, "request_quarantined", 2)


async def test_control_where_losses_of_streams_do_not_count_it_kills_them_all(world, monkeypatch):
    monkeypatch.setattr(attempts, "PROBATION_SECONDS", 0.0)
    deadly = Deadly("resets")
    await start_streams(world, deadly)
    assert end_of((await world.post(BODY)).body) == "stream_broken"
    assert len(deadly.streams) == len(ENGINES)


@pytest.mark.parametrize("times", [(1, 1), (0, 1, 0)], ids=["twice", "between two early losses"])
async def test_a_stream_that_was_served_for_long_survives_two_engines(world, times):
    """So many PROBATION_SECONDS each engine serves it before it dies."""
    deadly = Deadly("resets", deaths=len(times))
    deadly.may_die = asyncio.Semaphore(0)
    await start_streams(world, deadly)
    async with world.client.post(world.url + "/v1/chat/completions", data=BODY) as answer:
        got, clock = b"", world.state.clock
        for number in range(len(times)):
            sent = got.count(b"\n\n")
            while got.count(b"\n\n") == sent:
                got += await answer.content.readany()
            passed_seconds = sum(times[: number + 1]) * PROBATION_SECONDS
            world.state.clock = lambda passed_seconds=passed_seconds: clock() + passed_seconds
            deadly.may_die.release()
        got += await answer.content.read()
    assert (read(got), len(deadly.streams)) == (WHOLE, len(times) + 1)


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "control"])
async def test_a_begun_stream_kills_no_second_engine_once_its_like_is_refused(world, is_refused):
    path, deadly = "/v1/chat/completions", Deadly("resets", deaths=1)
    deadly.may_die = asyncio.Semaphore(0)
    await start_streams(world, deadly)
    async with world.client.post(world.url + path, data=BODY) as answer:
        got = await answer.content.readany()
        if is_refused:
            digest = hashlib.sha256(f"{path}\n".encode() + BODY).digest()
            world.state.quarantine.add(digest, "", world.state.clock())
        deadly.may_die.release()
        got += await answer.content.read()
    if is_refused:
        assert (end_of(got), len(deadly.streams)) == ("request_quarantined", 1)
    else:
        assert (read(got), len(deadly.streams)) == (WHOLE, 2)


@pytest.mark.parametrize(
    ("ended", "is_closed"),
    [
        (TimeoutError("it fell silent"), False),
        (BadInputError("no event"), False),
        (aiohttp.ClientOSError(errno.ETIMEDOUT, "timed out"), False),
        (ConnectionResetError(), True),
        (aiohttp.ClientPayloadError("the response is not whole"), True),
    ],
)
async def test_a_stream_that_fell_silent_or_is_nonsense_is_no_loss(ended, is_closed):
    async def fail() -> bytes:
        raise ended

    stream = AnswerStream(SimpleNamespace(path="/v1/completions"), SimpleNamespace(write=None), None, 0)
    with pytest.raises(BrokenOffError) as found:
        await stream.relay(SimpleNamespace(read=fail), Limits())
    assert found.value.is_closed == is_closed
