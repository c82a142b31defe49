"""An operator with good member clusters, before and after hostile ones join: its memory, and how the good ones fare."""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Final, NamedTuple

import msgspec
from aiohttp import web
from benchmarks.gateway.routers import started
from benchmarks.hardening.operating import Told, pool_name
from benchmarks.report import Figure, peak_mib, say
from benchmarks.worker_memory import memory_mib
from tests.attacks.hostile import Answer, lists_for_ever, page, redirected, same, text
from tests.memory_cluster import MemoryCluster
from tests.serving import serving

from prfaas.kube.session import ObjectKind
from prfaas.util import Deadline
from prfaas_operator.clusters.kinds import BY_NAME

GOOD: Final = ("near", "far")
QUIET_SECONDS, HOSTILE_SECONDS = 5.0, 20.0
PATIENCE_SECONDS: Final = 30.0
PAUSE_SECONDS: Final = 0.1
REACH_MIB: Final = 64.0
REACH_SECONDS: Final = 2.0
REACH_CALLS: Final = 3
Tell = Callable[[Told], None]
KINDS: Final[dict[str, ObjectKind]] = {kind.plural: kind for kind in BY_NAME.values()}


class Faced(NamedTuple):
    """Seconds of changes before and beside hostile members, memory, and the calls that each hostile member got."""

    quiet: list[float]
    beside: list[float]
    over_mib: float
    calls: list[int]


class GoodServer:
    """The API server of a good member: a cluster in memory over HTTP, whose watches tell nothing."""

    def __init__(self) -> None:
        self._cluster = MemoryCluster()
        self._applied: dict[tuple[str, int], asyncio.Future[float]] = {}

    def until_applied(self, name: str, replicas: int) -> "asyncio.Future[float]":
        """Return what will be the time at which a Deployment got so many replicas, by the monotonic clock."""
        return self._applied.setdefault((name, replicas), asyncio.get_running_loop().create_future())

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/version":
            return web.json_response({"gitVersion": "v1.34.4"})
        plural, *names = request.path.partition("/namespaces/")[2].split("/")[1:]
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.sleep(int(request.query["timeoutSeconds"]))
            return response
        if request.method == "PATCH":
            return web.json_response(await self._apply(json.loads(await request.read()), "dryRun" in request.query))
        if not names:
            items = await self._cluster.list_all(KINDS[plural])
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})
        found = await self._cluster.get(KINDS[plural], names[0])
        status = {"kind": "Status", "message": f"there is no {names[0]}"}
        return web.json_response(found) if found else web.json_response(status, status=404)

    async def _apply(self, body: dict, dry_run: bool) -> dict:
        applied = await self._cluster.apply(body, dry_run=dry_run)
        if body["kind"] == "Deployment" and not dry_run:
            waiting = self._applied.pop((body["metadata"]["name"], body["spec"]["replicas"]), None)
            if waiting and not waiting.done():
                waiting.set_result(time.monotonic())
        return applied


class HostileServer:
    """The API server of a member that answers probes well, so that it is followed, and all else in its own way."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.calls = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/version":
            return web.json_response({"gitVersion": "v1.34.4"})
        if request.query.get("limit") == "1":
            return page()
        self.calls += 1
        return self._answer(request)


def hostile_servers() -> dict[str, HostileServer]:
    answers = {"bomb": same(text), "pages": lists_for_ever, "redirect": redirected("http://127.0.0.1:9/")}
    return {name: HostileServer(answer) for name, answer in answers.items()}


@contextmanager
def operator() -> Iterator[tuple[int, Tell]]:
    """Start an operator; give its process, and what tells it something."""
    command = [sys.executable, "-m", "benchmarks.hardening.operating"]
    with started(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:

        def tell(told: Told) -> None:
            process.stdin.write(msgspec.json.encode(told).decode() + "\n")
            process.stdin.flush()

        try:
            yield process.pid, tell
        finally:
            process.stdin.close()


async def change(servers: dict[str, GoodServer], tell: Tell, numbers: Iterator[int], seconds: float) -> list[float]:
    """Give the pools of good members other numbers of replicas; return the seconds until each was applied there."""
    until, took = Deadline(seconds), list[float]()
    for name, server in itertools.cycle(servers.items()):
        if until.is_over:
            return took
        replicas = next(numbers)
        applied, began = server.until_applied(pool_name(name), replicas), time.monotonic()
        tell(Told(name, replicas=replicas))
        took.append(await asyncio.wait_for(applied, PATIENCE_SECONDS) - began)
        await asyncio.sleep(PAUSE_SECONDS)
    return took


async def _faced(hostile_seconds: float) -> Faced:
    good, evil, numbers = {name: GoodServer() for name in GOOD}, hostile_servers(), itertools.count(2)
    async with AsyncExitStack() as stack:
        pid, tell = stack.enter_context(operator())
        for name, server in good.items():
            first = server.until_applied(pool_name(name), 1)
            tell(Told(name, url=await stack.enter_async_context(serving(server.handle))))
            await asyncio.wait_for(first, PATIENCE_SECONDS)
        quiet = await change(good, tell, numbers, QUIET_SECONDS)
        idle_mib = memory_mib(pid)[0]
        say(f"{', '.join(evil)} join for {hostile_seconds:g} s")
        for name, server in evil.items():
            tell(Told(name, url=await stack.enter_async_context(serving(server.handle))))
        beside = await change(good, tell, numbers, hostile_seconds)
        return Faced(quiet, beside, peak_mib(pid) - idle_mib, [server.calls for server in evil.values()])


def faced(hostile_seconds: float = HOSTILE_SECONDS) -> Iterator[Figure]:
    found = asyncio.run(_faced(hostile_seconds))
    calls, slowest, before = min(found.calls), max(found.beside), max(found.quiet)
    yield Figure(
        name="hostile members: calls to each, or more", value=calls, unit="", better="higher", reach=REACH_CALLS
    )
    yield Figure(
        name="hostile members: the operator's peak memory over idle", value=found.over_mib, unit="MiB", reach=REACH_MIB
    )
    yield Figure(
        name="hostile members: slowest change of the others' pools",
        value=slowest,
        unit="s",
        reach=REACH_SECONDS,
        rival="before they joined",
        rival_value=before,
    )
