"""Manifests of `prfaas cluster join`: the hub's ServiceAccount in a member cluster, and the hub's MemberCluster.

The ServiceAccount equals the one of the chart prfaas-member; where that chart is installed, `join` makes none.
"""

import base64
import json
from typing import Final, NamedTuple

from prfaas import names
from prfaas_operator.render import certificates
from prfaas_operator.render.common import Manifest

ACCOUNT: Final = "prfaas-operator"
OLD_TOKEN_SECRET: Final = "prfaas-operator-token"  # noqa: S105  # a name
"""Secret of a token without an expiry, which an earlier version made; `join` deletes it."""
MADE_BY_JOIN: Final = "prfaas-cli"
RBAC_GROUP: Final = "rbac.authorization.k8s.io"
LABELS: Final = {"app.kubernetes.io/part-of": "prfaas", names.LABEL_MANAGED_BY: MADE_BY_JOIN}


class Registration(NamedTuple):
    """The facts about a member cluster that a person gives to `join`."""

    name: str
    namespace: str
    link_mbps: int
    round_trip_millis: int
    addressing: str
    datacenter: str
    region: str


def member_account(namespace: str) -> list[Manifest]:
    """Return namespace, account and rights in the member cluster, in the order of their dependencies."""
    metadata = {"name": ACCOUNT, "namespace": namespace, "labels": LABELS}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": LABELS}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata, "automountServiceAccountToken": False},
        {
            "apiVersion": f"{RBAC_GROUP}/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": [
                _rule("apps", "deployments", "get", "list", "watch", "create", "patch", "delete"),
                _rule("", "pods", "list", "watch"),
                # Settings that a pool's instances read again while they run: their share of its egress cap.
                _rule("", "configmaps", "get", "list", "watch", "create", "patch", "delete"),
                # Its instances' certificate. RBAC can limit the creation to one name because of server-side apply.
                _rule("", "secrets", "get", "create", "patch", "delete") | {"resourceNames": [certificates.SECRET]},
                # Its own next token only.
                _rule("", "serviceaccounts/token", "create") | {"resourceNames": [ACCOUNT]},
                # Keeps all but a tenth of a pool up while nodes are drained.
                _rule("policy", "poddisruptionbudgets", "get", "list", "watch", "create", "patch"),
            ],
        },
        {
            "apiVersion": f"{RBAC_GROUP}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        },
    ]


def _rule(group: str, resource: str, *verbs: str) -> Manifest:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


def kubeconfig(name: str, server: str, ca_pem: str, token: str) -> str:
    """Return a kubeconfig in the only form with a token that the operator accepts. JSON is YAML."""
    authority = base64.b64encode(ca_pem.encode()).decode()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority-data": authority}}],
        "users": [{"name": ACCOUNT, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": ACCOUNT}}],
        "current-context": name,
    }
    return json.dumps(document, indent=1)


def secret_name(member: str) -> str:
    """Return the name of the Secret with a member's kubeconfig."""
    return member + names.KUBECONFIG_SECRET_SUFFIX


def secret(member: str, document: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret_name(member), "labels": LABELS},
        "type": "Opaque",
        "data": {"kubeconfig": base64.b64encode(document.encode()).decode()},
    }


def member_cluster(registration: Registration) -> Manifest:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "MemberCluster",
        "metadata": {"name": registration.name, "labels": LABELS},
        "spec": {
            "kubeconfigSecretRef": {"name": secret_name(registration.name), "key": "kubeconfig"},
            "namespace": registration.namespace,
            "addressing": registration.addressing,
            "datacenter": registration.datacenter,
            "region": registration.region,
            "link": {"capacityMbps": registration.link_mbps, "roundTripMillis": registration.round_trip_millis},
        },
    }
