"""What the operator asks of an API server, as a small Protocol over plain dicts, and the kinds it speaks of.

Kinds are known here instead of being discovered: a broken aggregated API in a member cluster then stops nothing, no
discovery cache lies on disk, and one call less stands between a restart and the first reconcile.
"""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol

from prfaas import api
from prfaas.names import API_VERSION

Object = dict[str, Any]


class Kind(NamedTuple):
    """One kind of object and where it lives."""

    api_version: str
    name: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the URL path of the collection, of one object, or of its subresource."""
        root = "/apis" if "/" in self.api_version else "/api"
        scope = f"/namespaces/{namespace}" if self.namespaced else ""
        return "/".join(filter(None, (f"{root}/{self.api_version}{scope}/{self.plural}", name, subresource)))


MEMBER_CLUSTER: Final = Kind(API_VERSION, api.MemberCluster.kind_name, api.MemberCluster.plural)
PREFILL_POOL: Final = Kind(API_VERSION, api.PrefillPool.kind_name, api.PrefillPool.plural)
DECODE_POOL: Final = Kind(API_VERSION, api.DecodePool.kind_name, api.DecodePool.plural)
POLICY: Final = Kind(API_VERSION, api.PrfaaSPolicy.kind_name, api.PrfaaSPolicy.plural)

NAMESPACE: Final = Kind("v1", "Namespace", "namespaces", namespaced=False)
POD: Final = Kind("v1", "Pod", "pods")
SECRET: Final = Kind("v1", "Secret", "secrets")
CONFIG_MAP: Final = Kind("v1", "ConfigMap", "configmaps")
SERVICE: Final = Kind("v1", "Service", "services")
SERVICE_ACCOUNT: Final = Kind("v1", "ServiceAccount", "serviceaccounts")
EVENT: Final = Kind("v1", "Event", "events")
DEPLOYMENT: Final = Kind("apps/v1", "Deployment", "deployments")
ROLE: Final = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING: Final = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
LEASE: Final = Kind("coordination.k8s.io/v1", "Lease", "leases")
CUSTOM_RESOURCE: Final = Kind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
DISRUPTION_BUDGET: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY: Final = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
CERTIFICATE: Final = Kind("cert-manager.io/v1", "Certificate", "certificates")

BY_NAME: Final = {
    kind.name: kind
    for kind in (
        MEMBER_CLUSTER,
        PREFILL_POOL,
        DECODE_POOL,
        POLICY,
        NAMESPACE,
        POD,
        SECRET,
        CONFIG_MAP,
        SERVICE,
        SERVICE_ACCOUNT,
        EVENT,
        DEPLOYMENT,
        ROLE,
        ROLE_BINDING,
        LEASE,
        DISRUPTION_BUDGET,
        NETWORK_POLICY,
        CERTIFICATE,
    )
}


class WatchEvent(NamedTuple):
    """One line of a watch: ADDED, MODIFIED or DELETED, and the object as it was then."""

    type: str
    object: Object


class Page(NamedTuple):
    """One page of a list; `next_page` is empty on the last one."""

    items: list[Object]
    resource_version: str
    next_page: str


class Cluster(Protocol):
    """One namespace of one API server.

    Every call ends within a hard timeout. All raise from `prfaas_operator.errors`: ClusterUnreachableError,
    ServerFailedError, UnauthorizedError, ForbiddenError, InvalidObjectError, ConflictError, NamespaceNotFoundError.
    """

    namespace: str

    async def version(self) -> str:
        """Return the server's version, for example v1.34.4; the cheapest proof that it answers."""
        ...

    def now(self) -> datetime:
        """Return what the server's clock shows, ours before it has answered; it dates all that is written there."""
        ...

    async def get(self, kind: Kind, name: str) -> Object | None:
        """Return one object, None when there is none."""
        ...

    async def page(self, kind: Kind, *, selector: str = "", after: str = "") -> Page:
        """Return one page of objects by label selector; `after` is the previous page's `next_page`."""
        ...

    async def try_list(self, kind: Kind, *, selector: str = "") -> None:
        """Ask for one object of a kind, for the rights alone."""
        ...

    async def list_all(self, kind: Kind, *, selector: str = "") -> list[Object]:
        """Return all objects by label selector."""
        ...

    async def apply(self, body: Object, *, subresource: str = "", dry_run: bool = False) -> Object:
        """Apply a manifest under the connection's field manager, taking over contested fields; return it live.

        With `dry_run` the server does all but store it: it fills in, checks, asks its webhooks and its quotas.
        """
        ...

    async def create(self, kind: Kind, body: Object) -> Object:
        """Create an object; ConflictError when it exists."""
        ...

    async def merge(self, kind: Kind, name: str, patch: Object) -> Object:
        """Apply a JSON merge patch; ConflictError when it names a resourceVersion that is not the present one."""
        ...

    async def create_token(self, account: str, seconds: int) -> str:
        """Return a new token of a ServiceAccount for `seconds`, or for as long as the server allows."""
        ...

    def use_token(self, token: str) -> None:
        """Send another bearer token from the next call on."""
        ...

    async def delete(self, kind: Kind, name: str, *, uid: str = "") -> None:
        """Delete one object after its dependants (foreground); nothing happens when it is gone or has another uid."""
        ...

    def watch(self, kind: Kind, *, selector: str, since: str) -> AsyncIterator[WatchEvent]:
        """Yield changes after resource version `since` for about a minute; ExpiredError when that is too old."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
