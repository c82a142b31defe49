"""Proves that the operator reads a child again exactly when it may have changed since the last look."""

# ruff: noqa: ARG002  # the fake takes what the Protocol passes
import copy
from collections.abc import Awaitable, Callable

import pytest

from prfaas.kube.session import ObjectKind
from prfaas_operator.clusters.kinds import CONFIG_MAP, DECODE_POOL, DEPLOYMENT, DISRUPTION_BUDGET, Object
from prfaas_operator.controller.child_cache import ChildCache, ChildFacts
from prfaas_operator.controller.children import Children
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import ReconcileQueue, Ref

REF = Ref(DECODE_POOL, "decode")
MANIFEST = {"kind": "ConfigMap", "metadata": {"name": "c", "labels": {}}, "data": {"a": "1"}}


class CountingCluster:
    """One ConfigMap, whose version grows with every change; `reads` counts the calls that read it."""

    namespace = "ns"

    def __init__(self) -> None:
        self.live: Object | None = None
        self.reads = self.written = 0

    async def get(self, kind: ObjectKind, name: str) -> Object | None:
        self.reads += 1
        return copy.deepcopy(self.live)

    async def apply(self, body: Object, *, subresource: str = "", dry_run: bool = False) -> Object:
        self.written += 1
        self.change(body["data"])
        return copy.deepcopy(self.live or {})

    def change(self, data: dict[str, str]) -> None:
        version = int(self.live["metadata"]["resourceVersion"]) + 1 if self.live else 1
        metadata = {**MANIFEST["metadata"], "uid": "u", "resourceVersion": str(version)}
        self.live = {"kind": "ConfigMap", "metadata": metadata, "data": data}


@pytest.fixture
def hub() -> CountingCluster:
    return CountingCluster()


@pytest.fixture
def view(hub: CountingCluster) -> HubView:
    made = HubView(hub, ReconcileQueue())  # pyright: ignore[reportArgumentType]
    for informer in made.children.followed.values():
        informer.is_fresh = True
    return made


@pytest.fixture
def cache(view: HubView) -> ChildCache:
    return view.children


@pytest.fixture
def look(view: HubView) -> Callable[..., Awaitable[Object]]:
    children = Children(view, lambda _: view.children)

    async def apply(manifest: Object = MANIFEST) -> Object:
        return await children.apply(REF, view.client, manifest)

    return apply


def sees(cache: ChildCache, version: str) -> None:
    """Do what a watch does."""
    cache.followed[CONFIG_MAP].items["c"] = ChildFacts("c", "u", "pool", version)


async def test_does_not_read_a_child_whose_version_it_saw_last(hub, cache, look):
    await look()
    sees(cache, "1")
    reads = hub.reads
    child = await look()
    assert (hub.reads, hub.written) == (reads, 1)
    assert child["metadata"]["uid"] == "u", "what is kept of it is enough to go by"


async def test_an_edit_is_seen_and_put_back(hub, cache, look):
    await look()
    hub.change({"a": "theirs"})
    sees(cache, "2")
    await look()
    assert hub.written == 2
    assert hub.live["data"] == {"a": "1"}


async def test_looks_at_a_foreign_change_once(hub, cache, look):
    await look()
    hub.change({"a": "1", "more": "theirs"})
    sees(cache, "2")
    await look()
    reads = hub.reads
    await look()
    assert (hub.reads, hub.written) == (reads, 1)


async def test_applies_another_manifest_although_the_child_is_unchanged(hub, cache, look):
    await look()
    sees(cache, "1")
    await look({**MANIFEST, "data": {"a": "2"}})
    assert hub.live["data"] == {"a": "2"}


@pytest.mark.parametrize("blind", ["never seen", "not followed at the moment"])
async def test_reads_what_it_does_not_see(hub, cache, look, blind):
    await look()
    if blind == "not followed at the moment":
        sees(cache, "1")
        cache.followed[CONFIG_MAP].is_fresh = False
    reads = hub.reads
    await look()
    assert hub.reads == reads + 1


def test_owners_are_known_only_while_all_that_they_may_own_is_followed(cache):
    sees(cache, "1")
    assert cache.pool_uids(DEPLOYMENT, CONFIG_MAP) == {"pool"}
    cache.followed[DISRUPTION_BUDGET].is_fresh = False
    assert cache.pool_uids(DEPLOYMENT, CONFIG_MAP) == {"pool"}
    assert not cache.follows_all()
    cache.followed[DEPLOYMENT].is_fresh = False
    assert cache.pool_uids(DEPLOYMENT, CONFIG_MAP) is None
