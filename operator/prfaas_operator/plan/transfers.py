"""Conditions of a policy and its pools about what crosses between clusters: whether it is encrypted, whether it is
checked, whether the APIs there ask callers who they are, and whether the places where it may not go are known.

They are read from the routing table and from pods, and so from what the instances are and not from what their pools
want. What crosses inside the hub is left to the hub's network.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from prfaas.engines import ENGINES, EngineRecord
from prfaas.names import HUB
from prfaas.wire.preferences import unknown_places
from prfaas.wire.routes import RoutingTable
from prfaas_operator.plan.conditions import ENCRYPTED, PLACES_KNOWN, ConditionState, no, yes
from prfaas_operator.plan.pod_facts import PodFacts
from prfaas_operator.plan.pool_status import PoolObject

INTEGRITY_CHECKED: Final = "IntegrityChecked"
CALLERS_CHECKED: Final = "CallersChecked"
_NOTHING: Final = yes("NothingCrosses", "no instance of this policy runs in another cluster")
_NO_INSTANCE: Final = yes("NothingCrosses", "this pool has no instance")


class _Crossing(NamedTuple):
    """An instance in another cluster than the hub."""

    pool: str
    cluster: str
    record: EngineRecord
    in_tls: bool


def pool_conditions(pool: PoolObject, pods: Iterable[PodFacts]) -> dict[str, ConditionState]:
    """Return the condition Encrypted of a pool in a member cluster from its pods; none of a pool in the hub."""
    cluster = pool.spec.cluster_name
    if not cluster:
        return {}
    crossing = [
        _Crossing(
            pool.metadata.name,
            cluster,
            ENGINES.get(pod.instance.engine, pool.spec.engine.record),
            pod.scheme == "https",
        )
        for pod in pods
        if not pod.shared.over
    ]
    return {ENCRYPTED: _encrypted(crossing) if crossing else _NO_INSTANCE}


def conditions(table: RoutingTable) -> dict[str, ConditionState]:
    """Return these conditions of a policy; PlacesKnown only of one that forbids a place."""
    places = {PLACES_KNOWN: _places(table)} if table.forbid_datacenters else {}
    crossing = [
        _Crossing(one.pool, one.cluster, one.record, one.url.startswith("https:"))
        for one in table.instances
        if one.cluster != HUB
    ]
    if not crossing:
        return {ENCRYPTED: _NOTHING, INTEGRITY_CHECKED: _NOTHING, CALLERS_CHECKED: _NOTHING, **places}
    return {
        ENCRYPTED: _encrypted(crossing),
        INTEGRITY_CHECKED: _checked(crossing),
        CALLERS_CHECKED: _callers(crossing),
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


def _encrypted(crossing: Iterable[_Crossing]) -> ConditionState:
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


def _checked(crossing: Iterable[_Crossing]) -> ConditionState:
    weaker: list[_Crossing] = []
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


def _callers(crossing: Iterable[_Crossing]) -> ConditionState:
    for one in crossing:
        if not (one.record.checks_callers and one.in_tls):
            why = f"runs {one.record.name}" if one.in_tls else "has an instance without certificate"
            return no(
                "ApiAsksNobody",
                f"{_what(one)} {why}, so its API serves whoever reaches it, past the gateway's keys and limits: let "
                "only the hub reach it, by networkPolicy.hubCidrs of the chart prfaas-member where NetworkPolicies are "
                "enforced",
            )
    return yes("ByCertificate", "the APIs in other clusters ask each caller for a certificate and its right")


def _what(instance: _Crossing) -> str:
    return f"PrefillPool {instance.pool} in {instance.cluster}"
