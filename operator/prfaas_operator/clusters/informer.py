"""Keep a small projection of all labelled objects of one kind in memory, and tell whom a change concerns.

List, then watch from there; relist when the resource version has expired or anything else went wrong. Full objects are
dropped as soon as they are projected (10,000 pods as dicts cost 288 MB). While the API server is not reached the last
known items stay: the pods of a cluster that the hub cannot see go on working.

What we write ourselves is learned from the answer, and that may come after the watch has told what somebody else wrote
next. Resource versions say which is newer: an older state that took its place would stay until the next change.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from prfaas.errors import PrfaasError
from prfaas_operator.clusters.api import Cluster, Kind, Object
from prfaas_operator.errors import ExpiredError, ForbiddenError

log = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_BACKOFF_SECONDS: Final = 0.5
MAX_BACKOFF_SECONDS: Final = 5.0
FORBIDDEN_SECONDS: Final = 60.0
"""Rights come by a person's hand: there is no hurry to ask again."""


class Informer(Generic[T]):
    """A live mapping name -> projection of the objects that carry a label.

    Args:
        cluster, kind, selector: what to list and watch.
        project: what to keep of an object; must not hold on to it.
        on_change: called with the projection of each object that appeared, changed or went.

    """

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind,
        selector: str,
        project: Callable[[Object], T],
        on_change: Callable[[T], None],
    ):
        self.items: dict[str, T] = {}
        self.synced = asyncio.Event()
        self.is_fresh = False
        """Whether the items are listed and followed at this moment: not while the API server is not reached."""
        self._cluster = cluster
        self._kind = kind
        self._selector = selector
        self._project = project
        self._on_change = on_change
        self._versions: dict[str, int] = {}

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        self.is_fresh = False
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            try:
                since = await self._list()
                backoff_seconds = FIRST_BACKOFF_SECONDS
                while True:
                    since = await self._watch(since)
            except ExpiredError:
                continue
            except ForbiddenError as error:
                self.is_fresh = False
                log.info("%s informer: %s; again in %g s", self._kind.plural, error, FORBIDDEN_SECONDS)
                await asyncio.sleep(FORBIDDEN_SECONDS)
                continue
            except PrfaasError as error:
                self.is_fresh = False
                log.warning("%s informer: %s; again in %g s", self._kind.plural, error, backoff_seconds)
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(backoff_seconds * 2, MAX_BACKOFF_SECONDS)

    def learn(self, written: Object) -> None:
        """Take in an object that we have just written, without waiting for the watch to tell."""
        name, item = written["metadata"]["name"], self._project(written)
        if name not in self.items or not self._is_news(name, written):
            return
        self._versions[name] = _version(written)
        if self.items[name] != item:
            self.items[name] = item
            self._on_change(item)

    async def _list(self) -> str:
        """Replace all items by what exists now; return the resource version to watch from."""
        fresh: dict[str, T] = {}
        versions: dict[str, int] = {}
        page = await self._cluster.page(self._kind, selector=self._selector)
        while True:
            fresh |= {item["metadata"]["name"]: self._project(item) for item in page.items}
            versions |= {item["metadata"]["name"]: _version(item) for item in page.items}
            if not page.next_page:
                break
            page = await self._cluster.page(self._kind, selector=self._selector, after=page.next_page)
        old, self.items, self._versions = self.items, fresh, versions
        self.synced.set()
        self.is_fresh = True
        for name in old.keys() | fresh.keys():
            if old.get(name) != fresh.get(name):
                self._on_change(fresh[name] if name in fresh else old[name])
        return page.resource_version

    async def _watch(self, since: str) -> str:
        """Follow one watch to its end; return the resource version to go on from."""
        async for event in self._cluster.watch(self._kind, selector=self._selector, since=since):
            metadata = event.object["metadata"]
            since = metadata["resourceVersion"]
            name, item = metadata["name"], self._project(event.object)
            if event.type == "DELETED":
                self.items.pop(name, None)
                self._versions.pop(name, None)
            else:
                if not self._is_news(name, event.object):
                    continue
                self._versions[name] = _version(event.object)
                if self.items.get(name) == item:
                    continue
                self.items[name] = item
            self._on_change(item)
        return since

    def _is_news(self, name: str, seen: Object) -> bool:
        return _version(seen) > self._versions.get(name, 0)


def _version(item: Object) -> int:
    """Return an object's resource version, which orders the states of one object: Kubernetes promises decimals."""
    return int(item["metadata"]["resourceVersion"])
