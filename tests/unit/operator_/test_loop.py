"""Proves on an API server in memory that a status is written whatever happens, and that informers lose nothing."""

# ruff: noqa: ARG002  # the fakes take what the Protocol passes
import asyncio
import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from prfaas_operator.clusters.api import DECODE_POOL, MEMBER_CLUSTER, PREFILL_POOL, SECRET, Kind, Object
from prfaas_operator.errors import (
    ChildConflictError,
    ClusterUnreachableError,
    InvalidObjectError,
    NotLeaderError,
)
from prfaas_operator.plan.sharing import Sharer
from prfaas_operator.reconcile import children, loop
from prfaas_operator.reconcile.runtime import LOOKS_AT_ONCE, Report, Runtime
from prfaas_operator.reconcile.wakers import Ref

REF = Ref(DECODE_POOL, "decode")


class MemoryCluster:
    """`clusters.api.Cluster` over a dict; an apply replaces what it names, which is enough for one writer."""

    namespace = "ns"

    def __init__(self, *objects: Object):
        self.objects = {(one["kind"], one["metadata"]["name"]): one for one in objects}
        self.applied: list[Object] = []
        self.tried: list[str] = []
        self.refuses = ""
        self.failure: Exception | None = None

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def get(self, kind: Kind, name: str) -> Object | None:
        if self.failure:
            raise self.failure
        return copy.deepcopy(self.objects.get((kind.name, name)))

    async def list_all(self, kind: Kind, *, selector: str = "") -> list[Object]:
        return [one for (name, _), one in self.objects.items() if name == kind.name]

    async def apply(self, body: Object, *, subresource: str = "", dry_run: bool = False) -> Object:
        if dry_run:
            self.tried.append(body["kind"])
            if body["kind"] == self.refuses:
                raise InvalidObjectError("not here")
            return body
        self.applied.append(body)
        key = (body["kind"], body["metadata"]["name"])
        live = self.objects.setdefault(key, {"metadata": {"uid": "u", "generation": 1, "resourceVersion": "1"}})
        for part, value in body.items():
            live[part] = {**live["metadata"], **value} if part == "metadata" else value
        return copy.deepcopy(live)

    async def create(self, kind: Kind, body: Object) -> Object:
        self.applied.append(body)
        return body

    async def delete(self, kind: Kind, name: str, *, uid: str = "") -> None:
        self.objects.pop((kind.name, name), None)


def decode_pool(**metadata: Any) -> Object:
    return {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "DecodePool",
        "metadata": {"name": "decode", "namespace": "ns", "uid": "u", "generation": 1, **metadata},
        "spec": {"model": {"name": "tiny", "source": "builtin:tiny"}},
    }


async def refuse(name: str, namespace: str, access: Any) -> Any:
    raise ClusterUnreachableError(f"{name} is not reached")


def runtime_over(hub: MemoryCluster) -> Runtime:
    return Runtime(hub, refuse)  # pyright: ignore[reportArgumentType]  # only what these tests need


def ready(hub: MemoryCluster) -> dict[str, Any]:
    return hub.objects["DecodePool", "decode"]["status"]["conditions"][0]


async def test_a_second_look_at_an_unchanged_object_writes_nothing():
    hub = MemoryCluster(decode_pool())
    runtime = runtime_over(hub)
    await loop.reconcile(runtime, REF, "u")
    assert [body["kind"] for body in hub.applied] == ["Deployment", "PodDisruptionBudget", "DecodePool", "Event"]
    hub.applied.clear()
    await loop.reconcile(runtime, REF, "u")
    assert hub.applied == []


async def test_a_bug_becomes_a_condition_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch):
    async def broken(*_: Any) -> Report:
        raise KeyError("surprise")

    monkeypatch.setitem(loop.JUDGES, DECODE_POOL, broken)
    hub = MemoryCluster(decode_pool())
    report = await loop.reconcile(runtime_over(hub), REF, "u")
    assert not report.gone
    assert (ready(hub)["status"], ready(hub)["reason"]) == ("False", "InternalError")
    assert "surprise" in ready(hub)["message"]


