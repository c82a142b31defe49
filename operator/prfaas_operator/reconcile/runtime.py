"""What every reconcile works with: the hub, the members, the pods seen, what was applied, and whom to wake."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prfaas_operator.clusters.api import DEPLOYMENT, POD, POLICY, Cluster
from prfaas_operator.clusters.informer import Informer
from prfaas_operator.plan.conditions import Verdict
from prfaas_operator.plan.drift import Applied
from prfaas_operator.plan.pods import PodFacts, project
from prfaas_operator.plan.routes import ClusterView
from prfaas_operator.reconcile.members import Connect, Members, owner_and_version
from prfaas_operator.reconcile.wakers import Ref, Wakers
from prfaas_operator.render.common import GROUP_MANAGED

RESYNC_SECONDS: Final = 30.0
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

    """

    def __init__(self, hub: Cluster, connect: Connect):
        self.hub = hub
        self.wakers = Wakers()
        self.members = Members(connect, self.wakers)
        self.pods = Informer(hub, POD, GROUP_MANAGED, project, self._pod_changed)
        self.deployments = Informer(hub, DEPLOYMENT, GROUP_MANAGED, owner_and_version, self._deployment_changed)
        self.applied: dict[Ref, dict[tuple[str, str], Applied]] = {}

    def hub_view(self) -> ClusterView:
        """Return what is known of the hub's pods."""
        return ClusterView(tuple(self.pods.items.values()) if self.pods.synced.is_set() else None, reachable=True)

    def _pod_changed(self, pod: PodFacts) -> None:
        self.wakers.wake_uid(pod.pool_uid)
        self.wakers.wake_kinds(POLICY)

    def _deployment_changed(self, seen: tuple[str, str]) -> None:
        if seen[0]:
            self.wakers.wake_uid(seen[0])
        else:
            self.wakers.wake_kinds(POLICY)
