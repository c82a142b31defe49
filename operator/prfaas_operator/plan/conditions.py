"""Conditions: merges states into status.conditions, and keeps unchanged ones as they are."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from prfaas.api import Condition
from prfaas.conditions import ConditionState

READY: Final = "Ready"
REACHABLE: Final = "Reachable"
CERTIFICATE_READY: Final = "CertificateReady"
DELETING: Final = "Deleting"
"""Reason of an object that waits for its children to end."""
MAX_MESSAGE_CHARS: Final = 2000  # a server's sentence can be long; the schema's own limit is far above


def no(reason: str, message: str) -> ConditionState:
    """Return a condition with status False."""
    return ConditionState("False", reason, message)


def yes(reason: str, message: str) -> ConditionState:
    return ConditionState("True", reason, message)


def rfc3339(moment: datetime) -> str:
    """Return a moment as Kubernetes writes it, in UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def merge(
    current: Sequence[Condition], wanted: Mapping[str, ConditionState], generation: int, now: str
) -> list[dict[str, Any]]:
    """Return the conditions to apply, one for each wanted type, in that order.

    A condition whose status did not change keeps its lastTransitionTime, even if reason or message changed. Conditions
    of other writers are left out: server-side apply keeps them.
    """
    since = {(condition.type, condition.status): condition.last_transition_time for condition in current}
    return [
        {
            "type": type_,
            "status": state.status,
            "reason": state.reason,
            "message": state.message[:MAX_MESSAGE_CHARS],
            "observedGeneration": generation,
            "lastTransitionTime": since.get((type_, state.status), now),
        }
        for type_, state in wanted.items()
    ]


def turned(current: Sequence[Condition], type_: str, state: ConditionState) -> bool:
    """Return true if a condition changes its status or reason, which is worth an Event."""
    return all((known.status, known.reason) != state[:2] for known in current if known.type == type_)
