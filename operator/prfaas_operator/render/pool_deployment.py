"""The Deployment of a pool: worker pods whose command, ports, probes, labels and security belong to the operator.

Settings that change while instances run lie in a ConfigMap that a PrefillPool's pods mount. They are not in the pod
template, because a change of replicas would then restart all pods. The pods read the file again. So a member cluster
that is cut off still starts pods with its last content. The mount is optional, so that no pod waits for it.

The pool's owner adds only the allow-list of `template`. The Deployment has the pool's name. If another pool's
Deployment already has that name (a DecodePool, another hub's pool), the pool's condition says so.
"""

import copy
import hashlib
import json
from posixpath import normpath
from typing import Any, Final

from prfaas import names
from prfaas.api import MemberCluster, PrefillPool
from prfaas.api.template import PodTemplate, Resources, Spread
from prfaas.engines import ADMIN_PORT
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.kinds import Object, manifest
from prfaas_operator.plan.pod_facts import CHEAP, DELETION_COST, ROLE_GATE, TEMPLATE_ANNOTATION
from prfaas_operator.plan.pool_status import PoolObject, egress_share_mbps, role_of
from prfaas_operator.plan.roles import Assignment
from prfaas_operator.render import common, engines
from prfaas_operator.render.certificates import worker_in_tls
from prfaas_operator.render.common import http_probe
from prfaas_operator.render.launch import DEFAULT_TERMS, Start, StartTerms, gpus

SETTINGS_VOLUME: Final = "prfaas-settings"
SPREAD: Final = (Spread(topology_key="topology.kubernetes.io/zone"), Spread(topology_key="kubernetes.io/hostname"))
"""Spread of instances unless the pool sets its own: as far apart as possible, so that a lost node has few of them."""
TMP_VOLUME: Final = "prfaas-tmp"
SHM_VOLUME: Final = "prfaas-shm"
PYTHON_PATH: Final = "PYTHONPATH"
LOADING_SECONDS: Final = 3600
"""Longest time that another engine may take to load its model."""
PROGRESS_MARGIN_SECONDS: Final = 600  # Kubernetes' own deadline of a rollout: pulls and scheduling come before the load
DEFAULTS: Final = {"HOME": common.TMP_PATH, "USER": "prfaas"}
"""Libraries look these up; no account has the pods' number, and the root is read-only."""


def selector(pool: PoolObject) -> dict[str, str]:
    """Return the labels that select the pods of a pool's Deployment; without their role, which may change."""
    return {names.LABEL_POOL_UID: pool.metadata.uid}


def scale_selector(pool: PoolObject) -> str:
    """Return the selector of status.selector for /scale and autoscalers."""
    return common.selector_text({**selector(pool), names.LABEL_ROLE: role_of(pool)})


def deployment(pool: PoolObject, member: MemberCluster | None, terms: StartTerms = DEFAULT_TERMS) -> Object:
    """Return the Deployment of a pool, for the hub when `member` is None."""
    begin = engines.start(pool, terms)
    plain = _plain_deployment(pool, member, begin)
    return worker_in_tls(plain, begin.tls_args) if terms.tls and begin.tls_args else plain


def _plain_deployment(pool: PoolObject, member: MemberCluster | None, begin: Start) -> Object:
    by_host = member is not None and member.spec.addressing == "HostIP"
    metadata = _metadata(pool, member, pool.metadata.name)
    template = pool.spec.template
    pod_metadata: Object = {
        "labels": {**template.labels, **metadata["labels"], names.LABEL_ENGINE: pool.spec.engine.record.name},
        "annotations": {**template.annotations, names.ANNOTATION_MODEL: pool.spec.model.name},
    }
    spec: Object = {
        "replicas": pool.spec.replicas,
        "selector": {"matchLabels": selector(pool)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(pool, by_host=by_host)},
        "template": {"metadata": pod_metadata, "spec": _pod(pool, begin, by_host=by_host)},
    }
    if begin.health_path:
        spec["progressDeadlineSeconds"] = LOADING_SECONDS + PROGRESS_MARGIN_SECONDS
    return manifest(kinds.DEPLOYMENT, metadata, spec=spec)


def _rolling_update(pool: PoolObject, *, by_host: bool) -> Object:
    rollout = pool.spec.rollout
    if by_host:
        # A node's port is taken until the old pod is gone, so an extra pod could never be scheduled beside it.
        return {"maxSurge": 0, "maxUnavailable": rollout.max_unavailable if rollout.may_lack else 1}
    return {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable}


