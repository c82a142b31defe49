"""Apply and remove the children of an object, in whichever cluster they live: a set changes whole or not at all.

Three things may stand between a manifest and the live object. Somebody else's object has the name: it is left alone
unless an annotation gives it away. The API server refuses one of several: then none is written, so that what stands
stays whole. Somebody edits what is ours: it is put back, and an Event says who did what; two controllers that go on
correcting each other are slowed down.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from prfaas import names
from prfaas_operator import metrics
from prfaas_operator.clusters.api import BY_NAME, Cluster, Kind, Object
from prfaas_operator.errors import ChildConflictError
from prfaas_operator.plan import annotations, drift
from prfaas_operator.plan.drift import Applied, needs_apply, view
from prfaas_operator.reconcile import events
from prfaas_operator.reconcile.runtime import Runtime
from prfaas_operator.reconcile.wakers import Ref
from prfaas_operator.render.common import Manifest

log = logging.getLogger(__name__)

IDENTITY_LABELS: Final = (names.LABEL_MANAGED_BY, names.LABEL_POOL_UID, names.LABEL_POLICY_UID)


class Child(NamedTuple):
    """One child as it should be and as it is; `live` is None before it is made, `last` before we have applied it.

    `is_as_left`: it has the version that the last look found as it should be, so that only part of it is at hand.
    """

    manifest: Manifest
    live: Object | None
    last: Applied | None
    is_as_left: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Kind and name."""
        return self.manifest["kind"], self.manifest["metadata"]["name"]

    @property
    def changes_what_stands(self) -> bool:
        """Whether its apply is worth a dry run: not of a new one, which may need another new one, nor of the same."""
        return self.live is not None and view(self.live, self.manifest) != self.manifest

    @property
    def is_drift(self) -> bool:
        """Whether we had applied this very manifest before."""
        return self.last is not None and self.last.is_of(self.manifest)

    @property
    def edit(self) -> drift.Edit | None:
        """Who changed it since our last apply, and what."""
        return drift.edit(self.live, self.last) if self.live is not None and self.last and self.is_drift else None


async def apply(runtime: Runtime, owner: Ref, cluster: Cluster, manifest: Manifest) -> Object:
    """Bring one child to its manifest, as `apply_all` does; return it live."""
    return (await apply_all(runtime, owner, cluster, [manifest]))[0]


async def apply_all(runtime: Runtime, owner: Ref, cluster: Cluster, manifests: Sequence[Manifest]) -> list[Object]:
    """Bring children to their manifests, writing only what differs; return them live.

    What exists is changed only if the API server would take every change of what exists.

    Raises:
        ChildConflictError: an object of such a name exists and is not ours: taking it over could break its owner.
        PrfaasError: what the API server says against one of them.

    """
    known = runtime.applied.setdefault(owner, {})
    children = [await _look(runtime, owner, cluster, manifest) for manifest in manifests]
    changes = []
    for child in children:
        if child.is_as_left:
            continue
        if needs_apply(child.live, child.manifest, child.last):
            changes += [child] if _may_write(runtime, child) else []
        elif child.live is not None and child.last is not None:
            child.last.live = drift.keep(child.live)
    if len(changes) > 1:  # a single one is refused or written whole in any case
        for child in changes:
            if child.changes_what_stands:
                await cluster.apply(child.manifest, dry_run=True)
    written: dict[tuple[str, str], Object] = {}
    for child in changes:
        live = written[child.key] = await cluster.apply(child.manifest)
        known[child.key] = Applied(child.manifest, view(live, child.manifest), live)
        metrics.CHILD_WRITES.labels(child.key[0]).inc()
        if child.is_drift:
            log.info("%s: %s %s was changed or deleted by somebody else, putting it back", owner, *child.key)
            metrics.DRIFT_HEALED.labels(child.key[0]).inc()
        await _tell(runtime, owner, child)
    return [written.get(child.key) or child.live or {} for child in children]


async def _look(runtime: Runtime, owner: Ref, cluster: Cluster, manifest: Manifest) -> Child:
    kind, name = BY_NAME[manifest["kind"]], manifest["metadata"]["name"]
    last, sight = runtime.applied.get(owner, {}).get((kind.name, name)), runtime.sight_of(cluster)
    seen = sight.version(kind, name) if sight is not None else ""
    if seen and last is not None and last.version == seen and last.is_of(manifest):
        return Child(manifest, dict(last.live), last, is_as_left=True)
    live = await cluster.get(kind, name)
    if live is not None and not is_ours(live, manifest) and not _given_away(runtime, owner, live):
        raise ChildConflictError(
            f"{kind.name} {name} exists in namespace {cluster.namespace} and belongs to somebody else; "
            f"delete it, rename {owner}, or annotate either with {annotations.ADOPT}=true to have it taken over"
        )
    return Child(manifest, live, last)


def _given_away(runtime: Runtime, owner: Ref, live: Object) -> bool:
    """Tell whether the owner or the object itself says that we may take it over."""
    annotated = (runtime.seen.get(owner, {}), live)
    return any(annotations.says_yes(one, annotations.ADOPT) for one in annotated)


def _may_write(runtime: Runtime, child: Child) -> bool:
    """Tell whether a child may be written now: one that is edited again and again has to wait."""
    return child.edit is None or runtime.heals.may_heal((child.live or {})["metadata"]["uid"])


async def _tell(runtime: Runtime, owner: Ref, child: Child) -> None:
    """Post an Event when what we wrote was somebody else's doing or property."""
    subject, what = runtime.seen.get(owner), " ".join(child.key)
    if subject is None or child.live is None:
        return
    if edit := child.edit:
        runtime.heals.healed(child.live["metadata"]["uid"])
        await events.post(runtime.hub, subject, "Warning", "ChildEdited", f"{what}: {edit}; put back")
    elif not is_ours(child.live, child.manifest):
        await events.post(runtime.hub, subject, "Normal", "ChildAdopted", f"{what} was taken over, as annotated")


async def remove(cluster: Cluster, kinds: Iterable[Kind], selector: str) -> int:
    """Delete all objects of some kinds that carry the labels; return how many were still there."""
    remaining = 0
    for kind in kinds:
        for child in await cluster.list_all(kind, selector=selector):
            remaining += 1
            metadata = child["metadata"]
            if "deletionTimestamp" not in metadata:
                await cluster.delete(kind, metadata["name"], uid=metadata["uid"])
    return remaining


def is_ours(live: Object, manifest: Manifest) -> bool:
    """Tell whether a live object was made for the very owner that the manifest is for."""
    labels, wanted = live["metadata"].get("labels") or {}, manifest["metadata"]["labels"]
    return all(labels.get(label) == wanted[label] for label in IDENTITY_LABELS if label in wanted)
