"""Caches the children of one cluster with their resourceVersions, so that an unchanged child needs no GET.

Most reconciles find the children unchanged. A watch of each kind wakes a changed child's owner. An unchanged version
saves a call a child; with a thousand pools these calls are nearly all the work.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from prfaas import names
from prfaas.kube.session import ObjectKind
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.informer import Informer
from prfaas_operator.clusters.kinds import CONFIG_MAP, DEPLOYMENT, DISRUPTION_BUDGET, Object

FOLLOWED: Final = (DEPLOYMENT, CONFIG_MAP, DISRUPTION_BUDGET)


class ChildFacts(NamedTuple):
    """One child. `pool_uid` is the uid of its pool, empty for a policy's child."""

    name: str
    uid: str
    pool_uid: str
    version: str


class ChildCache:
    """The children with a label in one cluster; `on_change` gets each one that appeared, changed or went.

    Children of a kind that may not be watched, as under the rights of an earlier chart in a member, are read with GET.
    """

    def __init__(self, cluster: ClusterClient, selector: str, on_change: Callable[[ChildFacts], None]):
        self.followed: Mapping[ObjectKind, Informer[ChildFacts]] = {
            kind: Informer(cluster, kind, selector, project_child, on_change) for kind in FOLLOWED
        }

    def version(self, kind: ObjectKind, name: str) -> str:
        """Return the version in which a child was last seen, empty for one that was not seen or cannot be watched."""
        informer = self.followed.get(kind)
        if informer is None or not informer.is_fresh or name not in informer.items:
            return ""
        return informer.items[name].version

    def follows_all(self) -> bool:
        return all(informer.is_fresh for informer in self.followed.values())

    def pool_uids(self, *kinds: ObjectKind) -> set[str] | None:
        """Return the uids of the pools with children of some kinds; None while one of these is not watched."""
        if not all(self.followed[kind].is_fresh for kind in kinds):
            return None
        return {child.pool_uid for kind in kinds for child in self.followed[kind].items.values()}


def project_child(body: Object) -> ChildFacts:
    metadata = body["metadata"]
    pool_uid = (metadata.get("labels") or {}).get(names.LABEL_POOL_UID, "")
    return ChildFacts(metadata["name"], metadata["uid"], pool_uid, metadata["resourceVersion"])