def settings(pool: PrefillPool, member: MemberCluster | None) -> Object:
    """Return the ConfigMap of a pool's settings, for the hub when `member` is None; unset values have no key."""
    share_mbps = egress_share_mbps(pool)
    data = {} if share_mbps is None else {common.EGRESS_KEY: str(share_mbps)}
    metadata = _metadata(pool, member, names.settings_configmap(pool.metadata.name))
    return manifest(kinds.CONFIG_MAP, metadata, data=data)


def _metadata(pool: PoolObject, member: MemberCluster | None, name: str) -> Object:
    labels = {
        **common.PART_OF,
        names.LABEL_COMPONENT: "worker",
        names.LABEL_POOL: pool.metadata.name,
        names.LABEL_CLUSTER: member.metadata.name if member else names.HUB,
        names.LABEL_ROLE: role_of(pool),
        **selector(pool),
    }
    if member is None:
        return {"name": name, "labels": labels, "ownerReferences": [common.owner_reference(pool)]}
    return {"name": name, "labels": {**labels, common.LABEL_CLUSTER_UID: member.metadata.uid}}


def _pod(pool: PoolObject, begin: Start, *, by_host: bool) -> Object:
    template = pool.spec.template
    volumes, mounts = _volumes(pool, begin)
    pod: Object = {
        "automountServiceAccountToken": False,
        # Otherwise every Service of the namespace becomes variables: one named vllm would set VLLM_PORT.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": common.grace_seconds(pool.spec.drain_seconds),
        "securityContext": common.POD_SECURITY,
        "containers": [_worker(pool, begin, mounts, by_host=by_host)],
        "volumes": volumes,
    }
    optional = {
        "initContainers": list(begin.init_containers),
        "nodeSelector": dict(template.node_selector),
        "tolerations": [_dump(toleration) for toleration in template.tolerations],
        "imagePullSecrets": [_dump(reference) for reference in template.image_pull_secrets],
        "priorityClassName": template.priority_class_name,
        "serviceAccountName": template.service_account_name,
        "runtimeClassName": template.runtime_class_name,
        "schedulerName": template.scheduler_name,
        "affinity": _affinity(template),
        "topologySpreadConstraints": [
            # Only instances of one template count: in a rollout the old ones would draw the new ones to the same nodes.
            {**_dump(spread), "labelSelector": {"matchLabels": selector(pool)}, "matchLabelKeys": ["pod-template-hash"]}
            for spread in (SPREAD if template.topology_spread is None else template.topology_spread)
        ],
    }
    return pod | {key: value for key, value in optional.items() if value}


def _affinity(template: PodTemplate) -> Object:
    """Return the node affinity: one term with all requirements."""
    if not template.node_affinity:
        return {}
    term = {"matchExpressions": [_dump(requirement) for requirement in template.node_affinity]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def _worker(pool: PoolObject, begin: Start, mounts: list[Object], *, by_host: bool) -> Object:
    container: Object = {
        "name": "worker",
        "image": pool.spec.engine.image or begin.image,
        "command": begin.command,
        "args": begin.args,
        "env": _environment(pool, begin),
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            # Kubelet and Prometheus ask the pod's address: no node opens the port for them to other clusters.
            | ({"hostPort": port} if by_host and name != ADMIN_PORT else {})
            for name, port in begin.ports.items()
        ],
        **_probes(begin, pool.spec.engine.record.probed_port),
        "securityContext": _security(pool),
        "volumeMounts": mounts,
        **common.on_leaving(pool.spec.drain_seconds),
    }
    return container | common.resources(pool.spec.template.resources, default_resources(pool))


def default_resources(pool: PoolObject) -> Resources:
    """Return what an instance requests, and may not exceed, of what its pool does not name.

    The requested CPU is below a gateway's, which must answer probes beside busy instances. The requested memory is that
    of an idle worker with its cache on a CPU. The limit exists for quotas, so it is wide.
    """
    memory = f"{pool.spec.engine.record.memory_gib * gpus(pool)}Gi"
    return Resources(requests={"cpu": "50m", "memory": "1Gi"}, limits={"memory": memory})


def _environment(pool: PoolObject, begin: Start) -> list[Object]:
    """Return the container's variables: the pod's facts first, because others refer to them, the owner's last."""
    owners = {variable.name: _dump(variable) for variable in pool.spec.template.env}
    if begin.python_path:
        folders = filter(None, (begin.python_path, owners.get(PYTHON_PATH, {}).get("value")))
        owners[PYTHON_PATH] = {"name": PYTHON_PATH, "value": ":".join(folders)}
    ours = [{"name": name, "value": value} for name, value in {**DEFAULTS, **begin.env}.items() if name not in owners]
    return [*common.pod_environment(), *ours, *owners.values()]


