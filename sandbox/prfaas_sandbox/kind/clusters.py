"""Creates, fills and deletes a pair of kind clusters. Whatever is there and well is left as it is."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import yaml

from prfaas.errors import PeerError
from prfaas_sandbox.commands import Command, run
from prfaas_sandbox.kind import node
from prfaas_sandbox.kind.docker import docker, inspect, remove_all, succeeds
from prfaas_sandbox.kind.images import NodeImage
from prfaas_sandbox.kind.layout import KindCluster, Layout
from prfaas_sandbox.progress import Report, ticking

CREATE_TIMEOUT_SECONDS = 1200.0
READY_SECONDS = 240
READY_AGAIN_SECONDS = 90
LOAD_TIMEOUT_SECONDS = 900.0
IMAGES_PATH = "/prfaas-images"
QUICK_SECONDS = 120.0


@dataclass(frozen=True)
class Clusters:
    """A pair of kind clusters.

    Args:
        layout: their names and files.
        kind: the program.
        kubectl: the program.
        report: gets lines of progress.

    """

    layout: Layout
    kind: Path
    kubectl: Path
    report: Report

    async def ensure(self, image: NodeImage) -> None:
        """Create what is missing or broken, and open the link between the two."""
        self.layout.images.mkdir(exist_ok=True)
        if not await succeeds("network", "inspect", self.layout.network):
            await docker("network", "create", "--label", self.layout.label, self.layout.network)
        for cluster in self.layout.clusters:
            await self._ensure(cluster, image)
        await node.open_link(self.layout)

    async def _ensure(self, cluster: KindCluster, image: NodeImage) -> None:
        if cluster.name in await self.names():
            if await self._well(cluster):
                self.report(f"cluster {cluster.name} is there")
                return
            self.report(f"cluster {cluster.name} is there and does not answer: deleting it")
            await self.delete(cluster)
        config = configuration(cluster.config.read_text(), image, self.layout.images)
        words = ["create", "cluster", "--name", cluster.name, "--image", image.reference, "--config", "-"]
        words += ["--kubeconfig", str(cluster.kubeconfig), "--wait", f"{READY_SECONDS}s"]
        async with ticking(self.report, lambda: f"cluster {cluster.name}"):
            await self._kind(words, CREATE_TIMEOUT_SECONDS, config.encode())
        self.report(f"cluster {cluster.name} is ready")

    async def _well(self, cluster: KindCluster) -> bool:
        """Return whether a cluster that exists is ready, or gets so when its node is started."""
        try:
            if await inspect("{{.State.Running}}", cluster.node) != ["true"]:
                await docker("start", cluster.node)
            await self._kind(
                ["export", "kubeconfig", "--name", cluster.name, "--kubeconfig", str(cluster.kubeconfig)], QUICK_SECONDS
            )
            ready = ["wait", "--for=condition=Ready", "nodes", "--all", f"--timeout={READY_AGAIN_SECONDS}s"]
            await run(
                Command([self.kubectl, "--kubeconfig", cluster.kubeconfig, *ready], timeout_seconds=QUICK_SECONDS)
            )
        except PeerError:
            return False
        return True

    async def load(self, wanted: dict[str, list[str]]) -> None:
        """Put images into clusters, which are named by their role; each leaves Docker once."""
        takers: dict[str, list[KindCluster]] = {}
        for cluster in self.layout.clusters:
            present = (await node.execute(cluster, [*node.CONTAINERS, "images", "ls", "-q"])).split()
            for image in wanted[cluster.role]:
                if f"docker.io/{image}" not in present:
                    takers.setdefault(image, []).append(cluster)
        for image, clusters in takers.items():
            async with ticking(self.report, lambda name=image: f"clusters, {name} goes in"):
                await self._load(image, clusters)
        if takers:
            self.report("images are loaded")

    async def _load(self, image: str, clusters: list[KindCluster]) -> None:
        """Put an image into clusters by a folder that their nodes see: `kind load` would pipe it through Docker."""
        archive = self.layout.images / "image.tar"
        try:
            await docker("save", "-o", archive, image, timeout_seconds=LOAD_TIMEOUT_SECONDS)
            seen = f"{IMAGES_PATH}/{archive.name}"
            words = [*node.CONTAINERS, "images", "import", "--all-platforms", "--digests", seen]
            await asyncio.gather(*(node.execute(cluster, words, LOAD_TIMEOUT_SECONDS) for cluster in clusters))
        finally:
            archive.unlink(missing_ok=True)

    async def names(self) -> list[str]:
        """Return the names of all kind clusters that Docker holds."""
        return (await self._kind(["get", "clusters"], QUICK_SECONDS)).split()

    async def delete(self, cluster: KindCluster) -> None:
        """Delete a cluster; none of that name is no error."""
        words = ["delete", "cluster", "--name", cluster.name, "--kubeconfig", str(cluster.kubeconfig)]
        await self._kind(words, QUICK_SECONDS)

    async def _kind(self, words: list[str], timeout_seconds: float, stdin: bytes | None = None) -> str:
        command = Command(
            [self.kind, *words],
            f"kind {' '.join(words)}",
            {"KIND_EXPERIMENTAL_DOCKER_NETWORK": self.layout.network},
            timeout_seconds=timeout_seconds,
        )
        return await run(command, stdin)


def configuration(text: str, image: NodeImage, images: Path) -> str:
    """Return a cluster's file as kind gets it.

    Args:
        text: of the file in kind-configs/.
        image: the node image; where it is ours, it brings the network for pods.
        images: folder of this machine in which the nodes find archives.

    """
    document = yaml.safe_load(text)
    for each in document["nodes"]:
        each["extraMounts"] = [{"hostPath": str(images), "containerPath": IMAGES_PATH, "readOnly": True}]
    if not image.published:
        document["networking"]["disableDefaultCNI"] = True
    return yaml.safe_dump(document)


async def remove_everything(layout: Layout) -> None:
    """Remove by Docker alone what `ensure` and builds make: nodes with volumes, the network, helping containers."""
    for cluster in layout.clusters:
        await remove_all(("ps -aq", "rm -fv"), f"io.x-k8s.kind.cluster={cluster.name}")
    await remove_all(("ps -aq", "rm -fv"), layout.label)
    await remove_all(("network ls -q", "network rm"), layout.label)
