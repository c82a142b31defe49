"""Conditions: merges states into status.conditions, and keeps unchanged ones as they are."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from prfaas.api import Condition
from prfaas.conditions import ConditionState, conditions_body

READY: Final = "Ready"
REACHABLE: Final = "Reachable"
CERTIFICATE_READY: Final = "CertificateReady"
ENCRYPTED: Final = "Encrypted"
CALLERS_CHECKED: Final = "CallersChecked"
PLACES_KNOWN: Final = "PlacesKnown"
ENGINE_PROVEN: Final = "EngineProven"
REVOKED: Final = "Revoked"
"""Reason of whatever belongs to a member cluster that is cut off."""
DELETING: Final = "Deleting"
"""Reason of an object that waits for its children to end."""
MAX_MESSAGE_CHARS: Final = 2000  # a server's sentence can be long; the schema's own limit is far above


def no(reason: str, message: str) -> ConditionState:
    """Return a condition with status False."""
    return ConditionState("False", reason, message)


def yes(reason: str, message: str) -> ConditionState:
    return ConditionState("True", reason, message)


def merge(
    current: Sequence[Condition], wanted: Mapping[str, ConditionState], generation: int, now: str
) -> list[dict[str, Any]]:
    """Return the conditions to apply. Those of other writers are left out: server-side apply keeps them."""
    since = {(condition.type, condition.status): condition.last_transition_time for condition in current}
    return conditions_body(wanted, since, generation, now, MAX_MESSAGE_CHARS)


def turned(current: Sequence[Condition], type_: str, state: ConditionState) -> bool:
    """Return true if a condition changes its status or reason, which is worth an Event."""
    return all((known.status, known.reason) != state[:2] for known in current if known.type == type_)
