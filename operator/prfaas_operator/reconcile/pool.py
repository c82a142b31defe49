"""Reconciles a PrefillPool or DecodePool: one Deployment and its settings in one cluster."""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from prfaas import names
from prfaas.api import DecodePool, MemberCluster, PrefillPool
from prfaas.conditions import rfc3339
from prfaas.errors import PrfaasError
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import CONFIG_MAP, DECODE_POOL, DEPLOYMENT, MEMBER_CLUSTER, PREFILL_POOL, Object
from prfaas_operator.controller import events
from prfaas_operator.controller.children import Children, remove
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import Ref
from prfaas_operator.controller.status import RESYNC_SECONDS, RETRY_SECONDS, SEEN_RESYNC_SECONDS, ReconcileResult
from prfaas_operator.errors import ClusterNotFoundError, ClusterRevokedError, ForbiddenError, reason_of
from prfaas_operator.plan import ownership, transfers
from prfaas_operator.plan import pool_status as plan
from prfaas_operator.plan.conditions import DELETING, READY, ConditionState, no
from prfaas_operator.plan.member import check_secrets
from prfaas_operator.plan.pod_facts import PodFacts
from prfaas_operator.plan.profile import check_profile
from prfaas_operator.plan.reading import read
from prfaas_operator.reconcile.certificates import Certificates
from prfaas_operator.reconcile.content import ContentCheck
from prfaas_operator.reconcile.member import SecretGuard
from prfaas_operator.reconcile.members import Members
from prfaas_operator.reconcile.roles import SharedRoles
from prfaas_operator.render import pool_deployment as render
from prfaas_operator.render import protection
from prfaas_operator.render.launch import StartTerms

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolReconciler:
    """Reconciles pools of both kinds."""

    hub: HubView
    members: Members
    certificates: Certificates
    children: Children
    secrets: SecretGuard
    contents: ContentCheck
    roles: SharedRoles
    terms: StartTerms
    allowed: plan.AllowedNames

    async def reconcile_prefill(self, live: Object) -> ReconcileResult:
        return await self._reconcile(Ref(PREFILL_POOL, live["metadata"]["name"]), read(PrefillPool, live), live)

    async def reconcile_decode(self, live: Object) -> ReconcileResult:
        return await self._reconcile(Ref(DECODE_POOL, live["metadata"]["name"]), read(DecodePool, live), live)

    async def _reconcile(self, ref: Ref, pool: plan.PoolObject, live: Object) -> ReconcileResult:
        if pool.metadata.deletion_timestamp:
            return await self._remove(pool, live)
        if isinstance(pool, PrefillPool) and pool.spec.share_with:
            return self.roles.reconcile_sharer(pool, live)
        try:
            member, cluster = await self._checked(pool)
        except PrfaasError:
            await self._give_roles(pool, live)
            raise
        if member:
            await self.secrets.before_children(member.spec.kubeconfig_secret_ref.name)
        deployed = partial(cluster.get, DEPLOYMENT, pool.metadata.name)
        tls = await self.certificates.pool_uses_tls(member.metadata.name if member else names.HUB, deployed)
        # Settings come before the pods that read them.
        settings = [render.settings(pool, member)] if isinstance(pool, PrefillPool) else []
        shared = self.roles.shared(pool)
        pool = shared.whole if shared else pool
        terms, failures = self.terms._replace(tls=tls), []
        manifest = render.deployment(pool, member, terms)
        if shared:
            manifest = render.shared_deployment(manifest)
            failures = await self.roles.give_out(shared, manifest, live)
        deployment = (await self.children.apply_all(ref, cluster, [*settings, manifest]))[-1]
        await self._protect(ref, cluster, protection.pool_budget(manifest, deployment))
        pods = self._pods(pool, member)
        counts, ready = plan.counts(deployment), plan.readiness(pool, deployment, pods)
        result = ReconcileResult(
            conditions={READY: ready, **plan.version_proof(pods), **transfers.pool_conditions(pool, pods)},
            fields={
                "replicas": counts.replicas,
                "readyReplicas": counts.ready,
                "selector": render.scale_selector(pool),
                "replicasOwner": ownership.owner(live),
            },
            again_seconds=self._again_seconds(cluster, ready),
        )
        return self.roles.result_of(shared, result, failures) if shared else result

    async def _checked(self, pool: plan.PoolObject) -> tuple[MemberCluster | None, ClusterClient]:
        """Return where a pool runs. Raises PrfaasError: it may not be as its spec says."""
        check_secrets(pool.spec.template)
        member = self._member(pool)
        if member is None:
            plan.check_names(pool.spec.template, self.allowed)
        elif member.spec.revoked:
            name = member.metadata.name
            raise ClusterRevokedError(
                f"MemberCluster {name} is revoked: its instances get no prompt, and nothing is changed there; delete "
                f"the pool, or run `prfaas cluster join {name}` to admit the cluster again"
            )
        plan.check_addressing(pool, member)
        check_profile(pool)
        cluster = await self.members.cluster(member.metadata.name) if member else self.hub.client
        await self.contents.check(pool.spec.template, cluster)
        return member, cluster

    async def _give_roles(self, pool: plan.PoolObject, live: Object) -> None:
        """Give the pods of a refused pool their roles, and nothing else: a replaced one would wait for ever."""
        shared = self.roles.shared(pool)
        deployed = await self.hub.client.get(DEPLOYMENT, pool.metadata.name) if shared else None
        if shared and deployed and render.is_shared(deployed):
            await self.roles.give_out(shared, deployed, live)

    def _pods(self, pool: plan.PoolObject, member: MemberCluster | None) -> list[PodFacts]:
        """Return the observed pods of a pool."""
        observed = self.members.observed(member.metadata.name) if member else self.hub.observed()
        return [pod for pod in observed.pods or () if pod.pool_uid == pool.metadata.uid]

    def _again_seconds(self, cluster: ClusterClient, ready: ConditionState) -> float | None:
        """Return the delay until the next reconcile: longer where every change wakes the pool; None: the usual one."""
        if not self.children.follows_all(cluster):
            return None
        return SEEN_RESYNC_SECONDS if ready.good and not self.children.edits.is_holding_back() else RESYNC_SECONDS

    async def _protect(self, ref: Ref, cluster: ClusterClient, budget: Object) -> None:
        try:
            await self.children.apply(ref, cluster, budget)
        except ForbiddenError as error:  # a member's role may grant less: the pool works without a budget
            log.info("%s has no PodDisruptionBudget: %s", ref, error)

    def _member(self, pool: plan.PoolObject) -> MemberCluster | None:
        name = pool.spec.cluster_name
        if not name:
            return None
        found = self.hub.get(Ref(MEMBER_CLUSTER, name))
        if found is None:
            raise ClusterNotFoundError(
                f"MemberCluster {name} does not exist; "
                f"run `prfaas cluster join {name}`, or leave spec.clusterName empty for the hub"
            )
        return read(MemberCluster, found)

    async def _remove(self, pool: plan.PoolObject, live: Object) -> ReconcileResult:
        """Delete the Deployment of a pool that is being deleted; after the deadline, release the pool without that."""
        if isinstance(pool, DecodePool):
            self.roles.wake_sharers(pool.metadata.name)
        try:
            member = self._member(pool)
        except ClusterNotFoundError as error:
            message = f"{error}; its children there were not deleted"
            await events.post(self.hub.client, live, "Warning", "ChildrenLeftBehind", message)
            return ReconcileResult(gone=True)
        if member is None:
            return await _remove_from(self.hub.client, pool)
        try:
            result = await _remove_from(await self.members.cluster(member.metadata.name), pool)
        except PrfaasError as error:
            result = ReconcileResult({READY: no(reason_of(error), f"cannot delete the instances: {error}")})
        return result if result.gone else await self._until_deadline(pool, live, member, result)

    async def _until_deadline(
        self, pool: plan.PoolObject, live: Object, member: MemberCluster, result: ReconcileResult
    ) -> ReconcileResult:
        since, deadline_seconds = pool.metadata.deletion_timestamp or "", member.spec.deletion_deadline_seconds
        left_seconds = plan.seconds_left(since, deadline_seconds, self.hub.client.now())
        ready = result.conditions[READY]
        if left_seconds <= 0:
            message = f"{ready.message}; gave up after {deadline_seconds} s; they are deleted when the cluster is back"
            await events.post(self.hub.client, live, "Warning", "ChildrenLeftBehind", message)
            return ReconcileResult(gone=True)
        until = rfc3339(datetime.fromisoformat(since) + timedelta(seconds=deadline_seconds))
        explained = ready._replace(message=f"{ready.message}; the pool is released without that at {until}")
        return ReconcileResult({READY: explained}, again_seconds=min(left_seconds, RETRY_SECONDS))


async def _remove_from(cluster: ClusterClient, pool: plan.PoolObject) -> ReconcileResult:
    selector = f"{names.LABEL_POOL_UID}={pool.metadata.uid}"
    if not await remove(cluster, (DEPLOYMENT, CONFIG_MAP), selector):
        return ReconcileResult(gone=True)
    return ReconcileResult({READY: no(DELETING, "waiting for the instances' end")})
