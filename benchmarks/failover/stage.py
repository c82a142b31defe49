"""What is killed, and starts again: workers or vLLM servers, gateways, and the link between decode and prefill as a TCP
relay."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import aiohttp
from tests.vllm.engines import EngineHost
from tests.vllm.servers import FLAGS

from prfaas.ports import free_ports
from prfaas.processes import tail
from prfaas.wire.routes import Cluster, Instance, LinkWatermarks, RoutingTable, Threshold, encode

API_PORT, DATA_PORT = 8000, 8001
NET = f"127.{10 + os.getpid() % 80}.{os.getpid() // 80 % 250}"
"""Loopback addresses of this process alone."""
START_SECONDS = 180.0
THRESHOLD_TOKENS = 400


class Victim(Protocol):
    """What is killed and comes back under its own address."""

    name: str
    kills: int

    def kill(self) -> None:
        """End it at once, as a node that fails does."""
        ...

    async def come_back(self) -> None:
        """Start again, and wait until it serves."""
        ...

    async def ready(self) -> None:
        """Wait until it serves."""
        ...

    def end(self) -> None:
        """End it for good."""
        ...


async def answers_200(url: str) -> None:
    async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


async def is_free(address: str, port: int) -> None:
    """Wait until nobody listens: what is killed ends a moment later."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            with suppress(OSError):
                socket.create_server((address, port)).close()
                return
            await asyncio.sleep(0.1)


