"""Conditions: how a verdict becomes status.conditions, and whether a status has to be written at all."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

from prfaas.api import Condition

READY: Final = "Ready"
REACHABLE: Final = "Reachable"
CERTIFICATE_READY: Final = "CertificateReady"
DELETING: Final = "Deleting"
"""Reason of an object that waits for its children to end."""
MAX_MESSAGE_CHARS: Final = 2000  # a server's sentence can be long; the schema's own limit is far above


class ConditionState(NamedTuple):
    """What one condition says, before it knows when it began to say so."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str

    @property
    def good(self) -> bool:
        """Whether the condition holds."""
        return self.status == "True"


def no(reason: str, message: str) -> ConditionState:
    """Return a verdict that the condition does not hold."""
    return ConditionState("False", reason, message)


def yes(reason: str, message: str) -> ConditionState:
    """Return a verdict that the condition holds."""
    return ConditionState("True", reason, message)


def rfc3339(moment: datetime) -> str:
    """Return a moment as metav1.Time writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def merge(
    current: Sequence[Condition], wanted: Mapping[str, ConditionState], generation: int, now: str
) -> list[dict[str, Any]]:
    """Return the conditions to apply, one for each wanted type, in that order.

    A condition whose status did not change keeps its lastTransitionTime, whatever became of reason and message.
    Conditions of other writers are left out: server-side apply keeps them.
    """
    since = {(condition.type, condition.status): condition.last_transition_time for condition in current}
    return [
        {
            "type": type_,
            "status": verdict.status,
            "reason": verdict.reason,
            "message": verdict.message[:MAX_MESSAGE_CHARS],
            "observedGeneration": generation,
            "lastTransitionTime": since.get((type_, verdict.status), now),
        }
        for type_, verdict in wanted.items()
    ]


def turned(current: Sequence[Condition], type_: str, verdict: ConditionState) -> bool:
    """Tell whether a condition changes its status or reason, which is worth an Event."""
    return all((known.status, known.reason) != verdict[:2] for known in current if known.type == type_)
