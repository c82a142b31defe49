"""Reconcile a MemberCluster: probe it, keep its Secret while pools need it, sweep up what no pool owns any more."""

import logging
from datetime import UTC, datetime
from typing import Final, TypeVar

from pydantic import ValidationError

from prfaas import names
from prfaas.api import MemberCluster, PrefillPool
from prfaas.api.base import Resource
from prfaas_operator.clusters.api import DEPLOYMENT, MEMBER_CLUSTER, PREFILL_POOL, SECRET, Cluster, Kind, Object
from prfaas_operator.plan import member as plan
from prfaas_operator.reconcile.runtime import Report, Runtime

log = logging.getLogger(__name__)

PROBE_SECONDS: Final = 4.0

R = TypeVar("R", bound=Resource)


async def judge(runtime: Runtime, live: Object) -> Report:
    """Reconcile a MemberCluster."""
    hub, member = runtime.hub, MemberCluster.model_validate(live)
    secret = await hub.get(SECRET, member.spec.kubeconfig_secret_ref.name)
    contact, deployments = await runtime.members.contact(member, secret)
    # Pools are listed after their Deployments: whatever has no pool now had lost it before.
    pools = await read_all(hub, PREFILL_POOL, PrefillPool)
    if secret is not None:
        await _guard_secret(hub, secret, pools)
    orphans = await _sweep(runtime, member, deployments, pools)
    users = plan.users_of(member.metadata.name, pools)
    if member.metadata.deletion_timestamp and not users and not orphans:
        await runtime.members.drop(member.metadata.name)
        return Report(gone=True)
    fields = {}
    if contact.error is None:
        known = member.status.last_contact_time
        fields = {
            "serverVersion": contact.server_version,
            "lastContactTime": plan.contact_time(known, datetime.now(UTC)),
        }
    return Report(plan.verdicts(member, contact, users), fields, again_seconds=PROBE_SECONDS)


async def _guard_secret(hub: Cluster, secret: Object, pools: list[PrefillPool]) -> None:
    """Keep our finalizer on the Secret exactly while a pool is reached through it."""
    metadata = secret["metadata"]
    clusters = await read_all(hub, MEMBER_CLUSTER, MemberCluster)
    needed = plan.secret_is_needed(metadata["name"], clusters, pools)
    guarded = names.FINALIZER in metadata.get("finalizers", ())
    if needed == guarded or (needed and "deletionTimestamp" in metadata):
        return
    ours = {"finalizers": [names.FINALIZER]} if needed else {}
    # The uid keeps the apply from making an empty Secret where the old one has just gone.
    body = {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"], **ours}
    await hub.apply({"apiVersion": "v1", "kind": "Secret", "metadata": body})


async def _sweep(
    runtime: Runtime, member: MemberCluster, deployments: list[Object], pools: list[PrefillPool]
) -> list[Object]:
    """Delete Deployments whose pool gave up on them while the cluster was not reached; return them."""
    owners = {pool.metadata.uid for pool in pools}
    orphans = [one for one in deployments if one["metadata"]["labels"].get(names.LABEL_POOL_UID) not in owners]
    if orphans:
        cluster = await runtime.members.cluster(member.metadata.name)
        for orphan in orphans:
            metadata = orphan["metadata"]
            log.info(
                "MemberCluster %s: removing Deployment %s, its pool is gone", member.metadata.name, metadata["name"]
            )
            await cluster.delete(DEPLOYMENT, metadata["name"], uid=metadata["uid"])
    return orphans


async def read_all(hub: Cluster, kind: Kind, model: type[R]) -> list[R]:
    """List and read all objects of a kind; one that cannot be read is left out here and reports itself."""
    found: list[R] = []
    for item in await hub.list_all(kind):
        try:
            found.append(model.model_validate(item))
        except ValidationError as error:
            log.warning("%s %s is left out: %s", kind.name, item["metadata"]["name"], error)
    return found
