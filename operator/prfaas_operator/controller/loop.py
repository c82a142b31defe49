"""Reconciles one object during its whole life: after each wake-up and after a while, whatever failed before.

The status is written also after a failure. One object's failure affects no other object. Every object has its own loop,
and every call in it has a timeout.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from prfaas.errors import PrfaasError
from prfaas.kube.session import ObjectKind
from prfaas.names import HUB
from prfaas.telemetry.tracing import OFF, Tracing
from prfaas.wire.trace import NO_TRACE
from prfaas_operator import logs, metrics
from prfaas_operator.clusters.kinds import DECODE_POOL, MEMBER_CLUSTER, POLICY, PREFILL_POOL, Object
from prfaas_operator.controller.children import Children
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import Ref
from prfaas_operator.controller.status import RESYNC_SECONDS, RETRY_SECONDS, ReconcileResult, StatusWriter
from prfaas_operator.errors import NotLeaderError, reason_of
from prfaas_operator.plan import ownership
from prfaas_operator.plan.conditions import ENGINE_PROVEN, READY, ConditionState, no

log = logging.getLogger(__name__)

Reconcile = Callable[[Object], Awaitable[ReconcileResult]]
"""Brings all children of an object to their wanted state; it must not change the given object."""

RECONCILES_AT_ONCE: Final = 16
MIN_INTERVAL_SECONDS: Final[Mapping[ObjectKind, float]] = {POLICY: 1.0, MEMBER_CLUSTER: 1.0}
"""A routing table is written, and a member probed, at most once a second, whatever the rate of events."""

FIRST_PAUSE_SECONDS: Final[Mapping[ObjectKind, float]] = {DECODE_POOL: 0.3}
"""People apply a DecodePool and the PrefillPool that shares its instances together, but each has its own watch.

