"""Routing tables, as short as a test needs."""

from typing import Any

from prfaas.names import HUB
from prfaas.wire.routes import Instance, LinkWatermarks, RoutingTable, Threshold

PLACES = {"d": ("decode", HUB), "p": ("prefill", HUB), "x": ("prefill", "eu")}


def make_instance(name: str, **fields: Any) -> Instance:
    """Return an instance that its name describes: d... decodes, p... prefills in the hub, x... in the cluster eu."""
    role, cluster = PLACES[name[0]]
    defaults = {"name": name, "pool": role, "cluster": cluster, "role": role, "url": f"http://{name}:8000"}
    return Instance(**(defaults | fields))


def make_table(*instances: Instance, mode: str = "Auto", tokens: int = 1000, **fields: Any) -> RoutingTable:
    defaults = {
        "policy": "p",
        "namespace": "n",
        "generation": 1,
        "model": "m",
        "on_offload_failure": "PrefillLocally",
        "threshold": Threshold(mode=mode, tokens=tokens, min_tokens=10, max_tokens=5000),
        "watermarks": LinkWatermarks(high_percent=80, low_percent=50),
        "short_interval_seconds": 1,
        "instances": instances,
    }
    return RoutingTable(**(defaults | fields))
