"""kopf wiring, and nothing else: each object of our kinds gets a loop, and each event wakes whom it concerns.

kopf follows our own kinds, keeps the finalizer and ends the loops. A daemon keeps a living object; kopf cancels it when
the object is being deleted, and the deletion handler goes on with the same loop until nothing is left. That handler
also serves a deletion that began while no operator ran, for which kopf starts no daemon.
"""

from typing import Any, Final

import kopf

from prfaas.names import FINALIZER, GROUP, VERSION
from prfaas_operator.clusters.api import DECODE_POOL, MEMBER_CLUSTER, POLICY, PREFILL_POOL, Kind
from prfaas_operator.plan.conditions import READY
from prfaas_operator.progress import DiffBase, Progress
from prfaas_operator.reconcile.loop import JUDGES, keep
from prfaas_operator.reconcile.runtime import Runtime
from prfaas_operator.reconcile.wakers import Ref

ANNOTATION_PREFIX: Final = f"internal.{GROUP}"
CANCEL_SECONDS: Final = 5.0
REQUEST_SECONDS: Final = 30.0
ERROR_DELAYS: Final = (1, 1, 2, 3, 5, 8, 13, 21, 34, 60)
DEPENDANTS: Final[dict[Kind, tuple[Kind, ...]]] = {
    MEMBER_CLUSTER: (PREFILL_POOL, POLICY),
    PREFILL_POOL: (MEMBER_CLUSTER, POLICY),
    DECODE_POOL: (POLICY,),
    POLICY: (),
}


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: our finalizer and annotations, bounded waits, no cluster-wide watching."""
    chosen = kopf.OperatorSettings()
    chosen.persistence.finalizer = FINALIZER
    chosen.persistence.progress_storage = Progress(prefix=ANNOTATION_PREFIX)
    chosen.persistence.diffbase_storage = DiffBase(prefix=ANNOTATION_PREFIX)
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    chosen.networking.request_timeout = REQUEST_SECONDS
    chosen.execution.default_backoff = CANCEL_SECONDS
    chosen.queueing.error_delays = ERROR_DELAYS
    chosen.watching.server_timeout = 300
    chosen.watching.client_timeout = 330
    return chosen


def register(runtime: Runtime) -> kopf.OperatorRegistry:
    """Return the handlers of all kinds, bound to one runtime."""
    registry = kopf.OperatorRegistry()
    for kind in JUDGES:
        _register_kind(registry, runtime, kind)

    @kopf.on.cleanup(registry=registry)
    async def _(**_: Any) -> None:
        # kopf waits 5 s for tasks that outlive it, so what the loops started must end before.
        await runtime.members.close()

    return registry


def _register_kind(registry: kopf.OperatorRegistry, runtime: Runtime, kind: Kind) -> None:
    resource = (GROUP, VERSION, kind.plural)
    seen: dict[str, tuple[Any, ...]] = {}

    @kopf.daemon(*resource, registry=registry, id="keep", cancellation_timeout=CANCEL_SECONDS)
    async def _(name: str, uid: str, **_: Any) -> None:
        await keep(runtime, Ref(kind, name), uid)

    @kopf.on.delete(*resource, registry=registry, id="remove")
    async def _(name: str, uid: str, **_: Any) -> None:
        await keep(runtime, Ref(kind, name), uid)

    @kopf.on.event(*resource, registry=registry, id="wake")
    async def _(name: str, uid: str, type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002  # kopf's name
        runtime.wakers.wake(Ref(kind, name))
        news = fingerprint(body)
        if type == "DELETED":
            seen.pop(uid, None)
        elif seen.get(uid) == news:
            return
        else:
            seen[uid] = news
        runtime.wakers.wake_kinds(*DEPENDANTS[kind])


def fingerprint(body: kopf.Body) -> tuple[Any, ...]:
    """Return what of an object matters to others; a status that only counts differently wakes nobody else."""
    ready = [
        (condition.get("status"), condition.get("reason"))
        for condition in body.get("status", {}).get("conditions", ())
        if condition.get("type") == READY
    ]
    metadata = body["metadata"]
    return (metadata.get("generation"), metadata.get("deletionTimestamp"), *ready)
