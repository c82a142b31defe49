"""Creates, fills and deletes a pair of kind clusters, and shapes and cuts the link between their nodes.

A healthy cluster is left as it is. The link is the Docker network between the two node containers. Each node's own end
is shaped, so that this machine outside the containers stays unchanged. Deleting a container undoes all of it. As in the
sandbox, pods of one cluster reach those of the other by their own addresses.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from prfaas.errors import PeerError
from prfaas_sandbox.cache.entries import cache_folder
from prfaas_sandbox.kind.docker import QUICK_SECONDS, docker, inspect, remove_all, succeeds
from prfaas_sandbox.kind.images import NodeImage
from prfaas_sandbox.kind.layout import KindCluster, Layout
from prfaas_sandbox.network import lose, token_bucket
from prfaas_sandbox.processes import Command, at_once, run
from prfaas_sandbox.progress import OnProgress, ticking

CREATE_TIMEOUT_SECONDS = 1200.0
READY_SECONDS = 240
READY_AGAIN_SECONDS = 90
LOAD_TIMEOUT_SECONDS = 900.0
IMAGES_PATH = "/prfaas-images"
CACHE_PATH = "/prfaas-cache"  # what this machine has built and installed, such as vLLM
KIND_SECONDS = 120.0
DEVICE = "eth0"
CONTAINERS = ("ctr", "-n", "k8s.io")
RATE_UNITS = {"": 1e-6, "K": 1e-3, "M": 1.0, "G": 1e3}


@dataclass(frozen=True)
class Clusters:
    """A pair of kind clusters. `report` gets lines of progress."""

    layout: Layout
    kind: Path
    kubectl: Path
    report: OnProgress

    async def ensure(self, image: NodeImage) -> None:
        """Create missing and broken clusters, and open the link between the two."""
        self.layout.images.mkdir(exist_ok=True)
        if not await succeeds("network", "inspect", self.layout.network):
            await docker("network", "create", "--label", self.layout.label, self.layout.network)
        async with at_once() as group:
            for cluster in self.layout.clusters:
                group.create_task(self._ensure(cluster, image))
        await open_link(self.layout)

    async def _ensure(self, cluster: KindCluster, image: NodeImage) -> None:
        if cluster.name in await self.names():
            if await self._well(cluster):
                self.report(f"cluster {cluster.name} is there")
                return
            self.report(f"cluster {cluster.name} exists but does not answer: deleting it")
            await self.delete(cluster)
        folders = {IMAGES_PATH: self.layout.images, CACHE_PATH: cache_folder()}
        config = configuration(cluster.config.read_text(), image, folders)
        words = ["create", "cluster", "--name", cluster.name, "--image", image.reference, "--config", "-"]
        words += ["--kubeconfig", str(cluster.kubeconfig), "--wait", f"{READY_SECONDS}s"]
        async with ticking(self.report, lambda: f"cluster {cluster.name}"):
            await self._kind(words, CREATE_TIMEOUT_SECONDS, config.encode())
        self.report(f"cluster {cluster.name} is ready")

    async def _well(self, cluster: KindCluster) -> bool:
        """Return whether a cluster is ready, or becomes ready after a start of its node."""
        try:
            if await inspect("{{.State.Running}}", cluster.node) != ["true"]:
                await docker("start", cluster.node)
            await self._kind(
                ["export", "kubeconfig", "--name", cluster.name, "--kubeconfig", str(cluster.kubeconfig)], KIND_SECONDS
            )
            ready = ["wait", "--for=condition=Ready", "nodes", "--all", f"--timeout={READY_AGAIN_SECONDS}s"]
            await run(Command([self.kubectl, "--kubeconfig", cluster.kubeconfig, *ready], timeout_seconds=KIND_SECONDS))
        except PeerError:
            return False
        return True

    async def load(self, wanted: dict[str, list[str]]) -> None:
        """Load images into clusters, by role; each image leaves Docker once."""
        targets: dict[str, list[KindCluster]] = {}
        for cluster in self.layout.clusters:
            present = (await execute(cluster, [*CONTAINERS, "images", "ls", "-q"])).split()
            for image in wanted[cluster.role]:
                if f"docker.io/{image}" not in present:
                    targets.setdefault(image, []).append(cluster)
        for image, clusters in targets.items():
            async with ticking(self.report, lambda name=image: f"clusters, {name} goes in"):
                await self._load(image, clusters)
        if targets:
            self.report("images are loaded")

    async def _load(self, image: str, clusters: list[KindCluster]) -> None:
        """Load an image by a folder that the nodes mount: `kind load` would pipe it through Docker."""
        archive = self.layout.images / "image.tar"
        try:
            await docker("save", "-o", archive, image, timeout_seconds=LOAD_TIMEOUT_SECONDS)
            seen = f"{IMAGES_PATH}/{archive.name}"
            words = [*CONTAINERS, "images", "import", "--all-platforms", "--digests", seen]
            await asyncio.gather(*(execute(cluster, words, LOAD_TIMEOUT_SECONDS) for cluster in clusters))
        finally:
            archive.unlink(missing_ok=True)

    async def names(self) -> list[str]:
        return (await self._kind(["get", "clusters"], KIND_SECONDS)).split()

    async def delete(self, cluster: KindCluster) -> None:
        words = ["delete", "cluster", "--name", cluster.name, "--kubeconfig", str(cluster.kubeconfig)]
        await self._kind(words, KIND_SECONDS)

    async def _kind(self, words: list[str], timeout_seconds: float, stdin: bytes | None = None) -> str:
        command = Command(
            [self.kind, *words],
            f"kind {' '.join(words)}",
            {"KIND_EXPERIMENTAL_DOCKER_NETWORK": self.layout.network},
            timeout_seconds=timeout_seconds,
        )
        return await run(command, stdin)


def configuration(text: str, image: NodeImage, folders: Mapping[str, Path]) -> str:
    """Return the configuration file of a cluster for kind.

    `text` is the file in kind-configs/. `folders` are this machine's that the nodes get, by their path there.
    """
    document = yaml.safe_load(text)
    for each in document["nodes"]:
        each["extraMounts"] = [
            {"hostPath": str(folder), "containerPath": path, "readOnly": True} for path, folder in folders.items()
        ]
    if not image.published:
        document["networking"]["disableDefaultCNI"] = True
    return yaml.safe_dump(document)


async def remove_everything(layout: Layout) -> None:
    """Remove by Docker only all that `ensure` and builds make: nodes with volumes, the network, helper containers."""
    for cluster in layout.clusters:
        await remove_all(("ps -aq", "rm -fv"), f"io.x-k8s.kind.cluster={cluster.name}")
    await remove_all(("ps -aq", "rm -fv"), layout.label)
    await remove_all(("network ls -q", "network rm"), layout.label)


async def execute(cluster: KindCluster, words: Sequence[str], timeout_seconds: float = QUICK_SECONDS) -> str:
    return await docker("exec", "--privileged", cluster.node, *words, timeout_seconds=timeout_seconds)


async def addresses(layout: Layout) -> dict[str, str]:
    """Return the node address of each cluster by role."""
    template = f'{{{{(index .NetworkSettings.Networks "{layout.network}").IPAddress}}}}'
    found = await inspect(template, *(cluster.node for cluster in layout.clusters))
    return {cluster.role: address for cluster, address in zip(layout.clusters, found, strict=True)}


async def open_link(layout: Layout) -> None:
    """Allow all traffic between the clusters; pods reach pods by their own addresses."""
    for own, other, address in await _ends(layout):
        await execute(own, ["ip", "route", "replace", other.network.range, "via", address, "dev", DEVICE])
    await _lose(layout, lost=False)


async def cut_link(layout: Layout) -> None:
    """Drop all traffic between the nodes and their pods."""
    await _lose(layout, lost=True)


async def _lose(layout: Layout, *, lost: bool) -> None:
    for own, _, address in await _ends(layout):
        for words in lose(address, DEVICE, lost=lost):
            await execute(own, words)


async def _ends(layout: Layout) -> list[tuple[KindCluster, KindCluster, str]]:
    """Return each cluster with the other one and the address of the other one's node."""
    found = await addresses(layout)
    hub, member = layout.clusters
    return [(hub, member, found[member.role]), (member, hub, found[hub.role])]


