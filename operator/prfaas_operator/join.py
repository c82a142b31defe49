"""What `prfaas cluster` does: register a member cluster in the hub, list what is registered, and take it out again."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from prfaas.api import Condition, MemberCluster, PrefillPool
from prfaas.errors import ConfigError
from prfaas_operator.clusters import api
from prfaas_operator.clusters.api import Object
from prfaas_operator.clusters.client import KubernetesCluster
from prfaas_operator.clusters.connect import Terminal, connect_context
from prfaas_operator.errors import ConflictError
from prfaas_operator.plan import kubeconfig
from prfaas_operator.plan.conditions import READY
from prfaas_operator.plan.member import users_of
from prfaas_operator.render import account
from prfaas_operator.render.account import Registration

POLL_SECONDS: Final = 0.3
TOKEN_SECONDS: Final = 30.0


class Place(NamedTuple):
    """Which cluster and namespace a command works in."""

    kubeconfig: Path | None
    context: str | None
    namespace: str


@asynccontextmanager
async def at(place: Place) -> AsyncIterator[Terminal]:
    """Open a cluster for the length of a command."""
    terminal = await connect_context(place.kubeconfig, place.context, place.namespace)
    try:
        yield terminal
    finally:
        await terminal.cluster.close()


async def join(
    hub: Place, member: Place, registration: Registration, server: str | None, wait_seconds: float
) -> Object:
    """Make the account in the member, the Secret and the MemberCluster in the hub; return the latter when it is Ready.

    Running it again renews the token and the registration.

    Raises:
        ConfigError: a cluster refused something, or the operator did not find the member usable within `wait_seconds`.

    """
    async with at(member) as there, at(hub) as here:
        token, authority = await _account(there.cluster)
        document = account.kubeconfig(registration.name, server or there.server, there.ca_pem or authority, token)
        kubeconfig.parse(document.encode())  # whatever the operator would refuse is better refused here
        await here.cluster.apply(account.secret(registration.name, document))
        await here.cluster.apply(account.member_cluster(registration))
        return await _until_ready(here.cluster, registration.name, wait_seconds)


async def _account(member: KubernetesCluster) -> tuple[str, str]:
    """Make what is missing of the member's account; return its token and the cluster's CA."""
    for manifest in account.member_account(member.namespace):
        kind = api.BY_NAME[manifest["kind"]]
        if await member.get(kind, manifest["metadata"]["name"]) is None:
            try:
                await member.create(kind, manifest)
            except ConflictError:
                continue  # somebody was faster
    deadline = time.monotonic() + TOKEN_SECONDS
    while time.monotonic() < deadline:
        secret = await member.get(api.SECRET, account.TOKEN_SECRET)
        data = (secret or {}).get("data") or {}
        if "token" in data:
            return base64.b64decode(data["token"]).decode(), base64.b64decode(data.get("ca.crt", "")).decode()
        await asyncio.sleep(POLL_SECONDS)
    raise ConfigError(
        f"Secret {account.TOKEN_SECRET} got no token in {TOKEN_SECONDS:g} s; is the controller manager up?"
    )


async def _until_ready(hub: KubernetesCluster, name: str, wait_seconds: float) -> Object:
    deadline = time.monotonic() + wait_seconds
    while True:
        live = await hub.get(api.MEMBER_CLUSTER, name) or {}
        ready = ready_condition(live)
        generation = live.get("metadata", {}).get("generation", 0)
        if ready and ready.status == "True" and ready.observed_generation == generation:
            return live
        if time.monotonic() > deadline:
            why = f"{ready.reason}: {ready.message}" if ready else "no operator has looked at it; is it installed?"
            raise ConfigError(f"MemberCluster {name} is registered, but not Ready after {wait_seconds:g} s: {why}")
        await asyncio.sleep(POLL_SECONDS)


def ready_condition(live: Object) -> Condition | None:
    """Return the condition Ready of an object, if it has one."""
    conditions = (live.get("status") or {}).get("conditions") or ()
    return next((Condition.model_validate(one) for one in conditions if one.get("type") == READY), None)


async def leave(hub: Place, member: Place | None, name: str, wait_seconds: float) -> None:
    """Delete a MemberCluster and its Secret, and where `member` is given, the account that `join` made there.

    Raises:
        ConfigError: there is no such MemberCluster, or pools still need it after `wait_seconds`.

    """
    async with at(hub) as here:
        live = await here.cluster.get(api.MEMBER_CLUSTER, name)
        if live is None:
            raise ConfigError(f"MemberCluster {name} does not exist in namespace {hub.namespace}")
        await here.cluster.delete(api.MEMBER_CLUSTER, name)
        await _until_gone(here.cluster, name, wait_seconds)
        await _delete_own(here.cluster, api.SECRET, MemberCluster.model_validate(live).spec.kubeconfig_secret_ref.name)
    if member is not None:
        async with at(member) as there:
            for manifest in account.member_account(member.namespace):
                if manifest["kind"] != api.NAMESPACE.name:
                    await _delete_own(there.cluster, api.BY_NAME[manifest["kind"]], manifest["metadata"]["name"])


async def _until_gone(hub: KubernetesCluster, name: str, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    while (live := await hub.get(api.MEMBER_CLUSTER, name)) is not None:
        if time.monotonic() > deadline:
            ready = ready_condition(live)
            why = ready.message if ready else "no operator has looked at it"
            raise ConfigError(f"MemberCluster {name} is being deleted, but still there after {wait_seconds:g} s: {why}")
        await asyncio.sleep(POLL_SECONDS)


async def _delete_own(cluster: KubernetesCluster, kind: api.Kind, name: str) -> None:
    """Delete an object that `join` made; one that Helm or a person made stays."""
    live = await cluster.get(kind, name)
    labels = (live or {}).get("metadata", {}).get("labels") or {}
    if all(labels.get(label) == value for label, value in account.LABELS.items()):
        await cluster.delete(kind, name)


async def members(hub: Place) -> list[tuple[MemberCluster, tuple[str, ...]]]:
    """Return all MemberClusters with the names of the pools that run in each."""
    async with at(hub) as here:
        found = await here.cluster.list_all(api.MEMBER_CLUSTER)
        pools = [PrefillPool.model_validate(pool) for pool in await here.cluster.list_all(api.PREFILL_POOL)]
    clusters = [MemberCluster.model_validate(one) for one in found]
    return [(cluster, users_of(cluster.metadata.name, pools)) for cluster in clusters]
