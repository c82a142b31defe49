"""The way of one offloaded request is short: how many files of ours it enters, counted where the request runs.

A gateway, a source and a destination run as separate processes, each under a profiler of function calls. A file
counts if each of three requests enters a function of it that the idle system (heartbeats, polling, metrics) does not
enter: what runs now and then beside a request is no part of its way. docs/understand/architecture.md describes the way.
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from prfaas.names import HUB
from prfaas.wire import headers
from prfaas.wire.routes import Cluster, Instance, LinkWatermarks, RoutingTable, Threshold, encode

pytestmark = pytest.mark.system

ROOT: Final = Path(__file__).parents[3]
BUDGET: Final = 107
"""Files of ours that every offloaded request enters, in all five processes together, with those of model and core."""
IDLE_SECONDS: Final = 3.0
REQUEST_SECONDS: Final = 1.0
"""How long a window stays open: an idle system's polls come once in some seconds, a request's last words at once."""
PROFILER: Final = '''
"""Notes which functions of ours this process enters while the file `window` says so."""
import os, sys, threading, time
from pathlib import Path

folder = Path(__file__).parent
phase, entered = "", {}

def profile(frame, event, argument):
    if phase and event == "call" and frame.f_code.co_name != "<module>":
        entered.setdefault(phase, set()).add((frame.f_code.co_filename, frame.f_code.co_qualname))

def watch():
    global phase
    seen = None
    while True:
        try:
            phase = (folder / "window").read_text()
        except OSError:
            phase = ""
        if phase != seen:
            for name, functions in list(entered.items()):
                named = [one for one in tuple(functions) if "/prfaas" in one[0] and "/site-packages/" not in one[0]]
                ours = sorted(f"{file} {function}" for file, function in named)
                (folder / f"{name}-{os.getpid()}").write_text("\\n".join(ours))
            seen = phase
            (folder / f"seen-{os.getpid()}").write_text(seen)
        time.sleep(0.05)

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(profile)
sys.setprofile(profile)
'''


class Profiled:
    """What processes entered, by phase."""

    def __init__(self, folder: Path):
        self._folder = folder

    async def phase(self, name: str, seconds: float, during: Callable[[], Awaitable[None]] | None = None) -> set[str]:
        """Return FILE FUNCTION of all that processes enter while `during` is awaited, and for `seconds` after it."""
        window = self._folder / "window"
        window.write_text(name)
        await self._until_seen(name)
        if during is not None:
            await during()
        await asyncio.sleep(seconds)
        window.unlink()
        await self._until_seen("")
        lines = (line for one in self._folder.glob(f"{name}-*") for line in one.read_text().splitlines())
        return {line.removeprefix(f"{ROOT}/") for line in lines if line.startswith(str(ROOT))}

    async def _until_seen(self, phase: str) -> None:
        async with asyncio.timeout(60):
            while any(one.read_text() != phase for one in self._living()):  # noqa: ASYNC110  # processes, not tasks
                await asyncio.sleep(0.05)

    def _living(self) -> list[Path]:
        seen = list(self._folder.glob("seen-*"))
        return [one for one in seen if Path("/proc", one.name.removeprefix("seen-")).exists()]


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profiled:
    folder = tmp_path / "profiled"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PROFILER)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return Profiled(folder)


def table(source: str, destination: str) -> RoutingTable:
    return RoutingTable(
        policy="p",
        namespace="n",
        generation=1,
        model="tiny",
        on_offload_failure="Reject",
        threshold=Threshold(mode="Fixed", tokens=100, min_tokens=1, max_tokens=100_000),
        watermarks=LinkWatermarks(high_percent=80, low_percent=50),
        short_interval_seconds=1,
        clusters=(Cluster(name="member", capacity_mbps=1000, utilisation_query=""),),
        instances=(
            Instance(name="source", pool="p", cluster="member", role="prefill", url=source),
            Instance(name="destination", pool="d", cluster=HUB, role="decode", url=destination),
        ),
    )


@asynccontextmanager
async def gateway(routes: Path) -> AsyncIterator[str]:
    command = [sys.executable, "-m", "prfaas_gateway", "--port", "0", "--admin-port", "0", "--routes-file", str(routes)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    log = ""
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while not (found := re.search(r"listening on (\S+)", log)):
                line = (await process.stderr.readline()).decode()
                assert line, f"the gateway ended: {log}"
                log += line
        yield f"http://{found[1]}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_an_offloaded_request_enters_few_files(launch, profiled: Profiled, tmp_path: Path):
    source = launch("source", "--role", "prefill", "--cluster", "member")
    destination = launch("destination", "--role", "decode")
    await asyncio.gather(source.ready(), destination.ready())
    routes = tmp_path / "routes.json.gz"
    routes.write_bytes(encode(table(source.url, destination.url)))
    async with gateway(routes) as url, aiohttp.ClientSession() as session:

        async def ask(prompt: str) -> None:
            message = [{"role": "user", "content": prompt}]
            body = {"model": "tiny", "messages": message, "max_tokens": 4, "stream": True}
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text
                assert answer.headers[headers.DECISION] == "offload"
                assert "[DONE]" in text

        await ask("first " * 200)  # connections, caches of compiled things
        idle = await profiled.phase("idle", IDLE_SECONDS)
        ways = [
            await profiled.phase(word, REQUEST_SECONDS, lambda word=word: ask(f"{word} " * 200)) - idle
            for word in ("second", "third", "fourth")
        ]
    entered = set[str].intersection(*({one.partition(" ")[0] for one in functions} for functions in ways))

    for way in (
        "prfaas_gateway/dispatch",
        "front/generate",
        "engine/remote",
        "engine/loop",
        "transfer/send",
        "transfer/pull",
    ):
        assert any(way in one for one in entered), way
    assert len(entered) <= BUDGET, "\n".join(sorted(entered))
