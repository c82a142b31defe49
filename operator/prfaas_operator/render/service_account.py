"""Manifests of `prfaas cluster join`: the hub's ServiceAccount in a member cluster, and the hub's MemberCluster.

The ServiceAccount equals the one of the chart prfaas-member; where that chart is installed, `join` makes none.
"""

import base64
import json
from typing import Final, NamedTuple

from prfaas import names
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.kinds import Object, manifest
from prfaas_operator.plan.member import MADE_BY_JOIN
from prfaas_operator.render import certificates
from prfaas_operator.render.common import binding, rule

ACCOUNT: Final = "prfaas-operator"
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


def member_account(namespace: str) -> list[Object]:
    """Return namespace, account and rights in the member cluster, in the order of their dependencies."""
    metadata = {"name": ACCOUNT, "namespace": namespace, "labels": LABELS}
    rules = [
        rule("apps", "deployments", ("get", "list", "watch", "create", "patch", "delete")),
        rule("", "pods", ("list", "watch")),
        # Settings that a pool's instances read again while they run: their share of its egress cap.
        rule("", "configmaps", ("get", "list", "watch", "create", "patch", "delete")),
        # Its instances' certificate. RBAC can limit the creation to one name because of server-side apply.
        rule("", "secrets", ("get", "create", "patch", "delete"), certificates.SECRET),
        # Its own next token only.
        rule("", "serviceaccounts/token", ("create",), ACCOUNT),
        # Keeps all but a tenth of a pool up while nodes are drained.
        rule("policy", "poddisruptionbudgets", ("get", "list", "watch", "create", "patch")),
    ]
    return [
        manifest(kinds.NAMESPACE, {"name": namespace, "labels": LABELS}),
        manifest(kinds.SERVICE_ACCOUNT, metadata, automountServiceAccountToken=False),
        manifest(kinds.ROLE, metadata, rules=rules),
        manifest(kinds.ROLE_BINDING, metadata, **binding(ACCOUNT, namespace)),
    ]


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
    return member + names.KUBECONFIG_SECRET_SUFFIX


def secret(member: str, document: str) -> Object:
    """Return the Secret that holds a member's kubeconfig."""
    data = {"kubeconfig": base64.b64encode(document.encode()).decode()}
    labels = {**LABELS, names.LABEL_SECRET: names.KUBECONFIG_SECRET}
    return manifest(kinds.SECRET, {"name": secret_name(member), "labels": labels}, type="Opaque", data=data)


def member_cluster(registration: Registration) -> Object:
    """Return the MemberCluster that a registration describes."""
    spec = {
        "kubeconfigSecretRef": {"name": secret_name(registration.name), "key": "kubeconfig"},
        "namespace": registration.namespace,
        "addressing": registration.addressing,
        "datacenter": registration.datacenter,
        "region": registration.region,
        "revoked": False,  # who joins again is admitted again, with new certificates
        "link": {"capacityMbps": registration.link_mbps, "roundTripMillis": registration.round_trip_millis},
    }
    return manifest(kinds.MEMBER_CLUSTER, {"name": registration.name, "labels": LABELS}, spec=spec)
