"""`prfaas cluster join`, `list`, `revoke`, `leave`: registers a member cluster, lists it, cuts it off, removes it."""

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

from prfaas.api import Condition, MemberCluster, PrefillPool
from prfaas.errors import ConfigError
from prfaas.kube.session import ObjectKind
from prfaas.names import routes_configmap
from prfaas.util import Deadline
from prfaas.wire.routes import RoutingTable
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.connect import KubeContext, open_context
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.errors import ConflictError, ForbiddenError
from prfaas_operator.plan.conditions import CERTIFICATE_READY, READY, REVOKED
from prfaas_operator.plan.credentials import SECONDS_PER_DAY, parse_kubeconfig
from prfaas_operator.plan.member import users_of
from prfaas_operator.plan.ownership import has_labels
from prfaas_operator.plan.reading import read
from prfaas_operator.render import service_account
from prfaas_operator.render.gateway import read_config_map
from prfaas_operator.render.service_account import Registration

POLL_SECONDS: Final = 0.3
AUTHORITY_SECONDS: Final = 30.0


async def join(
    hub: KubeContext,
    member: KubeContext,
    registration: Registration,
    server: str | None,
    token_days: int,
    wait_seconds: float,
) -> Object:
    """Make the account in the member, Secret and MemberCluster in the hub; return the MemberCluster once it is Ready.

    A second run renews the token and the registration. The token expires after `token_days` or when the member's API
    server says; the operator renews it long before.

    Raises:
        ConfigError: a cluster refused something, or the operator did not find the member usable within `wait_seconds`.
    """
    async with open_context(member) as there, open_context(hub) as here:
        await _make_account(there)
        token = await there.create_token(service_account.ACCOUNT, token_days * SECONDS_PER_DAY)
        reached_by = there.session.configuration
        authority = str(reached_by.ca_cert_data) or await _authority(there)
        document = service_account.kubeconfig(registration.name, server or reached_by.host, authority, token)
        parse_kubeconfig(document.encode())  # Refuse here what the operator would refuse later.
        await here.apply(service_account.secret(registration.name, document))
        await here.apply(service_account.member_cluster(registration))
        return await _until_ready(here, registration.name, wait_seconds)


async def _make_account(member: ClusterClient) -> None:
    """Create the missing parts of the member's account, and update the parts that an earlier join made."""
    for manifest in service_account.member_account(member.namespace):
        kind, name = kinds.BY_NAME[manifest["kind"]], manifest["metadata"]["name"]
        live = await member.get(kind, name)
        if live is None:
            try:
                await member.create(kind, manifest)
            except ConflictError:
                continue  # another client was faster
        elif has_labels(live, service_account.LABELS):
            await member.apply(manifest)


async def _authority(member: ClusterClient) -> str:
    """Return the cluster's CA as Kubernetes publishes it in every namespace."""
    deadline = Deadline(AUTHORITY_SECONDS)
    while not deadline.is_over:
        published = await member.get(kinds.CONFIG_MAP, kinds.ROOT_CA)
        if published is not None:
            return published["data"]["ca.crt"]
        await asyncio.sleep(POLL_SECONDS)
    raise ConfigError(
        f"ConfigMap {kinds.ROOT_CA} does not exist after {AUTHORITY_SECONDS:g} s; does the controller manager run?"
    )


async def _until_ready(hub: ClusterClient, name: str, wait_seconds: float) -> Object:
    deadline = Deadline(wait_seconds)
    while True:
        live = await hub.get(kinds.MEMBER_CLUSTER, name) or {}
        ready = ready_condition(live)
        generation = live.get("metadata", {}).get("generation", 0)
        if ready and ready.status == "True" and ready.observed_generation == generation:
            return live
        if deadline.is_over:
            why = f"{ready.reason}: {ready.message}" if ready else "no operator has reconciled it; is it installed?"
            raise ConfigError(f"MemberCluster {name} is registered, but not Ready after {wait_seconds:g} s: {why}")
        await asyncio.sleep(POLL_SECONDS)


class CutOffMember(NamedTuple):
    """A member that was cut off, and its pools. `routes_checked` false: these credentials may not read the tables."""

    member: MemberCluster
    pools: tuple[str, ...]
    routes_checked: bool


async def revoke(hub: KubeContext, name: str, wait_seconds: float) -> CutOffMember:
    """Cut a member cluster off; return once the hub refuses its certificates and routes nothing there.

    Raises ConfigError: there is no such MemberCluster, or it is not cut off within `wait_seconds`.
    """
    async with open_context(hub) as here:
        if await here.get(kinds.MEMBER_CLUSTER, name) is None:
            raise ConfigError(f"MemberCluster {name} does not exist in namespace {hub.namespace}")
        await here.merge(kinds.MEMBER_CLUSTER, name, {"spec": {"revoked": True}})
        deadline = Deadline(wait_seconds)
        while True:
            member, tables = await here.get(kinds.MEMBER_CLUSTER, name), await _tables(here)
            if member is None:
                raise ConfigError(f"MemberCluster {name} was deleted before it was cut off")
            missing = missing_for_revocation(cluster := read(MemberCluster, member), tables or {})
            if not missing:
                break
            if deadline.is_over:
                raise ConfigError(f"MemberCluster {name} is not cut off after {wait_seconds:g} s: {missing}")
            await asyncio.sleep(POLL_SECONDS)
        pools = [read(PrefillPool, pool) for pool in await here.list_all(kinds.PREFILL_POOL)]
    return CutOffMember(cluster, users_of(name, pools), routes_checked=tables is not None)


