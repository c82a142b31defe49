"""The Deployment of a pool: worker pods whose command, ports, probes, labels and security belong to the operator.

The owner of the pool adds the allow-list of `template` and no more. The Deployment has the pool's name; where another
pool's Deployment has it already (a DecodePool of that name, another hub's pool), the pool says so in its condition.
"""

from typing import Any, Final

from prfaas import names
from prfaas.api import MemberCluster, PodTemplate
from prfaas_operator.plan.pool import Pool, role_of
from prfaas_operator.render.common import (
    CONTAINER_SECURITY,
    LABEL_CLUSTER_UID,
    PART_OF,
    POD_SECURITY,
    Manifest,
    http_probe,
    owner_reference,
    pod_environment,
    resources,
    selector_text,
)

DRAIN_MARGIN_SECONDS: Final = 10  # between the worker's own drain limit and the kubelet's kill
TMP_VOLUME: Final = "prfaas-tmp"
TMP_PATH: Final = "/tmp"  # noqa: S108  # a path inside the container, backed by an emptyDir of its own


def selector(pool: Pool) -> dict[str, str]:
    """Return the labels that select a pool's pods."""
    return {names.LABEL_POOL_UID: pool.metadata.uid, names.LABEL_ROLE: role_of(pool)}


def scale_selector(pool: Pool) -> str:
    """Return the selector of status.selector, which /scale and an autoscaler read."""
    return selector_text(selector(pool))


def deployment(pool: Pool, member: MemberCluster | None) -> Manifest:
    """Return the Deployment of a pool, for the hub when `member` is None."""
    labels = _labels(pool, member)
    by_host = member is not None and member.spec.addressing == "HostIP"
    metadata: Manifest = {"name": pool.metadata.name, "labels": labels}
    if member is None:
        metadata["ownerReferences"] = [owner_reference(pool)]
    template = pool.spec.template
    pod_metadata: Manifest = {"labels": {**template.labels, **labels}}
    if template.annotations:
        pod_metadata["annotations"] = dict(template.annotations)
    spec: Manifest = {
        "replicas": pool.spec.replicas,
        "selector": {"matchLabels": selector(pool)},
        "template": {"metadata": pod_metadata, "spec": _pod(pool, by_host=by_host)},
    }
    if by_host:
        # A node's port is taken until the old pod is gone, so a surge pod could never be scheduled beside it.
        spec["strategy"] = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _labels(pool: Pool, member: MemberCluster | None) -> dict[str, str]:
    labels = {
        **PART_OF,
        names.LABEL_COMPONENT: "worker",
        names.LABEL_POOL: pool.metadata.name,
        names.LABEL_CLUSTER: member.metadata.name if member else names.HUB,
        **selector(pool),
    }
    return labels | ({LABEL_CLUSTER_UID: member.metadata.uid} if member else {})


def _pod(pool: Pool, *, by_host: bool) -> Manifest:
    template = pool.spec.template
    volumes, mounts = _volumes(template)
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pool.spec.drain_seconds + DRAIN_MARGIN_SECONDS,
        "securityContext": POD_SECURITY,
        "containers": [_worker(pool, mounts, by_host=by_host)],
        "volumes": volumes,
    }
    optional = {
        "nodeSelector": dict(template.node_selector),
        "tolerations": [_dump(toleration) for toleration in template.tolerations],
        "imagePullSecrets": [_dump(reference) for reference in template.image_pull_secrets],
        "priorityClassName": template.priority_class_name,
    }
    return pod | {key: value for key, value in optional.items() if value}


def _worker(pool: Pool, mounts: list[Manifest], *, by_host: bool) -> Manifest:
    ports = (("api", names.WORKER_API_PORT), ("data", names.WORKER_DATA_PORT))
    host_port = (lambda port: {"hostPort": port}) if by_host else (lambda _: {})
    container: Manifest = {
        "name": "worker",
        "image": pool.spec.engine.image,
        "command": ["prfaas-worker"],
        "args": _arguments(pool),
        "env": [*pod_environment(), *(_dump(variable) for variable in pool.spec.template.env)],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP", **host_port(port)} for name, port in ports],
        "readinessProbe": http_probe("/readyz", "api", period_seconds=1, failures=2),
        "livenessProbe": http_probe("/healthz", "api", period_seconds=5, failures=6),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }
    return container | resources(pool.spec.template.resources)


def _arguments(pool: Pool) -> list[str]:
    spec = pool.spec
    flags = {
        "--model-source": spec.model.source,
        "--model-name": spec.model.name,
        "--host": "$(POD_IP)",
        "--api-port": str(names.WORKER_API_PORT),
        "--data-port": str(names.WORKER_DATA_PORT),
        "--instance": "$(POD_NAME)",
        "--cluster": spec.cluster_name or names.HUB,
        "--pool": pool.metadata.name,
        "--role": role_of(pool),
        "--drain-seconds": str(spec.drain_seconds),
    }
    return [word for flag in flags.items() for word in flag] + list(spec.engine.args)


def _volumes(template: PodTemplate) -> tuple[list[Manifest], list[Manifest]]:
    """Return volumes and mounts: the owner's, and scratch space at /tmp unless they mount their own there."""
    volumes = [_dump(volume) for volume in template.volumes]
    mounts = [_dump(mount) for mount in template.volume_mounts]
    if all(mount.mount_path != TMP_PATH for mount in template.volume_mounts):
        volumes.append({"name": TMP_VOLUME, "emptyDir": {}})
        mounts.append({"name": TMP_VOLUME, "mountPath": TMP_PATH})
    return volumes, mounts


def _dump(part: Any) -> Manifest:
    """Return a part of the template as Kubernetes writes it; the models use core/v1's own field names."""
    return part.model_dump(by_alias=True, exclude_none=True)
