"""A policy's gateway pods: the gateway that relays requests, the scheduler that moves the threshold, their rights and
their routing table."""

import base64
from typing import Any, Final, NamedTuple

from prfaas import names
from prfaas.api import PrfaaSPolicy
from prfaas.api.template import Resources
from prfaas.errors import ProtocolError
from prfaas.kube.lease import LEASE_KIND
from prfaas.memory import GATEWAY_LIMIT_GIB, SCHEDULER
from prfaas.wire import routes
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.render import common
from prfaas_operator.render.certificates import MODE
from prfaas_operator.render.common import child, http_probe, rule

SHARED_VOLUME: Final = "run"
SHARED_PATH: Final = "/run/prfaas"
CONTROL_SOCKET: Final = f"{SHARED_PATH}/control.sock"
KEYS_VOLUME: Final = "api-keys"
KEYS_PATH: Final = "/etc/prfaas/keys"
TMP_VOLUME: Final = "tmp"
GATEWAY_DEFAULTS: Final = Resources(
    requests={"cpu": "100m", "memory": "256Mi"}, limits={"memory": f"{GATEWAY_LIMIT_GIB}Gi"}
)
"""Beside engines that take every core, a gateway without a share of the CPU misses its probes and becomes unready; a
limit of the CPU could do the same. The gateway divides the limit of its memory into its budgets itself.
"""
SCHEDULER_DEFAULTS: Final = Resources(
    requests={"cpu": "25m", "memory": "64Mi"}, limits={"memory": f"{SCHEDULER.limit_mib}Mi"}
)
"""With 16 links it computes for 9 ms in each second. What Prometheus may answer is bounded by the limit that it has."""


class GatewayImage(NamedTuple):
    """The image of gateway and scheduler, and the Secrets by which a kubelet pulls it."""

    name: str
    pull_secrets: tuple[str, ...] = ()


def deployment(policy: PrfaaSPolicy, image: GatewayImage) -> Object:
    """Return the gateway's Deployment: the gateway and the scheduler in one pod, both of one image."""
    name = names.gateway_name(policy.metadata.name)
    pod = {
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": common.grace_seconds(policy.spec.gateway.drain_seconds),
        "securityContext": common.POD_SECURITY,
        "containers": [one | {"image": image.name} for one in (_gateway(policy), _scheduler(policy))],
        "volumes": _volumes(policy),
    }
    if image.pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in image.pull_secrets]
    spec = {
        "replicas": policy.spec.gateway.replicas,
        "selector": {"matchLabels": common.gateway_selector(policy)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": common.policy_labels(policy)}, "spec": pod},
    }
    return child(policy, kinds.DEPLOYMENT, name, spec=spec)


def _volumes(policy: PrfaaSPolicy) -> list[Object]:
    volumes: list[Object] = [{"name": SHARED_VOLUME, "emptyDir": {}}, {"name": TMP_VOLUME, "emptyDir": {}}]
    if keys := policy.spec.gateway.api_keys_secret_ref:
        # Not optional: a gateway that must ask for keys must not start without them.
        volumes.append({"name": KEYS_VOLUME, "secret": {"secretName": keys.name, "defaultMode": MODE}})
    return volumes


def _gateway(policy: PrfaaSPolicy) -> Object:
    arguments = {
        "--host": "$(POD_IP)",
        "--port": str(names.GATEWAY_PORT),
        "--admin-port": str(names.GATEWAY_ADMIN_PORT),
        "--policy": policy.metadata.name,
        "--namespace": "$(POD_NAMESPACE)",
        "--control-socket": CONTROL_SOCKET,
        "--drain-seconds": str(policy.spec.gateway.drain_seconds),
    }
    keys = policy.spec.gateway.api_keys_secret_ref
    if keys is not None:
        arguments["--keys-dir"] = KEYS_PATH
    if origins := policy.spec.gateway.cors_origins:
        arguments["--cors-origins"] = ",".join(sorted(origins))
    container = _container("gateway", "prfaas-gateway", arguments)
    if policy.spec.gateway.shared_cache:
        container["args"].append("--shared-cache")
    if keys is not None:
        # The whole folder: the kubelet never updates a file that is mounted by itself.
        container["volumeMounts"].append({"name": KEYS_VOLUME, "mountPath": KEYS_PATH, "readOnly": True})
    ports = {"http": names.GATEWAY_PORT, "admin": names.GATEWAY_ADMIN_PORT}
    container["ports"] = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]
    # Not at the clients' port: those who take all of its connections would have the pod killed, with its streams.
    container["readinessProbe"] = http_probe("/readyz", "admin", period_seconds=1, failures=2)
    container["livenessProbe"] = http_probe("/healthz", "admin", period_seconds=5, failures=6)
    spec = policy.spec.gateway
    return container | common.on_leaving(spec.drain_seconds) | common.resources(spec.resources, GATEWAY_DEFAULTS)


