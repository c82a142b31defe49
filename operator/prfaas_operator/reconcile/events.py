"""Post Events on purpose: when a condition turns, and when children are left behind; never for a log line."""

import logging
import uuid
from datetime import UTC, datetime
from typing import Literal

from prfaas.errors import PrfaasError
from prfaas.names import FIELD_MANAGER_OPERATOR
from prfaas_operator.clusters.api import EVENT, Cluster, Object
from prfaas_operator.plan.conditions import rfc3339

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000  # the API server refuses more than 1024


async def post(hub: Cluster, subject: Object, type_: Literal["Normal", "Warning"], reason: str, message: str) -> None:
    """Post an Event about an object of the hub. A failure is logged and nothing more: the status says the same."""
    metadata, now = subject["metadata"], datetime.now(UTC)
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name'][:200]}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": subject["apiVersion"],
            "kind": subject["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": type_,
        "reason": reason,
        "message": message[:MAX_MESSAGE_CHARS],
        "source": {"component": FIELD_MANAGER_OPERATOR},
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "count": 1,
    }
    try:
        await hub.create(EVENT, body)
    except PrfaasError as error:
        log.warning("Event %s on %s %s was not posted: %s", reason, subject["kind"], metadata["name"], error)
