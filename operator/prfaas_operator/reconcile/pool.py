"""Reconcile a PrefillPool or DecodePool: one Deployment in one cluster."""

import logging
from datetime import UTC, datetime, timedelta

from prfaas import names
from prfaas.api import DecodePool, MemberCluster, PrefillPool
from prfaas.errors import PrfaasError
from prfaas_operator.clusters.api import DECODE_POOL, DEPLOYMENT, MEMBER_CLUSTER, PREFILL_POOL, Cluster, Object
from prfaas_operator.errors import ClusterNotFoundError, reason_of
from prfaas_operator.plan import pool as plan
from prfaas_operator.plan.conditions import DELETING, READY, no, rfc3339
from prfaas_operator.reconcile import children, events
from prfaas_operator.reconcile.runtime import RETRY_SECONDS, Report, Runtime
from prfaas_operator.reconcile.wakers import Ref
from prfaas_operator.render import pool as render

log = logging.getLogger(__name__)


async def judge_prefill(runtime: Runtime, live: Object) -> Report:
    """Reconcile a PrefillPool."""
    return await _judge(runtime, Ref(PREFILL_POOL, live["metadata"]["name"]), PrefillPool.model_validate(live), live)


async def judge_decode(runtime: Runtime, live: Object) -> Report:
    """Reconcile a DecodePool."""
    return await _judge(runtime, Ref(DECODE_POOL, live["metadata"]["name"]), DecodePool.model_validate(live), live)


async def _judge(runtime: Runtime, ref: Ref, pool: plan.Pool, live: Object) -> Report:
    if pool.metadata.deletion_timestamp:
        return await _remove(runtime, pool, live)
    member = await _member(runtime, pool)
    cluster = await runtime.members.cluster(member.metadata.name) if member else runtime.hub
    deployment = await children.apply(runtime, ref, cluster, render.deployment(pool, member))
    view = runtime.members.view(member.metadata.name) if member else runtime.hub_view()
    pods = [pod for pod in view.pods or () if pod.pool_uid == pool.metadata.uid]
    counts = plan.counts(deployment)
    return Report(
        conditions={READY: plan.readiness(pool, deployment, pods)},
        fields={
            "replicas": counts.replicas,
            "readyReplicas": counts.ready,
            "selector": render.scale_selector(pool),
        },
    )


async def _member(runtime: Runtime, pool: plan.Pool) -> MemberCluster | None:
    """Return the MemberCluster that a pool runs in, None for the hub."""
    name = pool.spec.cluster_name
    if not name:
        return None
    found = await runtime.hub.get(MEMBER_CLUSTER, name)
    if found is None:
        raise ClusterNotFoundError(
            f"MemberCluster {name} does not exist; "
            f"run `prfaas cluster join {name}`, or leave spec.clusterName empty for the hub"
        )
    return MemberCluster.model_validate(found)


async def _remove(runtime: Runtime, pool: plan.Pool, live: Object) -> Report:
    """Remove the Deployment of a pool that is being deleted; past the deadline, let the pool go without that."""
    try:
        member = await _member(runtime, pool)
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
    if not await children.remove(cluster, (DEPLOYMENT,), selector):
        return Report(gone=True)
    return Report({READY: no(DELETING, "waiting until the instances have ended")})


async def _until_deadline(
    runtime: Runtime, pool: plan.Pool, live: Object, member: MemberCluster, report: Report
) -> Report:
    since, deadline_seconds = pool.metadata.deletion_timestamp or "", member.spec.deletion_deadline_seconds
    left_seconds = plan.seconds_left(since, deadline_seconds, datetime.now(UTC))
    verdict = report.conditions[READY]
    if left_seconds <= 0:
        message = f"{verdict.message}; gave up after {deadline_seconds} s, they are removed when the cluster is back"
        await events.post(runtime.hub, live, "Warning", "ChildrenLeftBehind", message)
        return Report(gone=True)
    until = rfc3339(datetime.fromisoformat(since) + timedelta(seconds=deadline_seconds))
    explained = verdict._replace(message=f"{verdict.message}; the pool goes without that at {until}")
    return Report({READY: explained}, again_seconds=min(left_seconds, RETRY_SECONDS))
