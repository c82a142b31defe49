"""Write an object's status: server-side apply of exactly the operator's own fields, and only when they differ."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from prfaas.api import Condition
from prfaas_operator import metrics
from prfaas_operator.clusters.api import DECODE_POOL, MEMBER_CLUSTER, POLICY, PREFILL_POOL, Cluster, Kind, Object
from prfaas_operator.plan.certificates import PENDING as CERTIFICATE_PENDING
from prfaas_operator.plan.conditions import (
    CERTIFICATE_READY,
    DELETING,
    REACHABLE,
    READY,
    Verdict,
    merge,
    rfc3339,
    turned,
)
from prfaas_operator.plan.drift import status_differs
from prfaas_operator.plan.pool import INSTANCES_NOT_READY, ROLLING_OUT
from prfaas_operator.reconcile import events
from prfaas_operator.reconcile.runtime import Report

log = logging.getLogger(__name__)

POOL_FIELDS: Final = ("replicas", "readyReplicas", "selector", "replicasOwner")
OWN_FIELDS: Final[Mapping[Kind, tuple[str, ...]]] = {
    MEMBER_CLUSTER: ("serverVersion", "lastContactTime", "tokenExpirationTime"),
    PREFILL_POOL: POOL_FIELDS,
    DECODE_POOL: POOL_FIELDS,
    POLICY: ("readyPrefill", "readyDecode", "capacity", "plan"),
}
PASSING: Final = {DELETING, ROLLING_OUT, INSTANCES_NOT_READY, CERTIFICATE_PENDING}
"""Reasons not to be Ready that pass by themselves: no warnings. What does not pass has a reason of its own."""
OWN_CONDITIONS: Final = (REACHABLE, READY)
CONDITIONS: Final = TypeAdapter(list[Condition])


async def write(hub: Cluster, kind: Kind, live: Object, report: Report) -> None:
    """Apply the status of one object and post an Event when Ready turned, or a certificate was refused.

    What the report does not speak of stays as it was: server-side apply would remove a field that we leave out.
    """
    current = live.get("status") or {}
    known = read_conditions(current)
    metadata = live["metadata"]
    generation = metadata.get("generation", 0)
    conditions = merge(known, report.conditions, generation, rfc3339(hub.now()))
    conditions += [
        condition.model_dump(by_alias=True)
        for condition in known
        if condition.type in OWN_CONDITIONS and condition.type not in report.conditions
    ]
    kept = {name: current[name] for name in OWN_FIELDS[kind] if name in current}
    fields = {name: value for name, value in {**kept, **report.fields}.items() if value is not None}
    wanted: dict[str, Any] = {**fields, "observedGeneration": generation, "conditions": conditions}
    if not status_differs(current, wanted) and kept.keys() <= fields.keys():
        return
    body = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        # The uid makes sure that a namesake made in between is left alone.
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
        "status": wanted,
    }
    await hub.apply(body, subresource="status")
    metrics.STATUS_WRITES.labels(kind.name).inc()
    await _tell(hub, live, known, report.conditions)


async def _tell(hub: Cluster, live: Object, known: Sequence[Condition], verdicts: Mapping[str, Verdict]) -> None:
    """Post an Event when Ready turned, or CertificateReady to False."""
    for type_ in (READY, CERTIFICATE_READY):
        verdict = verdicts.get(type_)
        if verdict is None or not turned(known, type_, verdict) or (type_ != READY and verdict.status != "False"):
            continue
        expected = verdict.good or verdict.reason in PASSING
        level = logging.INFO if expected else logging.WARNING
        log.log(level, "%s %s: %s: %s", live["kind"], live["metadata"]["name"], verdict.reason, verdict.message)
        await events.post(hub, live, "Normal" if expected else "Warning", verdict.reason, verdict.message)


def read_conditions(status: Mapping[str, Any]) -> list[Condition]:
    """Return the conditions of a status; none when somebody wrote what no condition looks like."""
    try:
        return CONDITIONS.validate_python(status.get("conditions") or [])
    except ValidationError:
        return []
