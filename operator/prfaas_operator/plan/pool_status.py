"""Pool status from the state of its Deployment and pods, and the deadline of a deletion in an unreachable cluster."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from prfaas.api import DecodePool, MemberCluster, PrefillPool
from prfaas.api.template import PodTemplate
from prfaas.wire.routes import PoolRole
from prfaas_operator.errors import AddressingRefusedError, ForbiddenTemplateError
from prfaas_operator.plan.conditions import ENGINE_PROVEN, ConditionState, no, yes
from prfaas_operator.plan.pod_facts import PodFacts

PoolObject = PrefillPool | DecodePool
INSTANCES_NOT_READY: Final = "InstancesNotReady"
ROLLING_OUT: Final = "RollingOut"
QUOTA_EXCEEDED: Final = "QuotaExceeded"
PODS_REFUSED: Final = "PodsRefused"


class AllowedNames(NamedTuple):
    """What pools in the hub may name, as the hub's owner lists it. A member's owner has the API server check it."""

    service_accounts: tuple[str, ...] = ()
    """Beside `default`, which every pod has that names none."""
    priority_classes: tuple[str, ...] = ()


class Counts(NamedTuple):
    """Instances of a Deployment, as its controller last saw them."""

    replicas: int = 0
    ready: int = 0
    updated: int = 0
    observed_generation: int = 0
    failure: str = ""


def engine_proof(pool: PoolObject) -> dict[str, ConditionState]:
    """Return the condition of a pool whose engine is experimental, or computes nothing; none for the others."""
    record = pool.spec.engine.record
    if record.is_emulated:
        return {
            ENGINE_PROVEN: no(
                "Emulated", "instances compute nothing: their answers mean nothing, their times are a profile's"
            )
        }
    missing = record.experimental
    if not missing:
        return {}
    advice = "the fields of this engine follow its documentation. Report what you see."
    return {ENGINE_PROVEN: no("Experimental", f"prfaas {missing}: {advice}")}


def version_proof(pods: Iterable[PodFacts]) -> dict[str, ConditionState]:
    """Return the condition of a pool with a pod whose engine is of a version that nobody tested; none for others."""
    found = sorted((pod.name, pod.untested) for pod in pods if pod.untested and not pod.terminating)
    return {ENGINE_PROVEN: no("UntestedVersion", f"pod {found[0][0]}: {found[0][1]}")} if found else {}


def check_addressing(pool: PoolObject, member: MemberCluster | None) -> None:
    """Raise AddressingRefusedError for an engine that is not reached at its node's ports, in a cluster that is."""
    engine = pool.spec.engine.record
    if member is not None and member.spec.addressing == "HostIP" and engine.needs_pod_ip:
        raise AddressingRefusedError(
            f"instances of {engine.name} announce their pods' addresses to each other, and MemberCluster "
            f"{member.metadata.name} has addressing HostIP: use addressing PodIP, or vllm with connector Prfaas"
        )


def check_names(template: PodTemplate, allowed: AllowedNames) -> None:
    """Raise ForbiddenTemplateError for a service account or a PriorityClass that pools in the hub may not have."""
    account, priority = template.service_account_name, template.priority_class_name
    if account not in (None, "default", *allowed.service_accounts):
        raise ForbiddenTemplateError(
            f"pods of the hub's pools may not have the service account {account}: remove template.serviceAccountName, "
            "or list the account in workers.serviceAccounts of the chart prfaas"
        )
    if priority not in (None, *allowed.priority_classes):
        raise ForbiddenTemplateError(
            f"pods of the hub's pools may not have the PriorityClass {priority}: remove template.priorityClassName, "
            "or list the class in workers.priorityClasses of the chart prfaas"
        )


def role_of(pool: PoolObject) -> PoolRole:
    """Return the role of a pool's instances."""
    return "decode" if isinstance(pool, DecodePool) else "prefill"


def egress_share_mbps(pool: PoolObject) -> int | None:
    """Return each instance's share of a pool's egress cap, None without a cap.

    The share divides by the wanted instances instead of the present ones. While some are missing, their share is
    unused. During a rollout the extra instances exceed the cap for a moment.
    """
    if not isinstance(pool, PrefillPool) or pool.spec.egress_mbps is None:
        return None
    # At least 1: an instance takes no smaller cap.
    return max(1, pool.spec.egress_mbps // max(1, pool.spec.replicas))


def counts(deployment: Mapping[str, Any]) -> Counts:
    """Read a Deployment's status. `failure` is its controller's own message: a quota, a refused pod."""
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


def readiness(pool: PoolObject, deployment: Mapping[str, Any], pods: Iterable[PodFacts]) -> ConditionState:
    """Return the condition Ready of a pool from its Deployment and its pods."""
    seen, wanted = counts(deployment), pool.spec.replicas
    # Until then its counts are of the former template.
    if seen.observed_generation < deployment["metadata"].get("generation", 0):
        return no(INSTANCES_NOT_READY, "the cluster's Deployment controller has not seen the last change yet")
    if seen.ready >= wanted and seen.updated >= wanted and seen.replicas == wanted:
        return yes("AllReady", f"{seen.ready} of {wanted} instances ready" if wanted else "scaled to zero")
    progress = f"{seen.ready} of {wanted} instances ready, {seen.updated} of the present template"
    reason, obstacle = _obstacle(seen, pods)
    if seen.ready >= wanted and reason == INSTANCES_NOT_READY:
        reason = ROLLING_OUT
    return no(reason, "; ".join(filter(None, (progress, obstacle))))


def _obstacle(seen: Counts, pods: Iterable[PodFacts]) -> tuple[str, str]:
    """Return the reason and message of a problem that waiting does not solve."""
    if seen.failure:
        # The words of the API server's quota admission, as the ReplicaSet's controller hands them on.
        return QUOTA_EXCEEDED if "exceeded quota" in seen.failure else PODS_REFUSED, seen.failure
    waiting = sorted((not pod.cause, pod.name, pod) for pod in pods if pod.problem and not pod.terminating)
    if not waiting:
        return INSTANCES_NOT_READY, ""
    pod = waiting[0][-1]
    return pod.cause or INSTANCES_NOT_READY, f"pod {pod.name}: {pod.problem}"


def seconds_left(deletion_timestamp: str, deadline_seconds: int, now: datetime) -> float:
    """Return how long a deletion still waits for an unreachable cluster; negative after the deadline."""
    since = datetime.fromisoformat(deletion_timestamp)
    return deadline_seconds - (now.astimezone(UTC) - since).total_seconds()
