"""A scripted server for either client, and a real gateway before a real worker for the examples of the documents."""

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from tests.serving import serving
from tests.tables import make_instance, make_table
from tests.waiting import eventually

from prfaas.client import AsyncClient, Client
from prfaas.processes import ends_with_us
from prfaas.wire.routes import encode

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ADDRESSES = (f"127.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}.{n}" for n in itertools.count(2))


class Seen(NamedTuple):
    path: str
    headers: dict[str, str]
    json: Any


class Server:
    """Answers requests by a script, one reply after the other; the last one for ever."""

    def __init__(self) -> None:
        self.script: list[Reply] = []
        self.seen: list[Seen] = []
        self.aborted = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.path, headers, json.loads(body) if body else None))
        reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        try:
            return await reply(request)
        except asyncio.CancelledError:
            self.aborted.set()
            raise


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    async with serving(made.handle) as made.url:
        yield made


class Both:
    """Either client behind the asynchronous one's methods, so that one test holds for both."""

    def __init__(self, client: Client | AsyncClient):
        self.client = client

    async def call(self, method: str, *args: Any, **parameters: Any) -> Any:
        found = getattr(self.client, method)
        if isinstance(self.client, AsyncClient):
            return await found(*args, **parameters)
        return await asyncio.to_thread(found, *args, **parameters)

    async def texts(self, method: str, *args: Any, into: list[str]) -> Any:
        """Read a stream to its end, and return it."""
        stream = await self.call(method, *args)
        if isinstance(self.client, AsyncClient):
            async for chunk in stream:
                into.append(chunk.text)
        else:
            await asyncio.to_thread(lambda: into.extend(chunk.text for chunk in stream))
        return stream


@pytest.fixture(params=[Client, AsyncClient])
async def either(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[Callable[..., Both]]:
    """Make clients of one kind and of the other."""
    made: list[Both] = []

    def make(**options: Any) -> Both:
        made.append(Both(request.param(server.url, **options)))
        return made[-1]

    yield make
    for one in made:
        await one.call("close")


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real gateway before one real worker with the model `tiny`."""
    folder = tmp_path_factory.mktemp("endpoint")
    worker_log, gateway_log = folder / "worker.log", folder / "gateway.log"
    worker = f"http://{(host := next(_ADDRESSES))}:8000"
    routes = folder / "routes.json.gz"
    routes.write_bytes(encode(make_table(make_instance("d0", url=worker), model="tiny", mode="Fixed")))
    flags = ["--model-source", "builtin:kimi-linear-tiny", "--model-name", "tiny", "--host", host, "--instance", "d0"]
    processes = [
        _started([sys.executable, "-m", "prfaas_worker", *flags, "--threads", "1"], worker_log),
        _started(
            [sys.executable, "-m", "prfaas_gateway", "--port", "0", "--admin-port", "0", "--routes-file", str(routes)],
            gateway_log,
        ),
    ]
    try:
        eventually(lambda: _is_ready(f"{worker}/readyz"), lambda: f"the worker starts: {worker_log.read_text()}")
        found = eventually(
            lambda: re.search(r"listening on (\S+)", gateway_log.read_text()),
            lambda: f"the gateway starts: {gateway_log.read_text()}",
        )
        yield f"http://{found.group(1)}"
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def _started(command: list[str], log: Path) -> subprocess.Popen:
    with log.open("wb") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*ends_with_us(), *command], stdout=output, stderr=output, env=environment, start_new_session=True
        )


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
