"""What every reconcile works with: the hub, the members, the pods seen, what was applied, and whom to wake."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prfaas.telemetry.tracing import OFF
from prfaas_operator.clusters.api import DECODE_POOL, MEMBER_CLUSTER, POD, POLICY, PREFILL_POOL, Cluster, Kind, Object
from prfaas_operator.clusters.informer import Informer
from prfaas_operator.plan.certificates_settings import DISABLED, Settings
from prfaas_operator.plan.conditions import Verdict
from prfaas_operator.plan.drift import Applied
from prfaas_operator.plan.longloop import Look, Summary
from prfaas_operator.plan.member import project as project_cluster
from prfaas_operator.plan.pods import PodFacts, project
from prfaas_operator.plan.routes import ClusterView
from prfaas_operator.plan.sharing import Settling, Sharer, project_sharer
from prfaas_operator.plan.tokens import DEFAULT_TOKEN_DAYS
from prfaas_operator.reconcile.certificates import Certificates
from prfaas_operator.reconcile.heals import Heals
from prfaas_operator.reconcile.members import Connect, Members
from prfaas_operator.reconcile.sight import ChildFacts, Sight
from prfaas_operator.reconcile.tokens import Renewals
from prfaas_operator.reconcile.wakers import Ref, Wakers
from prfaas_operator.render.common import GROUP_MANAGED

LOOKS_AT_ONCE: Final = 16
RESYNC_SECONDS: Final = 30.0
SEEN_RESYNC_SECONDS: Final = 300.0
"""For an object whose children are all followed: whatever becomes of them tells of itself."""
RETRY_SECONDS: Final = 4.0
"""An object that is not ready looks again this soon, so that a cause nobody watches (a Secret) heals within 5 s."""


@dataclass(frozen=True)
class Report:
    """What a reconcile found: conditions by type, other status fields, and when to look again.

    `gone` means that nothing of the object is left and that it may go itself; then no status is written.
    """

    conditions: Mapping[str, Verdict] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    again_seconds: float | None = None
    gone: bool = False


class Runtime:
    """The operator's working state; all of it can be lost and is read anew.

    Args:
        hub: the hub's namespace.
        connect: opens member clusters.
        token_days: how long tokens for member clusters are asked for.
        certificates: where the clusters' certificates come from.

    """

    def __init__(
        self, hub: Cluster, connect: Connect, token_days: int = DEFAULT_TOKEN_DAYS, certificates: Settings = DISABLED
    ):
        self.hub = hub
        self.certificates = Certificates(self, certificates)
        self.renewals = Renewals(token_days)
        self.tracing = OFF
        self.wakers = Wakers()
        self.members = Members(connect, self.wakers)
        self.pods = Informer(hub, POD, GROUP_MANAGED, project, self._pod_changed)
        self.sight = Sight(hub, GROUP_MANAGED, self._child_changed)
        self.sharers = Informer(hub, PREFILL_POOL, "", project_sharer, self._sharer_changed)
        self.clusters = Informer(hub, MEMBER_CLUSTER, "", project_cluster, self._cluster_changed)
        """The hub's MemberClusters without their statuses."""
        self.guarded: set[str] = set()
        """The Secrets that were last seen with our finalizer, by name."""
        self.settling: dict[str, Settling] = {}
        self.applied: dict[Ref, dict[tuple[str, str], Applied]] = {}
        self.seen: dict[Ref, Object] = {}
        """Each object that is being kept, as its reconcile last saw it."""
        self.misfits: dict[Ref, str] = {}
        """What was said of objects whose status the hub's CRD does not take whole."""
        self.heals = Heals()
        self.long_looks: dict[str, Look] = {}
        """What the long loop last said of each policy, by uid."""
        self.summaries: dict[str, Summary] = {}
        """What each policy's scheduler last said, by uid."""
        self._gateway_schemes: frozenset[str] = frozenset()
        self._places: dict[tuple[Kind, str], asyncio.Semaphore] = {}

    def place(self, ref: Ref) -> asyncio.Semaphore:
        """Return what a look at an object has to hold: a place among the looks into one cluster.

        After a start all objects want to be looked at. Those that wait have not begun; those that look have the server
        for themselves. A cluster that does not answer holds up its own pools, and no probe.
        """
        where = ref.name if ref.kind == MEMBER_CLUSTER else ""
        if ref.kind == PREFILL_POOL and ref.name in self.sharers.items:
            where = self.sharers.items[ref.name].cluster
        return self._places.setdefault((ref.kind, where), asyncio.Semaphore(LOOKS_AT_ONCE))

    def kubeconfigs(self) -> dict[str, str]:
        """Return the Secret that each MemberCluster is reached with."""
        references = {name: body["spec"].get("kubeconfigSecretRef") or {} for name, body in self.clusters.items.items()}
        return {name: reference.get("name", "") for name, reference in references.items()}

    def clusters_in_use(self) -> set[str]:
        """Return the MemberClusters that PrefillPools name."""
        return {pool.cluster for pool in self.sharers.items.values()}

    @property
    def informers(self) -> tuple[Informer[Any], ...]:
        """All that follow the hub."""
        return self.pods, self.sharers, self.clusters, *self.sight.followed.values()

    def sight_of(self, cluster: Cluster) -> Sight | None:
        """Return what is seen of the children in a cluster."""
        return self.sight if cluster is self.hub else self.members.sight_of(cluster)

    def hub_view(self) -> ClusterView:
        """Return what is known of the hub's pods."""
        return ClusterView(tuple(self.pods.items.values()) if self.pods.synced.is_set() else None, reachable=True)

    def gateway_pods(self) -> list[PodFacts]:
        """Return the gateways' pods that take new requests."""
        return [pod for pod in self.pods.items.values() if not pod.pool_uid and not pod.terminating]

    def any_worker_in_tls(self, members: Iterable[str]) -> bool:
        """Tell whether any instance is inside TLS, in the hub or one of the members."""
        seen = [self.hub_view(), *map(self.members.view, members)]
        return any(pod.pool_uid and pod.scheme == "https" for view in seen for pod in view.pods or ())

    def _pod_changed(self, pod: PodFacts) -> None:
        self.wakers.wake_uid(pod.pool_uid)
        if not pod.pool_uid:
            # Instances go inside TLS when all gateways are.
            schemes = frozenset(pod.scheme for pod in self.gateway_pods())
            if schemes != self._gateway_schemes:
                self._gateway_schemes = schemes
                self.wakers.wake_kinds(PREFILL_POOL, DECODE_POOL)
        self.wakers.wake_kinds(POLICY)

    def _sharer_changed(self, pool: Sharer) -> None:
        self.wakers.wake(Ref(DECODE_POOL, pool.share_with))

    def _cluster_changed(self, _: Mapping[str, Any]) -> None:
        self.wakers.wake_kinds(PREFILL_POOL, DECODE_POOL, POLICY)

    def _child_changed(self, child: ChildFacts) -> None:
        if child.pool_uid:
            self.wakers.wake_uid(child.pool_uid)
        else:
            self.wakers.wake_kinds(POLICY)
