"""Proves the command itself: its mistakes, its memory, and that SIGTERM lets requests finish."""

import asyncio
import gzip
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.waiting import PATIENCE_SECONDS, NotInTime, assert_prompt, eventually_async

from prfaas_gateway import server
from prfaas_gateway.limits import Limits
from prfaas_gateway.options import GatewayOptions
from prfaas_gateway.server import KEPT_SECONDS

pytestmark = pytest.mark.system

RSS_LIMIT_BYTES = 100 * 1000 * 1000


class Process:
    """A gateway in its own process, before the world's workers."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process
        self.log = ""
        self.url = ""

    async def until_logged(self, pattern: str) -> re.Match:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not (found := re.search(pattern, self.log)):
                    line = (await self.process.stderr.readline()).decode()
                    assert line, f"the gateway ended: {self.log}"
                    self.log += line
        except TimeoutError:
            raise NotInTime(f"the gateway does not log {pattern}: {self.log}") from None
        return found

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def until_refused(self) -> None:
        """Wait until no new connection is taken."""

        async def is_refused() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return True
            writer.close()
            return False

        await eventually_async(is_refused, "the gateway takes no new connection", poll=0.05)


class FrozenError(Exception):
    """The search for garbage leaves out what is there from now on."""


async def test_what_a_gateway_is_made_of_is_not_searched_for_garbage_while_it_serves(monkeypatch):
    serves = []

    @asynccontextmanager
    async def serving(config):
        serves.append(config)
        yield

    def freeze():
        assert serves
        raise FrozenError

    monkeypatch.setattr(server, "serving", serving)
    monkeypatch.setattr(server.gc, "freeze", freeze)
    with pytest.raises(FrozenError):
        await server.run(GatewayOptions())


@pytest.fixture
async def process(world) -> AsyncIterator[Process]:
    await world.start("d0")
    command = [
        sys.executable,
        "-m",
        "prfaas_gateway",
        "--port",
        "0",
        "--admin-port",
        "0",
        "--routes-file",
        str(world.routes_file),
    ]
    made = Process(await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE))
    try:
        made.url = "http://" + (await made.until_logged(r"listening on (\S+)")).group(1)
        yield made
    finally:
        if made.process.returncode is None:
            made.process.kill()
        await made.process.communicate()


async def test_sigterm_lets_requests_finish_and_exits_with_zero(process, world):
    here, gate = asyncio.Event(), asyncio.Event()

    async def reply(_request, _body):
        here.set()
        await gate.wait()
        return web.json_response({"late": True})

    world.workers["d0"].reply = reply

    async def ask() -> dict:
        async with world.client.post(f"{process.url}/v1/completions", data=b'{"model":"m"}') as response:
            return await response.json()

    asking = asyncio.create_task(ask())
    await here.wait()
    process.process.send_signal(signal.SIGTERM)
    await process.until_logged("draining: 1 requests")
    async with world.client.get(f"{process.url}/readyz") as response:
        assert response.status == 503
    gate.set()
    assert await asking == {"late": True}
    assert await asyncio.wait_for(process.process.wait(), PATIENCE_SECONDS) == 0
    with pytest.raises(aiohttp.ClientConnectionError):
        await world.client.get(f"{process.url}/healthz")


async def test_new_connections_are_served_after_sigterm_while_peers_send_requests_on_them(process, world):
    async def ask_on_a_new_connection() -> int:
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{process.url}/v1/completions", data=b'{"model":"m"}') as response,
        ):
            return response.status

    assert await ask_on_a_new_connection() == 200
    process.process.send_signal(signal.SIGTERM)
    await process.until_logged("draining: 0 requests")
    for _ in range(30):  # three times as long as without any
        assert await ask_on_a_new_connection() == 200
        await asyncio.sleep(Limits().drain_lead_seconds / 10)
    await process.until_refused()
    assert await asyncio.wait_for(process.process.wait(), PATIENCE_SECONDS) == 0


@pytest.mark.quiet
async def test_answers_another_request_on_the_connection_of_a_stream_that_outlived_the_goodbye(process, world):
    here, gate = asyncio.Event(), asyncio.Event()

    async def stream(request, _body):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"choices":[]}\n\n')
        here.set()
        await gate.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    world.workers["d0"].reply = stream
    body = b'{"model":"m","stream":true}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
    writer.write(request)
    await asyncio.wait_for(here.wait(), PATIENCE_SECONDS)
    process.process.send_signal(signal.SIGTERM)
    await process.until_logged("draining: 1 requests")

    await process.until_refused()
    gate.set()
    assert b"Connection: close" not in await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), PATIENCE_SECONDS)
    ended = time.monotonic()
    await asyncio.sleep(0.1)  # what a busy client takes
    assert_prompt(time.monotonic() - ended, KEPT_SECONDS / 2, "this client asks again while its connection is kept")
    writer.write(request)
    last = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    assert last.startswith(b"HTTP/1.1 200 OK")
    assert b"Connection: close" in last
    assert b"[DONE]" in last
    writer.close()
    assert await asyncio.wait_for(process.process.wait(), PATIENCE_SECONDS) == 0


async def test_a_request_whose_body_still_comes_as_the_gateway_leaves_is_served(process):
    body = b'{"model":"m"}'
    reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:5])
    await writer.drain()
    await asyncio.sleep(0.3)
    process.process.send_signal(signal.SIGTERM)
    await process.until_refused()
    await asyncio.sleep(KEPT_SECONDS + 0.5)
    writer.write(body[5:])
    assert (await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    assert await asyncio.wait_for(process.process.wait(), PATIENCE_SECONDS) == 0


async def test_memory_stays_below_its_limit_under_large_prompts(process, world, long):
    async def ask(session: aiohttp.ClientSession) -> None:
        for _ in range(20):
            async with session.post(f"{process.url}/v1/completions", data=long) as response:
                assert response.status == 200

    await asyncio.gather(*(ask(world.client) for _ in range(16)))
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    assert int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024 < RSS_LIMIT_BYTES


async def test_memory_stays_below_its_limit_under_bodies_that_unpack_to_much(process, world):
    bomb = gzip.compress(b" " * (1 << 28))

    async def ask() -> int:
        packed = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with world.client.post(f"{process.url}/v1/completions", data=bomb, headers=packed) as response:
            return response.status

    at_once = 8
    statuses = Counter(await asyncio.gather(*(ask() for _ in range(at_once))))
    assert statuses.keys() <= {413, 429}  # the latter where others have the room meanwhile
    assert statuses[413] > 0
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    assert (
        int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024
        < RSS_LIMIT_BYTES + at_once * Limits().request_bytes
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--routes-file"),
        (["--policy", "p"], "--namespace"),
        (["--policy", "p", "--namespace", "n", "--routes-file", "f"], "--routes-file"),
        (["--routes-file", "f", "--port", "70000"], "70000"),
        (["--routes-file", "f", "--port", "http"], "--port"),
        (["--routes-file", "f", "--drain-seconds", "-1"], "-1"),
        (["--routes-file", "/absent/routes.json"], "/absent/routes.json"),
        (["--unknown"], "--unknown"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_and_exits_with_two(arguments, says, capsys, monkeypatch):
    from prfaas_gateway.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
