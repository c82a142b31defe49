"""Asks an API server for the facts of a cluster, with a person's own rights."""

import asyncio
from typing import Final

from prfaas.errors import ConfigError, PrfaasError
from prfaas.kube.lease import LEASE_KIND
from prfaas.kube.session import CONFIG_MAP, ObjectKind
from prfaas_operator.check import granted, minor_of, probe_server
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.errors import ForbiddenError
from prfaas_operator.preflight.facts import (
    ADMISSION_KINDS,
    ENFORCE,
    Accelerators,
    Admission,
    ClusterFacts,
    accelerators,
)
from prfaas_operator.render import service_account
from prfaas_operator.render.common import rule

ADMISSION_MINOR: Final = 30
"""Of Kubernetes 1.x: since then it serves admission policies, as the chart prfaas-member knows."""
POD_MONITORS: Final = "podmonitors.monitoring.coreos.com"
_INSTALLED: Final = (
    *(kinds.NAMESPACE, kinds.SERVICE_ACCOUNT, kinds.ROLE, kinds.ROLE_BINDING, kinds.SECRET, kinds.NETWORK_POLICY),
)
INSTALLED_IN_MEMBER: Final = (*_INSTALLED, kinds.RESOURCE_QUOTA, *ADMISSION_KINDS)
"""What the chart prfaas-member and Helm itself create."""
INSTALLED_IN_HUB: Final = (
    *_INSTALLED,
    *(kinds.CUSTOM_RESOURCE, kinds.CLUSTER_ROLE, kinds.DEPLOYMENT, kinds.SERVICE, CONFIG_MAP, kinds.DISRUPTION_BUDGET),
)
"""The same of the chart prfaas."""
OURS: Final = (kinds.MEMBER_CLUSTER, kinds.PREFILL_POOL, kinds.DECODE_POOL, kinds.POLICY)
GRANTED_IN_HUB: Final[tuple[tuple[str, str, tuple[ObjectKind, ...]], ...]] = (
    ("get list watch create update patch delete", "", OURS),
    ("get update patch", "/scale", (kinds.PREFILL_POOL, kinds.DECODE_POOL, kinds.POLICY)),
    ("get patch", "/status", OURS),
    ("get patch", "", (kinds.SECRET,)),
    ("list watch patch", "", (kinds.POD,)),
    ("patch", "/status", (kinds.POD,)),
    ("get create patch", "", (kinds.EVENT,)),
    ("get list create patch delete", "", (kinds.SERVICE, kinds.SERVICE_ACCOUNT, kinds.ROLE, kinds.ROLE_BINDING)),
    ("get list create patch delete", "", (kinds.NETWORK_POLICY,)),
    ("get list watch create patch delete", "", (kinds.DEPLOYMENT, kinds.DISRUPTION_BUDGET, CONFIG_MAP)),
    ("get list create update patch delete", "", (LEASE_KIND,)),
)
"""Verbs, part and kinds that the chart prfaas grants its operator and people: RBAC lets nobody grant what they do not
hold.
"""


def rights_of_hub() -> list[Object]:
    """Return the rights that an installation of the hub takes, as rules of a Role."""
    granted_there = [_rule(kind, verbs, part) for verbs, part, some in GRANTED_IN_HUB for kind in some]
    return [*(_rule(kind, "create") for kind in INSTALLED_IN_HUB), *granted_there]


def rights_of_member(namespace: str) -> list[Object]:
    """Return the same of a member, with what the operator is granted there."""
    (role,) = [one for one in service_account.member_account(namespace) if one["kind"] == kinds.ROLE.name]
    return [*(_rule(kind, "create") for kind in INSTALLED_IN_MEMBER), *role["rules"]]


def _rule(kind: ObjectKind, verbs: str, part: str = "") -> Object:
    group = kind.api_version.rpartition("/")[0]
    return rule(group, kind.plural + part, verbs.split())


def rights_at(version: str, rights: list[Object]) -> list[Object]:
    """Return the rights that an installation takes on a server of this version."""
    minor = minor_of(version)
    if minor is None or minor >= ADMISSION_MINOR:
        return rights
    return [one for one in rights if one["resources"][0] not in {kind.plural for kind in ADMISSION_KINDS}]


async def look(cluster: ClusterClient, rights: list[Object]) -> ClusterFacts:
    """Return the facts of a cluster; raises the client's errors where its API server does not answer."""
    probe = await probe_server(cluster)
    answers, devices, has_monitors = await asyncio.gather(
        granted(cluster, rights_at(probe.version, rights)), _accelerators(cluster), _has_pod_monitors(cluster)
    )
    return ClusterFacts(probe, answers, devices, has_monitors)


async def _accelerators(cluster: ClusterClient) -> tuple[Accelerators, ...] | None:
    try:
        return accelerators(await cluster.list_all(kinds.NODE))
    except ForbiddenError:
        return None


async def _has_pod_monitors(cluster: ClusterClient) -> bool:
    try:
        return await cluster.get(kinds.CUSTOM_RESOURCE, POD_MONITORS) is not None
    except ForbiddenError:
        return False


async def admission(cluster: ClusterClient, pod: Object) -> Admission:
    """Try by a dry run whether the client's namespace, which must exist, admits a pod."""
    namespace = await cluster.get(kinds.NAMESPACE, cluster.namespace)
    if namespace is None:
        raise ConfigError(f"there is no namespace {cluster.namespace}")
    enforced = (namespace.get("metadata", {}).get("labels") or {}).get(ENFORCE, "")
    try:
        await cluster.create(kinds.POD, pod, dry_run=True)
    except PrfaasError as error:
        return Admission(enforced, str(error))
    return Admission(enforced, "")
