"""What the operator keeps of a worker or gateway pod: a few fields of the tens of kilobytes that the server sends."""

from typing import Any, NamedTuple

from prfaas import names

MAX_PROBLEM_CHARS = 300


class PodFacts(NamedTuple):
    """One pod. `problem` says why it is not ready, in the words of whoever holds it up; empty for a ready pod."""

    name: str
    pool_uid: str
    role: str
    pod_ip: str
    host_ip: str
    ready: bool
    terminating: bool
    problem: str


def project(pod: dict[str, Any]) -> PodFacts:
    """Reduce a pod, as the API server gives it, to its facts."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    ready = conditions.get("Ready", {}).get("status") == "True"
    terminating = "deletionTimestamp" in metadata
    return PodFacts(
        name=metadata["name"],
        pool_uid=labels.get(names.LABEL_POOL_UID, ""),
        role=labels.get(names.LABEL_ROLE, ""),
        pod_ip=status.get("podIP") or "",
        host_ip=status.get("hostIP") or "",
        ready=ready,
        terminating=terminating,
        problem="" if ready else _problem(status, conditions, terminating=terminating)[:MAX_PROBLEM_CHARS],
    )


def _problem(status: dict[str, Any], conditions: dict[str, Any], *, terminating: bool) -> str:
    if terminating:
        return "is terminating"
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', '')}"
    for container in status.get("containerStatuses") or ():
        waiting = container.get("state", {}).get("waiting")
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
        if waiting:
            return _sentence(waiting, ended)
        if ended and not container.get("ready"):
            return f"container ended with exit code {ended.get('exitCode')} ({ended.get('reason', 'Error')})"
    if status.get("phase") == "Running":
        return "is running, but its readiness probe fails"
    return f"is {status.get('phase', 'Pending')}, no container has started yet"


def _sentence(waiting: dict[str, Any], ended: dict[str, Any] | None) -> str:
    text = ": ".join(filter(None, (waiting.get("reason"), waiting.get("message"))))
    return f"{text} (last exit code {ended.get('exitCode')})" if ended else text
