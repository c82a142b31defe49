"""Two control planes, the operator, a relay that can freeze between hub and member, and kubelets that are played."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.operator_kills import Place, credentials, prepare, resource

from prfaas.kube.session import ObjectKind
from prfaas.kube.watch import BOOKMARK, DELETED
from prfaas.names import KUBECONFIG_SECRET, LABEL_SECRET
from prfaas.ports import free_ports
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.connect import KubeContext, open_context
from prfaas_operator.clusters.kinds import POD, Object
from prfaas_operator.errors import ConflictError
from prfaas_sandbox.controlplane import ControlPlane
from prfaas_sandbox.tools import Tools

HUB, MEMBER, CLUSTER = "scale", "scale-member", "far"
CALLS_AT_ONCE = 16
CONVERGE_SECONDS = 900.0
WRITTEN = "prefillpools,deployments,configmaps,poddisruptionbudgets,secrets"


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

    def __init__(self, cluster: ClusterClient, subnet: int):
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


async def follow(cluster: ClusterClient, kind: ObjectKind) -> AsyncIterator[Object]:
    """Yield every object of a kind, and again whenever it changes."""
    since = ""
    async for items, version in cluster.pages(kind):
        since = version
        for item in items:
            yield item
    while True:
        async for event in cluster.watch(kind, selector="", since=since):
            since = event.object["metadata"]["resourceVersion"]
            if event.type not in {BOOKMARK, DELETED}:
                yield event.object


class Operator:
    """The real process, with what it tells of itself."""

    def __init__(self, namespace: str, kubeconfig: Path, log: Path):
        self._ports = free_ports(2)
        command = [sys.executable, "-m", "prfaas_operator", "--namespace", namespace, "--certificates", "Disabled"]
        command += ["--gateway-image", "gateway", "--worker-image", "worker", "--connector-image", "connector"]
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

    hub: ClusterClient
    member: ClusterClient
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
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "far-kubeconfig", "labels": {LABEL_SECRET: KUBECONFIG_SECRET}},
        }
        reference = {
            "kubeconfigSecretRef": {"name": "far-kubeconfig"},
            "namespace": MEMBER,
            "link": {"capacityMbps": 100},
        }
        places[0].apply(
            {**secret, "stringData": {"kubeconfig": json.dumps(document)}},
            resource("MemberCluster", CLUSTER, **reference),
        )
        contexts = [KubeContext(place.kubeconfig, None, place.namespace) for place in places]
        hub, member = [await stack.enter_async_context(open_context(one)) for one in contexts]
        kubelets = [asyncio.create_task(Kubelets(one, subnet).run()) for one, subnet in ((hub, 1), (member, 2))]
        try:
            yield Stage(hub, member, places, relay, folder)
        finally:
            for task in kubelets:
                task.cancel()
            await asyncio.gather(*kubelets, return_exceptions=True)
