"""The Deployment that a DecodePool shares with a PrefillPool, and what its pods carry: role, deletion cost, open gate.

It is the DecodePool's own Deployment without a role: the template names none, workers start `mixed`, and a readiness
gate keeps each pod out of service until the operator has given it a role.
"""

import copy
import hashlib
import json
from typing import Any, Final

from prfaas import names
from prfaas_operator.plan.roles import Assignment
from prfaas_operator.plan.seats import CHEAP, DELETION_COST, ROLE_GATE, TEMPLATE_ANNOTATION
from prfaas_operator.render.common import Manifest

DIGEST_CHARS: Final = 10


def deployment(manifest: Manifest) -> Manifest:
    """Return a DecodePool's Deployment in the form in which both roles share it."""
    shared = copy.deepcopy(manifest)
    template = shared["spec"]["template"]
    del template["metadata"]["labels"][names.LABEL_ROLE]
    template["spec"]["readinessGates"] = [{"conditionType": ROLE_GATE}]
    arguments = template["spec"]["containers"][0]["args"]
    arguments[arguments.index("--role") + 1] = "mixed"
    template["metadata"].setdefault("annotations", {})[TEMPLATE_ANNOTATION] = _digest(template)
    return shared


def template_of(shared: Manifest) -> str:
    """Return the digest that pods of a shared Deployment's template carry."""
    return shared["spec"]["template"]["metadata"]["annotations"][TEMPLATE_ANNOTATION]


def _digest(template: Any) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARS]


def role(assignment: Assignment, namespace: str) -> Manifest:
    """Return what an instance is labelled with."""
    metadata = _identity(assignment, namespace)
    metadata["labels"] = {names.LABEL_ROLE: assignment.role} if assignment.role else {}
    metadata["annotations"] = {DELETION_COST: CHEAP} if assignment.cheap else {}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def open_gate(assignment: Assignment, namespace: str, now: str) -> Manifest:
    """Return the status that lets an instance become ready; `now` is the time of the transition, RFC 3339."""
    condition = {
        "type": ROLE_GATE,
        "status": "True",
        "reason": "Assigned",
        "message": f"label {names.LABEL_ROLE} says what the instance does",
        "lastTransitionTime": now,
    }
    metadata = _identity(assignment, namespace)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"conditions": [condition]}}


def _identity(assignment: Assignment, namespace: str) -> Manifest:
    # The uid makes sure that an apply to a pod that has just gone makes no new one.
    return {"name": assignment.pod.name, "namespace": namespace, "uid": assignment.pod.seat.uid}
