"""Applies and removes the children of an object in any cluster: a set changes whole or not at all.

Three things can keep a manifest from the live object. First, another owner's object has the name: it stays as it is
unless an annotation allows the takeover. Second, the API server refuses one of several changes: then none is written,
so that the present set stays whole. Third, somebody edits a child: the edit is reverted and an Event names the editor.
Two controllers that keep reverting each other are slowed down.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from prfaas import names
from prfaas.kube.session import ObjectKind
from prfaas_operator import metrics
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import BY_NAME, Object
from prfaas_operator.controller import events
from prfaas_operator.controller.child_cache import ChildCache
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import Ref
from prfaas_operator.errors import ChildConflictError
from prfaas_operator.plan import drift, ownership
from prfaas_operator.plan.drift import AppliedManifest, needs_apply, view

log = logging.getLogger(__name__)

IDENTITY_LABELS: Final = (names.LABEL_MANAGED_BY, names.LABEL_POOL_UID, names.LABEL_POLICY_UID)
EDITS_AT_ONCE: Final = 5
EDIT_WINDOW_SECONDS: Final = 60.0


class EditLimiter:
    """Rate-limits reverting external edits: at once, unless the edits go on.

    Two controllers that revert each other would write as fast as their watches deliver, without end. A person's edit is
    reverted within a second a few times in a row; after that the child waits until a minute has passed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._at: dict[str, deque[float]] = {}
        self._held_back_at = float("-inf")

    def may_revert(self, uid: str) -> bool:
        times, now = self._at.get(uid), self._clock()
        may = times is None or len(times) < EDITS_AT_ONCE or now - times[0] > EDIT_WINDOW_SECONDS
        if not may:
            self._held_back_at = now
        return may

    def is_holding_back(self) -> bool:
        """Return true while any child waits for its revert, which no watch will announce."""
        return self._clock() - self._held_back_at <= 2 * EDIT_WINDOW_SECONDS

    def reverted(self, uid: str) -> None:
        """Note a revert, and forget children without an edit since."""
        now = self._clock()
        for other in [one for one, times in self._at.items() if now - times[-1] > EDIT_WINDOW_SECONDS]:
            del self._at[other]
        self._at.setdefault(uid, deque(maxlen=EDITS_AT_ONCE)).append(now)


class _Child(NamedTuple):
    """One child: its manifest and its live state. `live` is None before its creation, `last` before our first apply.

    `is_as_left`: it has the version that the last reconcile left, so only part of it is at hand.
    """

    manifest: Object
    live: Object | None
    last: AppliedManifest | None
    is_as_left: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.manifest["kind"], self.manifest["metadata"]["name"]

    @property
    def changes_existing(self) -> bool:
        """True if the apply needs a dry run: it changes an existing object. A new one may depend on another new one."""
        return self.live is not None and view(self.live, self.manifest) != self.manifest

    @property
    def is_drift(self) -> bool:
        """True if we had applied this very manifest before."""
        return self.last is not None and self.last.is_of(self.manifest)

    @property
    def edit(self) -> drift.Edit | None:
        """The editor and the changes since our last apply."""
        return drift.edit(self.live, self.last) if self.live is not None and self.last and self.is_drift else None


