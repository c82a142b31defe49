"""What preflight sees of a cluster and of the path, as frozen structs; and what nodes say of their accelerators."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from prfaas.capacity.memory import DEVICE_BYTES
from prfaas.kube.session import Object
from prfaas.util import MIB
from prfaas_operator.check import Probe
from prfaas_operator.clusters import kinds

ADMISSION_KINDS: Final = (kinds.ADMISSION_POLICY, kinds.ADMISSION_BINDING)
"""Of the chart prfaas-member, which does without them on older servers and with `admission.enabled=false`."""
RESOURCES: Final = ("nvidia.com/gpu", "amd.com/gpu")
PRODUCTS: Final = (
    *("nvidia.com/gpu.product", "amd.com/gpu.product-name"),
    *("cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name"),
)
"""Labels of nodes that name the device: the vendors' discovery first, then those of clouds."""
MEMORY: Final = "nvidia.com/gpu.memory"
"""Label with the MiB of one device."""
ENFORCE: Final = "pod-security.kubernetes.io/enforce"
LARGE_H20_BYTES: Final = 120e9
LEAST_SHARE: Final = 0.9
"""Of a kind's memory: a device with less has only its name in common, as an A100 of 40 GB."""


class Accelerators(NamedTuple):
    """Equal devices that pods of a cluster may have."""

    resource: str
    product: str
    """As a label of the node says; empty without one."""
    memory_bytes: int | None
    kind: str | None
    """As the planner calls it; None if it knows none."""
    devices: int
    nodes: tuple[int, ...]
    """The devices of each node, since an instance is on one node."""


class ClusterFacts(NamedTuple):
    """What an API server answered."""

    probe: Probe
    rights: Mapping[str, bool]
    accelerators: tuple[Accelerators, ...] | None
    """The most frequent first; None where these credentials may not list nodes."""
    has_pod_monitors: bool


class Admission(NamedTuple):
    """What the probes' namespace makes of a pod of the restricted standard."""

    enforced: str
    """The namespace's own standard; empty if none is enforced."""
    refusal: str
    """Empty if the pod is admitted."""


class Scrape(msgspec.Struct, frozen=True):
    """The answer of a Prometheus about its configuration."""

    interval: str = ""
    failure: str = ""


class PathFacts(msgspec.Struct, frozen=True):
    """What the probe in the hub saw. Without an open port nothing was measured."""

    ports: dict[str, str]
    """A word for each of the member pod's ports; `open` is good."""
    api: str
    """The same for the member's API server."""
    prometheus: Scrape | None = None
    hub_address: str = ""
    """Of a pod in the hub, as the member sees it."""
    packet_bytes: int = 0
    """Largest packet that crosses both ways."""
    sent_bytes: int = 0
    """Largest that the ends would send."""
    lost: str = ""
    """The direction in which larger ones than the former vanish; empty if none do."""
    round_trip_seconds: float | None = None
    mbps: dict[str, float] = {}
    """From member to hub, without headers, by the number of connections."""

    @property
    def best_mbps(self) -> float:
        return max(self.mbps.values(), default=0.0)


def accelerators(nodes: Iterable[Object]) -> tuple[Accelerators, ...]:
    """Return the allocatable devices of nodes that take pods, the most frequent first."""
    found: dict[tuple[str, str, int | None], list[int]] = {}
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        product = next((labels[label] for label in PRODUCTS if labels.get(label)), "")
        size = labels.get(MEMORY, "")
        for resource in RESOURCES:
            count = int((node.get("status", {}).get("allocatable") or {}).get(resource, 0))
            if count and not node["spec"].get("unschedulable"):
                key = (resource, product, int(size) * MIB if size.isdecimal() else None)
                found.setdefault(key, []).append(count)
    equal = [
        Accelerators(resource, product, size, kind_of(product, size), sum(counts), tuple(counts))
        for (resource, product, size), counts in found.items()
    ]
    return tuple(sorted(equal, key=lambda one: -one.devices))


def kind_of(product: str, memory_bytes: int | None) -> str | None:
    """Return the planner's name of a device; None for one that it does not know, and for a part of one."""
    name = product.lower()
    if re.search(r"\b(mig|shared)\b", name):
        return None
    found = next((kind for kind in DEVICE_BYTES if re.search(rf"(?<![a-z0-9]){kind}(?![a-z0-9])", name)), None)
    if found == "h20" and (memory_bytes or 0) > LARGE_H20_BYTES:
        return "h20-141"
    if found and memory_bytes is not None and memory_bytes < LEAST_SHARE * DEVICE_BYTES[found]:
        return None
    return found