def _security(pool: PoolObject) -> Object:
    """Return the container's security context; RDMA pins memory, which needs a right."""
    if not engines.asks_for_rdma(pool):
        return common.CONTAINER_SECURITY
    return {**common.CONTAINER_SECURITY, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}


def _probes(begin: Start, port: str) -> Object:
    if not begin.health_path:
        return {
            "readinessProbe": http_probe("/readyz", port, period_seconds=1, failures=2),
            "livenessProbe": http_probe("/healthz", port, period_seconds=5, failures=6),
        }
    path = begin.health_path
    return {
        # Other engines answer nothing until the model is loaded.
        "startupProbe": http_probe(path, port, period_seconds=10, failures=LOADING_SECONDS // 10),
        "readinessProbe": http_probe(path, port, period_seconds=1, failures=2),
        "livenessProbe": http_probe(path, port, period_seconds=5, failures=6),
    }


def _volumes(pool: PoolObject, begin: Start) -> tuple[list[Object], list[Object]]:
    """Return volumes and mounts: the owner's, the engine's, settings, and scratch space where the owner mounts none."""
    template, engine = pool.spec.template, pool.spec.engine.record
    volumes = [*(_dump(volume) for volume in template.volumes), *begin.volumes]
    mounts = [*(_dump(mount) for mount in template.volume_mounts), *begin.mounts]
    scratch: dict[str, Object] = {common.TMP_PATH: {"name": TMP_VOLUME, "emptyDir": {}}}
    if engine.uses_shared_memory:
        scratch[common.SHM_PATH] = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}}
    taken = {normpath(mount.mount_path) for mount in template.volume_mounts}
    for path, volume in scratch.items():
        if path not in taken:
            volumes.append(volume)
            mounts.append({"name": volume["name"], "mountPath": path})
    if isinstance(pool, PrefillPool) and engine.caps_egress:
        source = {"name": names.settings_configmap(pool.metadata.name), "optional": True}
        volumes.append({"name": SETTINGS_VOLUME, "configMap": source})
        # The whole folder: the kubelet never updates a file that is mounted by itself.
        mounts.append({"name": SETTINGS_VOLUME, "mountPath": common.SETTINGS_PATH, "readOnly": True})
    return volumes, mounts


def _dump(part: Any) -> Object:
    """Return a part of the template in Kubernetes' form; the models use core/v1's own field names."""
    return part.model_dump(by_alias=True, exclude_none=True)


DIGEST_CHARS: Final = 10


def shared_deployment(unshared: Object) -> Object:
    """Return a DecodePool's Deployment in the form that both roles share."""
    shared = copy.deepcopy(unshared)
    template = shared["spec"]["template"]
    del template["metadata"]["labels"][names.LABEL_ROLE]
    template["spec"]["readinessGates"] = [{"conditionType": ROLE_GATE}]
    arguments = template["spec"]["containers"][0]["args"]
    if "--role" in arguments:  # another engine that shares serves both roles from its start
        arguments[arguments.index("--role") + 1] = "mixed"
    template["metadata"].setdefault("annotations", {})[TEMPLATE_ANNOTATION] = _digest(template)
    return shared


def is_shared(deployment: Object) -> bool:
    """Return whether a Deployment has the form that both roles share."""
    return TEMPLATE_ANNOTATION in deployment["spec"]["template"]["metadata"].get("annotations", {})


def template_of(shared: Object) -> str:
    """Return the template digest that pods of a shared Deployment carry."""
    return shared["spec"]["template"]["metadata"]["annotations"][TEMPLATE_ANNOTATION]


def _digest(template: Any) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARS]


def role(assignment: Assignment, namespace: str) -> Object:
    """Return the part of a pod that says its role and which pod is deleted first."""
    labels = {names.LABEL_ROLE: assignment.role} if assignment.role else {}
    annotations = {DELETION_COST: CHEAP} if assignment.cheap else {}
    return _pod_part(assignment, namespace, {"labels": labels, "annotations": annotations})


def open_gate(assignment: Assignment, namespace: str, now: str) -> Object:
    """Return the status that lets an instance become ready; `now` is the transition time, RFC 3339."""
    condition = {
        "type": ROLE_GATE,
        "status": "True",
        "reason": "Assigned",
        "message": f"label {names.LABEL_ROLE} says what the instance does",
        "lastTransitionTime": now,
    }
    return _pod_part(assignment, namespace, {}, status={"conditions": [condition]})


def _pod_part(assignment: Assignment, namespace: str, metadata: Object, **fields: Any) -> Object:
    # The uid keeps an apply to a deleted pod from creating a new one.
    identity = {"name": assignment.pod.name, "namespace": namespace, "uid": assignment.pod.shared.uid}
    return manifest(kinds.POD, {**identity, **metadata}, **fields)
