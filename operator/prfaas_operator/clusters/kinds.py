"""The kinds of objects that the operator uses.

They are constants instead of discovered, for three reasons. A broken aggregated API in a member cluster stops nothing,
and no discovery cache lies on disk. A restart needs one call less before the first reconcile.
"""

from typing import Any, Final

from prfaas import api
from prfaas.kube.lease import LEASE_KIND
from prfaas.kube.session import CONFIG_MAP, Object, ObjectKind
from prfaas.names import API_VERSION


def manifest(kind: ObjectKind, metadata: Object, **fields: Any) -> Object:
    """Return an object of a kind, or the part of one that is to be applied."""
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **fields}


MEMBER_CLUSTER: Final = ObjectKind(API_VERSION, api.MemberCluster.kind_name, api.MemberCluster.plural)
PREFILL_POOL: Final = ObjectKind(API_VERSION, api.PrefillPool.kind_name, api.PrefillPool.plural)
DECODE_POOL: Final = ObjectKind(API_VERSION, api.DecodePool.kind_name, api.DecodePool.plural)
POLICY: Final = ObjectKind(API_VERSION, api.PrfaaSPolicy.kind_name, api.PrfaaSPolicy.plural)

NAMESPACE: Final = ObjectKind("v1", "Namespace", "namespaces", namespaced=False)
NODE: Final = ObjectKind("v1", "Node", "nodes", namespaced=False)
JOB: Final = ObjectKind("batch/v1", "Job", "jobs")
POD: Final = ObjectKind("v1", "Pod", "pods")
SECRET: Final = ObjectKind("v1", "Secret", "secrets")
SERVICE: Final = ObjectKind("v1", "Service", "services")
SERVICE_ACCOUNT: Final = ObjectKind("v1", "ServiceAccount", "serviceaccounts")
EVENT: Final = ObjectKind("v1", "Event", "events")
DEPLOYMENT: Final = ObjectKind("apps/v1", "Deployment", "deployments")
ROLE: Final = ObjectKind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING: Final = ObjectKind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
CLUSTER_ROLE: Final = ObjectKind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", namespaced=False)
ADMISSION_POLICY: Final = ObjectKind(
    "admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies", namespaced=False
)
ADMISSION_BINDING: Final = ObjectKind(
    ADMISSION_POLICY.api_version,
    "ValidatingAdmissionPolicyBinding",
    "validatingadmissionpolicybindings",
    namespaced=False,
)
RESOURCE_QUOTA: Final = ObjectKind("v1", "ResourceQuota", "resourcequotas")
CUSTOM_RESOURCE: Final = ObjectKind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
DISRUPTION_BUDGET: Final = ObjectKind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY: Final = ObjectKind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
CERTIFICATE: Final = ObjectKind("cert-manager.io/v1", "Certificate", "certificates")
ACCESS_REVIEW: Final = ObjectKind(
    "authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)

ROOT_CA: Final = "kube-root-ca.crt"
"""The ConfigMap with the API server's authority, which Kubernetes puts into every namespace."""

BY_NAME: Final = {
    kind.name: kind for kind in (CONFIG_MAP, LEASE_KIND, *vars().values()) if isinstance(kind, ObjectKind)
}
