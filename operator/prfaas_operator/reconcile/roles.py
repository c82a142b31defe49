"""Roles of the instances that a DecodePool shares with a PrefillPool, given out by the DecodePool's reconcile alone.

The PrefillPool's own reconcile only looks: two writers of one label would disagree. A DecodePool that was shared once
keeps the shared form of its Deployment while it has pods of it, because going back would restart them all for nothing.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas import names
from prfaas.api import DecodePool, PrefillPool
from prfaas.errors import PrfaasError
from prfaas_operator import metrics
from prfaas_operator.clusters.api import DECODE_POOL, POD, PREFILL_POOL, Object
from prfaas_operator.errors import ConflictError, reason_of
from prfaas_operator.plan import pool as plan
from prfaas_operator.plan import replicas, sharing
from prfaas_operator.plan.conditions import READY, no, rfc3339
from prfaas_operator.plan.pods import PodFacts
from prfaas_operator.plan.roles import Assignment, Wanted, assign
from prfaas_operator.reconcile import events
from prfaas_operator.reconcile.reading import read
from prfaas_operator.reconcile.runtime import Report, Runtime
from prfaas_operator.reconcile.wakers import Ref
from prfaas_operator.render import shared as render
from prfaas_operator.render.common import Manifest, selector_text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """A shared DecodePool at this moment.

    Args:
        whole: the pool with as many replicas as its Deployment is to have.
        wanted: by both pools, which the Deployment follows when they have settled.
        sharer: the PrefillPool, None when it has gone and its share is to go.
        pods: of the Deployment.
        left_seconds: until the Deployment follows; 0 when it has.

    """

    whole: DecodePool
    wanted: Wanted
    sharer: sharing.Sharer | None
    pods: tuple[PodFacts, ...]
    left_seconds: float


def share_of(runtime: Runtime, pool: plan.Pool) -> Share | None:
    """Return how a pool is shared; None for a pool whose Deployment runs one role."""
    if isinstance(pool, PrefillPool):
        return None
    uid = pool.metadata.uid
    sharer = next(iter(sharing.sharers_of(pool.metadata.name, runtime.sharers.items.values())), None)
    pods = tuple(pod for pod in runtime.pods.items.values() if pod.pool_uid == uid)
    if sharer is None and not any(pod.seat.gated for pod in pods):
        runtime.settling.pop(uid, None)
        return None
    wanted, now = sharing.wanted(pool, sharer), time.monotonic()
    settled = runtime.settling[uid] = sharing.settle(runtime.settling.get(uid), wanted, now)
    whole = pool.model_copy(update={"spec": pool.spec.model_copy(update={"replicas": settled.total})})
    return Share(whole, wanted, sharer, pods, settled.left_seconds(now))


async def give_out(runtime: Runtime, share: Share, manifest: Manifest, live: Object) -> list[PrfaasError]:
    """Bring every pod to its role, its deletion cost and an open gate; return what failed.

    Before the Deployment shrinks, so that its controller knows whom to take. A pod that has gone meanwhile is no
    failure: its end wakes the pool again.
    """
    failures: list[PrfaasError] = []
    for given in assign(share.pods, share.wanted, render.template_of(manifest)):
        try:
            await _write(runtime, share, given, live)
        except ConflictError as error:
            log.info("DecodePool %s: pod %s: %s", share.whole.metadata.name, given.pod.name, error)
        except PrfaasError as error:
            failures.append(error)
    return failures


async def _write(runtime: Runtime, share: Share, given: Assignment, live: Object) -> None:
    hub = runtime.hub
    if given.labels_differ:
        runtime.pods.learn(await hub.apply(render.role(given, hub.namespace)))
        metrics.CHILD_WRITES.labels(POD.name).inc()
    if given.converts:
        await _tell(runtime, share, given, live)
    if given.gate_differs:
        now = rfc3339(hub.now())
        runtime.pods.learn(await hub.apply(render.open_gate(given, hub.namespace, now), subresource="status"))
        metrics.CHILD_WRITES.labels(POD.name).inc()


async def _tell(runtime: Runtime, share: Share, given: Assignment, live: Object) -> None:
    """Post an Event to both pools that an instance changes sides."""
    message = f"instance {given.pod.name} converts from {given.pod.role} to {given.role}"
    log.info("DecodePool %s: %s", share.whole.metadata.name, message)
    await events.post(runtime.hub, live, "Normal", "Converting", message)
    if share.sharer is not None:
        metadata = {"name": share.sharer.name, "namespace": runtime.hub.namespace, "uid": share.sharer.uid}
        subject = {"apiVersion": names.API_VERSION, "kind": PREFILL_POOL.name, "metadata": metadata}
        await events.post(runtime.hub, subject, "Normal", "Converting", message)


def report_of(runtime: Runtime, share: Share, whole: Report, failures: Sequence[PrfaasError]) -> Report:
    """Return what a shared DecodePool reports: its own side, where `whole` speaks of the Deployment."""
    wake_sharers(runtime, share.whole.metadata.name)
    pods = [pod for pod in runtime.pods.items.values() if pod.pool_uid == share.whole.metadata.uid]
    mine = sharing.side("decode", share.wanted, pods)
    verdict = sharing.readiness(mine, share.whole.metadata.name, whole.conditions[READY])
    if failures:
        verdict = no(reason_of(failures[0]), str(failures[0]))
    fields = _fields(mine, share.whole.metadata.uid)
    return Report({**whole.conditions, READY: verdict}, {**whole.fields, **fields}, share.left_seconds or None)


def wake_sharers(runtime: Runtime, decode_pool: str) -> None:
    """Have every PrefillPool that names a DecodePool look again."""
    for sharer in runtime.sharers.items.values():
        if sharer.share_with == decode_pool:
            runtime.wakers.wake(Ref(PREFILL_POOL, sharer.name))


async def judge_sharer(runtime: Runtime, pool: PrefillPool, live: Object) -> Report:
    """Reconcile a PrefillPool without instances of its own: say how its side of the Deployment fares."""
    found = await runtime.hub.get(DECODE_POOL, pool.spec.share_with)
    decode_pool = read(DecodePool, found) if found else None
    sharer = sharing.sharer_of(pool)
    refused = sharing.refusal(sharer, decode_pool, runtime.sharers.items.values())
    if refused is not None or decode_pool is None:
        nothing = {"replicas": 0, "readyReplicas": 0, "selector": "", "replicasOwner": replicas.owner(live)}
        return Report({READY: refused} if refused else {}, nothing)
    uid = decode_pool.metadata.uid
    pods = (pod for pod in runtime.pods.items.values() if pod.pool_uid == uid)
    mine = sharing.side("prefill", sharing.wanted(decode_pool, sharer), pods)
    fields = {**_fields(mine, uid), "replicasOwner": replicas.owner(live)}
    return Report({READY: sharing.readiness(mine, decode_pool.metadata.name)}, fields)


def _fields(side: sharing.Side, pool_uid: str) -> dict[str, object]:
    selector = {names.LABEL_POOL_UID: pool_uid, names.LABEL_ROLE: side.role}
    return {"replicas": len(side.pods), "readyReplicas": side.ready, "selector": selector_text(selector)}