def _scheduler(policy: PrfaaSPolicy) -> Object:
    arguments = {
        "--control-socket": CONTROL_SOCKET,
        "--policy": policy.metadata.name,
        "--namespace": "$(POD_NAMESPACE)",
        "--identity": "$(POD_NAME)",
        "--host": "$(POD_IP)",
        "--metrics-port": str(names.SCHEDULER_METRICS_PORT),
    }
    container = _container("scheduler", "prfaas-scheduler", arguments)
    container["ports"] = [{"name": "metrics", "containerPort": names.SCHEDULER_METRICS_PORT, "protocol": "TCP"}]
    container["livenessProbe"] = http_probe("/metrics", "metrics", period_seconds=10, failures=6)
    return container | common.resources(policy.spec.gateway.scheduler_resources, SCHEDULER_DEFAULTS)


def _container(name: str, command: str, arguments: dict[str, str]) -> Object:
    return {
        "name": name,
        "command": [command],
        "args": common.words(arguments),
        "env": common.pod_environment(),
        "securityContext": common.CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": SHARED_VOLUME, "mountPath": SHARED_PATH},
            {"name": TMP_VOLUME, "mountPath": common.TMP_PATH},
        ],
    }


def service(policy: PrfaaSPolicy) -> Object:
    """Return the gateway's Service."""
    spec = {
        "selector": common.gateway_selector(policy),
        "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
    }
    return child(policy, kinds.SERVICE, names.gateway_name(policy.metadata.name), spec=spec)


def service_account(policy: PrfaaSPolicy) -> Object:
    """Return the gateway's service account."""
    name = names.gateway_name(policy.metadata.name)
    return child(policy, kinds.SERVICE_ACCOUNT, name, automountServiceAccountToken=False)


def role(policy: PrfaaSPolicy) -> Object:
    """Return the rights of gateway pods; every rule names one object."""
    name = policy.metadata.name
    rules = [
        # RBAC allows list and watch of one name where the call selects that name, as `watch_object` does.
        rule("", "configmaps", ("get", "list", "watch"), names.routes_configmap(name)),
        rule(names.GROUP, "prfaaspolicies/status", ("get", "patch"), name),
        rule("coordination.k8s.io", "leases", ("get", "update", "patch"), names.scheduler_lease(name)),
    ]
    return child(policy, kinds.ROLE, names.gateway_name(name), rules=rules)


def role_binding(policy: PrfaaSPolicy) -> Object:
    """Return the RoleBinding of the gateway's service account."""
    name = names.gateway_name(policy.metadata.name)
    return child(policy, kinds.ROLE_BINDING, name, **common.binding(name, policy.metadata.namespace))


def lease(policy: PrfaaSPolicy) -> Object:
    """Return the Lease without a holder; its spec belongs to the scheduler that holds it."""
    return child(policy, LEASE_KIND, names.scheduler_lease(policy.metadata.name))


def config_map(policy: PrfaaSPolicy, table: routes.RoutingTable) -> Object:
    """Return the ConfigMap that holds the routing table."""
    document = base64.b64encode(routes.encode(table)).decode("ascii")
    name = names.routes_configmap(policy.metadata.name)
    return child(policy, kinds.CONFIG_MAP, name, binaryData={names.ROUTES_KEY: document})


def read_config_map(live: dict[str, Any] | None) -> routes.RoutingTable | None:
    """Return the table of a live ConfigMap; None if there is none, or none that this version can read."""
    document = ((live or {}).get("binaryData") or {}).get(names.ROUTES_KEY)
    if not document:
        return None
    try:
        return routes.decode(base64.b64decode(document))
    except (ProtocolError, ValueError):
        return None