class Children:
    """Applies children, and remembers the state in which it left them; all of that can be lost.

    `cache_of` returns the child cache of a cluster, None right after the cluster was removed.
    """

    def __init__(self, hub: HubView, cache_of: Callable[[ClusterClient], ChildCache | None]):
        self.edits = EditLimiter()
        self._hub = hub
        self._cache_of = cache_of
        self._applied: dict[Ref, dict[tuple[str, str], AppliedManifest]] = {}

    def forget(self, owner: Ref) -> None:
        self._applied.pop(owner, None)

    def follows_all(self, cluster: ClusterClient) -> bool:
        """Return true if every change of a child in a cluster wakes its owner."""
        cache = self._cache_of(cluster)
        return cache is not None and cache.follows_all()

    async def apply(self, owner: Ref, cluster: ClusterClient, manifest: Object) -> Object:
        """Apply the manifest of one child, as `apply_all` does; return the live child."""
        return (await self.apply_all(owner, cluster, [manifest]))[0]

    async def apply_all(self, owner: Ref, cluster: ClusterClient, manifests: Sequence[Object]) -> list[Object]:
        """Apply the manifests of children that differ; return the live children.

        Existing objects change only if the API server would accept the changes of all existing objects.

        Raises ChildConflictError: an object of that name exists and is not ours: taking it over could break its owner.
        Raises PrfaasError: the API server refuses one of them.
        """
        known = self._applied.setdefault(owner, {})
        children = [await self._observe(owner, cluster, manifest) for manifest in manifests]
        changes = []
        for child in children:
            if child.is_as_left:
                continue
            if needs_apply(child.live, child.manifest, child.last):
                changes += [child] if self._may_write(child) else []
            elif child.live is not None and child.last is not None:
                # Only its version or status is new: so that the next reconcile knows it again.
                child.last.live = drift.keep(child.live)
        if len(changes) > 1:  # a single one is refused or written whole anyway
            for child in changes:
                if child.changes_existing:
                    await cluster.apply(child.manifest, dry_run=True)
        written: dict[tuple[str, str], Object] = {}
        for child in changes:
            live = written[child.key] = await cluster.apply(child.manifest)
            known[child.key] = AppliedManifest(child.manifest, view(live, child.manifest), live)
            metrics.CHILD_WRITES.labels(child.key[0]).inc()
            if child.is_drift:
                log.info("%s: %s %s was changed or deleted by somebody else; reverting", owner, *child.key)
                metrics.DRIFT_REVERTED.labels(child.key[0]).inc()
            await self._tell(owner, child)
        return [written.get(child.key) or child.live or {} for child in children]

    async def _observe(self, owner: Ref, cluster: ClusterClient, manifest: Object) -> _Child:
        kind, name = BY_NAME[manifest["kind"]], manifest["metadata"]["name"]
        last, cache = self._applied.get(owner, {}).get((kind.name, name)), self._cache_of(cluster)
        seen = cache.version(kind, name) if cache is not None else ""
        if seen and last is not None and last.version == seen and last.is_of(manifest):
            return _Child(manifest, dict(last.live), last, is_as_left=True)
        live = await cluster.get(kind, name)
        if live is not None and not is_ours(live, manifest) and not self._may_adopt(owner, live):
            raise ChildConflictError(
                f"{kind.name} {name} exists in namespace {cluster.namespace} and belongs to somebody else; "
                f"delete it, rename {owner}, or annotate either with {ownership.ADOPT}=true to have it taken over"
            )
        return _Child(manifest, live, last)

    def _may_adopt(self, owner: Ref, live: Object) -> bool:
        """Return true if an annotation on the owner or on the object allows the takeover."""
        annotated = (self._hub.get(owner) or {}, live)
        return any(ownership.says_yes(one, ownership.ADOPT) for one in annotated)

    def _may_write(self, child: _Child) -> bool:
        """Return true if a child may be written now; one that is edited again and again has to wait."""
        return child.edit is None or self.edits.may_revert((child.live or {})["metadata"]["uid"])

    async def _tell(self, owner: Ref, child: _Child) -> None:
        """Post an Event after a takeover or after the revert of an external edit."""
        subject, what = self._hub.get(owner), " ".join(child.key)
        if subject is None or child.live is None:
            return
        if edit := child.edit:
            self.edits.reverted(child.live["metadata"]["uid"])
            await events.post(self._hub.client, subject, "Warning", "ChildEdited", f"{what}: {edit}; reverted")
        elif not is_ours(child.live, child.manifest):
            message = f"{what} was taken over, as annotated"
            await events.post(self._hub.client, subject, "Normal", "ChildAdopted", message)


async def remove(cluster: ClusterClient, kinds: Iterable[ObjectKind], selector: str) -> int:
    """Delete all objects of some kinds that carry the labels; return how many still existed."""
    remaining = 0
    for kind in kinds:
        for child in await cluster.list_all(kind, selector=selector):
            remaining += 1
            metadata = child["metadata"]
            if "deletionTimestamp" not in metadata:
                # By uid: since the list, another object may have got the name.
                await cluster.delete(kind, metadata["name"], uid=metadata["uid"])
    return remaining


def is_ours(live: Object, manifest: Object) -> bool:
    """Return true if a live object was made for the owner of the manifest."""
    labels = manifest["metadata"]["labels"]
    return ownership.has_labels(live, {label: labels[label] for label in IDENTITY_LABELS if label in labels})
