"""Apply and remove the children of an object, in whichever cluster they live."""

from collections.abc import Iterable
from typing import Final

from prfaas import names
from prfaas_operator import metrics
from prfaas_operator.clusters.api import BY_NAME, Cluster, Kind, Object
from prfaas_operator.errors import ChildConflictError
from prfaas_operator.plan.drift import Applied, needs_apply, view
from prfaas_operator.reconcile.runtime import Runtime
from prfaas_operator.reconcile.wakers import Ref
from prfaas_operator.render.common import Manifest

IDENTITY_LABELS: Final = (names.LABEL_MANAGED_BY, names.LABEL_POOL_UID, names.LABEL_POLICY_UID)


async def apply(runtime: Runtime, owner: Ref, cluster: Cluster, manifest: Manifest) -> Object:
    """Bring one child to its manifest, writing only where something differs; return it live.

    Raises:
        ChildConflictError: an object of that name exists and is not ours: taking it over could break its owner.

    """
    kind, name = BY_NAME[manifest["kind"]], manifest["metadata"]["name"]
    live = await cluster.get(kind, name)
    if live is not None and not is_ours(live, manifest):
        raise ChildConflictError(
            f"{kind.name} {name} exists in namespace {cluster.namespace} and belongs to somebody else; "
            f"delete it, or rename {owner}"
        )
    known = runtime.applied.setdefault(owner, {})
    if live is None or needs_apply(live, manifest, known.get((kind.name, name))):
        live = await cluster.apply(manifest)
        known[kind.name, name] = Applied(manifest, view(live, manifest))
        metrics.CHILD_WRITES.labels(kind.name).inc()
    return live


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
