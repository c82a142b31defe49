"""The operator's store of the hub: our own objects from kopf's one watch, pods and children from informers.

kopf watches each of our kinds once. Its events fill this store, and both reconciles and lookups read it. The operator
stores the answers to its own writes, so that no reconcile uses a state older than its own last write. Of two states the
one with the newer resource version counts, in whichever order they arrive.
"""

from collections.abc import Iterable
from typing import Any, Final, TypeVar

from prfaas.api.base import Resource
from prfaas.api.membercluster import KUBECONFIG_KEY
from prfaas.kube.session import ObjectKind
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.informer import Informer
from prfaas_operator.clusters.kinds import BY_NAME, DECODE_POOL, MEMBER_CLUSTER, POD, POLICY, PREFILL_POOL, Object
from prfaas_operator.controller.child_cache import ChildCache, ChildFacts
from prfaas_operator.controller.queue import ReconcileQueue, Ref
from prfaas_operator.plan.conditions import READY
from prfaas_operator.plan.pod_facts import NOT_ENDED, PodFacts, project_pod
from prfaas_operator.plan.policy import ObservedCluster
from prfaas_operator.plan.reading import read
from prfaas_operator.plan.roles import Sharer, project_sharer
from prfaas_operator.render.common import GROUP_MANAGED

R = TypeVar("R", bound=Resource)
DEPENDANTS: Final[dict[ObjectKind, tuple[ObjectKind, ...]]] = {
    MEMBER_CLUSTER: (PREFILL_POOL, DECODE_POOL, POLICY),
    PREFILL_POOL: (MEMBER_CLUSTER, POLICY),
    DECODE_POOL: (POLICY,),
    POLICY: (),
}


