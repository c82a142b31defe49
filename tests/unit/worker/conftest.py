"""Real workers on loopback: each is the two processes that a pod runs, on its own address."""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prfaas import schedule
from prfaas.names import WORKER_DATA_PORT
from prfaas.processes import ends_with_us
from prfaas.wire.engine import LENGTH, ToEngine, ToFront, decode_for_engine, encode_batch
from prfaas.wire.prefill import new_transfer
from prfaas_worker.front.engine_client import EngineClient
from prfaas_worker.front.server import build_app
from prfaas_worker.front.serving import FrontState
from prfaas_worker.options import parse

from ...waiting import eventually_async

# Loopback addresses of this test process, so that several test runs can share a machine.
_ADDRESSES = (f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.{n}" for n in itertools.count(2))
START_SECONDS = 300.0  # `import torch` on a busy machine


class Worker:
    """A running prfaas-worker."""

    data_port = WORKER_DATA_PORT

    def __init__(self, log: Path, *flags: str):
        self.host = next(_ADDRESSES)
        self.url = f"{'https' if '--tls-dir' in flags else 'http'}://{self.host}:8000"
        self.log = log
        command = [*ends_with_us(), sys.executable, "-m", "prfaas_worker", "--model-source", "builtin:kimi-linear-tiny"]
        command += ["--model-name", "tiny", "--host", self.host, "--instance", log.stem, "--threads", "1", *flags]
        with log.open("wb") as output:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            # A process group as a shell makes it, and none of ours.
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    @property
    def engine_pid(self) -> int:
        """The engine process, found as the front's only child."""
        (pid,) = self._children()
        return pid

    async def begun(self) -> None:
        """Wait until the engine process was started."""
        await eventually_async(self._children, "the engine process is started", START_SECONDS)

    def interrupt(self) -> None:
        """Send what a terminal sends for Ctrl-C: SIGINT to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    async def ready(self) -> "Worker":
        """Wait until /readyz says yes."""
        async with aiohttp.ClientSession() as session:

            async def is_ready() -> bool:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    async with session.get(f"{self.url}/readyz", ssl=False) as answer:
                        return answer.status == 200
                except aiohttp.ClientConnectionError:
                    return False

            await eventually_async(is_ready, lambda: f"a worker is ready:\n{self.log.read_text()}", START_SECONDS, 0.1)
        return self

    async def exit_code(self) -> int:
        """Wait for the front to end."""
        await eventually_async(lambda: self.process.poll() is not None, "the front ends", START_SECONDS)
        return self.process.wait()

    def stop(self) -> None:
        """End it whatever it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def _children(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in found.split()]


@contextmanager
def launched(directory: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def launch(name: str, *flags: str) -> Worker:
        workers.append(Worker(directory / f"{name}.log", *flags))
        return workers[-1]

    try:
        yield launch
    finally:
        for worker in workers:
            worker.stop()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Start workers for one test."""
    with launched(tmp_path) as launch:
        yield launch


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    """A prefill and a decode worker that all tests share and none may break. Their steps are equally long: measured
    ones may differ, and then two answers differ in the last bits."""
    equal = ("--step-tokens", "2048")
    with launched(tmp_path_factory.mktemp("pair")) as launch:
        pair = launch("prefill", "--role", "prefill", *equal), launch("decode", "--role", "decode", *equal)
        asyncio.run(_all_ready(*pair))
        yield pair


async def _all_ready(*workers: Worker) -> None:
    await asyncio.gather(*(worker.ready() for worker in workers))


@pytest.fixture(scope="module")
def model() -> Any:
    """The model that ships along, without a worker."""
    from prfaas_worker.models import load_model

    return load_model("builtin:kimi-linear-tiny", 1)[0]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 tokens, so that short prompts take several steps."""
    monkeypatch.setitem(schedule.BUDGETS, "mixed", schedule.Budgets(64, 64))


class Client:
    """Talks to workers as a gateway does."""

    def __init__(self, session: aiohttp.ClientSession):
        self.session = session

    async def complete(
        self, worker: Worker, via: Worker | str | None = None, cluster: str = "", **fields: Any
    ) -> aiohttp.ClientResponse:
        """POST /v1/completions with greedy defaults, and read the body. `via` prefills, a worker or the host of a relay
        before one, of this cluster."""
        if via is None:
            return await self._read(worker.url, fields)
        transfer, host = new_transfer(), via.host if isinstance(via, Worker) else via
        prompt = {name: fields[name] for name in ("prompt", "cache_salt") if name in fields}
        source = {"prfaas": {"role": "source", **transfer}}
        destination = {"prfaas": {"role": "destination", **transfer, "host": host, "port": 8001, "cluster": cluster}}
        url = f"{worker.url.partition(':')[0]}://{host}:8000"
        filling = asyncio.ensure_future(self._read(url, {**prompt, "max_tokens": 1, "kv_transfer_params": source}))
        try:
            answer = await self._read(worker.url, {**fields, "kv_transfer_params": destination})
            await asyncio.wait([filling])
            return answer
        finally:
            filling.cancel()

    async def _read(self, url: str, fields: dict[str, Any]) -> aiohttp.ClientResponse:
        async with self._post(url, fields) as answer:
            await answer.read()
            return answer

    def open(self, worker: Worker, **fields: Any) -> Any:
        """Begin the same request, without a hand-off; its body is the caller's to read."""
        return self._post(worker.url, fields)

    def _post(self, url: str, fields: dict[str, Any]) -> Any:
        body = {"model": "tiny", "prompt": "def main(", "max_tokens": 8, "temperature": 0} | fields
        return self.session.post(f"{url}/v1/completions", json=body)

    async def status(self, worker: Worker, path: str) -> int:
        """Return the HTTP status of a GET."""
        async with self.session.get(f"{worker.url}{path}") as answer:
            return answer.status

    async def until_status(self, worker: Worker, path: str, wanted: int) -> None:
        """Wait until a GET has this status."""

        async def has_status() -> bool:
            return await self.status(worker, path) == wanted

        await eventually_async(has_status, f"{path} answers {wanted}")

    async def metrics(self, worker: Worker) -> dict[str, float]:
        """Return /metrics by sample name with labels."""
        async with self.session.get(f"{worker.url}/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def eventually(self, worker: Worker, **wanted: float) -> None:
        """Wait until these metrics have these values."""
        found: dict[str, float] = {}

        async def are_so() -> bool:
            metrics = await self.metrics(worker)
            found.update({name: metrics[name] for name in wanted})
            return found == wanted

        await eventually_async(are_so, lambda: f"metrics are {wanted}, last {found}")

    @staticmethod
    async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | str]:
        """Yield a stream's events, the closing [DONE] as text."""
        async for line in answer.content:
            if line.startswith(b"data: "):
                data = line[6:].strip().decode()
                yield data if data == "[DONE]" else json.loads(data)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A client for one test."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        yield Client(session)


class Front:
    """A front, HTTP and all, whose engine is played by the test at the other end of the socket."""

    def __init__(self, host: str, serving: FrontState, engine: socket.socket):
        self.host = host
        self.url = f"http://{host}:8000"
        self.serving = serving
        self._engine = engine

    async def say(self, *messages: ToFront) -> None:
        """Say something as the engine."""
        await asyncio.get_running_loop().sock_sendall(self._engine, encode_batch(messages))

    async def hear(self) -> ToEngine:
        """Read the front's next message as the engine."""
        length = LENGTH.unpack(await self._read(LENGTH.size))[0]
        (message,) = decode_for_engine(await self._read(length))
        return message

    async def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = await asyncio.get_running_loop().sock_recv(self._engine, size - len(data))
            assert more
            data += more
        return data


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """A front for one test; its model is not loaded until the test says so."""
    host = next(_ADDRESSES)
    flags = ["--model-source", "x", "--model-name", "tiny", "--host", host, "--instance", "pod-1"]
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    client = await EngineClient.connect(ours)
    reading = asyncio.create_task(client.run())
    serving = FrontState(parse(flags), client)
    runner = web.AppRunner(build_app(serving), handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, host, 8000).start()
    yield Front(host, serving, theirs)
    await runner.cleanup()
    client.close()
    theirs.close()
    await reading
