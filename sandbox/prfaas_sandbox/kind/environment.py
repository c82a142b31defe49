"""A pair of kind clusters as an `Environment`: starts it, serves it like the sandbox, and removes it completely."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Final, Self

import httpx

from prfaas.errors import ConfigError, UnreachableError
from prfaas_sandbox.environment import ClusterAccess, Images, run_in
from prfaas_sandbox.kind import clusters, prometheus, vllm
from prfaas_sandbox.kind.clusters import Clusters, remove_everything
from prfaas_sandbox.kind.docker import daemon_answers, docker, ensure_daemon, stop_daemon
from prfaas_sandbox.kind.images import (
    KEPT_IMAGES,
    ImageBuilder,
    clear_work,
    node_image,
    product_images,
    prometheus_image,
    remove_images,
)
from prfaas_sandbox.kind.layout import NODE_PORTS, PROMETHEUS_NODE_PORT, Layout
from prfaas_sandbox.network import checked_rate
from prfaas_sandbox.processes import at_once
from prfaas_sandbox.progress import OnProgress
from prfaas_sandbox.tools import HELM, KIND, ensure_modules, ensure_tools

INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
ENOUGH_INOTIFY = 256
OUTSIDE = "-outside"
OUTSIDE_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.2


@dataclass(frozen=True)
class Programs:
    kind: Path
    helm: Path
    kubectl: Path


def programs(report: OnProgress) -> Programs:
    """Return the programs, built if needed; any kubectl on PATH is accepted."""
    found = ensure_modules((KIND, HELM), report)
    kubectl = shutil.which("kubectl")
    return Programs(found["kind"], found["helm"], Path(kubectl) if kubectl else ensure_tools(report)["kubectl"])


class KindEnvironment:
    """A running pair of kind clusters, an `Environment`; get one from `up` or `running`."""

    command = "kind"

    def __init__(self, layout: Layout, used: Programs, access: tuple[ClusterAccess, ClusterAccess], images: Images):
        self.layout = layout
        self.images: Images | None = images
        self.hub, self.member = access
        self.prometheus_url = ""
        self._programs = used

    @classmethod
    async def up(cls, layout: Layout, *, link_mbps: float, report: OnProgress) -> Self:
        """Start all that does not run: Docker's daemon, images, clusters, link and Prometheus.

        Raises ConfigError, with the cure, if this machine lacks something; PeerError, with the output, if a step fails.
        """
        layout.logs.mkdir(parents=True, exist_ok=True)
        layout.state.chmod(0o700)
        await ensure_daemon(layout, report)
        used = await asyncio.to_thread(programs, report)
        builder, pair = ImageBuilder(layout, report), Clusters(layout, used.kind, used.kubectl, report)
        _warn_of_inotify(report)
        nodes = await node_image(builder)
        async with at_once() as group:  # a cluster mostly waits for itself
            group.create_task(pair.ensure(nodes))
            made = group.create_task(_images(builder))
        images, watcher = made.result()
        await remove_images(KEPT_IMAGES, {nodes.reference, watcher, *filter(None, astuple(images))})
        await clusters.shape_link(layout, link_mbps)
        found = await clusters.addresses(layout)
        hub, member = (cluster.access(found[cluster.role]) for cluster in layout.clusters)
        self = cls(layout, used, (hub, member), images)
        engines = [image for image in (images.worker, images.connector, images.vllm) if image]
        await pair.load({"hub": [watcher], "member": []})
        report("installing Prometheus in the hub, while the other images go in")
        async with at_once() as group:
            group.create_task(prometheus.install(str(used.kubectl), layout, (hub, member), watcher))
            group.create_task(pair.load({"hub": [images.operator, images.gateway, *engines], "member": engines}))
        self.prometheus_url = await mapped(layout, PROMETHEUS_NODE_PORT)
        return self

    @classmethod
    @asynccontextmanager
    async def running(cls, layout: Layout, *, link_mbps: float, report: OnProgress) -> AsyncIterator[Self]:
        """Start a pair for the block, and remove it at the end, even after errors."""
        try:
            yield await cls.up(layout, link_mbps=link_mbps, report=report)
        finally:
            await asyncio.shield(down(layout))

    async def kubectl(self, cluster: ClusterAccess, *arguments: str, stdin: str | None = None) -> str:
        return await run_in(self._programs.kubectl, cluster, arguments, stdin)

    async def helm(self, cluster: ClusterAccess, *arguments: str) -> str:
        return await run_in(self._programs.helm, cluster, arguments)

    async def forward(self, cluster: ClusterAccess, namespace: str, service: str, port: int | str) -> str:
        """Return a URL on 127.0.0.1 for a port of a Service of the hub. Kube-proxy chooses a pod for each connection.

        Docker accepts connections before kube-proxy has a route, and breaks them. So this waits until HTTP is answered.
        Raises UnreachableError after a minute without an answer, and ConfigError for a Service of the member or if all
        mapped ports are used.
        """
        if cluster != self.hub:
            raise ConfigError("only Services of the hub can be reached from this machine")
        found = json.loads(await self.kubectl(cluster, "-n", namespace, "get", "service", service, "-o", "json"))
        way = next(way for way in found["spec"]["ports"] if port in (way["port"], way.get("name")))
        node_port = await self._node_port(namespace, service)
        outside = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": service + OUTSIDE, "namespace": namespace},
            "spec": {
                "type": "NodePort",
                "selector": found["spec"]["selector"],
                "ports": [{"port": way["port"], "targetPort": way["targetPort"], "nodePort": node_port}],
            },
        }
        await self.kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(outside))
        url = await mapped(self.layout, node_port)
        await _answered(url)
        return url

    async def _node_port(self, namespace: str, service: str) -> int:
        """Return the hub node's port of a Service, or a free one."""
        listed = json.loads(await self.kubectl(self.hub, "get", "services", "-A", "-o", "json"))["items"]
        taken = {
            way["nodePort"]: (each["metadata"]["namespace"], each["metadata"]["name"])
            for each in listed
            for way in each["spec"].get("ports", ())
            if "nodePort" in way
        }
        for port in NODE_PORTS:
            if taken.get(port, (namespace, service + OUTSIDE)) == (namespace, service + OUTSIDE):
                return port
        raise ConfigError(
            f"the hub's node has no free mapped port for Service {service}: delete one that ends in {OUTSIDE}"
        )

    async def shape_link(self, mbps: float) -> None:
        await clusters.shape_link(self.layout, checked_rate(mbps))

    async def cut_link(self) -> None:
        await clusters.cut_link(self.layout)

    async def restore_link(self) -> None:
        await clusters.open_link(self.layout)

    async def kill_pod(self, cluster: ClusterAccess, namespace: str, pod: str) -> None:
        owner = self.layout.hub if cluster == self.hub else self.layout.member
        await clusters.kill_pod(owner, namespace, pod)

    def program(self, name: str) -> str:
        return name if shutil.which(name) else str(getattr(self._programs, name))


