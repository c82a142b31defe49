"""Asks an API server for the facts of a cluster, with a person's own rights."""

import asyncio
from typing import Final

from prfaas.errors import PrfaasError
from prfaas.kube.session import CONFIG_MAP, ObjectKind
from prfaas_operator.check import granted, probe_server
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.errors import ForbiddenError
from prfaas_operator.preflight.facts import ENFORCE, Accelerators, Admission, ClusterFacts, accelerators
from prfaas_operator.render import service_account
from prfaas_operator.render.common import rule

POD_MONITORS: Final = "podmonitors.monitoring.coreos.com"
INSTALLED: Final = (
    *(kinds.NAMESPACE, kinds.SERVICE_ACCOUNT, kinds.ROLE, kinds.ROLE_BINDING, kinds.SECRET, kinds.NETWORK_POLICY),
)
"""What the chart prfaas-member and Helm itself create."""
INSTALLED_IN_HUB: Final = (
    *INSTALLED,
    *(kinds.CUSTOM_RESOURCE, kinds.DEPLOYMENT, kinds.SERVICE, CONFIG_MAP, kinds.DISRUPTION_BUDGET),
)
"""The same of the chart prfaas."""


def rights_of_hub() -> list[Object]:
    """Return the rights that an installation of the hub takes, as rules of a Role."""
    return [_create(kind) for kind in INSTALLED_IN_HUB]


def rights_of_member(namespace: str) -> list[Object]:
    """Return the same of a member: who grants the operator its rights must have them."""
    (role,) = [one for one in service_account.member_account(namespace) if one["kind"] == kinds.ROLE.name]
    return [*(_create(kind) for kind in INSTALLED), *role["rules"]]


def _create(kind: ObjectKind) -> Object:
    return rule(kind.api_version.rpartition("/")[0].partition("/")[0], kind.plural, ("create",))


async def look(cluster: ClusterClient, rights: list[Object]) -> ClusterFacts:
    """Return the facts of a cluster; raises the client's errors where its API server does not answer."""
    probe = await probe_server(cluster)
    answers, devices, has_monitors = await asyncio.gather(
        granted(cluster, rights), _accelerators(cluster), _has_pod_monitors(cluster)
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
    namespace = await cluster.get(kinds.NAMESPACE, cluster.namespace) or {}
    enforced = (namespace.get("metadata", {}).get("labels") or {}).get(ENFORCE, "")
    try:
        await cluster.create(kinds.POD, pod, dry_run=True)
    except PrfaasError as error:
        return Admission(enforced, str(error))
    return Admission(enforced, "")
