"""Writes an object's status: server-side apply of exactly the operator's own fields, and only when they differ.

The hub's CRD may be of another version than this operator. An older CRD lacks a field, and the API server then refuses
the whole apply. A newer one may accept other values. Refused fields are left out, and the rest is written with a
condition that says so. If a newer CRD requires a field that this version does not know, nothing can be written, and an
Event says so. Every reconcile tries the whole status first, so no restart is needed once the CRD fits.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from prfaas.api import Condition, DecodePool, PrefillPool
from prfaas.conditions import rfc3339
from prfaas.errors import PrfaasError
from prfaas.kube.session import ObjectKind
from prfaas.util import LogOnce
from prfaas_operator import metrics
from prfaas_operator.clusters.kinds import DECODE_POOL, MEMBER_CLUSTER, POLICY, PREFILL_POOL, Object, manifest
from prfaas_operator.controller import events
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import Ref
from prfaas_operator.errors import InvalidObjectError, ServerFailedError
from prfaas_operator.plan.certificates import GATEWAYS_APART
from prfaas_operator.plan.certificates import PENDING as CERTIFICATE_PENDING
from prfaas_operator.plan.conditions import (
    CERTIFICATE_READY,
    DELETING,
    ENGINE_PROVEN,
    PLACES_KNOWN,
    REACHABLE,
    READY,
    ConditionState,
    merge,
    no,
    turned,
)
from prfaas_operator.plan.drift import status_differs
from prfaas_operator.plan.pool_status import INSTANCES_NOT_READY, ROLLING_OUT, engine_proof
from prfaas_operator.plan.reading import read

log = logging.getLogger(__name__)

RESYNC_SECONDS: Final = 30.0
SEEN_RESYNC_SECONDS: Final = 300.0
"""For an object whose children are all watched: their changes wake it."""
RETRY_SECONDS: Final = 4.0
"""An unready object is reconciled again this soon: an unwatched cause (a Secret) is found in 5 s."""
CRD_FITS: Final = "CRDFits"
MISMATCH: Final = "CRDMismatch"
POOL_FIELDS: Final = ("replicas", "readyReplicas", "selector", "replicasOwner")
OWN_FIELDS: Final[Mapping[ObjectKind, tuple[str, ...]]] = {
    MEMBER_CLUSTER: ("serverVersion", "lastContactTime", "tokenExpirationTime", "admittedTime"),
    PREFILL_POOL: POOL_FIELDS,
    DECODE_POOL: POOL_FIELDS,
    POLICY: ("readyPrefill", "readyDecode", "capacity", "plan"),
}
PASSING: Final = {DELETING, ROLLING_OUT, INSTANCES_NOT_READY, CERTIFICATE_PENDING}
"""Reasons not to be Ready that end by themselves, so they are no warnings. A lasting problem has its own reason."""
OWN_CONDITIONS: Final = (REACHABLE, READY)
TEMPORARY_CONDITIONS: Final = {ENGINE_PROVEN, PLACES_KNOWN, GATEWAYS_APART}
"""They are absent at most times, and a newer operator or image, another spec or a pod's end takes them away."""
CONDITIONS: Final = TypeAdapter(list[Condition])


@dataclass(frozen=True)
class ReconcileResult:
    """The result of a reconcile: conditions by type, other status fields, and the delay until the next reconcile.

    `gone` means that nothing of the object is left and its finalizer may go; then no status is written.
    """

    conditions: Mapping[str, ConditionState] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    again_seconds: float | None = None
    gone: bool = False


