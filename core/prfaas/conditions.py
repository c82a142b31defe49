"""Conditions of an object's status, and times, as Kubernetes has them; the operator and the scheduler write both."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple


class ConditionState(NamedTuple):
    """The state of one condition, without its transition time."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str

    @property
    def good(self) -> bool:
        return self.status == "True"


def rfc3339(moment: datetime) -> str:
    """Return a moment as Kubernetes writes it, in UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def conditions_body(
    wanted: Mapping[str, ConditionState],
    since: Mapping[tuple[str, str], str],
    generation: int,
    now: str,
    max_message_chars: int,
) -> list[dict[str, Any]]:
    """Return the conditions to apply, one for each wanted type, in that order.

    `since` holds the lastTransitionTime by type and status as the object has them: a condition whose status did not
    change keeps it, even if reason or message changed. A longer message is cut.
    """
    return [
        {
            "type": type_,
            "status": state.status,
            "reason": state.reason,
            "message": state.message[:max_message_chars],
            "observedGeneration": generation,
            "lastTransitionTime": since.get((type_, state.status)) or now,
        }
        for type_, state in wanted.items()
    ]
