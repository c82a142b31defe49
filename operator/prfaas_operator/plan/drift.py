"""Drift of a child: decides in memory if an apply is needed, because a no-op apply is the most expensive call.

A live object never equals its manifest: the server adds defaults and rewrites quantities. So the comparison uses the
manifest's fields of the live object, now and right after our last apply.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from prfaas.names import FIELD_MANAGER_OPERATOR

LIST_KEYS = ("name", "containerPort", "port", "mountPath", "type", "uid")
"""Fields that name an element of a list of objects, in the order in which they are tried."""
MAX_PATHS: Final = 4
KEPT_METADATA: Final = ("name", "namespace", "uid", "generation", "resourceVersion", "labels")
FieldPath = tuple[str | tuple[str, Any], ...]
"""The path of a field: names of fields, and (key, value) for the element of a list that it names."""


class AppliedManifest:
    """The manifest that was applied last, and the live object's values of its fields at that time.

    Thousands are kept and few are ever read, so both are packed. Dicts would take most of the operator's memory.
    """

    __slots__ = ("_digest", "_packed", "live")

    def __init__(self, manifest: Mapping[str, Any], seen: Any, live: Mapping[str, Any] | None = None):
        self._digest = _digest(manifest)
        self._packed = zlib.compress(msgspec.json.encode((manifest, seen)), level=1)
        self.live: Mapping[str, Any] = keep(live) if live is not None else {}
        """The part of the live object that is kept: its identity and its status, without its spec."""

    def is_of(self, manifest: Mapping[str, Any]) -> bool:
        return self._digest == _digest(manifest)

    def read(self) -> tuple[Mapping[str, Any], Any]:
        manifest, seen = msgspec.json.decode(zlib.decompress(self._packed))
        return manifest, seen

    @property
    def version(self) -> str:
        """The live object's version at that time; empty if it is not kept."""
        return self.live.get("metadata", {}).get("resourceVersion", "")


class Edit(NamedTuple):
    """The fields of ours that somebody changed, and the editor's name, if the server knows it."""

    manager: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.paths) - MAX_PATHS} more" if len(self.paths) > MAX_PATHS else ""
        return f"{self.manager or 'somebody'} changed {', '.join(self.paths[:MAX_PATHS])}{more}"


def keep(live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a live object that is kept between reconciles."""
    metadata = {key: live["metadata"][key] for key in KEPT_METADATA if key in live["metadata"]}
    return {"kind": live.get("kind", ""), "metadata": metadata, "status": live.get("status") or {}}


def _digest(manifest: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(msgspec.json.encode(manifest, order="deterministic")).digest()


def view(live: Any, manifest: Any) -> Any:
    """Return the values of the manifest's fields in `live`, in the manifest's shape; None if live has none."""
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


def needs_apply(live: Mapping[str, Any] | None, manifest: Mapping[str, Any], last: AppliedManifest | None) -> bool:
    """Return true if the manifest must be applied: it is new or changed, or the live object was edited since."""
    return live is None or last is None or not last.is_of(manifest) or last.read()[1] != view(live, manifest)


def status_differs(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return true if a status apply would change anything; statuses have no defaults, so plain equality is enough."""
    return view(live, wanted) != wanted


def edit(live: Mapping[str, Any], last: AppliedManifest) -> Edit | None:
    """Return the editor and the changes of an object since our last apply; None if it is unchanged."""
    manifest, seen = last.read()
    paths = tuple(_differences(seen, view(live, manifest), manifest))
    return Edit(_editor(live, paths), tuple(_text(path) for path in paths)) if paths else None


def _differences(before: Any, now: Any, manifest: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the paths at which two views through one manifest differ, as deep as both have values."""
    if isinstance(manifest, Mapping) and isinstance(before, Mapping) and isinstance(now, Mapping):
        for key, part in manifest.items():
            yield from _differences(before.get(key), now.get(key), part, (*path, str(key)))
    elif isinstance(manifest, list) and (key := _list_key(manifest)) and before and now:
        for index, part in enumerate(manifest):
            yield from _differences(before[index], now[index], part, (*path, (key, part[key])))
    elif before != now:
        yield path


def _text(path: FieldPath) -> str:
    """Return a path in its usual form, such as spec.containers[worker].image."""
    return "".join(f".{step}" if isinstance(step, str) else f"[{step[1]}]" for step in path).removeprefix(".")


def _editor(live: Mapping[str, Any], paths: Sequence[FieldPath]) -> str:
    """Return the present manager of one of the fields; for a removed field, the last writer."""
    entries = [
        entry
        for entry in live["metadata"].get("managedFields") or ()
        # The writer of a status edits no field of ours.
        if entry.get("manager") != FIELD_MANAGER_OPERATOR and not entry.get("subresource")
    ]
    entries.sort(key=lambda entry: entry.get("time", ""), reverse=True)
    owners = [entry for entry in entries if any(_owns(entry.get("fieldsV1") or {}, path) for path in paths)]
    return next((str(entry.get("manager", "")) for entry in (*owners, *entries)), "")


def _owns(fields: Mapping[str, Any], path: FieldPath) -> bool:
    """Return true if a managedFields entry names a field; a leaf above the field owns it too."""
    for step in path:
        # FieldsV1 of managedFields: `f:` and a field's name, or `k:` and the keys of a list's element.
        below = fields.get(f"f:{step}") if isinstance(step, str) else _element(fields, *step)
        if below is None:
            return False
        if not below:
            return True
        fields = below
    return True


def _element(fields: Mapping[str, Any], key: str, value: Any) -> Mapping[str, Any] | None:
    for name, below in fields.items():
        if name.startswith("k:") and _keys_of(name[2:]).get(key) == value:
            return below
    return None


def _keys_of(text: str) -> Mapping[str, Any]:
    """Return the keys of a list's element; none for what another cluster's API server wrote in a form of its own."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
