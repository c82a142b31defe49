"""The gateway Deployment of a policy: the router, which relays requests, and beside it the scheduler, which moves t."""

from typing import Final

from prfaas import names
from prfaas.api import PrfaaSPolicy
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
    """Return the Deployment of a policy's gateway."""
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
        # Not optional: a gateway without the keys that it was told to ask for must not start.
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
        # The whole folder: the kubelet never updates a file that is mounted alone.
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
