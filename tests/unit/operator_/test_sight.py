"""Proves that a child is asked for again exactly when it may have changed since the last look."""

# ruff: noqa: ARG002  # the fake takes what the Protocol passes
import copy
from typing import Any

import pytest

from prfaas_operator.clusters.api import CONFIG_MAP, DECODE_POOL, DEPLOYMENT, DISRUPTION_BUDGET, Kind, Object
from prfaas_operator.errors import ClusterUnreachableError
from prfaas_operator.reconcile import children
from prfaas_operator.reconcile.runtime import Runtime
from prfaas_operator.reconcile.sight import ChildFacts
from prfaas_operator.reconcile.wakers import Ref

REF = Ref(DECODE_POOL, "decode")
MANIFEST = {"kind": "ConfigMap", "metadata": {"name": "c", "labels": {}}, "data": {"a": "1"}}


class CountingCluster:
    """One ConfigMap, whose version grows with every change; `asked` counts the calls that read it."""

    namespace = "ns"

    def __init__(self) -> None:
        self.live: Object | None = None
        self.asked = self.written = 0

    async def get(self, kind: Kind, name: str) -> Object | None:
        self.asked += 1
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
def runtime(hub: CountingCluster) -> Runtime:
    async def nobody(*_: Any) -> Any:
        raise ClusterUnreachableError("there is none")

    made = Runtime(hub, nobody)  # pyright: ignore[reportArgumentType]
    for informer in made.sight.followed.values():
        informer.is_fresh = True
    return made


def sees(runtime: Runtime, version: str) -> None:
    """Do what a watch does."""
    runtime.sight.followed[CONFIG_MAP].items["c"] = ChildFacts("c", "u", "pool", version)


async def look(runtime: Runtime, manifest: Object = MANIFEST) -> Object:
    return await children.apply(runtime, REF, runtime.hub, manifest)


async def test_a_child_of_the_version_of_the_last_look_is_not_asked_for(hub, runtime):
    await look(runtime)
    sees(runtime, "1")
    asked = hub.asked
    child = await look(runtime)
    assert (hub.asked, hub.written) == (asked, 1)
    assert child["metadata"]["uid"] == "u", "what is kept of it is enough to go by"


async def test_an_edit_is_seen_and_put_back(hub, runtime):
    await look(runtime)
    hub.change({"a": "theirs"})
    sees(runtime, "2")
    await look(runtime)
    assert hub.written == 2
    assert hub.live["data"] == {"a": "1"}


async def test_a_change_that_is_none_of_ours_is_looked_at_once(hub, runtime):
    await look(runtime)
    hub.change({"a": "1", "more": "theirs"})
    sees(runtime, "2")
    await look(runtime)
    asked = hub.asked
    await look(runtime)
    assert (hub.asked, hub.written) == (asked, 1)


async def test_another_manifest_is_applied_although_nobody_touched_the_child(hub, runtime):
    await look(runtime)
    sees(runtime, "1")
    await look(runtime, {**MANIFEST, "data": {"a": "2"}})
    assert hub.live["data"] == {"a": "2"}


@pytest.mark.parametrize("blind", ["never seen", "not followed at the moment"])
async def test_what_is_not_seen_is_asked_for(hub, runtime, blind):
    await look(runtime)
    if blind == "not followed at the moment":
        sees(runtime, "1")
        runtime.sight.followed[CONFIG_MAP].is_fresh = False
    asked = hub.asked
    await look(runtime)
    assert hub.asked == asked + 1


def test_owners_are_known_only_while_all_that_they_may_own_is_followed(runtime):
    sees(runtime, "1")
    assert runtime.sight.pool_uids(DEPLOYMENT, CONFIG_MAP) == {"pool"}
    runtime.sight.followed[DISRUPTION_BUDGET].is_fresh = False
    assert runtime.sight.pool_uids(DEPLOYMENT, CONFIG_MAP) == {"pool"}
    assert not runtime.sight.follows_all()
    runtime.sight.followed[DEPLOYMENT].is_fresh = False
    assert runtime.sight.pool_uids(DEPLOYMENT, CONFIG_MAP) is None
