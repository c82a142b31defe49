"""Reconcile a PrefillPool or DecodePool: one Deployment, and its settings, in one cluster."""

import logging
from datetime import datetime, timedelta

from prfaas import names
from prfaas.api import DecodePool, MemberCluster, PrefillPool
from prfaas.errors import PrfaasError
from prfaas_operator.clusters.api import (
    CONFIG_MAP,
    DECODE_POOL,
    DEPLOYMENT,
    PREFILL_POOL,
    Cluster,
    Object,
)
from prfaas_operator.errors import ClusterNotFoundError, ForbiddenError, reason_of
from prfaas_operator.plan import pool as plan
from prfaas_operator.plan import replicas, secrets
from prfaas_operator.plan.conditions import DELETING, READY, Verdict, no, rfc3339
from prfaas_operator.reconcile import children, events, guard, roles
from prfaas_operator.reconcile.reading import read
from prfaas_operator.reconcile.runtime import RESYNC_SECONDS, RETRY_SECONDS, SEEN_RESYNC_SECONDS, Report, Runtime
from prfaas_operator.reconcile.wakers import Ref
from prfaas_operator.render import certificates, protection, shared
from prfaas_operator.render import pool as render
from prfaas_operator.render.common import Manifest

log = logging.getLogger(__name__)


async def judge_prefill(runtime: Runtime, live: Object) -> Report:
    """Reconcile a PrefillPool."""
    return await _judge(runtime, Ref(PREFILL_POOL, live["metadata"]["name"]), read(PrefillPool, live), live)


async def judge_decode(runtime: Runtime, live: Object) -> Report:
    """Reconcile a DecodePool."""
    return await _judge(runtime, Ref(DECODE_POOL, live["metadata"]["name"]), read(DecodePool, live), live)


async def _judge(runtime: Runtime, ref: Ref, pool: plan.Pool, live: Object) -> Report:
    if pool.metadata.deletion_timestamp:
        return await _remove(runtime, pool, live)
    if isinstance(pool, PrefillPool) and pool.spec.share_with:
        return await roles.judge_sharer(runtime, pool, live)
    secrets.check(pool.spec.template, runtime.kubeconfigs().values())
    member = _member(runtime, pool)
    cluster = await runtime.members.cluster(member.metadata.name) if member else runtime.hub
    if member:
        await guard.before_children(runtime, member.spec.kubeconfig_secret_ref.name)
    tls = await runtime.certificates.pool_uses_tls(member.metadata.name if member else names.HUB)
    settings = [render.settings(pool, member)] if isinstance(pool, PrefillPool) else []  # before the pods that read it
    share = roles.share_of(runtime, pool)
    pool = share.whole if share else pool
    manifest, failures = render.deployment(pool, member), []
    manifest = certificates.worker_in_tls(manifest) if tls and plan.engine_name(pool) == "prfaas" else manifest
    if share:
        manifest = shared.deployment(manifest)
        failures = await roles.give_out(runtime, share, manifest, live)
    deployment = (await children.apply_all(runtime, ref, cluster, [*settings, manifest]))[-1]
    await _protect(runtime, ref, cluster, protection.pool_budget(manifest, deployment))
    view = runtime.members.view(member.metadata.name) if member else runtime.hub_view()
    pods = [pod for pod in view.pods or () if pod.pool_uid == pool.metadata.uid]
    counts, verdict = plan.counts(deployment), plan.readiness(pool, deployment, pods)
    report = Report(
        conditions={READY: verdict},
        fields={
            "replicas": counts.replicas,
            "readyReplicas": counts.ready,
            "selector": render.scale_selector(pool),
            "replicasOwner": replicas.owner(live),
        },
        again_seconds=_again_seconds(runtime, cluster, verdict),
    )
    return roles.report_of(runtime, share, report, failures) if share else report


def _again_seconds(runtime: Runtime, cluster: Cluster, verdict: Verdict) -> float | None:
    """Return when to look again at a pool whose every change, also from unready to ready, wakes it; else None."""
    sight = runtime.sight_of(cluster)
    if sight is None or not sight.follows_all():
        return None
    return SEEN_RESYNC_SECONDS if verdict.good and not runtime.heals.holds_back() else RESYNC_SECONDS


async def _protect(runtime: Runtime, ref: Ref, cluster: Cluster, budget: Manifest) -> None:
    """Apply the pool's disruption budget.

    A member cluster whose role is of an earlier version gives no right to one: that is worth a line in the log, not a
    pool that does not work.
    """
    try:
        await children.apply(runtime, ref, cluster, budget)
    except ForbiddenError as error:
        log.info("%s has no PodDisruptionBudget: %s", ref, error)


def _member(runtime: Runtime, pool: plan.Pool) -> MemberCluster | None:
    """Return the MemberCluster that a pool runs in, None for the hub."""
    name = pool.spec.cluster_name
    if not name:
        return None
    found = runtime.clusters.items.get(name)
    if found is None:
        raise ClusterNotFoundError(
            f"MemberCluster {name} does not exist; "
            f"run `prfaas cluster join {name}`, or leave spec.clusterName empty for the hub"
        )
    return read(MemberCluster, dict(found))


async def _remove(runtime: Runtime, pool: plan.Pool, live: Object) -> Report:
    """Remove the Deployment of a pool that is being deleted; past the deadline, let the pool go without that."""
    if isinstance(pool, DecodePool):
        roles.wake_sharers(runtime, pool.metadata.name)
    try:
        member = _member(runtime, pool)
    except ClusterNotFoundError as error:
        await events.post(
            runtime.hub, live, "Warning", "ChildrenLeftBehind", f"{error}; what ran there was not removed"
        )
        return Report(gone=True)
    if member is None:
        return await _remove_from(runtime.hub, pool)
    try:
        report = await _remove_from(await runtime.members.cluster(member.metadata.name), pool)
    except PrfaasError as error:
        report = Report({READY: no(reason_of(error), f"cannot remove the instances: {error}")})
    return report if report.gone else await _until_deadline(runtime, pool, live, member, report)


async def _remove_from(cluster: Cluster, pool: plan.Pool) -> Report:
    selector = f"{names.LABEL_POOL_UID}={pool.metadata.uid}"
    if not await children.remove(cluster, (DEPLOYMENT, CONFIG_MAP), selector):
        return Report(gone=True)
    return Report({READY: no(DELETING, "waiting until the instances have ended")})


async def _until_deadline(
    runtime: Runtime, pool: plan.Pool, live: Object, member: MemberCluster, report: Report
) -> Report:
    since, deadline_seconds = pool.metadata.deletion_timestamp or "", member.spec.deletion_deadline_seconds
    left_seconds = plan.seconds_left(since, deadline_seconds, runtime.hub.now())
    verdict = report.conditions[READY]
    if left_seconds <= 0:
        message = f"{verdict.message}; gave up after {deadline_seconds} s, they are removed when the cluster is back"
        await events.post(runtime.hub, live, "Warning", "ChildrenLeftBehind", message)
        return Report(gone=True)
    until = rfc3339(datetime.fromisoformat(since) + timedelta(seconds=deadline_seconds))
    explained = verdict._replace(message=f"{verdict.message}; the pool goes without that at {until}")
    return Report({READY: explained}, again_seconds=min(left_seconds, RETRY_SECONDS))
