"""The containers of pods, and what a ResourceQuota may ask of each: a share of the CPU, and memory within a limit."""

from collections.abc import Iterator
from typing import Any, Final

ASKED: Final = (("requests", "cpu"), ("requests", "memory"), ("limits", "memory"))


def pods_in(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the spec of every pod in a manifest, wherever it is."""
    if isinstance(node, dict):
        if isinstance(node.get("containers"), list):
            yield node
        for child in node.values():
            yield from pods_in(child)
    elif isinstance(node, list):
        for child in node:
            yield from pods_in(child)


def containers_in(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of a manifest's pods, those that run first included."""
    return [one for pod in pods_in(manifest) for one in (*pod.get("initContainers", ()), *pod["containers"])]


def lacking(manifest: dict[str, Any]) -> list[str]:
    """Return what the containers of a manifest's pods lack, such as `scheduler: limits.memory`."""
    return [
        f"{one['name']}: {part}.{name}"
        for one in containers_in(manifest)
        for part, name in ASKED
        if name not in (one.get("resources") or {}).get(part, {})
    ]
