"""Facts of two clusters that are well, and of accelerators, as short as a test needs."""

from datetime import UTC, datetime

import msgspec

from prfaas.util import MIB
from prfaas_operator.check import Probe
from prfaas_operator.preflight.facts import Accelerators, ClusterFacts, PathFacts, kind_of
from prfaas_operator.preflight.findings import REQUIRED_PORTS, engine_ports

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WELL = PathFacts(
    ports={str(port): "open" for port in (*REQUIRED_PORTS, *engine_ports())},
    api="open",
    hub_address="192.0.2.7",
    packet_bytes=1500,
    sent_bytes=1500,
    round_trip_seconds=0.02,
    mbps={"1": 940.0, "4": 944.0},
)


def devices(product: str, *nodes: int, mib: int | None = None) -> tuple[Accelerators, ...]:
    memory_bytes = mib * MIB if mib else None
    return (
        Accelerators("nvidia.com/gpu", product, memory_bytes, kind_of(product, memory_bytes), sum(nodes), tuple(nodes)),
    )


H200, H20 = devices("NVIDIA-H200", 8, 8, mib=143_771), devices("NVIDIA-H20", *[8] * 6, mib=146_000)


def cluster(**changed) -> ClusterFacts:
    facts = ClusterFacts(Probe("v1.34.4", NOW, NOW, 0.01), {"create deployments": True}, H200, has_pod_monitors=True)
    return facts._replace(**changed)


def path(**changed) -> PathFacts:
    return msgspec.structs.replace(WELL, **changed)
