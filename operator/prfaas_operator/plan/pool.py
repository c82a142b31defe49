"""Pools: what the state of their Deployment and pods means, and when a deletion stops waiting for a dead cluster."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from prfaas.api import DecodePool, PrefillPool
from prfaas.wire.routes import Role
from prfaas_operator.plan.conditions import Verdict, no, yes
from prfaas_operator.plan.pods import PodFacts

Pool = PrefillPool | DecodePool
INSTANCES_NOT_READY: Final = "InstancesNotReady"


class Counts(NamedTuple):
    """Instances of a Deployment, as its controller last saw them."""

    replicas: int = 0
    ready: int = 0
    updated: int = 0
    observed_generation: int = 0
    failure: str = ""


def role_of(pool: Pool) -> Role:
    """Return what a pool's instances do."""
    return "decode" if isinstance(pool, DecodePool) else "prefill"


def counts(deployment: Mapping[str, Any]) -> Counts:
    """Read a Deployment's status. `failure` is its controller's own complaint: a quota, a refused pod."""
    status = deployment.get("status") or {}
    failures = [
        condition.get("message", "")
        for condition in status.get("conditions") or ()
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True"
    ]
    return Counts(
        replicas=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        observed_generation=status.get("observedGeneration", 0),
        failure=" ".join(failures),
    )


def readiness(pool: Pool, deployment: Mapping[str, Any], pods: Iterable[PodFacts]) -> Verdict:
    """Return the condition Ready of a pool whose Deployment is applied."""
    seen, wanted = counts(deployment), pool.spec.replicas
    if seen.observed_generation < deployment["metadata"].get("generation", 0):
        return no(INSTANCES_NOT_READY, "the cluster's Deployment controller has not seen the last change yet")
    if seen.ready >= wanted and seen.updated >= wanted and seen.replicas == wanted:
        return yes("AllReady", f"{seen.ready} of {wanted} instances ready" if wanted else "scaled to zero")
    progress = f"{seen.ready} of {wanted} instances ready, {seen.updated} of the present template"
    return no(INSTANCES_NOT_READY, "; ".join(filter(None, (progress, _obstacle(seen, pods)))))


def _obstacle(seen: Counts, pods: Iterable[PodFacts]) -> str:
    """Return the sentence that tells a person where to look first."""
    if seen.failure:
        return seen.failure
    waiting = sorted(pod for pod in pods if pod.problem and not pod.terminating)
    return f"pod {waiting[0].name}: {waiting[0].problem}" if waiting else ""


def seconds_left(deletion_timestamp: str, deadline_seconds: int, now: datetime) -> float:
    """Return how long a deletion still waits for a cluster that is not reached; negative when the time is up."""
    since = datetime.fromisoformat(deletion_timestamp)
    return deadline_seconds - (now.astimezone(UTC) - since).total_seconds()
