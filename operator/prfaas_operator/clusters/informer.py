"""Keep a small projection of all labelled objects of one kind in memory, and tell whom a change concerns.

List, then watch from there; relist when the resource version has expired or anything else went wrong. Full objects are
dropped as soon as they are projected (10,000 pods as dicts cost 288 MB). While the API server is not reached the last
known items stay: the pods of a cluster that the hub cannot see go on working.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from prfaas.errors import PrfaasError
from prfaas_operator.clusters.api import Cluster, Kind, Object
from prfaas_operator.errors import ExpiredError

log = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_BACKOFF_SECONDS: Final = 0.5
MAX_BACKOFF_SECONDS: Final = 5.0


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
        self._cluster = cluster
        self._kind = kind
        self._selector = selector
        self._project = project
        self._on_change = on_change

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            try:
                since = await self._list()
                backoff_seconds = FIRST_BACKOFF_SECONDS
                while True:
                    since = await self._watch(since)
            except ExpiredError:
                continue
            except PrfaasError as error:
                log.warning("%s informer: %s; again in %g s", self._kind.plural, error, backoff_seconds)
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(backoff_seconds * 2, MAX_BACKOFF_SECONDS)

    async def _list(self) -> str:
        """Replace all items by what exists now; return the resource version to watch from."""
        fresh: dict[str, T] = {}
        page = await self._cluster.page(self._kind, selector=self._selector)
        while True:
            fresh |= {item["metadata"]["name"]: self._project(item) for item in page.items}
            if not page.next_page:
                break
            page = await self._cluster.page(self._kind, selector=self._selector, after=page.next_page)
        old, self.items = self.items, fresh
        self.synced.set()
        for name in old.keys() | fresh.keys():
            if old.get(name) != fresh.get(name):
                self._on_change(fresh[name] if name in fresh else old[name])
        return page.resource_version

    async def _watch(self, since: str) -> str:
        """Follow one watch to its end; return the resource version to go on from."""
        async for event in self._cluster.watch(self._kind, selector=self._selector, since=since):
            metadata = event.object["metadata"]
            since = metadata["resourceVersion"]
            item = self._project(event.object)
            if event.type == "DELETED":
                self.items.pop(metadata["name"], None)
            elif self.items.get(metadata["name"]) == item:
                continue
            else:
                self.items[metadata["name"]] = item
            self._on_change(item)
        return since