class HubView:
    """The hub's namespace. It wakes the objects that a change concerns."""

    def __init__(self, client: ClusterClient, queue: ReconcileQueue):
        self.client = client
        self.queue = queue
        self.pods = Informer(client, POD, GROUP_MANAGED, project_pod, self._pod_changed, fields=NOT_ENDED)
        self.children = ChildCache(client, GROUP_MANAGED, self._child_changed)
        self.sharers: dict[str, Sharer] = {}
        """The hub's PrefillPools, reduced to the part that others depend on, by name."""
        self._objects: dict[Ref, Object] = {}
        self._gateway_schemes: frozenset[str] = frozenset()

    @property
    def informers(self) -> tuple[Informer[Any], ...]:
        """The watches of the hub beside kopf's."""
        return self.pods, *self.children.followed.values()

    def put(self, kind: ObjectKind, body: Object) -> None:
        """Store the state of an object, unless a newer one is known; wake it and all that depends on it."""
        ref = Ref(kind, body["metadata"]["name"])
        known = self._objects.get(ref)
        if known is None or _version(known) < _version(body):
            self._store(ref, body)

    def _store(self, ref: Ref, body: Object) -> None:
        known = self._objects.get(ref)
        self._objects[ref] = body
        if ref.kind == PREFILL_POOL:
            self.sharers[ref.name] = project_sharer(body)
        self._wake(ref, changed=known is None or wake_key(known) != wake_key(body))

    def discard(self, kind: ObjectKind, name: str, uid: str) -> None:
        """Forget a deleted object; keep a new one of the same name."""
        ref = Ref(kind, name)
        known = self._objects.get(ref)
        if known is not None and known["metadata"]["uid"] == uid:
            # Before the sharer goes: its DecodePool is looked up by it.
            self._wake(ref, changed=True)
            del self._objects[ref]
            if kind == PREFILL_POOL:
                del self.sharers[name]

    def learn(self, written: Object) -> None:
        """Store an object of ours that was just written, as the API server answered, unless it is gone meanwhile."""
        kind = BY_NAME[written["kind"]]
        if Ref(kind, written["metadata"]["name"]) in self._objects:
            self.put(kind, written)

    async def refresh(self, ref: Ref) -> None:
        """Read an object again. Unless it changed meanwhile, this read counts, whatever its version is.

        A server that was restored from a backup begins again with older versions.
        """
        before = self._objects.get(ref)
        live = await self.client.get(ref.kind, ref.name)
        if self._objects.get(ref) is not before:
            if live is not None:
                self.put(ref.kind, live)
        elif live is None:
            if before is not None:
                self.discard(ref.kind, ref.name, before["metadata"]["uid"])
        elif before is None or _identity(before) != _identity(live):
            self._store(ref, live)

    def get(self, ref: Ref) -> Object | None:
        """Return an object of ours, None if there is none. Callers must not change it."""
        return self._objects.get(ref)

    def all(self, kind: ObjectKind) -> list[Object]:
        return [body for ref, body in self._objects.items() if ref.kind == kind]

    def named(self, kind: ObjectKind, model: type[R], names: Iterable[str]) -> dict[str, R]:
        """Return some objects of a kind by their names, as read; missing ones are left out.

        Raises InvalidObjectError: one of them cannot be read; the caller depends on all of them.
        """
        found = {name: self._objects.get(Ref(kind, name)) for name in sorted(set(names))}
        return {name: read(model, body) for name, body in found.items() if body is not None}

    def kubeconfigs(self) -> dict[str, str]:
        """Return the kubeconfig Secret of each MemberCluster."""
        return {
            member["metadata"]["name"]: ((member.get("spec") or {}).get("kubeconfigSecretRef") or {}).get("name", "")
            for member in self.all(MEMBER_CLUSTER)
        }

    def kubeconfig_keys(self) -> set[tuple[str, str]]:
        """Return the Secrets that MemberClusters name, each with the key of its kubeconfig."""
        named = [(one.get("spec") or {}).get("kubeconfigSecretRef") or {} for one in self.all(MEMBER_CLUSTER)]
        return {(reference.get("name", ""), reference.get("key") or KUBECONFIG_KEY) for reference in named}

    def datacenters(self) -> frozenset[str]:
        """Return the datacenters of all MemberClusters, also of revoked ones."""
        named = ((one.get("spec") or {}).get("datacenter", "") for one in self.all(MEMBER_CLUSTER))
        return frozenset(filter(None, named))

    def clusters_in_use(self) -> set[str]:
        return {pool.cluster for pool in self.sharers.values()}

    def observed(self) -> ObservedCluster:
        return ObservedCluster(tuple(self.pods.items.values()) if self.pods.synced.is_set() else None, reachable=True)

    def gateway_pods(self) -> list[PodFacts]:
        """Return the gateways' pods that live: one that ends, or is somebody else's, says nothing about them."""
        return [pod for pod in self.pods.items.values() if pod.policy_uid and not pod.terminating]

    def _wake(self, ref: Ref, *, changed: bool) -> None:
        self.queue.wake(ref)
        if not changed:
            return
        self.queue.wake_kinds(*DEPENDANTS[ref.kind])
        if ref.kind == PREFILL_POOL:
            self.queue.wake(Ref(DECODE_POOL, self.sharers[ref.name].share_with))

    def _pod_changed(self, pod: PodFacts) -> None:
        self.queue.wake_uid(pod.pool_uid)
        if not pod.pool_uid:
            # Instances use TLS once all gateways do.
            schemes = frozenset(pod.scheme for pod in self.gateway_pods())
            if schemes != self._gateway_schemes:
                self._gateway_schemes = schemes
                self.queue.wake_kinds(PREFILL_POOL, DECODE_POOL)
        self.queue.wake_kinds(POLICY)

    def _child_changed(self, child: ChildFacts) -> None:
        if child.pool_uid:
            self.queue.wake_uid(child.pool_uid)
        else:
            self.queue.wake_kinds(POLICY)


def wake_key(body: Object) -> tuple[Any, ...]:
    """Return the part of an object that others depend on; a status with other counts only wakes no other object."""
    status, metadata = body.get("status") or {}, body["metadata"]
    ready = [
        (condition.get("status"), condition.get("reason"))
        for condition in status.get("conditions") or ()
        if condition.get("type") == READY
    ]
    of_spec = (metadata.get("uid"), metadata.get("generation"), metadata.get("deletionTimestamp"))
    return (*of_spec, status.get("admittedTime"), *ready)


def _identity(body: Object) -> tuple[str, int]:
    return body["metadata"]["uid"], _version(body)


def _version(body: Object) -> int:
    return int(body["metadata"].get("resourceVersion") or 0)
