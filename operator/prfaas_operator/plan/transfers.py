"""Conditions of a policy about what crosses between its clusters: whether it is encrypted, and whether it is checked.

They are read from the routing table, and so from what the instances are and not from what their pools want. What
crosses inside the hub is left to the hub's network.
"""

from collections.abc import Iterable
from typing import Final

from prfaas.names import HUB
from prfaas.wire.routes import Instance, RoutingTable
from prfaas_operator.plan.conditions import ConditionState, no, yes

ENCRYPTED: Final = "Encrypted"
INTEGRITY_CHECKED: Final = "IntegrityChecked"
_NOTHING: Final = yes("NothingCrosses", "no instance of this policy runs in another cluster")


def conditions(table: RoutingTable) -> dict[str, ConditionState]:
    """Return both conditions of a policy."""
    crossing = [instance for instance in table.instances if instance.cluster != HUB]
    if not crossing:
        return {ENCRYPTED: _NOTHING, INTEGRITY_CHECKED: _NOTHING}
    return {ENCRYPTED: _encrypted(crossing), INTEGRITY_CHECKED: _checked(crossing)}


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
