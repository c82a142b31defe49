"""A real gateway on loopback before workers that speak the wire contract and do what a test wants."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tests.tables import make_instance, make_table
from tests.waiting import eventually_async

from prfaas.wire import headers
from prfaas.wire.routes import Cluster, EngineName, RoutingTable, encode
from prfaas_gateway.kv import foreign_events, manager
from prfaas_gateway.limits import Limits
from prfaas_gateway.options import GatewayOptions
from prfaas_gateway.server import RunningGateway, serving

Reply = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
QUICK = Limits(connect_seconds=5, eject_seconds=0.1, eject_max_seconds=0.4, drain_lead_seconds=0.05, idle_seconds=5)
QUICK = QUICK._replace(hold_seconds=0.05, poll_seconds=0.02)


class Seen(NamedTuple):
    """One request as a worker got it."""

    path: str
    headers: dict[str, str]
    body: bytes


async def answer(_request: web.Request, body: bytes) -> web.StreamResponse:
    """Answer like a worker whose model takes 4 bytes a token of what the client sent."""
    if b"kv_transfer_params" in body:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        del fields["kv_transfer_params"]
        body = msgspec.json.encode(fields)
    reported = {headers.PROMPT_TOKENS: str(len(body) // 4), "x-extra": "kept"}
    return web.json_response({"object": "chat.completion"}, headers=reported)


async def not_yet(_request: web.Request) -> web.StreamResponse:
    """Publish no cache now."""
    return web.Response(status=503)


@dataclass
class Worker:
    """A worker's HTTP side. `reply` says what it does next; `aborted` is set when a caller leaves early."""

    name: str
    host: str = "127.0.0.1"
    url: str = ""
    reply: Reply = answer
    cache: Callable[[web.Request], Awaitable[web.StreamResponse]] = not_yet
    seen: list[Seen] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, self.host, port).start()
        self.url = f"http://{self.host}:{self.port}"

    @property
    def port(self) -> int:
        return self.runner.addresses[0][1]

    @property
    def data_port(self) -> int:
        """Its cache events are asked for here, too."""
        return self.port

    async def wait_aborted(self) -> None:
        await eventually_async(self.aborted.is_set, f"a caller of worker {self.name} leaves early")

    async def stop(self) -> None:
        """Die: the port refuses connections from now on."""
        await self.runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/v1/kv-events", "/v1/profile"):  # the gateway polls them; most have none
            return await self.cache(request)
        body = await request.read()
        self.seen.append(Seen(request.path, lower(request.headers), body))
        try:
            return await self.reply(request, body)
        except asyncio.CancelledError:
            self.aborted.set()
            raise


def lower(received: Mapping[str, str]) -> dict[str, str]:
    """Return headers under lower-case names."""
    return {name.lower(): value for name, value in received.items()}


class Answered(NamedTuple):
    """What a client got: status, headers and the raw body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)


class World:
    """One gateway, its workers by name, and its routing table. Workers named d... decode, p... prefill in the hub, and
    x... prefill in the member cluster eu.
    """

    def __init__(self, directory: Path):
        self.stack = AsyncExitStack()
        self.routes_file = directory / "routes.json.gz"
        self.control_socket = directory / "control.sock"
        self.workers: dict[str, Worker] = {}
        self.table: RoutingTable | None = None
        self.running: RunningGateway | None = None
        self.client: aiohttp.ClientSession | None = None

    async def start(
        self,
        *names: str,
        limits: Limits = QUICK,
        keys_dir: Path | None = None,
        shared_cache: bool = False,
        cors_origins: str = "",
        **table,
    ) -> None:
        for name in names:
            self.workers[name] = Worker(name)
            await self.workers[name].start()
            self.stack.push_async_callback(self.workers[name].stop)
        self.write_table(**table)
        config = GatewayOptions(
            "127.0.0.1",
            port=0,
            admin_port=0,
            routes_file=self.routes_file,
            control_socket=self.control_socket,
            keys_dir=keys_dir,
            shared_cache=shared_cache,
            cors_origins=cors_origins,
            limits=limits,
        )
        self.client = await self.stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        self.running = await self.stack.enter_async_context(serving(config._replace(drain_seconds=2)))

    def write_table(self, engine: EngineName = "prfaas", **table) -> RoutingTable:
        """Put all workers into a table, as instances of this engine."""
        workers = self.workers.items()
        fields = {
            "clusters": (Cluster(name="eu", capacity_mbps=100, utilisation_query="vector(0)"),),
            # A stand-in answers at one port for the API and for the mover.
            "instances": tuple(
                make_instance(name, url=one.url, engine=engine, data_port=one.data_port) for name, one in workers
            ),
        }
        return self._write(make_table(**(fields | table)))

    def change_instances(self, **changes) -> None:
        """Change all instances of the table, at once."""
        instances = tuple(msgspec.structs.replace(one, **changes) for one in self.table.instances)
        self.state.set_table(self._write(msgspec.structs.replace(self.table, instances=instances)))

    def _write(self, table: RoutingTable) -> RoutingTable:
        self.table = table
        self.routes_file.write_bytes(encode(table))
        return table

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.running.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.running.admin_port}"

    @property
    def state(self):
        return self.running.state

    async def post(self, body: bytes | BinaryIO | dict, path: str = "/v1/chat/completions", **options) -> Answered:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        async with self.client.post(self.url + path, data=data, **options) as response:
            return Answered(response.status, lower(response.headers), await response.read())

    async def get(self, path: str) -> Answered:
        return await self._get(self.url + path)

    async def get_admin(self, path: str) -> Answered:
        """Get something from the port of those who operate the gateway."""
        return await self._get(self.admin_url + path)

    async def _get(self, url: str) -> Answered:
        async with self.client.get(url) as response:
            return Answered(response.status, lower(response.headers), await response.read())

    async def control(self, method: str, path: str, body: bytes = b"") -> Answered:
        connector = aiohttp.UnixConnector(str(self.control_socket))
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.request(method, f"http://gateway{path}", data=body) as response,
        ):
            return Answered(response.status, lower(response.headers), await response.read())

    async def metric(self, line: str) -> float:
        """Return the value of one metric line, 0 where it is absent."""
        text = (await self.get_admin("/metrics")).body.decode()
        return next((float(one.rsplit(" ", 1)[1]) for one in text.splitlines() if one.startswith(line + " ")), 0.0)


def prompt(body_bytes: int) -> bytes:
    """Return a request body of exactly this size; 5 letters are a token to a gateway that has learnt nothing yet."""
    frame = b'{"model":"m","messages":[{"role":"user","content":""}]}'
    return frame[:-4] + b"x" * (body_bytes - len(frame)) + frame[-4:]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    async with made.stack:
        yield made
        if made.running is not None:
            made.running.state.check_integrity()


@pytest.fixture
def _quick_pauses(monkeypatch) -> None:
    monkeypatch.setattr(manager, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(manager, "MAX_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(foreign_events, "SILENCE_SECONDS", 0.2)


@pytest.fixture
def short() -> bytes:
    """A prompt below the tables' threshold of 1000 tokens."""
    return prompt(400)


@pytest.fixture
def long() -> bytes:
    """A prompt above it."""
    return prompt(40_000)
