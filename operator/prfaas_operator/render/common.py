"""Parts of every manifest: labels, owners, names and the hardened security context."""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final

from prfaas import names
from prfaas.api import PrfaaSPolicy
from prfaas.api.base import Resource
from prfaas.api.template import Resources
from prfaas.kube.session import ObjectKind
from prfaas_operator.clusters.kinds import Object, manifest

PART_OF: Final = {"app.kubernetes.io/part-of": "prfaas", names.LABEL_MANAGED_BY: names.MANAGED_BY}
LABEL_CLUSTER_UID: Final = f"{names.GROUP}/cluster-uid"
"""uid of the MemberCluster that a remote child was made for. Two hubs may share a namespace of one member cluster. Each
deletes only orphans with the uid of its own MemberCluster.
"""

USER_ID: Final = 65532  # the images' own; stated here so that the kubelet can check runAsNonRoot
GROUP_MANAGED: Final = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"

POD_SECURITY: Final[Object] = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final[Object] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
TMP_PATH: Final = "/tmp"  # noqa: S108  # a path inside the container, backed by its own emptyDir
SHM_PATH: Final = "/dev/shm"  # noqa: S108  # a path inside the container
SETTINGS_PATH: Final = "/etc/prfaas/settings"
EGRESS_KEY: Final = "egress-mbps"
EGRESS_FILE: Final = f"{SETTINGS_PATH}/{EGRESS_KEY}"
GRACE_MARGIN_SECONDS: Final = 10  # between a process's own drain limit and the kubelet's kill
NOTICE_SECONDS: Final = 5
"""Longest time that a leaving pod still serves as before, until all clients know that it leaves. A routing table takes
up to a second to be written and as long to arrive, and so do a Service's endpoints.
"""
POD_FIELDS: Final = (("POD_IP", "status.podIP"), ("POD_NAME", "metadata.name"), ("POD_NAMESPACE", "metadata.namespace"))


def owner_reference(owner: Resource) -> Object:
    """Return the reference by which the hub's garbage collector deletes a child with its owner."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": owner.kind_name,
        "name": owner.metadata.name,
        "uid": owner.metadata.uid,
        "controller": True,
    }


def pod_environment() -> list[Object]:
    """Return the downward API variables that every process reads its own address and names from."""
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in POD_FIELDS]


def notice(drain_seconds: int) -> int:
    """Return the seconds that a pod still serves after its deletion began; 0 for a pod without a drain."""
    return min(NOTICE_SECONDS, drain_seconds)


def grace_seconds(drain_seconds: int) -> int:
    """Return a pod's terminationGracePeriodSeconds."""
    return notice(drain_seconds) + drain_seconds + GRACE_MARGIN_SECONDS


def on_leaving(drain_seconds: int) -> Object:
    """Return a container's `lifecycle`: SIGTERM arrives only after the notice; nothing without a notice.

    It uses exec, because the kind `sleep` needs Kubernetes 1.30.
    """
    seconds = notice(drain_seconds)
    return {"lifecycle": {"preStop": {"exec": {"command": ["sleep", str(seconds)]}}}} if seconds else {}


def words(flags: Mapping[str, str]) -> list[str]:
    """Return flags as the words of a command line."""
    return [word for flag in flags.items() for word in flag]


def http_probe(path: str, port: str, *, period_seconds: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def resources(wanted: Resources, default: Resources) -> Object:
    """Return the `resources` field of a container: its owner's, and the defaults of what the owner does not name.

    A limit that the owner names is the request, too, as Kubernetes has it. A request that the owner names raises the
    default limit, which may not be below it.
    """
    requests = {name: value for name, value in default.requests.items() if name not in wanted.limits} | wanted.requests
    limits = {name: max(value, requests.get(name, 0), key=_amount) for name, value in default.limits.items()}
    return {"resources": {"requests": requests, "limits": limits | wanted.limits}}


_UNITS: Final = {unit: 10 ** (3 * power) for power, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))} | {
    f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)
}


def _amount(quantity: int | str) -> Decimal:
    """Return the number of a Kubernetes quantity such as `500m`, `1e3` or `8Gi`."""
    text = str(quantity)
    number = text.rstrip("numkKMGTPEi")
    unit = text[len(number) :]
    small = {"m": 3, "u": 6, "n": 9}.get(unit)
    return Decimal(number) * _UNITS[unit] if small is None else Decimal(number).scaleb(-small)


def policy_labels(policy: PrfaaSPolicy) -> dict[str, str]:
    return {
        **PART_OF,
        names.LABEL_COMPONENT: "gateway",
        names.LABEL_POLICY: policy.metadata.name,
        names.LABEL_POLICY_UID: policy.metadata.uid,
        names.LABEL_CLUSTER: names.HUB,
    }


def gateway_selector(policy: PrfaaSPolicy) -> dict[str, str]:
    """Return the labels that select a policy's gateway pods; by name, because selectors can never change."""
    return {names.LABEL_COMPONENT: "gateway", names.LABEL_POLICY: policy.metadata.name}


def child(policy: PrfaaSPolicy, kind: ObjectKind, name: str, **fields: Any) -> Object:
    """Return a child of a policy: with the policy's labels, deleted with it."""
    metadata = {"name": name, "labels": policy_labels(policy), "ownerReferences": [owner_reference(policy)]}
    return manifest(kind, metadata, **fields)


RBAC_GROUP: Final = "rbac.authorization.k8s.io"


def rule(group: str, resource: str, verbs: Iterable[str], name: str = "") -> Object:
    """Return a rule of a Role; with `name` for that one object only."""
    only = {"resourceNames": [name]} if name else {}
    return {"apiGroups": [group], "resources": [resource], **only, "verbs": list(verbs)}


def binding(name: str, namespace: str) -> Object:
    """Return the fields of a RoleBinding that gives a ServiceAccount the Role of the same name."""
    return {
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }


def selector_text(labels: dict[str, str]) -> str:
    """Return labels as a selector for list calls and /scale."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
