"""Informer: keeps a small projection of all labelled objects of one kind in memory, and reports changes.

Informers serve children and pods in any cluster; our own kinds come from kopf's watch. Full objects are dropped once
they are projected (10,000 pods as dicts cost 288 MB). While the API server is not reached, the last known items stay,
because the pods of an unreachable cluster still work.

Our own writes are learned from their answers, which may arrive after the watch has delivered a later change. Resource
versions decide which state is newer, so an older one never replaces it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from prfaas.errors import ConfigError, PeerError, ProtocolError
from prfaas.kube.session import ObjectKind
from prfaas.kube.watch import DELETED, WatchEvent, list_and_watch
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.errors import ForbiddenError

log = logging.getLogger(__name__)

T = TypeVar("T")
ERROR_SECONDS: Final = 5.0
FORBIDDEN_SECONDS: Final = 60.0
"""A person grants missing rights, so there is no hurry to retry."""
MAX_ITEM_BYTES: Final = 4096
"""Of a projection as JSON, which usually has some hundred. A server may write a name of megabytes, and many of them."""


class Informer(Generic[T]):
    """A live mapping name -> projection of the objects that carry a label.

    Args:
        cluster, kind, selector: the objects to list and watch.
        project: returns the part of an object to keep; must not keep the object.
        on_change: called with the projection of each object that appeared, changed or went.
        fields: a field selector; an object that it chooses no longer has gone.
    """

    def __init__(
        self,
        cluster: ClusterClient,
        kind: ObjectKind,
        selector: str,
        project: Callable[[Object], T],
        on_change: Callable[[T], None],
        *,
        fields: str = "",
    ):
        self.items: dict[str, T] = {}
        self.synced = asyncio.Event()
        self.is_fresh = False
        """True while the items are listed and watched; false while the API server is not reached."""
        self._cluster = cluster
        self._kind = kind
        self._selectors = {"selector": selector, "fields": fields}
        self._project = project
        self._on_change = on_change
        self._versions: dict[str, int] = {}
        self._is_full = False

    async def run(self) -> None:
        while True:
            self.is_fresh = False
            try:
                async for change in list_and_watch(
                    self._list,
                    lambda since: self._cluster.watch(self._kind, **self._selectors, since=since),
                    self._failed,
                ):
                    if not isinstance(change, WatchEvent):
                        self._replace(*change)
                    elif change.type == DELETED:
                        self._discard(change.object)
                    else:
                        self._put(change.object)
                    del change  # as in list_and_watch
            except Exception:  # a bug, or a malformed object, must not end the informer and must be visible
                log.exception("%s informer: internal error; retry in %g s", self._kind.plural, ERROR_SECONDS)
                self.is_fresh = False
                await asyncio.sleep(ERROR_SECONDS)

    def learn(self, written: Object) -> None:
        """Store an object that we have just written, without waiting for the watch."""
        # An unknown one may have been deleted meanwhile, and no watch would take it away again.
        if written["metadata"]["name"] in self.items:
            self._put(written)

    def _failed(self, error: PeerError | ConfigError, pause_seconds: float) -> float:
        self.is_fresh = False
        is_forbidden = isinstance(error, ForbiddenError)
        seconds = FORBIDDEN_SECONDS if is_forbidden else pause_seconds
        level = logging.INFO if is_forbidden else logging.WARNING
        log.log(level, "%s informer: %s; retry in %.1f s", self._kind.plural, error, seconds)
        return seconds

    async def _list(self) -> tuple[tuple[dict[str, T], dict[str, int]], str]:
        """Return all items and their versions by name, projected page by page, and the version to watch from."""
        items: dict[str, T] = {}
        versions: dict[str, int] = {}
        since = ""
        try:
            async for found, whole_version in self._cluster.pages(self._kind, **self._selectors):
                items |= {one["metadata"]["name"]: self._small(one) for one in found}
                versions |= {one["metadata"]["name"]: _version(one) for one in found}
                self._note_kept(max(len(items), len(self.items)))
                since = whole_version
                del found  # not beside the next page
        finally:
            self._note_kept(len(self.items))
        return (items, versions), since

    def _replace(self, items: dict[str, T], versions: dict[str, int]) -> None:
        old, self.items, self._versions = self.items, items, versions
        self._note_kept(len(items))
        self._is_full = False
        self.synced.set()
        self.is_fresh = True
        for name in old.keys() | items.keys():
            if old.get(name) != items.get(name):
                self._on_change(items[name] if name in items else old[name])

    def _put(self, seen: Object) -> None:
        name, item, version = seen["metadata"]["name"], self._small(seen), _version(seen)
        if version <= self._versions.get(name, 0):
            return
        if name not in self._versions and len(self._versions) >= self._cluster.room(self._kind):
            self._note_full()
            return
        self._versions[name] = version
        if self.items.get(name) != item:
            self.items[name] = item
            self._note_kept(len(self.items))
            self._on_change(item)

    def _small(self, seen: Object) -> T:
        """Project an object. Raises ProtocolError: what is to be kept of it is longer than MAX_ITEM_BYTES."""
        item = self._project(seen)
        if len(msgspec.json.encode(item)) > MAX_ITEM_BYTES:
            kept = f"more than {MAX_ITEM_BYTES} bytes in its names and messages"
            raise ProtocolError(f"{self._kind.name} {str(seen['metadata']['name'])[:80]} has {kept}: delete it there")
        return item

    def _note_kept(self, objects: int) -> None:
        self._cluster.kept[self._kind] = objects

    def _note_full(self) -> None:
        """Log once that new objects are not followed; the next list is refused with its own reason."""
        if not self._is_full:
            self._is_full = True
            log.warning("%s informer: too many objects, only %d are followed", self._kind.plural, len(self.items))

    def _discard(self, seen: Object) -> None:
        name = seen["metadata"]["name"]
        self.items.pop(name, None)
        self._versions.pop(name, None)
        self._note_kept(len(self.items))
        self._on_change(self._project(seen))


def _version(item: Object) -> int:
    """Return an object's resource version, which orders the states of one object: Kubernetes guarantees decimals."""
    return int(item["metadata"]["resourceVersion"])
