"""What is done in the nodes of kind: routes between the clusters' pods, and the shaping and cutting of the link.

The link is what lies between the two node containers on their Docker network. Each node's own end is shaped, so that
nothing on this machine outside the containers is touched, and deleting a container undoes all of it. As in the sandbox,
pods of one cluster reach those of the other by their own addresses.
"""

import re
from collections.abc import Sequence

from prfaas.errors import PeerError
from prfaas_sandbox.kind.docker import QUICK_SECONDS, docker, inspect
from prfaas_sandbox.kind.layout import KindCluster, Layout
from prfaas_sandbox.network import lose, token_bucket

DEVICE = "eth0"
CONTAINERS = ("ctr", "-n", "k8s.io")
RATE_UNITS = {"": 1e-6, "K": 1e-3, "M": 1.0, "G": 1e3}


async def execute(cluster: KindCluster, words: Sequence[str], timeout_seconds: float = QUICK_SECONDS) -> str:
    """Run a command in a cluster's node and return what it prints."""
    return await docker("exec", "--privileged", cluster.node, *words, timeout_seconds=timeout_seconds)


async def addresses(layout: Layout) -> dict[str, str]:
    """Return the address of each cluster's node by the cluster's role."""
    template = f'{{{{(index .NetworkSettings.Networks "{layout.network}").IPAddress}}}}'
    found = await inspect(template, *(cluster.node for cluster in layout.clusters))
    return {cluster.role: address for cluster, address in zip(layout.clusters, found, strict=True)}


async def open_link(layout: Layout) -> None:
    """Let everything pass between the clusters; pods reach pods by their own addresses."""
    for own, other, address in await _ends(layout):
        await execute(own, ["ip", "route", "replace", other.network.range, "via", address, "dev", DEVICE])
    await _lose(layout, lost=False)


async def cut_link(layout: Layout) -> None:
    """Lose everything that one node or its pods send to the other."""
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
    """Kill all processes of a pod with SIGKILL; raise PeerError when the node runs no such pod."""
    chosen = f'labels."io.kubernetes.pod.namespace"=={namespace},labels."io.kubernetes.pod.name"=={pod}'
    containers = (await execute(cluster, [*CONTAINERS, "containers", "ls", "-q", chosen])).split()
    running = (await execute(cluster, [*CONTAINERS, "tasks", "ls", "-q"])).split()
    killed = [container for container in containers if container in running]
    if not killed:
        raise PeerError(f"node {cluster.node} runs no pod {namespace}/{pod}")
    for container in killed:
        await execute(cluster, [*CONTAINERS, "tasks", "kill", "--all", "--signal", "SIGKILL", container])


async def shape_link(layout: Layout, mbps: float) -> None:
    """Limit what each node sends to a rate in Mbit/s."""
    for cluster in layout.clusters:
        await execute(cluster, token_bucket(mbps, DEVICE))


async def link_rate(layout: Layout) -> float:
    """Return the rate in Mbit/s to which the link is shaped; 0 where it is not."""
    return parse_rate(await execute(layout.hub, ["tc", "qdisc", "show", "dev", DEVICE]))


def parse_rate(shown: str) -> float:
    """Return the rate in Mbit/s that `tc qdisc show` tells, 0 if it tells none."""
    found = re.search(r"\brate (\d+)([KMG]?)bit\b", shown)
    return float(found[1]) * RATE_UNITS[found[2]] if found else 0.0
