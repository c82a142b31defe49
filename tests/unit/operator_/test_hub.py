"""Proves that the hub's store holds what is newest of each object, and wakes the objects that a change concerns."""

from typing import Any

import pytest

from prfaas_operator.clusters.kinds import DECODE_POOL, MEMBER_CLUSTER, POLICY, PREFILL_POOL, Object
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import ReconcileQueue, Ref

REF = Ref(PREFILL_POOL, "far")


class Server:
    """An API server with at most one object; `during` runs while it is read."""

    namespace = "ns"

    def __init__(self) -> None:
        self.live: Object | None = None
        self.during = lambda: None

    async def get(self, *_: Any) -> Object | None:
        found = self.live
        self.during()
        return found


def pool(version: int, uid: str = "u", **spec: Any) -> Object:
    metadata = {"name": "far", "uid": uid, "resourceVersion": str(version), "generation": spec.get("replicas", 1)}
    return {"kind": "PrefillPool", "metadata": metadata, "spec": {"clusterName": "eu", **spec}}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def hub(server) -> HubView:
    return HubView(server, ReconcileQueue())


def test_an_older_state_never_takes_the_place_of_a_newer_one(hub):
    hub.put(PREFILL_POOL, pool(9, replicas=2))
    hub.learn(pool(11, replicas=3))
    hub.put(PREFILL_POOL, pool(10, replicas=2))
    assert hub.get(REF)["metadata"]["resourceVersion"] == "11"
    assert hub.sharers["far"].replicas == 3


def test_the_answer_to_a_write_restores_nothing_that_was_deleted(hub):
    hub.put(PREFILL_POOL, pool(9))
    hub.discard(PREFILL_POOL, "far", "u")
    hub.learn(pool(10))
    assert hub.get(REF) is None


def test_a_removal_keeps_a_namesake(hub):
    hub.put(PREFILL_POOL, pool(9))
    hub.put(PREFILL_POOL, pool(12, uid="u2"))
    hub.discard(PREFILL_POOL, "far", "u")
    assert hub.get(REF)["metadata"]["uid"] == "u2"
    hub.discard(PREFILL_POOL, "far", "u2")
    assert hub.get(REF) is None
    assert not hub.clusters_in_use()


async def test_a_resync_finds_what_the_watch_has_missed(hub, server):
    hub.put(PREFILL_POOL, pool(9))
    server.live = pool(10, replicas=2)
    await hub.refresh(REF)
    assert hub.sharers["far"].replicas == 2
    server.live = None
    await hub.refresh(REF)
    assert hub.get(REF) is None


async def test_a_resync_believes_a_server_whose_versions_went_back(hub, server):
    hub.put(PREFILL_POOL, pool(900, replicas=3))
    server.live = pool(50, replicas=2)  # restored from a backup
    await hub.refresh(REF)
    assert hub.sharers["far"].replicas == 2
    hub.put(PREFILL_POOL, pool(51, replicas=4))
    assert hub.sharers["far"].replicas == 4


async def test_what_is_learned_during_a_resync_is_newer_than_what_it_reads(hub, server):
    hub.put(PREFILL_POOL, pool(9))
    server.live = pool(10, replicas=2)
    server.during = lambda: hub.learn(pool(11, replicas=3))
    await hub.refresh(REF)
    assert hub.sharers["far"].replicas == 3


async def test_an_object_made_while_its_predecessor_is_read_stays(hub, server):
    hub.put(PREFILL_POOL, pool(9))
    server.during = lambda: hub.put(PREFILL_POOL, pool(12, uid="u2"))
    await hub.refresh(REF)
    assert hub.get(REF)["metadata"]["uid"] == "u2"


def test_a_change_wakes_the_objects_it_concerns_and_a_count_wakes_only_its_own(hub):
    others = {kind: hub.queue.of(Ref(kind, "x"), kind.name) for kind in (MEMBER_CLUSTER, DECODE_POOL, POLICY)}
    home, own = hub.queue.of(Ref(DECODE_POOL, "home"), "h"), hub.queue.of(REF, "u")
    woken = lambda: [waker.event.is_set() for waker in (own, others[MEMBER_CLUSTER], others[POLICY], home)]  # noqa: E731
    hub.put(PREFILL_POOL, pool(9, shareWith="home"))
    assert woken() == [True, True, True, True]
    assert not others[DECODE_POOL].event.is_set()
    for waker in (own, home, *others.values()):
        waker.event.clear()
    hub.put(PREFILL_POOL, {**pool(10, shareWith="home"), "status": {"replicas": 3}})
    assert woken() == [True, False, False, False]
    own.event.clear()
    hub.put(PREFILL_POOL, pool(10, shareWith="home"))
    assert woken() == [False, False, False, False], "what is known already is no news"


async def test_an_object_made_again_under_its_name_keeps_its_waker(hub):
    old = hub.queue.of(REF, "u")
    waker = hub.queue.of(REF, "u2")
    hub.queue.forget(REF, "u")
    hub.queue.wake(REF)
    assert waker is old
    assert await waker.wait(120)
    hub.queue.forget(REF, "u2")
    assert hub.queue.depth() == 0
