"""Projects a worker or gateway pod to a few fields of the tens of kilobytes that the server sends.

In a Deployment that two pools share, a pod's role is a label that the operator sets, never its template. A pod without
a role is not ready, because its readiness gate is shut. So a rollout waits for the operator, and no role runs empty.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple

from prfaas import names
from prfaas.engines import ENGINES
from prfaas.routing.drafts import draft_layers

DATA_RANKS_FLAG: Final = "--data-parallel-size"
"""Of vLLM and SGLang, before what a pool's owner adds."""
NOT_ENDED: Final = "status.phase!=Failed,status.phase!=Succeeded"
"""Field selector of the pods to follow. An ended pod, such as an evicted one, stays for long beside its successor, and
says nothing about what runs."""
ROLE_GATE: Final = f"{names.GROUP}/role-assigned"
TEMPLATE_ANNOTATION: Final = f"{names.GROUP}/template"
"""Digest of a pod's template: distinguishes a rollout's new pods from its old ones."""
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
CHEAP: Final = "-1"
"""Deletion cost of a pod that should be deleted first when the Deployment shrinks. Others have none, which means 0."""


class SharedPodFacts(NamedTuple):
    """Facts of a pod in a Deployment that two pools share.

    `template` is empty for a pod of an unshared Deployment.
    """

    uid: str = ""
    created: str = ""
    template: str = ""
    gated: bool = False
    gate_open: bool = False
    cheap: bool = False


def _shared_facts(pod: dict[str, Any], conditions: dict[str, Any]) -> SharedPodFacts:
    """Reduce a pod to its facts for a shared Deployment; `conditions` are its status conditions by type."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    gates = (pod.get("spec") or {}).get("readinessGates") or ()
    return SharedPodFacts(
        uid=metadata.get("uid", ""),
        created=metadata.get("creationTimestamp", ""),
        template=annotations.get(TEMPLATE_ANNOTATION, ""),
        gated=any(gate["conditionType"] == ROLE_GATE for gate in gates),
        gate_open=conditions.get(ROLE_GATE, {}).get("status") == "True",
        cheap=annotations.get(DELETION_COST) == CHEAP,
    )


class InstanceFacts(NamedTuple):
    """What an instance is, by its own pod: its pool's spec may have changed since, and is right for new pods only.

    Args:
        engine, model: empty for a pod of an older operator.
        data_port: of rank 0; 0 for an engine without one.
        ranks: data-parallel ranks, each with cache events.
        rank_ports: data ports of each of these.
        by_host: its ports are its node's; None if the pod names no port.
        draft_layers: the method whose layers draft, as in a routing table.
    """

    engine: str = ""
    model: str = ""
    data_port: int = 0
    ranks: int = 1
    rank_ports: int = 1
    by_host: bool | None = None
    draft_layers: str = ""


def _instance_facts(pod: dict[str, Any]) -> InstanceFacts:
    metadata = pod["metadata"]
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    ports = {port.get("name", ""): port for port in containers[0].get("ports") or ()}
    arguments = containers[0].get("args") or ()
    ranks = _data_ranks(arguments)
    data_ports = sum(name == "data" or name.startswith("data-") for name in ports)
    engine = (metadata.get("labels") or {}).get(names.LABEL_ENGINE, "")
    flag = ENGINES[engine].draft_flag if engine in ENGINES else ""
    return InstanceFacts(
        engine=engine,
        model=(metadata.get("annotations") or {}).get(names.ANNOTATION_MODEL, ""),
        data_port=ports.get("data", {}).get("containerPort", 0),
        ranks=ranks,
        rank_ports=max(1, data_ports // ranks),
        by_host=any("hostPort" in port for port in ports.values()) if ports else None,
        draft_layers=draft_layers(flag, arguments),
    )


def _data_ranks(arguments: Iterable[str]) -> int:
    """Return the data-parallel ranks by the flag that the operator sets where there are several."""
    found = (value for flag, value in pairwise(arguments) if flag == DATA_RANKS_FLAG)
    return max(1, int(next((value for value in found if value.isdecimal()), "1")))


MAX_PROBLEM_CHARS = 300
CRASHES: Final = 2
"""A container that ended this often before it was ready is crashing, also while it runs."""

UNSCHEDULABLE: Final = "Unschedulable"
CRASH_LOOPING: Final = "CrashLooping"
WAITING_REASONS: Final = {
    "ErrImagePull": "ImagePullFailed",
    "ImagePullBackOff": "ImagePullFailed",
    "ErrImageNeverPull": "ImagePullFailed",
    "InvalidImageName": "ImagePullFailed",
    "ImageInspectError": "ImagePullFailed",
    "RegistryUnavailable": "ImagePullFailed",
    "CreateContainerConfigError": "ContainerNotCreated",
    "CreateContainerError": "ContainerNotCreated",
    "RunContainerError": "ContainerNotCreated",
    "CrashLoopBackOff": CRASH_LOOPING,
}
"""The kubelet's reasons for a waiting container, and the one cause behind reasons that alternate."""


