"""Runs the probe as a Job in each cluster, and removes all that it made: at the end, at Ctrl-C, and after a kill.

A killed run removes nothing itself. Its Jobs end by their deadline and go by their time to live, and the next run
begins by removing what carries the label. Therefore one person at a time checks a pair of clusters.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from prfaas import names
from prfaas.errors import ConfigError, PeerError, PrfaasError, UnreachableError
from prfaas.util import Deadline, decode_json
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import Object, manifest
from prfaas_operator.preflight import probe
from prfaas_operator.preflight.facts import RESOURCES, PathFacts
from prfaas_operator.preflight.findings import REQUIRED_PORTS, engine_ports
from prfaas_operator.render.common import CONTAINER_SECURITY, POD_SECURITY

NAME: Final = "prfaas-preflight"
LABELS: Final = {names.LABEL_MANAGED_BY: NAME}
SELECTOR: Final = f"{names.LABEL_MANAGED_BY}={NAME}"
JOB_NAME: Final = "batch.kubernetes.io/job-name"
POLL_SECONDS: Final = 0.3
CLIENT_SECONDS: Final = 120
"""More than the client's longest waits together."""
LIVE_SECONDS: Final = 60
RESOURCE_LIMITS: Final[Object] = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
_WITH_ACCELERATORS: Final[list[Object]] = [
    {"weight": 1, "preference": {"matchExpressions": [{"key": key, "operator": "Exists"}]}}
    for key in ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
]
"""Nodes that tell of their accelerators."""
STUCK: Final = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    }
)
"""Reasons for which a container waits that no waiting cures."""


class Order(NamedTuple):
    """What the probes are to do."""

    token: str
    image: str
    server: str
    """HOST:PORT of the member's API server."""
    prometheus: str | None
    wait_seconds: float
    """For each pod to start."""


def probe_pod(order: Order, *arguments: str) -> Object:
    """Return the spec of a pod that runs the probe, of the restricted standard."""
    container = {
        "name": "probe",
        "image": order.image,
        "command": ["python3", "-I", "-c", Path(probe.__file__).read_text()],
        "args": list(arguments),
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": RESOURCE_LIMITS,
        "securityContext": CONTAINER_SECURITY,
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": POD_SECURITY,
        # Where the caches will leave and arrive, if the nodes with accelerators take it.
        "tolerations": [{"key": resource, "operator": "Exists"} for resource in RESOURCES],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": _WITH_ACCELERATORS}},
        "containers": [container],
    }


def trial(order: Order) -> Object:
    """Return a pod for a dry run."""
    return manifest(kinds.POD, {"generateName": f"{NAME}-", "labels": LABELS}, spec=probe_pod(order, "serve"))


@asynccontextmanager
async def room(cluster: ClusterClient, *, is_given: bool, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Have the client's namespace for the block, without anything of ours before and after; a given one stays."""
    await _clear(cluster, is_given=is_given)
    try:
        if not is_given:
            await cluster.create(
                kinds.NAMESPACE, manifest(kinds.NAMESPACE, {"name": cluster.namespace, "labels": LABELS})
            )
        yield
    finally:
        try:
            await _clear(cluster, is_given=is_given)
        except PrfaasError as error:
            say(f"not removed, the next preflight will: {error}")


async def _clear(cluster: ClusterClient, *, is_given: bool) -> None:
    kind = kinds.JOB if is_given else kinds.NAMESPACE
    for left in await cluster.list_all(kind, selector=SELECTOR):
        if not left["metadata"].get("deletionTimestamp"):
            await cluster.delete(kind, left["metadata"]["name"])


async def measure(hub: ClusterClient, member: ClusterClient, order: Order) -> PathFacts:
    """Run the server in the member and the client in the hub, and return what the client saw."""
    ports = [str(port) for port in (*REQUIRED_PORTS, *engine_ports())]
    # The server also waits for the client's pod.
    life = str(round(order.wait_seconds) + CLIENT_SECONDS)
    server = _job("member", order, "serve", order.token, "$(POD_IP)", *ports, life)
    await member.create(kinds.JOB, server)
    pod = await _pod(member, server, order.wait_seconds, {"Running"})
    words = [order.token, pod["status"]["podIP"], *ports, order.server, *filter(None, [order.prometheus])]
    client = _job("hub", order, "client", *words)
    await hub.create(kinds.JOB, client)
    await _pod(hub, client, order.wait_seconds, {"Running", "Succeeded", "Failed"})
    ended = await _pod(hub, client, CLIENT_SECONDS, {"Succeeded", "Failed"})
    said = await hub.log(ended["metadata"]["name"])
    if _phase(ended) == "Failed":
        raise PeerError(f"the probe in the hub failed: {' '.join(said.splitlines()[-1:])}")
    # An image may write warnings of its own before.
    return decode_json("".join(said.splitlines()[-1:]).encode(), PathFacts, "the probe in the hub")


def _job(where: str, order: Order, *arguments: str) -> Object:
    """Return a Job in the hub or the member; a former one that is being removed has another name."""
    spec = {
        "backoffLimit": 0,
        # Before the client measures, the server's Job waits for its own pod and for the client's.
        "activeDeadlineSeconds": 2 * round(order.wait_seconds) + CLIENT_SECONDS,
        "ttlSecondsAfterFinished": LIVE_SECONDS,
        "template": {"metadata": {"labels": LABELS}, "spec": probe_pod(order, *arguments)},
    }
    return manifest(kinds.JOB, {"name": f"{NAME}-{order.token}-{where}", "labels": LABELS}, spec=spec)


async def _pod(cluster: ClusterClient, job: Object, seconds: float, phases: set[str]) -> Object:
    """Return the pod of a Job once it is in one of some phases; ConfigError or UnreachableError if it never is."""
    deadline, name = Deadline(seconds), job["metadata"]["name"]
    while True:
        pods = await cluster.list_all(kinds.POD, selector=f"{JOB_NAME}={name}")
        for pod in pods:
            if _phase(pod) in phases:
                return pod
            if why := _stuck(pod):
                raise ConfigError(f"Job {name}: its pod cannot start: {why}")
        if deadline.is_over:
            raise UnreachableError(f"Job {name} is not ready after {seconds:g} s: {_waits(pods)}")
        await asyncio.sleep(POLL_SECONDS)


def _phase(pod: Object) -> str:
    return pod.get("status", {}).get("phase", "Pending")


def _stuck(pod: Object) -> str:
    for one in pod.get("status", {}).get("containerStatuses", []):
        waiting: dict[str, Any] = one["state"].get("waiting") or {}
        if waiting.get("reason") in STUCK:
            return f"{waiting['reason']}: {waiting.get('message', '')}"
        if ended := one["state"].get("terminated"):
            return f"it ended at once, {ended.get('reason')}: {ended.get('message', '')}".rstrip(": ")
    return "it ended at once" if _phase(pod) in {"Succeeded", "Failed"} else ""


def _waits(pods: Sequence[Object]) -> str:
    """Return why the pods have not started, by the scheduler's word if it has said one."""
    if not pods:
        return "no pod was made; `kubectl get events` may say why"
    conditions = pods[0].get("status", {}).get("conditions", [])
    told = [one["message"] for one in conditions if one["status"] != "True" and one.get("message")]
    return told[0] if told else f"it is {_phase(pods[0])}"
