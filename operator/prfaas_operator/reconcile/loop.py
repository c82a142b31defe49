"""Keep one object reconciled: again when woken, again after a while, whatever went wrong before.

The status is written also on failure, and one object's failure is nobody else's: every object has its own loop, and
every call inside it a timeout.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from prfaas.errors import PrfaasError
from prfaas.names import HUB
from prfaas.wire.trace import NO_TRACE
from prfaas_operator import logs, metrics
from prfaas_operator.clusters.api import DECODE_POOL, MEMBER_CLUSTER, POLICY, PREFILL_POOL, Kind, Object
from prfaas_operator.errors import NotLeaderError, reason_of
from prfaas_operator.plan import annotations
from prfaas_operator.plan.conditions import READY, Verdict, no
from prfaas_operator.reconcile import member, misfit, policy, pool
from prfaas_operator.reconcile.runtime import RESYNC_SECONDS, RETRY_SECONDS, Report, Runtime
from prfaas_operator.reconcile.wakers import Ref

log = logging.getLogger(__name__)

Judge = Callable[[Runtime, Object], Awaitable[Report]]
JUDGES: Final[Mapping[Kind, Judge]] = {
    MEMBER_CLUSTER: member.judge,
    PREFILL_POOL: pool.judge_prefill,
    DECODE_POOL: pool.judge_decode,
    POLICY: policy.judge,
}
REST_SECONDS: Final[Mapping[Kind, float]] = {POLICY: 1.0, MEMBER_CLUSTER: 1.0}
"""A routing table is written, and a member probed, at most once a second, however fast pods and pools come and go."""

PAUSED: Final = Verdict(
    "Unknown", "Paused", f"nothing that belongs to it is changed; remove the annotation {annotations.PAUSED} to go on"
)


async def keep(runtime: Runtime, ref: Ref, uid: str) -> None:
    """Reconcile an object until nothing of it is left."""
    logs.about(kind=ref.kind.name, namespace=runtime.hub.namespace, name=ref.name, uid=uid)
    waker = runtime.wakers.of(ref, uid)
    async with waker.turn:
        while True:
            async with runtime.place(ref):
                with waker.looking():
                    report = await reconcile(runtime, ref, uid)
            if report.gone:
                metrics.forget_object(ref.kind.name, ref.name)
                runtime.wakers.forget(ref, uid)
                runtime.applied.pop(ref, None)
                runtime.seen.pop(ref, None)
                runtime.misfits.pop(ref, None)
                return
            await asyncio.sleep(REST_SECONDS.get(ref.kind, 0))
            await waker.wait(_pause_seconds(report))


def _is_ready(report: Report) -> bool:
    ready = report.conditions.get(READY)
    return ready is not None and ready.good


def _pause_seconds(report: Report) -> float:
    if report.again_seconds is not None:
        return report.again_seconds
    return RESYNC_SECONDS if all(verdict.good for verdict in report.conditions.values()) else RETRY_SECONDS


async def reconcile(runtime: Runtime, ref: Ref, uid: str) -> Report:
    """Look at an object once and bring everything that belongs to it where it should be."""
    started = time.monotonic()
    report = Report(again_seconds=RETRY_SECONDS)
    try:
        with runtime.tracing.start("reconcile", NO_TRACE) as span:
            span.set(kind=ref.kind.name, namespace=runtime.hub.namespace, name=ref.name, uid=uid)
            live = await runtime.hub.get(ref.kind, ref.name)
            if live is None or live["metadata"]["uid"] != uid:
                return Report(gone=True)
            logs.add(cluster=_cluster(ref, live))
            runtime.seen[ref] = subject_of(live)
            report = await _judge(runtime, ref, live)
            if any(verdict.reason == NotLeaderError.reason for verdict in report.conditions.values()):
                return Report(again_seconds=RETRY_SECONDS)  # what another replica sees counts, not that we may not act
            span.set(**{type_: verdict.reason for type_, verdict in report.conditions.items()})
            if not report.gone:
                metrics.judged(ref.kind.name, ref.name, ready=_is_ready(report))
                report = await misfit.write(runtime, ref, live, report)
    except PrfaasError as error:
        _count(ref, reason_of(error))
        log.warning("%s: %s; again soon", ref, error)
    finally:
        metrics.RECONCILE_SECONDS.labels(ref.kind.name).observe(time.monotonic() - started)
    return report


def subject_of(live: Object) -> Object:
    """Return what is kept of an object between looks: what Events and annotations are about."""
    metadata = {key: value for key, value in live["metadata"].items() if key != "managedFields"}
    return {"apiVersion": live["apiVersion"], "kind": live["kind"], "metadata": metadata}


def _cluster(ref: Ref, live: Object) -> str:
    """Return the cluster that an object is about."""
    return ref.name if ref.kind == MEMBER_CLUSTER else live["spec"].get("clusterName") or HUB


async def _judge(runtime: Runtime, ref: Ref, live: Object) -> Report:
    """Call the kind's reconcile; whatever it raises becomes the condition Ready."""
    if annotations.says_yes(live, annotations.PAUSED) and "deletionTimestamp" not in live["metadata"]:
        return Report({READY: PAUSED})
    try:
        return await JUDGES[ref.kind](runtime, live)
    except PrfaasError as error:
        reason, message = reason_of(error), str(error)
    except Exception as error:  # a bug must not end the loop of an object, and has to be seen
        reason, message = "InternalError", f"{type(error).__name__}: {error}; see the operator's log"
        log.exception("%s: internal error", ref)
    _count(ref, reason)
    return Report({READY: no(reason, message)})


def _count(ref: Ref, reason: str) -> None:
    metrics.RECONCILE_ERRORS.labels(ref.kind.name, reason).inc()