async def _images(builder: ImageBuilder) -> tuple[Images, str]:
    """Return prfaas's images, with that of vLLM where this machine has one, and Prometheus's."""
    images, watcher = await product_images(builder), await prometheus_image(builder)
    if not vllm.why_not():
        images = replace(images, vllm=await vllm.vllm_image(builder))
    return images, watcher


async def mapped(layout: Layout, node_port: int) -> str:
    """Return the URL on 127.0.0.1 of a port of the hub's node."""
    address = (await docker("port", layout.hub.node, f"{node_port}/tcp")).splitlines()[0]
    return f"http://{address}"


async def down(layout: Layout, *, purge: bool = False) -> None:
    """Remove clusters, network, helper containers and files, and end our daemon; `purge` removes images too. Repeating
    is harmless.
    """
    if await daemon_answers():
        await remove_everything(layout)
        if purge:
            await remove_images()
    elif purge:
        raise ConfigError("Docker's daemon does not run, so its images cannot be removed: `make kind` starts it")
    await asyncio.to_thread(stop_daemon, layout)
    await asyncio.to_thread(clear_work)
    await asyncio.to_thread(shutil.rmtree, layout.state, ignore_errors=True)


def _warn_of_inotify(report: OnProgress) -> None:
    """Warn of the cause of `too many open files` in a node, before it happens."""
    if INOTIFY.exists() and (limit := int(INOTIFY.read_text())) < ENOUGH_INOTIFY:
        report(
            f"fs.inotify.max_user_instances is {limit}, which may be too few for two nodes: sysctl -w raises it to 512"
        )


async def _answered(url: str) -> None:
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False) as http:
        try:
            async with asyncio.timeout(OUTSIDE_SECONDS):
                while True:
                    try:
                        await http.get(url)
                    except httpx.TransportError:
                        await asyncio.sleep(POLL_SECONDS)
                    else:
                        return
        except TimeoutError as error:
            reason = f"{url} was not answered within {OUTSIDE_SECONDS:.0f} s; does the Service have a ready pod?"
            raise UnreachableError(reason) from error
