"""Ownership: annotations allow takeovers and pauses, and the last writer of spec.replicas owns the replicas.

The only value of an annotation that means yes is `true`. The API server records the writer of spec.replicas. A pool has
one owner of replicas at a time. Each owner writes the same field, by /scale or with the whole object, and the last one
wins. The status names the owner, so that alternating writers are visible.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from prfaas.names import FIELD_MANAGER_OPERATOR, GROUP

PAUSED: Final = f"{GROUP}/paused"
"""On an object of ours: none of its children is changed while the annotation exists; a deletion still proceeds."""
ADOPT: Final = f"{GROUP}/adopt"
"""On an object of ours, or on another owner's object with a child's name: it may be taken over."""
SCALED_BY_POLICY: Final = f"{GROUP}/scaled-by-policy"
"""On a pool: a policy that converts or scales may write replicas that a person wrote, at any time."""


def says_yes(live: Mapping[str, Any], annotation: str) -> bool:
    """Return true if a live object carries an annotation with the value `true`."""
    return ((live.get("metadata") or {}).get("annotations") or {}).get(annotation) == "true"


def has_labels(live: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    """Return true if a live object carries all of these labels."""
    labels = live["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in wanted.items())


Owner = Literal["User", "Autoscaler", "Policy"]
AUTOSCALERS: Final = ("kube-controller-manager", "horizontal-pod-autoscaler", "keda-operator")
"""Field managers of autoscalers that write /scale; the one of Kubernetes runs in its controller manager."""


def owner(live: Mapping[str, Any]) -> Owner:
    """Return the last writer of an object's spec.replicas; a value without a writer belongs to the user."""
    last = _last_writer(live)
    if last is None:
        return "User"
    if last.get("manager") == FIELD_MANAGER_OPERATOR:
        return "Policy"
    scales = last.get("subresource") == "scale"
    return "Autoscaler" if scales and last.get("manager") in AUTOSCALERS else "User"


def is_default(live: Mapping[str, Any]) -> bool:
    """Return true if spec.replicas of an object never had a writer."""
    return _last_writer(live) is None


def written_before(live: Mapping[str, Any], moment: datetime) -> bool:
    """Return true if spec.replicas is surely older than a moment; a write by /scale has no time."""
    last = _last_writer(live)
    time = live["metadata"]["creationTimestamp"] if last is None else last.get("time")
    return bool(time) and datetime.fromisoformat(time) < moment


def _last_writer(live: Mapping[str, Any]) -> Mapping[str, Any] | None:
    writers = [
        entry
        for entry in live["metadata"].get("managedFields") or ()
        if "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {})
    ]
    return max(writers, key=lambda entry: entry.get("time", ""), default=None)
