"""What a pod says of its seat in a shared Deployment: how old it is, what it was made of, whether its gate is open.

A pod's role is a label that the operator sets, never its template: one Deployment runs both roles. Until it has one,
the pod's readiness gate keeps it out of service, so that a rollout waits for the operator and no role runs dry.
"""

from typing import Any, Final, NamedTuple

from prfaas import names

ROLE_GATE: Final = f"{names.GROUP}/role-assigned"
TEMPLATE_ANNOTATION: Final = f"{names.GROUP}/template"
"""Digest of the template that a pod was made from: tells the pods that a rollout brings from those that it takes."""
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
CHEAP: Final = "-1"
"""Cost of a pod that should go first when the Deployment shrinks. All others have none, which means 0."""


class Seat(NamedTuple):
    """A pod's place among the instances of its pool.

    `template` is empty for a pod that was never meant to be shared. A pod that is `over` has ended for good, and its
    ReplicaSet does not count it any more.
    """

    uid: str = ""
    created: str = ""
    template: str = ""
    gated: bool = False
    gate_open: bool = False
    cheap: bool = False
    over: bool = False


def project_seat(pod: dict[str, Any], conditions: dict[str, Any]) -> Seat:
    """Reduce a pod to its seat; `conditions` are its status conditions by type."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    gates = (pod.get("spec") or {}).get("readinessGates") or ()
    return Seat(
        uid=metadata.get("uid", ""),
        created=metadata.get("creationTimestamp", ""),
        template=annotations.get(TEMPLATE_ANNOTATION, ""),
        gated=any(gate["conditionType"] == ROLE_GATE for gate in gates),
        gate_open=conditions.get(ROLE_GATE, {}).get("status") == "True",
        cheap=annotations.get(DELETION_COST) == CHEAP,
        over=(pod.get("status") or {}).get("phase") in {"Failed", "Succeeded"},
    )
