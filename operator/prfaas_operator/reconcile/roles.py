"""Roles of the instances that a DecodePool shares with a PrefillPool, assigned by the DecodePool's reconcile only.

The PrefillPool's own reconcile only observes: two writers of one label would disagree. A DecodePool whose share ended
keeps the shared form of its Deployment while pods of that form exist. The change would restart them all.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas import names
from prfaas.api import DecodePool, PrefillPool
from prfaas.conditions import rfc3339
from prfaas.errors import PrfaasError
from prfaas_operator import metrics
from prfaas_operator.clusters.kinds import DECODE_POOL, POD, PREFILL_POOL, Object, manifest
from prfaas_operator.controller import events
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import Ref
from prfaas_operator.controller.status import ReconcileResult
from prfaas_operator.errors import ConflictError, reason_of
from prfaas_operator.plan import ownership
from prfaas_operator.plan import roles as plan
from prfaas_operator.plan.conditions import READY, no
from prfaas_operator.plan.pod_facts import PodFacts
from prfaas_operator.plan.pool_status import PoolObject, version_proof
from prfaas_operator.plan.reading import read
from prfaas_operator.plan.roles import Assignment, RoleCounts, assign
from prfaas_operator.render import pool_deployment as render
from prfaas_operator.render.common import selector_text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedDeployment:
    """A shared Deployment at one moment.

    Args:
        whole: the pool with the replicas of its Deployment.
        wanted: by both pools; the Deployment follows once these have settled.
        sharer: the PrefillPool, None when it is gone and its share ends.
        pods: of the Deployment.
        left_seconds: until the Deployment follows; 0 once it has.
    """

    whole: DecodePool
    wanted: RoleCounts
    sharer: plan.Sharer | None
    pods: tuple[PodFacts, ...]
    left_seconds: float


class SharedRoles:
    """Assigns the roles of shared Deployments, and remembers since when both pools have wanted their counts."""

    def __init__(self, hub: HubView):
        self._hub = hub
        self._settling: dict[str, plan.Settling] = {}

    def shared(self, pool: PoolObject) -> SharedDeployment | None:
        """Return the shared Deployment of a pool; None for a pool whose Deployment runs one role."""
        if isinstance(pool, PrefillPool):
            return None
        uid = pool.metadata.uid
        sharers = plan.sharers_of(pool.metadata.name, self._hub.sharers.values())
        sharer = next(iter(sharers), None) if pool.spec.engine.record.serves_both_roles else None
        pods = self._pods(uid)
        if sharer is None and not any(pod.shared.gated for pod in pods):
            self._settling.pop(uid, None)
            return None
        wanted, now = plan.wanted(pool, sharer), time.monotonic()
        settled = self._settling[uid] = plan.settle(self._settling.get(uid), wanted, now)
        whole = pool.model_copy(update={"spec": pool.spec.model_copy(update={"replicas": settled.total})})
        return SharedDeployment(whole, wanted, sharer, pods, settled.left_seconds(now))

    def _pods(self, pool_uid: str) -> tuple[PodFacts, ...]:
        return tuple(pod for pod in self._hub.pods.items.values() if pod.pool_uid == pool_uid)

    async def give_out(self, shared: SharedDeployment, deployment: Object, live: Object) -> list[PrfaasError]:
        """Set every pod's role, its deletion cost and its gate; return the errors.

        This precedes the Deployment's scale-down, whose controller reads the deletion costs. A pod that is gone
        meanwhile is no failure: its end wakes the pool again.
        """
        failures: list[PrfaasError] = []
        for assignment in assign(shared.pods, shared.wanted, render.template_of(deployment)):
            try:
                await self._write(shared, assignment, live)
            except ConflictError as error:
                log.info("DecodePool %s: pod %s: %s", shared.whole.metadata.name, assignment.pod.name, error)
            except PrfaasError as error:
                failures.append(error)
        return failures

    async def _write(self, shared: SharedDeployment, assignment: Assignment, live: Object) -> None:
        hub = self._hub.client
        if assignment.labels_differ:
            self._hub.pods.learn(await hub.apply(render.role(assignment, hub.namespace)))
            metrics.CHILD_WRITES.labels(POD.name).inc()
        if assignment.converts:
            await self._tell(shared, assignment, live)
        if assignment.gate_differs:
            now = rfc3339(hub.now())
            self._hub.pods.learn(
                await hub.apply(render.open_gate(assignment, hub.namespace, now), subresource="status")
            )
            metrics.CHILD_WRITES.labels(POD.name).inc()

    async def _tell(self, shared: SharedDeployment, assignment: Assignment, live: Object) -> None:
        """Post an Event to both pools about an instance that converts."""
        message = f"instance {assignment.pod.name} converts from {assignment.pod.role} to {assignment.role}"
        log.info("DecodePool %s: %s", shared.whole.metadata.name, message)
        await events.post(self._hub.client, live, "Normal", "Converting", message)
        if shared.sharer is not None:
            metadata = {"name": shared.sharer.name, "namespace": self._hub.client.namespace, "uid": shared.sharer.uid}
            await events.post(self._hub.client, manifest(PREFILL_POOL, metadata), "Normal", "Converting", message)

    def result_of(
        self, shared: SharedDeployment, whole: ReconcileResult, failures: Sequence[PrfaasError]
    ) -> ReconcileResult:
        """Return the status of a shared DecodePool for its own side; `whole` is the status of the Deployment."""
        self.wake_sharers(shared.whole.metadata.name)
        uid = shared.whole.metadata.uid
        mine = plan.side("decode", shared.wanted, self._pods(uid))
        ready = plan.readiness(mine, shared.whole.metadata.name, whole.conditions[READY])
        if failures:
            ready = no(reason_of(failures[0]), str(failures[0]))
        fields = {**whole.fields, **_fields(mine, uid)}
        return ReconcileResult({**whole.conditions, READY: ready}, fields, shared.left_seconds or None)

    def wake_sharers(self, decode_pool: str) -> None:
        for sharer in self._hub.sharers.values():
            if sharer.share_with == decode_pool:
                self._hub.queue.wake(Ref(PREFILL_POOL, sharer.name))

    def reconcile_sharer(self, pool: PrefillPool, live: Object) -> ReconcileResult:
        """Reconcile a PrefillPool without instances of its own: report the state of its side of the Deployment."""
        found = self._hub.get(Ref(DECODE_POOL, pool.spec.share_with))
        decode_pool = read(DecodePool, found) if found else None
        sharer = plan.sharer_of(pool)
        refused = plan.refusal(sharer, decode_pool, self._hub.sharers.values())
        if refused is not None or decode_pool is None:
            nothing = {"replicas": 0, "readyReplicas": 0, "selector": "", "replicasOwner": ownership.owner(live)}
            return ReconcileResult({READY: refused} if refused else {}, nothing)
        uid = decode_pool.metadata.uid
        pods = self._pods(uid)
        mine = plan.side("prefill", plan.wanted(decode_pool, sharer), pods)
        fields = {**_fields(mine, uid), "replicasOwner": ownership.owner(live)}
        ready = plan.readiness(mine, decode_pool.metadata.name)
        return ReconcileResult({READY: ready, **version_proof(pods)}, fields)


def _fields(side: plan.Side, pool_uid: str) -> dict[str, object]:
    selector = {names.LABEL_POOL_UID: pool_uid, names.LABEL_ROLE: side.role}
    return {"replicas": len(side.pods), "readyReplicas": side.ready, "selector": selector_text(selector)}
