"""Proves that a request ends when its deadline comes: with 504 before its first byte, with an error event after it, and
on the worker at once; and that a worker gets the time that is left.
"""

import asyncio
import json
from types import SimpleNamespace

import pytest
from aiohttp import web
from tests.waiting import eventually_async

from prfaas.wire.headers import DEADLINE_SECONDS
from prfaas_gateway import stream
from prfaas_gateway.limits import Limits
from prfaas_gateway.stream import AnswerStream, ClientGoneError

pytestmark = pytest.mark.system

SOON = {DEADLINE_SECONDS: "1"}


async def hang(_request: web.Request, _body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def begin(content_type: str):
    async def reply(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await asyncio.Event().wait()
        return response

    return reply


async def test_before_the_first_byte_the_answer_is_504_and_the_worker_aborts(world, short):
    await world.start("d0")
    world.workers["d0"].reply = hang
    got = await world.post(short, headers=SOON)
    assert (got.status, got.json["error"]["code"]) == (504, "deadline_exceeded")
    await world.workers["d0"].wait_aborted()
    assert world.state.in_flight == 0
    assert not world.state.ejections.until_seconds
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="failed"}') == 1


async def test_after_the_first_byte_the_stream_ends_with_an_error_event(world, short):
    await world.start("d0")
    world.workers["d0"].reply = begin("text/event-stream")
    got = await world.post(short, headers={DEADLINE_SECONDS: "2"})
    first, last, end = got.body.decode().split("\n\n")
    assert (got.status, first, end) == (200, "data: 1", "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    await world.workers["d0"].wait_aborted()


class UnreadResponse:
    """An answer whose client does not read until `is_read`."""

    content_type = "text/event-stream"

    def __init__(self):
        self.sent = b""
        self.is_read = asyncio.Event()

    async def write(self, data: bytes) -> None:
        self.sent += data
        await self.is_read.wait()

    async def write_eof(self) -> None:
        await self.is_read.wait()

    def force_close(self) -> None:
        pass


class Connection:
    """The transport of a client."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


class Pieces:
    """A worker's answer of these pieces."""

    def __init__(self, *pieces: bytes):
        self._pieces = [*pieces]

    async def read(self) -> bytes:
        return self._pieces.pop(0)


@pytest.mark.parametrize(("sent", "end"), [(b'data: {"half', b"\n\n"), (b"data: 1\n", b"\n"), (b"data: 1\n\n", b"")])
async def test_an_event_that_the_deadline_cuts_in_its_write_gets_its_end(sent: bytes, end: bytes):
    response = UnreadResponse()
    answer = AnswerStream(SimpleNamespace(path="/v1/completions", transport=None), response, None, 1000)
    relaying = asyncio.create_task(answer.relay(Pieces(sent), Limits()))
    await eventually_async(lambda: response.sent == sent, "the write has begun")
    relaying.cancel()
    await asyncio.wait([relaying])
    response.is_read.set()
    await answer.end_in_error(b"data: late\n\n")
    assert response.sent == sent + end + b"data: late\n\n"


@pytest.mark.parametrize("way", ["relay", "end_in_error"])
async def test_a_client_that_does_not_read_the_end_is_given_up_with_its_connection(monkeypatch, way: str):
    monkeypatch.setattr(stream, "END_SECONDS", 0.05)
    response, connection = UnreadResponse(), Connection()
    answer = AnswerStream(SimpleNamespace(path="/v1/completions", transport=connection), response, None, 1000)
    with pytest.raises(ClientGoneError):
        await (answer.relay(Pieces(b""), Limits()) if way == "relay" else answer.end_in_error(b"data: late\n\n"))
    assert connection.is_aborted


async def test_a_body_that_drips_longer_than_the_deadline_is_answered(world):
    await world.start("d0", limits=Limits(idle_seconds=30))

    async def drip():
        yield b'{"model":'
        await asyncio.sleep(30)
        yield b'"m"}'

    got = await world.post(drip(), headers=SOON)
    assert (got.status, got.json["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_worker_gets_the_time_that_is_left(world, short):
    await world.start("d0")
    await world.post(short, headers={DEADLINE_SECONDS: "60"})
    left = float(world.workers["d0"].seen[0].headers[DEADLINE_SECONDS])
    assert 0 < left <= 60
    await world.post(short)
    assert DEADLINE_SECONDS not in world.workers["d0"].seen[1].headers
