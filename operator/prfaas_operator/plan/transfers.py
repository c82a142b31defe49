"""Conditions of a policy about what crosses between its clusters: whether it is encrypted, whether it is checked, and
whether the places where it may not go are known.

They are read from the routing table, and so from what the instances are and not from what their pools want. What
crosses inside the hub is left to the hub's network.
"""

from collections.abc import Iterable
from typing import Final

from prfaas.names import HUB
from prfaas.wire.preferences import unknown_places
from prfaas.wire.routes import Instance, RoutingTable
from prfaas_operator.plan.conditions import ConditionState, no, yes

ENCRYPTED: Final = "Encrypted"
INTEGRITY_CHECKED: Final = "IntegrityChecked"
PLACES_KNOWN: Final = "PlacesKnown"
_NOTHING: Final = yes("NothingCrosses", "no instance of this policy runs in another cluster")


def conditions(table: RoutingTable) -> dict[str, ConditionState]:
    """Return these conditions of a policy; PlacesKnown only of one that forbids a place."""
    places = {PLACES_KNOWN: _places(table)} if table.forbid_datacenters else {}
    crossing = [instance for instance in table.instances if instance.cluster != HUB]
    if not crossing:
        return {ENCRYPTED: _NOTHING, INTEGRITY_CHECKED: _NOTHING, **places}
    return {ENCRYPTED: _encrypted(crossing), INTEGRITY_CHECKED: _checked(crossing), **places}


def _places(table: RoutingTable) -> ConditionState:
    unnamed = [one.name for one in table.clusters if not one.datacenter]
    if unnamed:
        return no(
            "ClusterWithoutDatacenter",
            f"MemberCluster {unnamed[0]} names no datacenter, so it may lie in a forbidden one and gets no prompt; set "
            "its spec.datacenter",
        )
    known = sorted({one.datacenter for one in table.clusters})
    unknown = unknown_places(table.forbid_datacenters, known)
    if unknown and known:
        return no(
            "UnknownDatacenter",
            f"datacenters.forbid names {unknown[0]}, where no cluster of this policy is; they are in "
            f"{', '.join(known)}: correct a misspelt name, or keep one of a cluster that may come",
        )
    return yes("AllKnown", "every cluster names its datacenter, and every forbidden name is one of theirs")


def _encrypted(crossing: Iterable[Instance]) -> ConditionState:
    for one in crossing:
        if not one.record.is_encrypted:
            return no(
                "PlainTransfers",
                f"{_what(one)} runs {one.engine}: requests, caches and cache events cross unencrypted; use a network "
                "that encrypts, or vllm with connector Prfaas",
            )
        if not one.url.startswith("https:"):
            return no(
                "WithoutCertificate",
                f"{_what(one)} has an instance without certificate: requests and caches cross unencrypted; see "
                f"CertificateReady of MemberCluster {one.cluster}, and certificates.mode of the chart",
            )
    return yes("MutualTls", "requests, caches and cache events cross inside TLS with certificates of both ends")


def _checked(crossing: Iterable[Instance]) -> ConditionState:
    weaker: list[Instance] = []
    for one in crossing:
        if one.record.checked == "Request":
            weaker.append(one)
        elif one.record.checked == "Nothing":
            return no(
                "CachesNotChecked",
                f"{_what(one)} runs {one.engine}, which does not check a cache on arrival: a damaged one gives wrong "
                "answers; use vllm with connector Prfaas",
            )
    if weaker:
        return yes(
            "ChecksumPerRequest",
            f"{_what(weaker[0])} runs {weaker[0].record.title}, which compares one checksum a request, where both ends "
            "have one layout",
        )
    return yes("DigestPerFrame", "each frame of a cache has a digest that its destination checks")


def _what(instance: Instance) -> str:
    return f"PrefillPool {instance.pool} in {instance.cluster}"
