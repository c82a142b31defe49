"""Reconcile a MemberCluster: probe it, keep its Secret while pools need it, sweep up what no pool owns any more."""

import logging
from typing import Final

from prfaas import names
from prfaas.api import MemberCluster
from prfaas_operator.clusters.api import PREFILL_POOL, SECRET, Cluster, Object
from prfaas_operator.plan import member as plan
from prfaas_operator.plan.conditions import rfc3339
from prfaas_operator.reconcile import guard
from prfaas_operator.reconcile.members import Owned
from prfaas_operator.reconcile.reading import read
from prfaas_operator.reconcile.runtime import Report, Runtime

log = logging.getLogger(__name__)

PROBE_SECONDS: Final = 4.0


async def judge(runtime: Runtime, live: Object) -> Report:
    """Reconcile a MemberCluster."""
    hub, member = runtime.hub, read(MemberCluster, live)
    secret = await hub.get(SECRET, member.spec.kubeconfig_secret_ref.name)
    contact = await runtime.members.contact(member, secret)
    if secret is not None:
        await guard.while_needed(runtime, secret)
    await guard.release_others(runtime)
    orphans = await _sweep(runtime, member) if contact.error is None else []
    leaving = member.metadata.deletion_timestamp is not None
    users = await _users(hub, member) if leaving else ()
    if leaving and not users and not orphans:
        await runtime.certificates.leave(member.metadata.name, member.metadata.uid)
        await runtime.members.drop(member.metadata.name)
        return Report(gone=True)
    fields: dict[str, str | None] = {
        "tokenExpirationTime": rfc3339(contact.token.expires_at) if contact.token else None
    }
    if contact.error is None:
        known = member.status.last_contact_time
        fields["serverVersion"] = contact.server_version
        fields["lastContactTime"] = plan.contact_time(known, hub.now())
        if secret is not None and contact.token is not None:
            there = await runtime.members.cluster(member.metadata.name)
            await runtime.renewals.renew(hub, there, live, secret, contact.token)
    conditions = {**plan.verdicts(member, contact, users), **runtime.certificates.conditions(member.metadata.name)}
    return Report(conditions, fields, again_seconds=PROBE_SECONDS)


async def _sweep(runtime: Runtime, member: MemberCluster) -> Owned:
    """Delete what pools gave up on while the cluster was not reached; return it.

    What watches tell only raises the suspicion: of a pool that was just made they may tell in the wrong order.
    """
    suspected = runtime.members.owners(member.metadata.name)
    if suspected is not None and suspected <= {pool.uid for pool in runtime.sharers.items.values()}:
        return []
    owned = await runtime.members.owned(member.metadata.name)
    # Pools are listed after what they own: whatever has no pool now had lost it before.
    owners = {pool["metadata"]["uid"] for pool in await runtime.hub.list_all(PREFILL_POOL)}
    orphans = [(kind, one) for kind, one in owned if one["metadata"]["labels"].get(names.LABEL_POOL_UID) not in owners]
    if orphans:
        cluster = await runtime.members.cluster(member.metadata.name)
        for kind, orphan in orphans:
            metadata, where = orphan["metadata"], member.metadata.name
            log.info("MemberCluster %s: removing %s %s, its pool is gone", where, kind.name, metadata["name"])
            await cluster.delete(kind, metadata["name"], uid=metadata["uid"])
    return orphans


async def _users(hub: Cluster, member: MemberCluster) -> tuple[str, ...]:
    """Return the pools that run in a cluster, those among them that this version cannot read."""
    pools = await hub.list_all(PREFILL_POOL)
    in_it = (pool for pool in pools if (pool.get("spec") or {}).get("clusterName") == member.metadata.name)
    return tuple(sorted(pool["metadata"]["name"] for pool in in_it))