VERSION_CONTAINER: Final = "version"
"""The init container that looks at the engine's version. It leaves a sentence about one that nobody has tested."""


class PodFacts(NamedTuple):
    """One pod. `problem` says why it is not ready, in the words of the scheduler or kubelet; empty for a ready pod.

    `cause` is the CamelCase reason of a problem that waiting does not solve, empty for all others. `untested` is what
    the pod says of its engine's version, empty for one that was tested. `secrets` are those that it mounts.
    """

    name: str
    pool_uid: str
    role: str
    pod_ip: str
    host_ip: str
    ready: bool
    terminating: bool
    problem: str
    cause: str = ""
    scheme: str = "http"
    shared: SharedPodFacts = SharedPodFacts()
    instance: InstanceFacts = InstanceFacts()
    policy_uid: str = ""
    untested: str = ""
    secrets: frozenset[str] = frozenset()


def project_pod(pod: dict[str, Any]) -> PodFacts:
    """Reduce a pod, as the API server returns it, to its facts."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    ready = conditions.get("Ready", {}).get("status") == "True"
    terminating = "deletionTimestamp" in metadata
    return PodFacts(
        name=metadata["name"],
        pool_uid=labels.get(names.LABEL_POOL_UID, ""),
        role=labels.get(names.LABEL_ROLE, ""),
        scheme=(metadata.get("annotations") or {}).get(names.ANNOTATION_SCHEME, "http"),
        pod_ip=status.get("podIP") or "",
        host_ip=status.get("hostIP") or "",
        ready=ready,
        terminating=terminating,
        problem="" if ready else _problem(status, conditions, terminating=terminating)[:MAX_PROBLEM_CHARS],
        cause="" if ready or terminating else _cause(status, conditions),
        shared=_shared_facts(pod, conditions),
        instance=_instance_facts(pod),
        policy_uid=labels.get(names.LABEL_POLICY_UID, ""),
        untested=_untested(status)[:MAX_PROBLEM_CHARS],
        secrets=frozenset(
            one["secret"]["secretName"] for one in (pod.get("spec") or {}).get("volumes") or () if one.get("secret")
        ),
    )


def _cause(status: dict[str, Any], conditions: dict[str, Any]) -> str:
    if conditions.get("PodScheduled", {}).get("status") == "False":
        return UNSCHEDULABLE
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in WAITING_REASONS:
            return WAITING_REASONS[waiting["reason"]]
        if not container.get("ready") and container.get("restartCount", 0) >= CRASHES:
            return CRASH_LOOPING
    return ""


def _problem(status: dict[str, Any], conditions: dict[str, Any], *, terminating: bool) -> str:
    if terminating:
        return "is terminating"
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', '')}"
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting")
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
        if waiting:
            return _sentence(waiting, ended)
        if ended and not container.get("ready"):
            text = f"container ended with exit code {ended.get('exitCode')} ({ended.get('reason', 'Error')})"
            return ": ".join(filter(None, (text, _last_words(ended))))
    if status.get("phase") == "Running":
        return "is running, but its readiness probe fails"
    return f"is {status.get('phase', 'Pending')}, no container has started yet"


def _containers(status: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the containers that keep a pod from being ready: until the init containers are through, one of these."""
    first = [one for one in status.get("initContainerStatuses") or () if not one.get("ready")]
    return first or status.get("containerStatuses") or ()


def _sentence(waiting: dict[str, Any], ended: dict[str, Any] | None) -> str:
    message = _last_words(ended or {}) or waiting.get("message")
    text = ": ".join(filter(None, (waiting.get("reason"), message)))
    return f"{text} (last exit code {ended.get('exitCode')})" if ended else text


def _untested(status: dict[str, Any]) -> str:
    looked = (one for one in status.get("initContainerStatuses") or () if one["name"] == VERSION_CONTAINER)
    return _last_words(next(looked, {}).get("state", {}).get("terminated") or {})


def _last_words(ended: dict[str, Any]) -> str:
    """Return what a container has left in its termination log, in one line."""
    return " ".join((ended.get("message") or "").split())
