"""ServiceAccount, Role, RoleBinding and Lease of a policy's gateway: one ConfigMap, one status, one Lease, no more.

The Lease is made here, because RBAC cannot limit `create` to a name.
"""

from prfaas import names
from prfaas.api import PrfaaSPolicy
from prfaas_operator.render.common import Manifest, child_metadata

RBAC_GROUP = "rbac.authorization.k8s.io"


def lease_name(policy: str) -> str:
    """Return the name of the Lease that a policy's schedulers contend for."""
    return f"{policy}-scheduler"


def service_account(policy: PrfaaSPolicy) -> Manifest:
    """Return the account that gateway pods run as."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": child_metadata(policy, names.gateway_name(policy.metadata.name)),
        "automountServiceAccountToken": False,
    }


def role(policy: PrfaaSPolicy) -> Manifest:
    """Return what gateway pods may do; every rule names the one object it is for."""
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
    """Return the binding of the account to the Role."""
    name = names.gateway_name(policy.metadata.name)
    return {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": child_metadata(policy, name),
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": policy.metadata.namespace}],
    }


def lease(policy: PrfaaSPolicy) -> Manifest:
    """Return the Lease without a holder; its spec belongs to whoever takes it."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": child_metadata(policy, lease_name(policy.metadata.name)),
    }
