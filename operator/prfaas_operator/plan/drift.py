"""Whether a child has to be applied, decided in memory: a no-op apply costs the client more than all the rest.

A live object never equals its manifest: the server adds defaults and writes quantities its own way. So what counts is
the live object seen through the manifest, compared with the same view right after our last apply.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LIST_KEYS = ("name", "containerPort", "port", "mountPath", "type", "uid")
"""Fields that name an element of a list of objects, in the order in which they are tried."""


class Applied(NamedTuple):
    """What was applied last, and how the live object looked through it then."""

    manifest: Mapping[str, Any]
    view: Any


def view(live: Any, manifest: Any) -> Any:
    """Return the part of `live` that `manifest` speaks about, in the manifest's shape; None where live has nothing."""
    if isinstance(manifest, Mapping):
        return {key: view(live.get(key), part) for key, part in manifest.items()} if isinstance(live, Mapping) else None
    if isinstance(manifest, list):
        return _view_list(live, manifest) if isinstance(live, list) else None
    return live


def _view_list(live: list[Any], manifest: list[Any]) -> list[Any]:
    key = _list_key(manifest)
    if key is None:
        return live
    by_key = {item.get(key): item for item in live if isinstance(item, Mapping)}
    return [view(by_key.get(part[key]), part) for part in manifest]


def _list_key(manifest: Sequence[Any]) -> str | None:
    if not manifest or not all(isinstance(part, Mapping) for part in manifest):
        return None
    return next((key for key in LIST_KEYS if all(key in part for part in manifest)), None)


def needs_apply(live: Mapping[str, Any] | None, manifest: Mapping[str, Any], last: Applied | None) -> bool:
    """Tell whether the manifest must be applied: new, changed, or the live object was edited since."""
    return live is None or last is None or last.manifest != manifest or last.view != view(live, manifest)


def status_differs(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Tell whether a status apply would change anything; statuses have no defaults, so plain equality serves."""
    return view(live, wanted) != wanted
