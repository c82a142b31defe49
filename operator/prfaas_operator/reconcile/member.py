"""Reconciles a MemberCluster: probes it, keeps its Secret while pools need it, renews its token, deletes orphans.

If a member's Secret were deleted before the last pool, the pool's children there would stay for ever. So the operator's
finalizer is on the Secret from before the first child until after the last.

A token is renewed at half its life with its own rights, and only in a Secret that `prfaas cluster join` made. Another
owner of a Secret would revert the write. The old token works until its own expiry, whenever the write happens.
"""

import base64
import logging
import time
from dataclasses import dataclass
from typing import Final

from prfaas import names
from prfaas.api import MemberCluster
from prfaas.conditions import rfc3339
from prfaas.errors import PrfaasError
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import PREFILL_POOL, SECRET, Object, manifest
from prfaas_operator.controller import events
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.status import ReconcileResult
from prfaas_operator.errors import ConflictError, ForbiddenSecretError
from prfaas_operator.plan import credentials
from prfaas_operator.plan import member as plan
from prfaas_operator.plan.credentials import SECONDS_PER_DAY, TokenFacts
from prfaas_operator.plan.member import MADE_BY_JOIN, secret_is_needed
from prfaas_operator.plan.reading import read
from prfaas_operator.plan.roles import project_sharer
from prfaas_operator.reconcile.certificates import Certificates
from prfaas_operator.reconcile.members import Members, Owned

log = logging.getLogger(__name__)

PROBE_SECONDS: Final = 4.0
RENEWAL_PAUSE_SECONDS: Final = 60.0
"""A refused renewal is retried after this long."""


class SecretGuard:
    """Keeps our finalizer on the kubeconfig Secrets of pools."""

    def __init__(self, hub: HubView):
        self._hub = hub
        self._guarded: set[str] = set()

    async def before_children(self, name: str) -> None:
        """Put the finalizer on a Secret before the first child; no call if it is known to be there."""
        if name in self._guarded:
            return
        secret = await self._hub.client.get(SECRET, name)
        if secret is not None:
            await self._put(secret, needed=True)

    async def while_needed(self, secret: Object) -> None:
        """Keep the finalizer on a Secret exactly while a pool needs it."""
        name, kubeconfigs = secret["metadata"]["name"], self._hub.kubeconfigs()
        needed = secret_is_needed(name, kubeconfigs, self._hub.clusters_in_use())
        if _is_guarded(secret) and not needed:  # the watch may not have delivered a new pool yet
            pools = await self._hub.client.list_all(PREFILL_POOL)
            needed = secret_is_needed(name, kubeconfigs, {project_sharer(pool).cluster for pool in pools})
        await self._put(secret, needed=needed)

    async def release_others(self) -> None:
        """Remove the finalizer from Secrets that no MemberCluster names any more."""
        for name in self._guarded - set(self._hub.kubeconfigs().values()):
            secret = await self._hub.client.get(SECRET, name)
            if secret is None:
                self._guarded.discard(name)
            else:
                await self.while_needed(secret)

    async def _put(self, secret: Object, *, needed: bool) -> None:
        metadata, guarded = secret["metadata"], _is_guarded(secret)
        if needed != guarded and not (needed and "deletionTimestamp" in metadata):
            ours = {"finalizers": [names.FINALIZER]} if needed else {}
            # The uid keeps the apply from creating an empty Secret in place of a deleted one.
            identity = {key: metadata[key] for key in ("name", "namespace", "uid")}
            await self._hub.client.apply(manifest(SECRET, {**identity, **ours}))
            guarded = needed
        if guarded:
            self._guarded.add(metadata["name"])
        else:
            self._guarded.discard(metadata["name"])


def _is_guarded(secret: Object) -> bool:
    return names.FINALIZER in secret["metadata"].get("finalizers", ())


class TokenRenewal:
    """Renews tokens when they are due; `token_days` is the requested life of new ones."""

    def __init__(self, token_days: int):
        self._token_seconds = token_days * SECONDS_PER_DAY
        self._not_before: dict[str, float] = {}

    async def renew(
        self, hub: ClusterClient, there: ClusterClient, live: Object, secret: Object, token: TokenFacts
    ) -> None:
        """Replace a member's token in its Secret when that is due; a refusal becomes an Event.

        `there` is the member, reached with its present token; `live` and `secret` lie in the hub.
        """
        member = read(MemberCluster, live)
        name = member.metadata.name
        made_by_join = (secret["metadata"].get("labels") or {}).get(names.LABEL_MANAGED_BY) == MADE_BY_JOIN
        # `create_token` reaches accounts of this namespace alone.
        is_due = token.namespace == there.namespace and credentials.is_renewal_due(token, there.now())
        if not (made_by_join and is_due) or time.monotonic() < self._not_before.get(name, 0.0):
            return
        try:
            fresh = await there.create_token(token.account, self._token_seconds)
            await _store_token(hub, secret, member.spec.kubeconfig_secret_ref.key, fresh)
        except ConflictError:
            return  # the Secret was written in between, perhaps by us: the next reconcile reads it
        except PrfaasError as error:
            self._not_before[name] = time.monotonic() + RENEWAL_PAUSE_SECONDS
            await events.post(hub, live, "Warning", "TokenNotRenewed", f"{error}; run `prfaas cluster join {name}`")
            return
        granted = credentials.read_token(fresh)
        log.info("MemberCluster %s: new token until %s", name, granted.expires_at if granted else "further notice")