A DecodePool that is reconciled before its sharer is known starts pods that the sharer then replaces."""

PAUSED: Final = ConditionState(
    "Unknown",
    "Paused",
    f"the operator changes none of its children; remove the annotation {ownership.PAUSED} to resume",
)


class Controller:
    """The loops of all objects; `reconciles` holds the reconcile of each kind."""

    def __init__(
        self, hub: HubView, children: Children, reconciles: Mapping[ObjectKind, Reconcile], tracing: Tracing = OFF
    ):
        self.hub = hub
        self.kinds = tuple(reconciles)
        self._children = children
        self._reconciles = reconciles
        self._tracing = tracing
        self._statuses = StatusWriter(hub)
        self._slots: dict[tuple[ObjectKind, str], asyncio.Semaphore] = {}

    async def run(self, ref: Ref, uid: str) -> None:
        """Reconcile an object until nothing of it is left."""
        logs.about(kind=ref.kind.name, namespace=self.hub.client.namespace, name=ref.name, uid=uid)
        waker = self.hub.queue.of(ref, uid)
        is_resync = False
        await asyncio.sleep(FIRST_PAUSE_SECONDS.get(ref.kind, 0))
        async with waker.turn:
            while True:
                async with self.slot(ref):
                    with waker.reconciling():
                        result = await self.reconcile(ref, uid, is_resync=is_resync)
                if result.gone:
                    metrics.forget_object(ref.kind.name, ref.name)
                    self.hub.queue.forget(ref, uid)
                    self._children.forget(ref)
                    self._statuses.forget(ref)
                    return
                # Wake-ups that come meanwhile are one.
                await asyncio.sleep(MIN_INTERVAL_SECONDS.get(ref.kind, 0))
                is_resync = not await waker.wait(_pause_seconds(result))

    def slot(self, ref: Ref) -> asyncio.Semaphore:
        """Return the semaphore of a reconcile: a slot among the reconciles of one cluster.

        After a start all objects need a reconcile, and the slots bound how many run at once. A cluster that does not
        answer delays only its own pools, and no probe.
        """
        where = ref.name if ref.kind == MEMBER_CLUSTER else ""
        if ref.kind == PREFILL_POOL and ref.name in self.hub.sharers:
            where = self.hub.sharers[ref.name].cluster
        return self._slots.setdefault((ref.kind, where), asyncio.Semaphore(RECONCILES_AT_ONCE))

    async def reconcile(self, ref: Ref, uid: str, *, is_resync: bool = False) -> ReconcileResult:
        """Reconcile an object once, and write its status; `is_resync`: no event woke it."""
        started = time.monotonic()
        result = ReconcileResult(again_seconds=RETRY_SECONDS)
        try:
            with self._tracing.start("reconcile", NO_TRACE) as span:
                span.set(kind=ref.kind.name, namespace=self.hub.client.namespace, name=ref.name, uid=uid)
                if is_resync or not self._is_known(ref, uid):
                    # kopf's watch may have a dead connection, and kopf does not report a deletion that happened
                    # while it did not watch: this read finds both. No loop ends without it.
                    await self.hub.refresh(ref)
                live = self.hub.get(ref)
                if live is None or not self._is_known(ref, uid):
                    return ReconcileResult(gone=True)
                logs.add(cluster=_cluster(ref, live))
                result = await self._reconcile(ref, live)
                if any(state.reason == NotLeaderError.reason for state in result.conditions.values()):
                    # The leader's view counts; that this replica may not write is no error.
                    return ReconcileResult(again_seconds=RETRY_SECONDS)
                span.set(**{type_: state.reason for type_, state in result.conditions.items()})
                if not result.gone:
                    metrics.judged(ref.kind.name, ref.name, result.conditions)
                    result = await self._statuses.write(ref, live, result)
        except PrfaasError as error:
            _count(ref, reason_of(error))
            log.warning("%s: %s; retry soon", ref, error)
        finally:
            metrics.RECONCILE_SECONDS.labels(ref.kind.name).observe(time.monotonic() - started)
        return result

    def _is_known(self, ref: Ref, uid: str) -> bool:
        live = self.hub.get(ref)
        return live is not None and live["metadata"]["uid"] == uid

    async def _reconcile(self, ref: Ref, live: Object) -> ReconcileResult:
        """Call the kind's reconcile; its errors become the condition Ready."""
        if ownership.says_yes(live, ownership.PAUSED) and "deletionTimestamp" not in live["metadata"]:
            return ReconcileResult({READY: PAUSED}, _lost(ref, live))
        try:
            return await self._reconciles[ref.kind](live)
        except PrfaasError as error:
            reason, message = reason_of(error), str(error)
        except Exception as error:  # a bug must not end the loop of an object, and must be visible
            reason, message = "InternalError", f"{type(error).__name__}: {error}; see the operator's log"
            log.exception("%s: internal error", ref)
        _count(ref, reason)
        return ReconcileResult({READY: no(reason, message)}, _lost(ref, live))


def _pause_seconds(result: ReconcileResult) -> float:
    if result.again_seconds is not None:
        return result.again_seconds
    # No retry proves an engine.
    is_good = all(state.good for type_, state in result.conditions.items() if type_ != ENGINE_PROVEN)
    return RESYNC_SECONDS if is_good else RETRY_SECONDS


def _lost(ref: Ref, live: Object) -> Mapping[str, None]:
    """Return the status fields that an object loses even where nothing else of it is reconciled.

    Else a member that was cut off and joins again would be the place it was, whose caches must serve no request.
    """
    is_cut_off = ref.kind == MEMBER_CLUSTER and (live.get("spec") or {}).get("revoked") is True
    return {"admittedTime": None} if is_cut_off else {}


def _cluster(ref: Ref, live: Object) -> str:
    return ref.name if ref.kind == MEMBER_CLUSTER else live["spec"].get("clusterName") or HUB


def _count(ref: Ref, reason: str) -> None:
    metrics.RECONCILE_ERRORS.labels(ref.kind.name, reason).inc()
