"""The status of a pod, from facts of its containers. Pure.

It has only fields that the node owns. Applied server-side, they do not change conditions of others (the scheduler's
PodScheduled, readiness gates). Rules: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prfaas.kube.session import Object


@dataclass(frozen=True)
class ContainerWaiting:
    reason: str
    message: str = ""


@dataclass(frozen=True)
class ContainerRunning:
    """Running since a time (RFC 3339)."""

    started_at: str


@dataclass(frozen=True)
class ContainerTerminated:
    exit_code: int
    reason: str
    started_at: str
    finished_at: str
    message: str = ""


ContainerState = ContainerWaiting | ContainerRunning | ContainerTerminated


@dataclass(frozen=True)
class ContainerFacts:
    """The node's facts of a container.

    `last` is how the previous run ended. `restarts` counts runs after the first. `ready` is the readiness verdict;
    `started` means that it runs and its startup probe has succeeded.
    """

    name: str
    image: str
    state: ContainerState
    last: ContainerTerminated | None = None
    restarts: int = 0
    ready: bool = False
    started: bool = False


@dataclass(frozen=True)
class PodAddresses:
    """The addresses in a pod's status."""

    pod_address: str
    node_address: str


def pod_status(
    pod: Object,
    containers: Sequence[ContainerFacts],
    addresses: PodAddresses,
    now: str,
    init_containers: Sequence[ContainerFacts] = (),
) -> Object:
    """Return the node's part of the status.

    Unchanged conditions of `pod` keep their transition times; `now` is the time of new ones, RFC 3339. Both kinds of
    containers are in the spec's order.
    """
    ended = [replace(facts, ready=is_done(facts)) for facts in init_containers]
    failed = any(isinstance(facts.state, ContainerTerminated) and not facts.ready for facts in ended)
    current = "Failed" if failed else phase(pod["spec"].get("restartPolicy", "Always"), containers)
    status = {
        "phase": current,
        "podIP": addresses.pod_address,
        "podIPs": [{"ip": addresses.pod_address}],
        "hostIP": addresses.node_address,
        "hostIPs": [{"ip": addresses.node_address}],
        "startTime": pod.get("status", {}).get("startTime") or now,
        "conditions": _conditions(pod, containers, ended, current, now),
        "containerStatuses": [_container_status(pod, facts) for facts in containers],
    }
    return status | ({"initContainerStatuses": [_container_status(pod, facts) for facts in ended]} if ended else {})


def is_done(init_container: ContainerFacts) -> bool:
    """Return whether an init container has ended well, so that the next container may start."""
    return isinstance(init_container.state, ContainerTerminated) and init_container.state.exit_code == 0


def phase(restart_policy: str, containers: Sequence[ContainerFacts]) -> str:
    ended = [each.state for each in containers if isinstance(each.state, ContainerTerminated)]
    if len(ended) == len(containers) and restart_policy != "Always":
        failed = any(state.exit_code != 0 for state in ended)
        if not failed:
            return "Succeeded"
        if restart_policy == "Never":
            return "Failed"
    first_start_is_due = any(isinstance(each.state, ContainerWaiting) and each.last is None for each in containers)
    return "Pending" if first_start_is_due else "Running"


def should_restart(restart_policy: str, exit_code: int) -> bool:
    """Return whether to restart a container that ended with `exit_code`."""
    return restart_policy == "Always" or (restart_policy == "OnFailure" and exit_code != 0)


def _conditions(
    pod: Object, containers: Sequence[ContainerFacts], init_containers: Sequence[ContainerFacts], current: str, now: str
) -> list[Object]:
    held = {condition["type"]: condition for condition in pod.get("status", {}).get("conditions", [])}
    not_ready = [each.name for each in containers if not each.ready]
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", [])]
    closed = [gate for gate in gates if held.get(gate, {}).get("status") != "True"]
    over = "PodCompleted" if current in ("Succeeded", "Failed") else ""
    if not_ready:
        blocked = (over or "ContainersNotReady", f"containers with unready status: {' '.join(not_ready)}")
        verdicts = {"ContainersReady": blocked, "Ready": blocked}
    elif closed:
        blocked = ("ReadinessGatesNotReady", f"readiness gates not True: {' '.join(closed)}")
        verdicts = {"ContainersReady": None, "Ready": blocked}
    else:
        verdicts = {"ContainersReady": None, "Ready": None}
    waiting = [each.name for each in init_containers if not each.ready]
    uninitialized = ("ContainersNotInitialized", f"containers with incomplete status: {' '.join(waiting)}")
    verdicts = {"Initialized": uninitialized if waiting else None, **verdicts}
    return [_condition(kind, verdict, held.get(kind, {}), now) for kind, verdict in verdicts.items()]


def _condition(kind: str, blocked: tuple[str, str] | None, held: Object, now: str) -> Object:
    """Return a condition; it is False with (reason, message) if `blocked`, and keeps an equal status's time."""
    status = "False" if blocked else "True"
    since = held.get("lastTransitionTime") if held.get("status") == status else None
    condition = {"type": kind, "status": status, "lastTransitionTime": since or now}
    if blocked:
        condition |= {"reason": blocked[0], "message": blocked[1]}
    return condition


def _container_status(pod: Object, facts: ContainerFacts) -> Object:
    status: Object = {
        "name": facts.name,
        "image": facts.image,
        "imageID": "",
        "containerID": f"process://{pod['metadata']['uid']}/{facts.name}/{facts.restarts}",
        "restartCount": facts.restarts,
        "ready": facts.ready,
        "started": facts.started,
        "state": _state(facts.state),
    }
    if facts.last is not None:
        status["lastState"] = _state(facts.last)
    return status


def _state(state: ContainerState) -> Object:
    match state:
        case ContainerWaiting():
            return {"waiting": {"reason": state.reason, "message": state.message}}
        case ContainerRunning():
            return {"running": {"startedAt": state.started_at}}
        case ContainerTerminated():
            times = {"startedAt": state.started_at, "finishedAt": state.finished_at}
            return {
                "terminated": {"exitCode": state.exit_code, "reason": state.reason, "message": state.message, **times}
            }
