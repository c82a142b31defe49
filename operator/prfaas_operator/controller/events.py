"""Posts Events when a condition changes or children are left behind; never for a log line."""

import hashlib
import logging
from typing import Literal

from prfaas.conditions import rfc3339
from prfaas.errors import PrfaasError
from prfaas.names import FIELD_MANAGER_OPERATOR
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import EVENT, Object, manifest
from prfaas_operator.errors import ConflictError

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000  # the API server refuses more than 1024


async def post(
    hub: ClusterClient, subject: Object, type_: Literal["Normal", "Warning"], reason: str, message: str
) -> None:
    """Post an Event about an object of the hub. A failure is only logged, because the status carries the same facts.

    An equal Event (same object, reason and message) is counted instead of posted again.
    """
    body = _event(subject, type_, reason, message[:MAX_MESSAGE_CHARS], rfc3339(hub.now()))
    try:
        try:
            await hub.create(EVENT, body)
        except ConflictError:
            await _count(hub, body)
    except PrfaasError as error:
        log.warning("Event %s on %s %s was not posted: %s", reason, subject["kind"], subject["metadata"]["name"], error)


def _event(subject: Object, type_: str, reason: str, message: str, now: str) -> Object:
    metadata = subject["metadata"]
    # A hash of the Event's identity is its name, so a later call finds it again, also after a restart.
    digest = hashlib.sha256("\0".join((metadata["uid"], type_, reason, message)).encode()).hexdigest()[:16]
    about = {key: metadata[key] for key in ("name", "namespace", "uid")}
    return manifest(
        EVENT,
        {"name": f"{metadata['name'][:200]}.{digest}", "namespace": metadata["namespace"]},
        involvedObject={"apiVersion": subject["apiVersion"], "kind": subject["kind"], **about},
        type=type_,
        reason=reason,
        message=message,
        source={"component": FIELD_MANAGER_OPERATOR},
        firstTimestamp=now,
        lastTimestamp=now,
        count=1,
    )


async def _count(hub: ClusterClient, body: Object) -> None:
    """Increase the count of an existing Event; API servers delete Events after an hour, perhaps during this call."""
    name = body["metadata"]["name"]
    known = await hub.get(EVENT, name)
    if known is None:
        await hub.create(EVENT, body)
        return
    await hub.merge(EVENT, name, {"count": known.get("count", 1) + 1, "lastTimestamp": body["lastTimestamp"]})
