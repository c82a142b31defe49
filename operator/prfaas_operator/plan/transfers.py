"""Conditions of a policy and its pools about what crosses between clusters: whether it is encrypted, whether it is
checked, whether the APIs ask callers who they are, and whether the places where it may not go are known.

They are read from the routing table and from pods, and so from what the instances are and not from what their pools
want. What crosses inside the hub is left to the hub's network. APIs in the hub count: any pod there may reach them.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from prfaas.api import DecodePool, PrefillPool
from prfaas.engines import ENGINES, EngineRecord
from prfaas.names import HUB
from prfaas.wire.preferences import unknown_places
from prfaas.wire.routes import RoutingTable
from prfaas_operator.plan.conditions import CALLERS_CHECKED, ENCRYPTED, PLACES_KNOWN, ConditionState, no, yes
from prfaas_operator.plan.pod_facts import PodFacts
from prfaas_operator.plan.pool_status import PoolObject

INTEGRITY_CHECKED: Final = "IntegrityChecked"
_KINDS: Final = {"decode": DecodePool.kind_name, "prefill": PrefillPool.kind_name}
_NOTHING: Final = yes("NothingCrosses", "no instance of this policy runs in another cluster")
_NO_INSTANCE: Final = yes("NothingCrosses", "there is no instance")


class _Server(NamedTuple):
    """What these conditions ask of an instance."""

    pool: str
    """Kind and name."""
    cluster: str
    record: EngineRecord
    in_tls: bool


def pool_conditions(pool: PoolObject, pods: Iterable[PodFacts]) -> dict[str, ConditionState]:
    """Return the condition Encrypted of a pool in a member cluster from its pods; none of a pool in the hub."""
    cluster = pool.spec.cluster_name
    if not cluster:
        return {}
    crossing = [
        _Server(
            f"{pool.kind_name} {pool.metadata.name}",
            cluster,
            ENGINES.get(pod.instance.engine, pool.spec.engine.record),
            pod.scheme == "https",
        )
        for pod in pods
    ]
    return {ENCRYPTED: _encrypted(crossing) if crossing else _NO_INSTANCE}


def conditions(table: RoutingTable) -> dict[str, ConditionState]:
    """Return these conditions of a policy; PlacesKnown only of one that forbids a place."""
    places = {PLACES_KNOWN: _places(table)} if table.forbid_datacenters else {}
    servers = [
        _Server(f"{_KINDS[one.role]} {one.pool}", one.cluster, one.record, one.url.startswith("https:"))
        for one in table.instances
    ]
    crossing = [one for one in servers if one.cluster != HUB]
    return {
        ENCRYPTED: _encrypted(crossing) if crossing else _NOTHING,
        INTEGRITY_CHECKED: _checked(crossing) if crossing else _NOTHING,
        CALLERS_CHECKED: _callers(servers) if servers else _NO_INSTANCE,
        **places,
    }


def _places(table: RoutingTable) -> ConditionState:
    known = table.known_places
    unknown = unknown_places(table.forbid_datacenters, known)
    if unknown and known:
        return no(
            "UnknownDatacenter",
            f"datacenters.forbid names {unknown[0]}, where no MemberCluster is; they are in "
            f"{', '.join(sorted(known))}. It may be misspelt and mean any of them, so nothing is offloaded: correct "
            "it, or remove it until a cluster is there",
        )
    unnamed = [one.name for one in table.clusters if not one.datacenter]
    if unnamed:
        return no(
            "ClusterWithoutDatacenter",
            f"MemberCluster {unnamed[0]} names no datacenter, so it may lie in a forbidden one and gets no prompt; set "
            "its spec.datacenter",
        )
    return yes("AllKnown", "every cluster names its datacenter, and every forbidden name is one of theirs")


def _encrypted(crossing: Iterable[_Server]) -> ConditionState:
    for one in crossing:
        if not one.record.is_encrypted:
            return no(
                "PlainTransfers",
                f"{_what(one)} runs {one.record.name}: requests, caches and cache events cross unencrypted; use a "
                "network that encrypts, or vllm with connector Prfaas",
            )
        if not one.in_tls:
            return no(
                "WithoutCertificate",
                f"{_what(one)} has an instance without certificate: requests and caches cross unencrypted; see "
                f"CertificateReady of MemberCluster {one.cluster}, and certificates.mode of the chart",
            )
    return yes("MutualTls", "requests, caches and cache events cross inside TLS with certificates of both ends")


def _checked(crossing: Iterable[_Server]) -> ConditionState:
    weaker: list[_Server] = []
    for one in crossing:
        if one.record.checked == "Request":
            weaker.append(one)
        elif one.record.checked == "Nothing":
            return no(
                "CachesNotChecked",
                f"{_what(one)} runs {one.record.name}, which does not check a cache on arrival: a damaged one gives "
                "wrong answers; use vllm with connector Prfaas",
            )
    if weaker:
        return yes(
            "ChecksumPerRequest",
            f"{_what(weaker[0])} runs {weaker[0].record.title}, which compares one checksum a request, where both ends "
            "have one layout",
        )
    return yes("DigestPerFrame", "each frame of a cache has a digest that its destination checks")


def _callers(servers: Iterable[_Server]) -> ConditionState:
    for one in servers:
        if not (one.record.checks_callers and one.in_tls):
            why = "has an instance without certificate" if one.record.checks_callers else f"runs {one.record.name}"
            return no(
                "ApiAsksNobody",
                f"{_what(one)} {why}, so its API serves whoever reaches it, past the gateway's keys and limits: close "
                "it by NetworkPolicies that are enforced, in the hub workers.networkPolicy of the chart prfaas, in a "
                "member networkPolicy.hubCidrs of prfaas-member",
            )
    return yes("ByCertificate", "every instance's API asks each caller for a certificate and its right")


def _what(server: _Server) -> str:
    return f"{server.pool} in {server.cluster}"