async def test_a_paused_object_changes_nothing_but_its_status_until_it_is_deleted():
    hub = MemoryCluster(decode_pool(annotations={"prfaas.io/paused": "true"}))
    runtime = runtime_over(hub)
    assert not (await loop.reconcile(runtime, REF, "u")).gone
    assert [body["kind"] for body in hub.applied] == ["DecodePool", "Event"]
    assert (ready(hub)["status"], ready(hub)["reason"]) == ("Unknown", "Paused")
    hub.objects["DecodePool", "decode"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert (await loop.reconcile(runtime, REF, "u")).gone


@pytest.mark.parametrize("value", ["false", "True", "yes", ""])
async def test_only_the_word_true_pauses(value: str):
    hub = MemoryCluster(decode_pool(annotations={"prfaas.io/paused": value}))
    await loop.reconcile(runtime_over(hub), REF, "u")
    assert ("Deployment", "decode") in hub.objects


async def test_an_object_of_a_newer_version_is_reported_as_invalid():
    newer = decode_pool()
    newer["spec"]["engine"] = {"type": "quantum"}
    hub = MemoryCluster(newer)
    await loop.reconcile(runtime_over(hub), REF, "u")
    assert ready(hub)["reason"] == "Invalid"
    assert "DecodePool decode does not fit this version of prfaas" in ready(hub)["message"]


async def test_a_status_of_a_newer_version_is_written_anew():
    newer = decode_pool()
    newer["status"] = {"replicasOwner": "Oracle", "replicas": 3}
    hub = MemoryCluster(newer)
    await loop.reconcile(runtime_over(hub), REF, "u")
    assert ("Deployment", "decode") in hub.objects
    assert hub.objects["DecodePool", "decode"]["status"]["replicasOwner"] == "User"


async def test_a_failure_keeps_the_counts_that_were_known():
    known = decode_pool()
    known["status"] = {"replicas": 3, "readyReplicas": 2, "selector": "a=b"}
    hub = MemoryCluster(known, {"kind": "Deployment", "metadata": {"name": "decode", "labels": {"owner": "another"}}})
    await loop.reconcile(runtime_over(hub), REF, "u")
    assert ready(hub)["reason"] == "ChildConflict"
    status = hub.objects["DecodePool", "decode"]["status"]
    assert (status["replicas"], status["readyReplicas"], status["selector"]) == (3, 2, "a=b")


async def test_a_hub_that_is_not_reached_ends_no_loop():
    hub = MemoryCluster(decode_pool())
    hub.failure = ClusterUnreachableError("the hub is not reached")
    report = await loop.reconcile(runtime_over(hub), REF, "u")
    assert not report.gone
    assert report.again_seconds is not None


async def test_objects_that_wait_for_a_place_have_not_begun(monkeypatch: pytest.MonkeyPatch):
    hub = MemoryCluster()
    runtime = runtime_over(hub)
    begun: list[str] = []
    gate = asyncio.Event()

    async def slow(_: Runtime, ref: Ref, uid: str) -> Report:
        begun.append(ref.name)
        await gate.wait()
        return Report(gone=True)

    monkeypatch.setattr(loop, "reconcile", slow)
    refs = [Ref(DECODE_POOL, f"pool-{number}") for number in range(LOOKS_AT_ONCE + 3)]
    tasks = [asyncio.create_task(loop.keep(runtime, ref, ref.name)) for ref in refs]
    for _ in range(10):  # turns of the event loop, each far more than a task needs to get there
        await asyncio.sleep(0)
    assert len(begun) == LOOKS_AT_ONCE
    gate.set()
    await asyncio.gather(*tasks)
    assert sorted(begun) == sorted(ref.name for ref in refs)


def test_a_cluster_holds_up_its_own_pools_alone_and_no_probe():
    runtime = runtime_over(MemoryCluster())
    for name, cluster in (("near", ""), ("far", "eu"), ("far-too", "eu"), ("elsewhere", "us")):
        runtime.sharers.items[name] = Sharer("", name, name, "", 1, deleting=False, cluster=cluster)
    near, far, far_too, elsewhere = (
        runtime.place(Ref(PREFILL_POOL, name)) for name in ("near", "far", "far-too", "elsewhere")
    )
    assert far is far_too
    probes = [runtime.place(Ref(MEMBER_CLUSTER, name)) for name in ("eu", "us")]
    assert len({id(one) for one in (near, far, elsewhere, *probes)}) == 5


async def test_an_object_that_is_gone_or_has_a_namesake_ends_its_loop():
    assert (await loop.reconcile(runtime_over(MemoryCluster()), REF, "u")).gone
    assert (await loop.reconcile(runtime_over(MemoryCluster(decode_pool(uid="new"))), REF, "u")).gone


async def test_a_deleted_pool_takes_its_deployment_along_before_it_goes():
    hub = MemoryCluster(decode_pool())
    runtime = runtime_over(hub)
    await loop.reconcile(runtime, REF, "u")
    hub.objects["DecodePool", "decode"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not (await loop.reconcile(runtime, REF, "u")).gone
    assert ("Deployment", "decode") not in hub.objects
    assert (await loop.reconcile(runtime, REF, "u")).gone


def pair(value: str) -> list[Object]:
    """Return manifests of two children that belong together."""
    return [{"kind": kind, "metadata": {"name": "c", "labels": {}}, "data": value} for kind in ("ConfigMap", "Secret")]


async def test_what_stands_changes_only_when_every_change_is_accepted():
    hub = MemoryCluster()
    runtime = runtime_over(hub)
    await children.apply_all(runtime, REF, hub, pair("old"))  # pyright: ignore[reportArgumentType]
    assert hub.tried == [], "what is new may need other new ones"
    hub.refuses = "Secret"
    with pytest.raises(InvalidObjectError):
        await children.apply_all(runtime, REF, hub, pair("new"))  # pyright: ignore[reportArgumentType]
    assert {one["data"] for one in hub.objects.values()} == {"old"}
    hub.refuses = ""
    await children.apply_all(runtime, REF, hub, pair("new"))  # pyright: ignore[reportArgumentType]
    assert {one["data"] for one in hub.objects.values()} == {"new"}


async def test_a_start_tries_nothing_that_is_as_it_should_be():
    hub = MemoryCluster()
    await children.apply_all(runtime_over(hub), REF, hub, pair("old"))  # pyright: ignore[reportArgumentType]
    hub.applied.clear()
    await children.apply_all(runtime_over(hub), REF, hub, pair("old"))  # pyright: ignore[reportArgumentType]
    assert (hub.tried, len(hub.applied)) == ([], 2)


async def test_an_object_of_somebody_else_is_never_applied_over():
    hub = MemoryCluster({"kind": "Secret", "metadata": {"name": "s", "labels": {}}})
    manifest = {"kind": "Secret", "metadata": {"name": "s", "labels": {"app.kubernetes.io/managed-by": "x"}}}
    with pytest.raises(ChildConflictError, match="Secret s exists in namespace ns"):
        await children.apply(runtime_over(hub), REF, hub, manifest)  # pyright: ignore[reportArgumentType]
    assert hub.applied == []
    assert SECRET.path("ns", "s") == "/api/v1/namespaces/ns/secrets/s"


async def test_not_leading_any_more_is_nobodys_condition(monkeypatch: pytest.MonkeyPatch):
    async def silenced(*_: Any) -> Report:
        raise NotLeaderError("not written")

    monkeypatch.setitem(loop.JUDGES, DECODE_POOL, silenced)
    hub = MemoryCluster(decode_pool())
    assert not (await loop.reconcile(runtime_over(hub), REF, "u")).gone
    assert hub.applied == []