async def kill_pod(cluster: KindCluster, namespace: str, pod: str) -> None:
    """Kill all processes of a pod with SIGKILL; raise PeerError if the node runs no such pod."""
    chosen = f'labels."io.kubernetes.pod.namespace"=={namespace},labels."io.kubernetes.pod.name"=={pod}'
    containers = (await execute(cluster, [*CONTAINERS, "containers", "ls", "-q", chosen])).split()
    running = (await execute(cluster, [*CONTAINERS, "tasks", "ls", "-q"])).split()
    killed = [container for container in containers if container in running]
    if not killed:
        raise PeerError(f"node {cluster.node} runs no pod {namespace}/{pod}")
    for container in killed:
        await execute(cluster, [*CONTAINERS, "tasks", "kill", "--all", "--signal", "SIGKILL", container])


async def shape_link(layout: Layout, mbps: float) -> None:
    """Limit the outgoing rate of each node, in Mbit/s."""
    for cluster in layout.clusters:
        await execute(cluster, token_bucket(mbps, DEVICE))


async def link_rate(layout: Layout) -> float:
    """Return the link's rate in Mbit/s; 0 if it is not shaped."""
    return parse_rate(await execute(layout.hub, ["tc", "qdisc", "show", "dev", DEVICE]))


def parse_rate(shown: str) -> float:
    """Return the rate in Mbit/s from the output of `tc qdisc show`, 0 without one."""
    found = re.search(r"\brate (\d+)([KMG]?)bit\b", shown)
    return float(found[1]) * RATE_UNITS[found[2]] if found else 0.0
