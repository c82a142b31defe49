"""The sandbox's network: one namespace per cluster, a veth pair between them, and its token bucket.

Every address of a cluster's /16 is local to its namespace (AnyIP: one route of type local). So a pod gets an address
without an interface, can bind to it, and the other cluster reaches it. A pod whose program takes ports of all addresses
gets its own namespace. The functions return commands as data; `prfaas_sandbox.supervisor` and the node run them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.errors import BadInputError

LINK = "link0"
POD_DEVICE = "eth0"
NOBODY = "02:00:00:00:00:01"
# Long enough for a full bucket at any rate, short enough that TCP feels the link instead of filling a queue.
QUEUE_MILLIS = 50
BURST_MILLIS = 20
# A bucket of 256 KiB keeps the rate exact under segmentation offload; small rates get less, or a burst would be a
# second's worth of link. Above 2 Gbit/s the kernel's timer needs at least a millisecond's worth.
LARGEST_BURST_BYTES = 256 * 1024
SMALLEST_BURST_BYTES = 8 * 1024
LARGEST_MBPS = 100_000
SMALLEST_MBPS = 0.1


@dataclass(frozen=True)
class ClusterNetwork:
    """The addresses of one cluster.

    `prefix` is the first two octets of its /16, `service_prefix` the first three of the unrouted cluster IPs.
    """

    name: str
    prefix: str
    service_prefix: str

    @property
    def address(self) -> str:
        """Address of the node and of the API server."""
        return f"{self.prefix}.0.1"

    @property
    def range(self) -> str:
        return f"{self.prefix}.0.0/16"

    def pod_address(self, index: int) -> str:
        """Return the address of a pod by its number; after 64,516 numbers the addresses repeat."""
        third, fourth = divmod(index % (254 * 254), 254)
        return f"{self.prefix}.{third + 1}.{fourth + 1}"


HUB = ClusterNetwork("hub", "10.244", "10.96.0")
MEMBER = ClusterNetwork("member", "10.245", "10.97.0")
CLUSTERS = (HUB, MEMBER)


def enter(namespace: Path, command: list[str]) -> list[str]:
    """Return a command that runs `command` in the network namespace of a file."""
    return ["nsenter", f"--net={namespace}", *command]


def create_link(hub: Path, member: Path) -> list[list[str]]:
    """Return the commands that join two empty namespaces and make each cluster's addresses local."""
    join = ["ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", str(member)]
    return [enter(hub, join), *_own_side(hub, HUB, MEMBER), *_own_side(member, MEMBER, HUB)]


def _own_side(namespace: Path, own: ClusterNetwork, other: ClusterNetwork) -> list[list[str]]:
    commands = [
        ["ip", "link", "set", "lo", "up"],
        # Without an address that is not loopback's, name resolution by AI_ADDRCONFIG finds nothing.
        ["ip", "address", "add", f"{own.address}/32", "dev", LINK],
        ["ip", "link", "set", LINK, "up"],
        ["ip", "route", "add", "local", own.range, "dev", "lo"],
        # One neighbour to resolve, whatever the number of pods behind it.
        ["ip", "route", "add", other.address, "dev", LINK, "src", own.address],
        ["ip", "route", "add", other.range, "via", other.address, "dev", LINK, "src", own.address],
    ]
    return [enter(namespace, command) for command in commands]


def join_pod(namespace: Path, cluster: ClusterNetwork, address: str) -> list[list[str]]:
    """Return the commands that give a pod its own network, for a process in the cluster's.

    Its address is no longer local there: a route in the local table, which is asked first, leads to the pod.
    """
    device = _pod_device(address)
    inside = [
        ["ip", "link", "set", "lo", "up"],
        ["ip", "address", "add", f"{address}/32", "dev", POD_DEVICE],
        ["ip", "link", "set", POD_DEVICE, "up"],
        ["ip", "route", "add", cluster.address, "dev", POD_DEVICE],
        ["ip", "route", "add", "default", "via", cluster.address, "dev", POD_DEVICE],
    ]
    return [
        ["touch", str(namespace)],
        ["unshare", f"--net={namespace}", "true"],
        ["ip", "link", "add", device, "type", "veth", "peer", "name", POD_DEVICE, "netns", str(namespace)],
        ["ip", "link", "set", device, "up"],
        ["ip", "route", "add", address, "dev", device, "src", cluster.address, "table", "local"],
        ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"],
        *(enter(namespace, command) for command in inside),
    ]


def leave_pod(namespace: Path, address: str) -> list[list[str]]:
    """Return the commands that undo `join_pod`."""
    return [["ip", "link", "delete", _pod_device(address)], ["umount", str(namespace)], ["rm", str(namespace)]]


def _pod_device(address: str) -> str:
    return f"pod{address.split('.', 2)[2]}"


def cut_link(hub: Path, member: Path, *, cut: bool) -> list[list[str]]:
    """Return the commands that drop all traffic between the ends, or undo it."""
    ends = ((hub, MEMBER), (member, HUB))
    return [enter(end, command) for end, other in ends for command in lose(other.address, LINK, lost=cut)]


def lose(address: str, device: str, *, lost: bool) -> list[list[str]]:
    """Return the commands that drop all traffic to a neighbour, or undo it.

    They set an unused hardware address, so that no sender gets an error, as on a broken line.
    """
    wrong = ["ip", "neighbour", "replace", address, "lladdr", NOBODY, "nud", "permanent", "dev", device]
    return [wrong] if lost else [wrong, ["ip", "neighbour", "del", address, "dev", device]]


def shape_link(namespaces: tuple[Path, ...], mbps: float) -> list[list[str]]:
    """Return the commands that limit the outgoing rate of each end; they also change an existing limit."""
    return [enter(namespace, token_bucket(mbps)) for namespace in namespaces]


def checked_rate(mbps: Any) -> float:
    """Return a link rate in Mbit/s; raise BadInputError for a rate out of range."""
    if not isinstance(mbps, int | float) or not SMALLEST_MBPS <= mbps <= LARGEST_MBPS:
        raise BadInputError(f"a link of {mbps} Mbit/s is not possible: choose {SMALLEST_MBPS} to {LARGEST_MBPS}")
    return mbps


def token_bucket(mbps: float, device: str = LINK) -> list[str]:
    """Return the tc command that limits a device's outgoing rate in Mbit/s."""
    burst_bytes = min(max(_bytes_in(mbps, BURST_MILLIS), SMALLEST_BURST_BYTES), LARGEST_BURST_BYTES)
    burst_bytes = max(burst_bytes, _bytes_in(mbps, 1))
    rate = f"{round(mbps * 1_000_000)}bit"
    shape = ["rate", rate, "burst", f"{burst_bytes}b", "latency", f"{QUEUE_MILLIS}ms"]
    return ["tc", "qdisc", "replace", "dev", device, "root", "tbf", *shape]


def _bytes_in(mbps: float, millis: int) -> int:
    return int(mbps * 1000 / 8 * millis)