async def _store_token(hub: ClusterClient, secret: Object, key: str, token: str) -> None:
    """Write a token into a Secret as it was read; ConflictError if the Secret was changed in between.

    This is a merge patch, because an apply would make the data ours, and our apply of the finalizer would remove it.
    """
    document = credentials.with_token(base64.b64decode(secret["data"][key]), token)
    patch = {
        "metadata": {"resourceVersion": secret["metadata"]["resourceVersion"]},
        "data": {key: base64.b64encode(document).decode()},
    }
    await hub.merge(SECRET, secret["metadata"]["name"], patch)


@dataclass(frozen=True)
class MemberReconciler:
    """Reconciles MemberClusters."""

    hub: HubView
    members: Members
    certificates: Certificates
    secrets: SecretGuard
    tokens: TokenRenewal

    async def reconcile(self, live: Object) -> ReconcileResult:
        hub, member = self.hub.client, read(MemberCluster, live)
        secret = await hub.get(SECRET, member.spec.kubeconfig_secret_ref.name)
        contact = await self.members.contact(member, secret)
        if secret is not None and not isinstance(contact.error, ForbiddenSecretError):
            await self.secrets.while_needed(secret)
        await self.secrets.release_others()
        leaving = member.metadata.deletion_timestamp is not None
        # One that was cut off is hostile: what it answers, or does not, must not delay that. It is swept on its return.
        is_swept = contact.error is None and (leaving or not member.spec.revoked)
        orphans = await self._sweep(member) if is_swept else []
        users = await _users(hub, member) if leaving else ()
        if leaving and not users and not orphans:
            await self.certificates.leave(member.metadata.name, member.metadata.uid)
            await self.members.drop(member.metadata.name)
            return ReconcileResult(gone=True)
        fields: dict[str, str | None] = {
            "tokenExpirationTime": rfc3339(contact.token.expires_at) if contact.token else None,
            "admittedTime": plan.admitted_time(member, hub.now()),
        }
        if contact.error is None:
            known = member.status.last_contact_time
            fields["serverVersion"] = contact.server_version
            fields["lastContactTime"] = plan.contact_time(known, hub.now())
            if secret is not None and contact.token is not None:
                there = await self.members.cluster(member.metadata.name)
                await self.tokens.renew(hub, there, live, secret, contact.token)
        conditions = {**plan.conditions(member, contact, users), **self.certificates.conditions(member.metadata.name)}
        return ReconcileResult(conditions, fields, again_seconds=PROBE_SECONDS)

    async def _sweep(self, member: MemberCluster) -> Owned:
        """Delete orphans: children of pools that gave up while the cluster was not reached; return them.

        Watches only raise the suspicion, because the order of their events may be wrong for a new pool.
        """
        suspected = self.members.owners(member.metadata.name)
        if suspected is not None and suspected <= {pool.uid for pool in self.hub.sharers.values()}:
            return []
        owned = await self.members.owned(member.metadata.name)
        # Pools are listed after their children: a child without a pool now had lost it before.
        owners = {pool["metadata"]["uid"] for pool in await self.hub.client.list_all(PREFILL_POOL)}
        orphans = [
            (kind, one) for kind, one in owned if one["metadata"]["labels"].get(names.LABEL_POOL_UID) not in owners
        ]
        if orphans:
            cluster = await self.members.cluster(member.metadata.name)
            for kind, orphan in orphans:
                metadata, where = orphan["metadata"], member.metadata.name
                log.info("MemberCluster %s: deleting %s %s, its pool is gone", where, kind.name, metadata["name"])
                await cluster.delete(kind, metadata["name"], uid=metadata["uid"])
        return orphans


async def _users(hub: ClusterClient, member: MemberCluster) -> tuple[str, ...]:
    """Return the pools that run in a cluster, and those among them that this version cannot read.

    They are listed again: a pool that the watch has not delivered yet would lose its cluster for good.
    """
    pools = await hub.list_all(PREFILL_POOL)
    in_it = (pool for pool in pools if (pool.get("spec") or {}).get("clusterName") == member.metadata.name)
    return tuple(sorted(pool["metadata"]["name"] for pool in in_it))
