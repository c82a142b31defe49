"""The names that more than one process has to agree on: API group, labels, ports, file and field-manager names.

A name that only one package uses belongs to that package.
"""

from typing import Final

GROUP: Final = "prfaas.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

# Labels of everything the operator creates, in either cluster.
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "prfaas-operator"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"  # worker | gateway
LABEL_POOL: Final = f"{GROUP}/pool"
LABEL_POOL_UID: Final = f"{GROUP}/pool-uid"
LABEL_POLICY: Final = f"{GROUP}/policy"
LABEL_POLICY_UID: Final = f"{GROUP}/policy-uid"
LABEL_CLUSTER: Final = f"{GROUP}/cluster"  # the MemberCluster's name, or HUB
LABEL_ROLE: Final = f"{GROUP}/role"  # prefill | decode
LABEL_ENGINE: Final = f"{GROUP}/engine"  # an EngineName: the charts' NetworkPolicies select by it
HUB: Final = "hub"

ANNOTATION_SCHEME: Final = f"{GROUP}/scheme"
"""`https` on a pod with its cluster's certificate: its API port then uses TLS."""
ANNOTATION_MODEL: Final = f"{GROUP}/model"
"""The model that a pod serves, which its pool may have changed since."""

FINALIZER: Final = f"{GROUP}/cleanup"
FIELD_MANAGER_OPERATOR: Final = "prfaas-operator"
FIELD_MANAGER_SCHEDULER: Final = "prfaas-scheduler"

# The worker has two ports for other clusters, and no more: a member's firewall opens exactly these.
WORKER_API_PORT: Final = 8000
WORKER_DATA_PORT: Final = 8001
WORKER_ADMIN_PORT: Final = 8002
"""Probes and metrics of our worker, for kubelet and Prometheus of its own cluster."""
# Foreign engines need more ports; these are their own defaults.
BOOTSTRAP_PORT: Final = 8998
"""SGLang, and vLLM with Mooncake: a prefill instance tells there how to reach its cache."""
SIDE_CHANNEL_PORT: Final = 5600
"""vLLM with NIXL: handshakes."""
KV_EVENTS_PORT: Final = 5557
"""Cache events over ZMQ, of an engine's first data-parallel rank; each further rank uses the next port."""
GATEWAY_PORT: Final = 8080
GATEWAY_ADMIN_PORT: Final = 8082
"""Probes, metrics and the live page: no Service has it."""
SCHEDULER_METRICS_PORT: Final = 9091
OPERATOR_METRICS_PORT: Final = 9090
OPERATOR_HEALTH_PORT: Final = 8081

# Secrets that no pool may read.
AUTHORITY_SECRET: Final = "prfaas-ca"  # noqa: S105  # a name
TLS_SECRET: Final = "prfaas-tls"  # noqa: S105  # a name
"""Every cluster's instances mount it."""
GATEWAY_TLS_SECRET: Final = "prfaas-gateway-tls"  # noqa: S105  # a name
"""The hub's gateways mount it: they may do more than instances."""
KUBECONFIG_SECRET_SUFFIX: Final = "-kubeconfig"  # noqa: S105  # a name
API_KEYS_SECRET_SUFFIX: Final = "-api-keys"  # noqa: S105  # a name
LABEL_SECRET: Final = f"{GROUP}/secret"
"""Says what a Secret is for. The operator uses none whose owner did not give it to prfaas by this label."""
KUBECONFIG_SECRET: Final = "kubeconfig"  # noqa: S105  # a value of that label
API_KEYS_SECRET: Final = "api-keys"  # noqa: S105  # a value of that label

# The files of a cluster's certificate, in a directory or a Secret.
TLS_CERT: Final = "tls.crt"
TLS_KEY: Final = "tls.key"
TLS_TRUSTED: Final = "ca.crt"
AUTHORITY_KEY: Final = "ca.key"
TLS_REVOKED: Final = "revoked.json"
"""Not there while no cluster is revoked."""
TLS_SETTLE: Final = "settle-seconds"
"""Not there where the operator has not written the others."""

ROUTES_KEY: Final = "routes.json.gz"  # key of the ConfigMap's binaryData

ORIGIN: Final = r"^(\*|[a-z][-+.a-z0-9]*://[-._:\[\]a-z0-9]+)$"
"""Pattern of an origin whose pages may call a gateway from a browser; * is every one."""


def kv_log_port(ranks: int) -> int:
    """Return the port of the first rank's log of cache events; each further rank uses the next port.

    Engines add the rank to both ports, so the logs of all ranks come after the event ports of all ranks.
    """
    return KV_EVENTS_PORT + ranks


def scheduler_lease(policy: str) -> str:
    """Return the name of the Lease of a policy's schedulers."""
    return f"{policy}-scheduler"


def routes_configmap(policy: str) -> str:
    """Return the name of the ConfigMap that carries a policy's routing table."""
    return f"{policy}-routes"


def settings_configmap(pool: str) -> str:
    """Return the name of the ConfigMap with what a pool's instances read again while they run."""
    return f"{pool}-settings"


def gateway_name(policy: str) -> str:
    """Return the name of a policy's gateway Deployment, Service, ServiceAccount and Role."""
    return f"{policy}-gateway"