class Part:
    """A process that can be killed and comes back under its own address."""

    def __init__(self, name: str, command: list[str], ready_url: str, log: Path):
        self.name = name
        self.kills = 0
        self._command = command
        self._ready_url = ready_url
        self._log = log.open("ab")
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )

    def kill(self) -> None:
        """End it and its engine at once, as a node that fails does."""
        self.kills += 1
        for pid in (*_children(self._process.pid), self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    async def come_back(self) -> None:
        """Start again, and wait until it serves."""
        self._process = self._start()
        await self.ready()

    async def ready(self) -> None:
        """Wait until it serves."""
        await answers_200(self._ready_url)

    def end(self) -> None:
        """End it for good."""
        if self._process.poll() is None:
            self.kill()
        self._log.close()


class VllmPart:
    """`vllm serve` with our connector. Its restarts are forks of one process that has imported vLLM."""

    def __init__(self, name: str, address: str, engines: EngineHost):
        self.name = name
        self.kills = 0
        self._address = address
        self._url = f"http://{address}:{API_PORT}"
        connector = {
            "kv_connector": "PrfaasConnector",
            "kv_connector_module_path": "prfaas_vllm.connector",
            "kv_role": "kv_both",
            "kv_port": DATA_PORT,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host": address},
        }
        # The last of two flags counts.
        self._flags = [*FLAGS, "--host", address, "--port", str(API_PORT), "--served-model-name", "m"]
        self._flags += ["--kv-transfer-config", json.dumps(connector)]
        self._engines = engines
        self._log = engines.serve(name, self._flags)

    def kill(self) -> None:
        self.kills += 1
        self._engines.kill(self)

    async def come_back(self) -> None:
        for port in (API_PORT, DATA_PORT):
            await is_free(self._address, port)
        self._engines.serve(self.name, self._flags)
        await self.ready()

    async def ready(self) -> None:
        try:
            await answers_200(f"{self._url}/health")
        except TimeoutError as error:
            raise RuntimeError(f"{self.name} is not ready after {START_SECONDS:g} s:\n{tail(self._log)}") from error

    def end(self) -> None:
        self._engines.kill(self)


class Link:
    """Relays from one address to another, on both ports of a worker. Cut, it resets all and refuses more."""

    def __init__(self, name: str, host: str, target: str):
        self.name = name
        self.host = host
        self.kills = 0
        self._target = target
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def ready(self) -> None:
        await self.come_back()

    async def come_back(self) -> None:
        """Relay."""
        for port in (API_PORT, DATA_PORT):
            self._servers.append(await asyncio.start_server(self._relay(port), self.host, port))

    def kill(self) -> None:
        """Cut it."""
        self.kills += 1
        self.end()

    def end(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for writer in self._writers:
            writer.transport.abort()

    def _relay(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            try:
                theirs, to_them = await asyncio.open_connection(self._target, port)
                self._writers.add(to_them)
                await asyncio.gather(_pass_on(reader, to_them), _pass_on(theirs, writer))
                self._writers.discard(to_them)
            except (OSError, asyncio.CancelledError):
                pass  # cut, or the end of all
            finally:
                writer.transport.abort()
                self._writers.discard(writer)

        return relay


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class Stage:
    """Two decode instances, two prefill instances behind a link each, two gateways; instances of vLLM with a host."""

    def __init__(self, folder: Path, engines: EngineHost | None = None):
        self.folder = folder
        self._engines = engines
        self.decodes: list[Victim] = [
            self._instance(f"d{number}", f"{NET}.{2 + number}", "decode") for number in range(2)
        ]
        self.prefills: list[Victim] = [
            self._instance(f"x{number}", f"{NET}.{12 + number}", "prefill") for number in range(2)
        ]
        self.links: list[Victim] = [
            Link(f"link{number}", f"{NET}.{22 + number}", f"{NET}.{12 + number}") for number in range(2)
        ]
        routes = folder / "routes.json.gz"
        routes.write_bytes(encode(self._table()))
        self.ports, self.admin_ports = free_ports(2), free_ports(2)
        self.gateways: list[Victim] = [self._gateway(number, routes) for number in range(len(self.ports))]

    @property
    def parts(self) -> list[Victim]:
        """All that can be killed."""
        return [*self.decodes, *self.prefills, *self.links, *self.gateways]

    async def ready(self) -> None:
        """Wait until all serve."""
        await asyncio.gather(*(part.ready() for part in self.parts))

    def end(self) -> None:
        """End all."""
        for part in self.parts:
            part.end()

    @property
    def may_draw(self) -> bool:
        """Whether requests may have a seed."""
        return self._engines is None

    @property
    def near_tie(self) -> float:
        """How close the log-probabilities of two tokens are where another batch may choose the other."""
        return 1e-3 if self._engines is None else 0.25

    @property
    def urls(self) -> list[str]:
        """Addresses of all instances, those that decode first."""
        return [f"http://{NET}.{last}:{API_PORT}" for last in (2, 3, 12, 13)]

    def _instance(self, name: str, host: str, role: str) -> Victim:
        if self._engines is not None:
            return VllmPart(name, host, self._engines)
        command = [sys.executable, "-m", "prfaas_worker", "--model-source", "builtin:kimi-linear-tiny"]
        command += ["--model-name", "m", "--host", host, "--instance", name, "--role", role, "--threads", "1"]
        return Part(name, command, f"http://{host}:{API_PORT}/readyz", self.folder / f"{name}.log")

    def _gateway(self, number: int, routes: Path) -> Part:
        port, admin_port = self.ports[number], self.admin_ports[number]
        command = [sys.executable, "-m", "prfaas_gateway", "--port", str(port), "--admin-port", str(admin_port)]
        command += ["--routes-file", str(routes)]
        log = self.folder / f"gateway{number}.log"
        return Part(f"gateway{number}", command, f"http://127.0.0.1:{port}/readyz", log)

    def _table(self) -> RoutingTable:
        hosts = [("d0", 2), ("d1", 3), ("x0", 22), ("x1", 23)]  # prefill workers through their links
        return RoutingTable(
            policy="bench",
            namespace="bench",
            generation=1,
            model="m",
            on_offload_failure="PrefillLocally",
            threshold=Threshold(mode="Fixed", tokens=THRESHOLD_TOKENS, min_tokens=1, max_tokens=100_000),
            watermarks=LinkWatermarks(high_percent=80, low_percent=50),
            short_interval_seconds=1,
            clusters=(Cluster(name="far", capacity_mbps=1000, utilisation_query="vector(0)"),),
            instances=tuple(
                Instance(
                    name=name,
                    pool=name[0],
                    cluster="hub" if name[0] == "d" else "far",
                    role="decode" if name[0] == "d" else "prefill",
                    url=f"http://{NET}.{last}:{API_PORT}",
                    engine="prfaas" if self._engines is None else "vllm-prfaas",
                )
                for name, last in hosts
            ),
        )
