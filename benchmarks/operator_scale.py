"""The operator among many pools: how soon it knows all after a start, what it costs at rest, how fast it reacts.

    prfaas bench operator_scale [--pools 1000] [--pods-per-pool 10] [--rest-seconds 60] [--outage-seconds 30]

Two real control planes with their own controllers, the real operator with the charts' rights, half of the pools in the
hub and half in the member. Nodes are played: what a kubelet writes of a pod, `Kubelets` writes as soon as a pod is
there. The API server that the operator reaches the member by is behind a relay, which freezes for the outage: its
connections stay open and no byte passes, the worst way in which a network fails.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.operator_kills import MODEL, Place, credentials, prepare, resource
from benchmarks.report import Figure, cpu_seconds, run

from prfaas.ports import free_ports
from prfaas_operator.clusters.api import DEPLOYMENT, POD, PREFILL_POOL, Kind, Object
from prfaas_operator.clusters.client import KubernetesCluster
from prfaas_operator.clusters.connect import connect_context
from prfaas_operator.errors import ConflictError
from prfaas_sandbox.build import ensure_tools
from prfaas_sandbox.controlplane import ControlPlane
from prfaas_sandbox.tools import Tools

HUB, MEMBER, CLUSTER = "scale", "scale-member", "far"
CALLS_AT_ONCE = 16
CONVERGE_SECONDS = 900.0
REACTIONS = 100
WRITTEN = "prefillpools,deployments,configmaps,poddisruptionbudgets,secrets"


def say(words: str) -> None:
    print(f"{time.strftime('%T')} {words}", file=sys.stderr, flush=True)


async def all_of(calls: Iterable[Any]) -> None:
    """Make many calls, a few at once."""
    turn = asyncio.Semaphore(CALLS_AT_ONCE)

    async def one(call: Any) -> None:
        async with turn:
            await call

    await asyncio.gather(*map(one, calls))


class Relay:
    """A TCP relay in front of an API server, which can freeze: connections stay open, no byte passes."""

    def __init__(self, server: str):
        target = urlsplit(server)
        self._target = (target.hostname, target.port)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.url = ""

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there = await asyncio.open_connection(*self._target)
            await asyncio.gather(self._relay(reader, there[1]), self._relay(there[0], writer), return_exceptions=True)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()


class Kubelets:
    """What the kubelets of one cluster write: that a pod is ready, as soon as it is there."""

    def __init__(self, cluster: KubernetesCluster, subnet: int):
        self._cluster = cluster
        self._subnet = subnet
        self._turn = asyncio.Semaphore(CALLS_AT_ONCE)
        self._started: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Go on until cancelled."""
        async for pod in follow(self._cluster, POD):
            name = pod["metadata"]["name"]
            if name not in self._started:
                self._started.add(name)
                task = asyncio.create_task(self._start(name, len(self._started)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _start(self, name: str, number: int) -> None:
        address = f"10.{self._subnet}.{number // 250}.{number % 250 + 1}"
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "status": {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "hostIP": "192.168.7.7",
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        async with self._turn:
            with contextlib.suppress(ConflictError):
                await self._cluster.apply(body, subresource="status")


async def follow(cluster: KubernetesCluster, kind: Kind) -> AsyncIterator[Object]:
    """Yield every object of a kind, and again whenever it changes."""
    page = await cluster.page(kind)
    for item in page.items:
        yield item
    since = page.resource_version
    while True:
        async for event in cluster.watch(kind, selector="", since=since):
            since = event.object["metadata"]["resourceVersion"]
            if event.type != "DELETED":
                yield event.object


class Operator:
    """The real process, with what it tells of itself."""

    def __init__(self, namespace: str, kubeconfig: Path, log: Path):
        self._ports = free_ports(2)
        command = [sys.executable, "-m", "prfaas_operator", "--namespace", namespace, "--certificates", "Disabled"]
        command += ["--metrics-port", str(self._ports[0]), "--health-port", str(self._ports[1])]
        self._log = log.open("ab")
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)

    def end(self) -> None:
        """Kill it, as a node that fails does."""
        self.process.kill()
        self.process.wait()
        self._log.close()

    def ready_pools(self) -> int:
        """Return how many pools this process has looked at and found ready."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[0]}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0
        return sum(
            line.startswith('prfaas_operator_object_ready{kind="PrefillPool"') and line.endswith(" 1.0")
            for line in lines
        )

    async def settled(self, pools: int) -> float:
        """Wait until all pools are ready; return the seconds since the process began."""
        while await asyncio.to_thread(self.ready_pools) < pools:
            if time.monotonic() - self.started_at > CONVERGE_SECONDS or self.process.poll() is not None:
                raise RuntimeError(f"{self.ready_pools()} of {pools} pools are ready; see {self._log.name}")
            await asyncio.sleep(0.2)
        return time.monotonic() - self.started_at

    def resident_mib(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass
class Stage:
    """Both clusters with what acts in them."""

    hub: KubernetesCluster
    member: KubernetesCluster
    places: tuple[Place, Place]
    relay: Relay
    folder: Path

    def operator(self) -> Operator:
        return Operator(HUB, self.folder / "operator.kubeconfig", self.folder / "operator.log")

    def versions(self) -> dict[str, str]:
        """Return the version of all that the operator may write, but the MemberCluster's time of contact."""
        return {
            f"{place.namespace} {each['kind']} {each['metadata']['name']}": each["metadata"]["resourceVersion"]
            for place, kinds in zip(self.places, (WRITTEN, WRITTEN.removeprefix("prefillpools,")), strict=True)
            for each in place.listing(kinds)
        }


class Changes:
    """Scales pools one after the other, and sees when their Deployments follow."""

    def __init__(self, stage: Stage, names: list[str], replicas: int):
        self._stage = stage
        self._wanted = dict.fromkeys(names, replicas)
        self._pending: dict[str, asyncio.Future[float]] = {}
        self._tasks = [asyncio.create_task(self._watch(one)) for one in (stage.hub, stage.member)]

    async def one(self, name: str) -> float:
        """Change a pool; return the seconds until its Deployment has it."""
        return await asyncio.wait_for((await self.begin(name)), CONVERGE_SECONDS)

    async def begin(self, name: str) -> "asyncio.Task[float]":
        """Change a pool, and return what will give the seconds until its Deployment has it."""
        wanted = self._wanted[name] = self._wanted[name] ^ 1
        self._pending[name] = asyncio.get_running_loop().create_future()
        started = time.monotonic()
        await self._stage.hub.merge(PREFILL_POOL, name, {"spec": {"replicas": wanted}})
        return asyncio.create_task(self._until(self._pending[name], started))

    async def _until(self, applied: "asyncio.Future[float]", started: float) -> float:
        return await applied - started

    async def _watch(self, cluster: KubernetesCluster) -> None:
        async for deployment in follow(cluster, DEPLOYMENT):
            name = deployment["metadata"]["name"]
            waiting = self._pending.get(name)
            if waiting and not waiting.done() and deployment["spec"]["replicas"] == self._wanted[name]:
                waiting.set_result(time.monotonic())

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def pool_name(number: int) -> str:
    return f"pool-{number}"


async def create(stage: Stage, given: argparse.Namespace) -> None:
    """Create all pools, the odd ones in the member."""
    pools = [
        resource(
            "PrefillPool",
            pool_name(number),
            model=MODEL,
            replicas=given.pods_per_pool,
            clusterName=CLUSTER if number % 2 else "",
        )
        for number in range(given.pools)
    ]
    await all_of(stage.hub.create(PREFILL_POOL, pool) for pool in pools)


async def first_start(stage: Stage, given: argparse.Namespace) -> Figure:
    """Start an operator where nothing has been made yet, and end it when everything has."""
    fresh = stage.operator()
    try:
        took = await fresh.settled(given.pools)
    finally:
        fresh.end()
    say(f"everything was made in {took:.0f} s")
    return Figure(name="from nothing to all pools ready, pods by controllers and played kubelets", value=took, unit="s")


async def rest(stage: Stage, operator: Operator, given: argparse.Namespace) -> AsyncIterator[Figure]:
    """Yield what a settled operator costs while nothing changes."""
    await asyncio.sleep(given.rest_seconds / 4)  # what its own start has woken
    before, cpu, started = await asyncio.to_thread(stage.versions), cpu_seconds(operator.process.pid), time.monotonic()
    await asyncio.sleep(given.rest_seconds)
    share = 100 * (cpu_seconds(operator.process.pid) - cpu) / (time.monotonic() - started)
    after = await asyncio.to_thread(stage.versions)
    writes = sum(after.get(key) != version for key, version in before.items()) + len(after.keys() - before.keys())
    yield Figure(name="CPU at rest", value=share, unit="% of a core", reach=10)
    yield Figure(name="resident memory", value=operator.resident_mib(), unit="MiB", reach=400)
    yield Figure(name="pools and children written while nothing changed", value=writes, unit="", reach=0)


async def reactions(changes: Changes, given: argparse.Namespace) -> AsyncIterator[Figure]:
    """Yield how soon a change of a pool reaches its Deployment."""
    chance = random.Random(1)
    took = [await changes.one(pool_name(chance.randrange(given.pools))) for _ in range(REACTIONS)]
    yield Figure(name="pool changed to child applied, p50", value=percentile(took, 0.5), unit="s", reach=0.5)
    yield Figure(name="pool changed to child applied, p99", value=percentile(took, 0.99), unit="s", reach=2)


async def outage(stage: Stage, changes: Changes, given: argparse.Namespace) -> AsyncIterator[Figure]:
    """Freeze the way to the member while pools change; yield how the hub's fared, and when the member's followed."""
    chance = random.Random(2)
    stage.relay.freeze()
    late = [await changes.begin(pool_name(number)) for number in range(1, min(given.pools, 20), 2)]
    until, took = time.monotonic() + given.outage_seconds, []
    while time.monotonic() < until:
        took.append(await changes.one(pool_name(2 * chance.randrange(given.pools // 2))))
        await asyncio.sleep(0.2)
    stage.relay.thaw()
    thawed = time.monotonic()
    await asyncio.wait_for(asyncio.gather(*late), CONVERGE_SECONDS)
    healed = time.monotonic() - thawed
    yield Figure(
        name="p99 of the hub's pools while the member is frozen", value=percentile(took, 0.99), unit="s", reach=2
    )
    name = f"member thawed after {given.outage_seconds:g} s to all its changes applied"
    yield Figure(name=name, value=healed, unit="s", reach=15)


async def measured(stage: Stage, given: argparse.Namespace) -> list[Figure]:
    """Go through all phases."""
    figures = [await first_start(stage, given)]
    operator = stage.operator()
    try:
        took = await operator.settled(given.pools)
        say(f"all {given.pools} pools are known {took:.1f} s after a start")
        figures.append(Figure(name="start of the operator to all pools known", value=took, unit="s", reach=60))
        figures += [figure async for figure in rest(stage, operator, given)]
        say("at rest; now changes")
        changes = Changes(stage, [pool_name(number) for number in range(given.pools)], given.pods_per_pool)
        figures += [figure async for figure in reactions(changes, given)]
        say(f"now an outage of {given.outage_seconds:g} s")
        figures += [figure async for figure in outage(stage, changes, given)]
        changes.end()
    finally:
        operator.end()
    return figures


@contextlib.asynccontextmanager
async def staged(tools: Tools, folder: Path) -> AsyncIterator[Stage]:
    """Two clusters, prepared as the charts do, with kubelets and a MemberCluster."""
    for name in ("hub", "member"):
        (folder / name).mkdir()
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(ControlPlane.start("hub", tools, folder / "hub", scheduler=False))
        there = await stack.enter_async_context(ControlPlane.start("member", tools, folder / "member", scheduler=False))
        places = (Place(tools["kubectl"], here.kubeconfig, HUB), Place(tools["kubectl"], there.kubeconfig, MEMBER))
        await asyncio.to_thread(prepare, *places, tools["helm"])
        relay = await stack.enter_async_context(Relay(there.server))
        (folder / "operator.kubeconfig").write_text(credentials(places[0]))
        document = json.loads(credentials(places[1]))
        document["clusters"][0]["cluster"]["server"] = relay.url
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "far"}}
        reference = {"kubeconfigSecretRef": {"name": "far"}, "namespace": MEMBER, "link": {"capacityMbps": 100}}
        places[0].apply(
            {**secret, "stringData": {"kubeconfig": json.dumps(document)}},
            resource("MemberCluster", CLUSTER, **reference),
        )
        hub, member = [(await connect_context(place.kubeconfig, None, place.namespace)).cluster for place in places]
        for cluster in (hub, member):
            stack.push_async_callback(cluster.close)
        kubelets = [asyncio.create_task(Kubelets(one, subnet).run()) for one, subnet in ((hub, 1), (member, 2))]
        try:
            yield Stage(hub, member, places, relay, folder)
        finally:
            for task in kubelets:
                task.cancel()
            await asyncio.gather(*kubelets, return_exceptions=True)


async def _figures(given: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="prfaas-scale-") as folder:
        async with staged(ensure_tools(print), Path(folder)) as stage:
            await create(stage, given)
            say(f"{given.pools} pools are there")
            return await measured(stage, given)


def figures(given: argparse.Namespace) -> Iterator[Figure]:
    yield from asyncio.run(_figures(given))


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pools", type=int, default=1000)
    parser.add_argument("--pods-per-pool", type=int, default=10)
    parser.add_argument("--rest-seconds", type=float, default=60)
    parser.add_argument("--outage-seconds", type=float, default=30)


if __name__ == "__main__":
    run("operator_scale", __doc__, figures, flags)