class StatusWriter:
    """Writes statuses, and reports once the fields that the hub's CRD refuses."""

    def __init__(self, hub: HubView):
        self._hub = hub
        self._mismatches = LogOnce(log)

    def forget(self, ref: Ref) -> None:
        self._mismatches.forget(str(ref))

    async def write(self, ref: Ref, live: Object, result: ReconcileResult) -> ReconcileResult:
        """Write the part of a status that the hub's CRD accepts; return that part, and when to come again.

        Raises PrfaasError: nothing could be written.
        """
        left_out: set[str] = set()
        while True:
            try:
                await write_status(self._hub, ref.kind, live, result)
            except (InvalidObjectError, ServerFailedError) as error:
                # For a field that the schema lacks the API server answers 500, and names it in its sentence alone.
                refused = set(re.findall(r"\bstatus\.(\w+)", str(error)))
                more = refused & set(OWN_FIELDS[ref.kind]) - left_out
                if refused and not left_out:
                    await self._tell(ref, live, message := _mismatch(ref, error))
                    result = replace(result, conditions={**result.conditions, CRD_FITS: no(MISMATCH, message)})
                if not more:
                    raise
                left_out |= more
                again_seconds = min(result.again_seconds or RESYNC_SECONDS, RESYNC_SECONDS)
                fields = {**result.fields, **dict.fromkeys(left_out)}
                result = replace(result, fields=fields, again_seconds=again_seconds)
            else:
                if not left_out:
                    self._mismatches.worked(str(ref), f"{ref}: the hub's CRD takes the whole status again")
                return result

    async def _tell(self, ref: Ref, live: Object, message: str) -> None:
        """Post an Event once, until the problem changes."""
        if self._mismatches.failed(str(ref), f"{ref}: {message}"):
            await events.post(self._hub.client, live, "Warning", MISMATCH, message)


def _mismatch(ref: Ref, error: PrfaasError) -> str:
    return (
        f"the CRD of {ref.kind.name} in the hub is of another version than this operator: {error}; "
        "apply the CRDs of the operator's version, see `prfaas cluster check`"
    )


async def write_status(hub: HubView, kind: ObjectKind, live: Object, result: ReconcileResult) -> None:
    """Apply the status of one object; post an Event if Ready changed or a certificate was refused.

    Fields that the result leaves out keep their values, because server-side apply would otherwise remove them.
    """
    current = live.get("status") or {}
    known = read_conditions(current)
    metadata = live["metadata"]
    generation = metadata.get("generation", 0)
    states = {**result.conditions, **lasting(kind, live)}
    conditions = merge(known, states, generation, rfc3339(hub.client.now()))
    conditions += [
        condition.model_dump(by_alias=True)
        for condition in known
        if condition.type in OWN_CONDITIONS and condition.type not in result.conditions
    ]
    kept = {name: current[name] for name in OWN_FIELDS[kind] if name in current}
    fields = {name: value for name, value in {**kept, **result.fields}.items() if value is not None}
    wanted: dict[str, Any] = {**fields, "observedGeneration": generation, "conditions": conditions}
    ended = TEMPORARY_CONDITIONS & {condition.type for condition in known} - states.keys()
    if not status_differs(current, wanted) and kept.keys() <= fields.keys() and not ended:
        return
    # The uid protects a new object of the same name.
    identity = {key: metadata[key] for key in ("name", "namespace", "uid")}
    hub.learn(await hub.client.apply(manifest(kind, identity, status=wanted), subresource="status"))
    metrics.STATUS_WRITES.labels(kind.name).inc()
    await _tell_turned(hub, live, known, result.conditions)


def lasting(kind: ObjectKind, live: Object) -> dict[str, ConditionState]:
    """Return the conditions that an object's spec alone decides: no failure takes them away, and no retry helps."""
    model = {PREFILL_POOL: PrefillPool, DECODE_POOL: DecodePool}.get(kind)
    if model is not None:
        with suppress(InvalidObjectError):  # its reconcile says so
            return engine_proof(read(model, live))
    return {}


async def _tell_turned(
    hub: HubView, live: Object, known: Sequence[Condition], states: Mapping[str, ConditionState]
) -> None:
    """Post an Event if Ready changed, or CertificateReady changed to False."""
    for type_ in (READY, CERTIFICATE_READY):
        state = states.get(type_)
        if state is None or not turned(known, type_, state) or (type_ != READY and state.status != "False"):
            continue
        expected = state.good or state.reason in PASSING
        level = logging.INFO if expected else logging.WARNING
        log.log(level, "%s %s: %s: %s", live["kind"], live["metadata"]["name"], state.reason, state.message)
        await events.post(hub.client, live, "Normal" if expected else "Warning", state.reason, state.message)


def read_conditions(status: Mapping[str, Any]) -> list[Condition]:
    """Return the conditions of a status; none if they are malformed."""
    try:
        return CONDITIONS.validate_python(status.get("conditions") or [])
    except ValidationError:
        return []