async def _tables(hub: ClusterClient) -> dict[str, RoutingTable | None] | None:
    """Return the routing tables that gateways read, by policy, None for one that this version cannot read.

    None instead of all: these credentials may not read them.
    """
    policies = [one["metadata"]["name"] for one in await hub.list_all(kinds.POLICY)]
    try:
        found = {one: await hub.get(kinds.CONFIG_MAP, routes_configmap(one)) for one in policies}
    except ForbiddenError:
        return None
    return {policy: read_config_map(live) for policy, live in found.items() if live is not None}


def missing_for_revocation(member: MemberCluster, tables: Mapping[str, RoutingTable | None]) -> str:
    """Return what is missing until a MemberCluster is cut off; empty: nothing. `tables` are those of policies, None for
    one that cannot be read."""
    name, found = member.metadata.name, {condition.type: condition for condition in member.status.conditions}
    ready, certificate = found.get(READY), found.get(CERTIFICATE_READY)
    if not member.spec.revoked:
        return "spec.revoked is not set: somebody took it back, or the hub's CRD is older than this command"
    if ready is None or ready.observed_generation != member.metadata.generation:
        return "no operator has reconciled it; does it run?"
    if ready.reason != REVOKED or member.status.admitted_time:
        return f"its operator, which may be older than this command, reports {ready.reason}: {ready.message}"
    if certificate is not None and certificate.reason != REVOKED:
        return f"{CERTIFICATE_READY} is {certificate.reason}: {certificate.message}"
    return _routed(name, tables)


def _routed(name: str, tables: Mapping[str, RoutingTable | None]) -> str:
    """Return which routing table has or may have a member; empty: none."""
    for policy, table in sorted(tables.items()):
        if table is None:
            where = f"ConfigMap {routes_configmap(policy)}"
            return f"{where} cannot be read by this version, and may route prompts there; upgrade this command"
        if name in {one.name for one in table.clusters} | {one.cluster for one in table.instances}:
            return f"PrfaaSPolicy {policy} still routes prompts there; see its conditions, it may be paused"
    return ""


def ready_condition(live: Object) -> Condition | None:
    conditions = (live.get("status") or {}).get("conditions") or ()
    return next((Condition.model_validate(one) for one in conditions if one.get("type") == READY), None)


async def leave(hub: KubeContext, member: KubeContext | None, name: str, wait_seconds: float) -> None:
    """Delete a MemberCluster and its Secret; with `member`, also the account that `join` made there.

    Raises ConfigError: there is no such MemberCluster, or pools still need it after `wait_seconds`.
    """
    async with open_context(hub) as here:
        live = await here.get(kinds.MEMBER_CLUSTER, name)
        if live is None:
            raise ConfigError(f"MemberCluster {name} does not exist in namespace {hub.namespace}")
        pools = [read(PrefillPool, pool) for pool in await here.list_all(kinds.PREFILL_POOL)]
        if users := users_of(name, pools):
            named = ", ".join(f"PrefillPool {user}" for user in users)
            raise ConfigError(f"MemberCluster {name} is used by {named}: delete these first, then leave")
        await here.delete(kinds.MEMBER_CLUSTER, name)
        await _await_removal(here, name, wait_seconds)
        await _delete_own(here, kinds.SECRET, read(MemberCluster, live).spec.kubeconfig_secret_ref.name)
    if member is not None:
        async with open_context(member) as there:
            for manifest in service_account.member_account(member.namespace):
                if manifest["kind"] != kinds.NAMESPACE.name:
                    await _delete_own(there, kinds.BY_NAME[manifest["kind"]], manifest["metadata"]["name"])


async def _await_removal(hub: ClusterClient, name: str, wait_seconds: float) -> None:
    deadline = Deadline(wait_seconds)
    while (live := await hub.get(kinds.MEMBER_CLUSTER, name)) is not None:
        if deadline.is_over:
            ready = ready_condition(live)
            why = ready.message if ready else "no operator has reconciled it"
            raise ConfigError(f"MemberCluster {name} is being deleted, but still there after {wait_seconds:g} s: {why}")
        await asyncio.sleep(POLL_SECONDS)


async def _delete_own(cluster: ClusterClient, kind: ObjectKind, name: str) -> None:
    """Delete an object that `join` made; keep one that Helm or a person made."""
    live = await cluster.get(kind, name)
    if live is not None and has_labels(live, service_account.LABELS):
        await cluster.delete(kind, name)


async def members(hub: KubeContext) -> list[tuple[MemberCluster, tuple[str, ...]]]:
    """Return all MemberClusters with the names of the pools that run in each."""
    async with open_context(hub) as here:
        found = await here.list_all(kinds.MEMBER_CLUSTER)
        pools = [read(PrefillPool, pool) for pool in await here.list_all(kinds.PREFILL_POOL)]
    clusters = [read(MemberCluster, one) for one in found]
    return [(cluster, users_of(cluster.metadata.name, pools)) for cluster in clusters]
