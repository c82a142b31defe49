"""The gateway Deployment of a policy: the router, which relays requests, and the scheduler, which moves the
threshold."""

import base64
from typing import Any, Final

from prfaas import names
from prfaas.api import PrfaaSPolicy
from prfaas.errors import ProtocolError
from prfaas.wire import routes
from prfaas_operator.render.certificates import MODE
from prfaas_operator.render.common import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    Manifest,
    child_metadata,
    gateway_selector,
    http_probe,
    notice,
    on_leaving,
    pod_environment,
    policy_labels,
    resources,
)

GRACE_MARGIN_SECONDS: Final = 10  # between the gateway's own limits and the kubelet's kill
SHARED_VOLUME: Final = "run"
SHARED_PATH: Final = "/run/prfaas"
CONTROL_SOCKET: Final = f"{SHARED_PATH}/control.sock"
KEYS_VOLUME: Final = "api-keys"
KEYS_PATH: Final = "/etc/prfaas/keys"
TMP_VOLUME: Final = "tmp"
TMP_PATH: Final = "/tmp"  # noqa: S108  # a path inside the container, backed by an emptyDir of its own


def deployment(policy: PrfaaSPolicy) -> Manifest:
    name, drain_seconds = names.gateway_name(policy.metadata.name), policy.spec.gateway.drain_seconds
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": child_metadata(policy, name),
        "spec": {
            "replicas": policy.spec.gateway.replicas,
            "selector": {"matchLabels": gateway_selector(policy)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": policy_labels(policy)},
                "spec": {
                    "serviceAccountName": name,
                    "automountServiceAccountToken": True,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": notice(drain_seconds) + drain_seconds + GRACE_MARGIN_SECONDS,
                    "securityContext": POD_SECURITY,
                    "containers": [_router(policy), _scheduler(policy)],
                    "volumes": _volumes(policy),
                },
            },
        },
    }


def _volumes(policy: PrfaaSPolicy) -> list[Manifest]:
    volumes: list[Manifest] = [{"name": SHARED_VOLUME, "emptyDir": {}}, {"name": TMP_VOLUME, "emptyDir": {}}]
    if keys := policy.spec.gateway.api_keys_secret_ref:
        # Not optional: a gateway that must ask for keys must not start without them.
        volumes.append({"name": KEYS_VOLUME, "secret": {"secretName": keys.name, "defaultMode": MODE}})
    return volumes


def _router(policy: PrfaaSPolicy) -> Manifest:
    arguments = {
        "--host": "$(POD_IP)",
        "--port": str(names.GATEWAY_PORT),
        "--policy": policy.metadata.name,
        "--namespace": "$(POD_NAMESPACE)",
        "--control-socket": CONTROL_SOCKET,
        "--drain-seconds": str(policy.spec.gateway.drain_seconds),
    }
    keys = policy.spec.gateway.api_keys_secret_ref
    if keys is not None:
        arguments["--keys-dir"] = KEYS_PATH
    container = _container(policy, "router", "prfaas-gateway", arguments)
    if keys is not None:
        # The whole folder: the kubelet never updates a file that is mounted by itself.
        container["volumeMounts"].append({"name": KEYS_VOLUME, "mountPath": KEYS_PATH, "readOnly": True})
    container["ports"] = [{"name": "http", "containerPort": names.GATEWAY_PORT, "protocol": "TCP"}]
    container["readinessProbe"] = http_probe("/readyz", "http", period_seconds=1, failures=2)
    container["livenessProbe"] = http_probe("/healthz", "http", period_seconds=5, failures=6)
    return container | on_leaving(policy.spec.gateway.drain_seconds) | resources(policy.spec.gateway.resources)


def _scheduler(policy: PrfaaSPolicy) -> Manifest:
    arguments = {
        "--control-socket": CONTROL_SOCKET,
        "--policy": policy.metadata.name,
        "--namespace": "$(POD_NAMESPACE)",
        "--identity": "$(POD_NAME)",
        "--host": "$(POD_IP)",
        "--metrics-port": str(names.SCHEDULER_METRICS_PORT),
    }
    container = _container(policy, "scheduler", "prfaas-scheduler", arguments)
    container["ports"] = [{"name": "metrics", "containerPort": names.SCHEDULER_METRICS_PORT, "protocol": "TCP"}]
    container["livenessProbe"] = http_probe("/metrics", "metrics", period_seconds=10, failures=6)
    return container


def _container(policy: PrfaaSPolicy, name: str, command: str, arguments: dict[str, str]) -> Manifest:
    return {
        "name": name,
        "image": policy.spec.gateway.image,
        "command": [command],
        "args": [word for argument in arguments.items() for word in argument],
        "env": pod_environment(),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": SHARED_VOLUME, "mountPath": SHARED_PATH},
            {"name": TMP_VOLUME, "mountPath": TMP_PATH},
        ],
    }


def service(policy: PrfaaSPolicy) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(policy, names.gateway_name(policy.metadata.name)),
        "spec": {
            "selector": gateway_selector(policy),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
        },
    }


RBAC_GROUP = "rbac.authorization.k8s.io"


def lease_name(policy: str) -> str:
    """Return the name of the Lease of a policy's schedulers."""
    return f"{policy}-scheduler"


def service_account(policy: PrfaaSPolicy) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": child_metadata(policy, names.gateway_name(policy.metadata.name)),
        "automountServiceAccountToken": False,
    }


def role(policy: PrfaaSPolicy) -> Manifest:
    """Return the rights of gateway pods; every rule names one object."""
    name = policy.metadata.name
    return {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": "Role",
        "metadata": child_metadata(policy, names.gateway_name(name)),
        "rules": [
            _rule("", "configmaps", names.routes_configmap(name), "get", "list", "watch"),
            _rule(names.GROUP, "prfaaspolicies/status", name, "get", "patch"),
            _rule("coordination.k8s.io", "leases", lease_name(name), "get", "update", "patch"),
        ],
    }


def _rule(group: str, resource: str, name: str, *verbs: str) -> Manifest:
    return {"apiGroups": [group], "resources": [resource], "resourceNames": [name], "verbs": list(verbs)}


def role_binding(policy: PrfaaSPolicy) -> Manifest:
    name = names.gateway_name(policy.metadata.name)
    return {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": child_metadata(policy, name),
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": policy.metadata.namespace}],
    }


def lease(policy: PrfaaSPolicy) -> Manifest:
    """Return the Lease without a holder; its spec belongs to the scheduler that holds it."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": child_metadata(policy, lease_name(policy.metadata.name)),
    }


def config_map(policy: PrfaaSPolicy, table: routes.RoutingTable) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(policy, names.routes_configmap(policy.metadata.name)),
        "binaryData": {names.ROUTES_KEY: base64.b64encode(routes.encode(table)).decode("ascii")},
    }


def read_config_map(live: dict[str, Any] | None) -> routes.RoutingTable | None:
    """Return the table of a live ConfigMap; None if there is none, or none that this version can read."""
    document = ((live or {}).get("binaryData") or {}).get(names.ROUTES_KEY)
    if not document:
        return None
    try:
        return routes.decode(base64.b64decode(document))
    except (ProtocolError, ValueError):
        return None
