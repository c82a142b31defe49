"""Proves on an API server in memory that a status is written whatever happens, and that informers lose nothing."""

# ruff: noqa: ARG002  # the fakes take what the Protocol passes
import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest

from prfaas_operator.clusters.api import DECODE_POOL, POD, SECRET, Kind, Object, Page, WatchEvent
from prfaas_operator.clusters.informer import Informer
from prfaas_operator.errors import ChildConflictError, ClusterUnreachableError, ConflictError, ExpiredError
from prfaas_operator.reconcile import children, loop
from prfaas_operator.reconcile.runtime import Report, Runtime
from prfaas_operator.reconcile.wakers import Ref

REF = Ref(DECODE_POOL, "decode")


class MemoryCluster:
    """`clusters.api.Cluster` over a dict; an apply replaces what it names, which is enough for one writer."""

    namespace = "ns"

    def __init__(self, *objects: Object):
        self.objects = {(one["kind"], one["metadata"]["name"]): one for one in objects}
        self.applied: list[Object] = []
        self.failure: Exception | None = None

    async def get(self, kind: Kind, name: str) -> Object | None:
        if self.failure:
            raise self.failure
        return copy.deepcopy(self.objects.get((kind.name, name)))

    async def list_all(self, kind: Kind, *, selector: str = "") -> list[Object]:
        return [one for (name, _), one in self.objects.items() if name == kind.name]

    async def apply(self, body: Object, *, subresource: str = "") -> Object:
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
    assert [body["kind"] for body in hub.applied] == ["Deployment", "DecodePool", "Event"]
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


async def test_an_object_of_a_newer_version_is_reported_as_invalid():
    newer = decode_pool()
    newer["spec"]["engine"] = {"type": "quantum"}
    hub = MemoryCluster(newer)
    await loop.reconcile(runtime_over(hub), REF, "u")
    assert ready(hub)["reason"] == "Invalid"


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


async def test_an_object_of_somebody_else_is_never_applied_over():
    hub = MemoryCluster({"kind": "Secret", "metadata": {"name": "s", "labels": {}}})
    manifest = {"kind": "Secret", "metadata": {"name": "s", "labels": {"app.kubernetes.io/managed-by": "x"}}}
    with pytest.raises(ChildConflictError, match="Secret s exists in namespace ns"):
        await children.apply(runtime_over(hub), REF, hub, manifest)  # pyright: ignore[reportArgumentType]
    assert hub.applied == []
    assert SECRET.path("ns", "s") == "/api/v1/namespaces/ns/secrets/s"


class Script:
    """A server whose lists and watches follow a script; an exception in it is raised."""

    def __init__(self, lists: list[Any], watches: list[Any]):
        self._lists = iter(lists)
        self._watches = iter(watches)
        self.done = asyncio.Event()

    async def page(self, kind: Kind, *, selector: str = "", after: str = "") -> Page:
        answer = next(self._lists)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def watch(self, kind: Kind, *, selector: str, since: str) -> AsyncIterator[WatchEvent]:
        step = next(self._watches, None)
        if step is None:
            self.done.set()
            await asyncio.Event().wait()
        for event in step or ():
            if isinstance(event, Exception):
                raise event
            yield event


def thing(name: str, version: str) -> Object:
    return {"metadata": {"name": name, "resourceVersion": version}}


async def run(script: Script) -> tuple[dict[str, str], list[str]]:
    """Run an informer to the end of a script; return its items and whom it told about."""
    told: list[str] = []
    informer = Informer(
        script,  # pyright: ignore[reportArgumentType]
        POD,
        "",
        lambda one: f"{one['metadata']['name']}@{one['metadata']['resourceVersion']}",
        told.append,
    )
    task = asyncio.create_task(informer.run())
    await asyncio.wait_for(script.done.wait(), 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return informer.items, told


async def test_an_informer_follows_pages_and_events():
    script = Script(
        [Page([thing("a", "1")], "1", "more"), Page([thing("b", "2")], "2", "")],
        [[WatchEvent("MODIFIED", thing("a", "3")), WatchEvent("DELETED", thing("b", "4"))], []],
    )
    items, told = await run(script)
    assert items == {"a": "a@3"}
    assert sorted(told[:2]) + told[2:] == ["a@1", "b@2", "a@3", "b@4"]


async def test_an_informer_lists_again_when_its_version_expired_and_tells_what_it_missed():
    script = Script(
        [Page([thing("a", "1"), thing("b", "1")], "1", ""), Page([thing("a", "5")], "5", "")],
        [[ExpiredError("too old")]],
    )
    items, told = await run(script)
    assert items == {"a": "a@5"}
    assert sorted(told[2:]) == ["a@5", "b@1"]


async def test_an_informer_keeps_what_it_saw_while_the_server_is_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prfaas_operator.clusters.informer.FIRST_BACKOFF_SECONDS", 0)
    cut = ClusterUnreachableError("cut")
    script = Script(
        [Page([thing("a", "1")], "1", ""), cut, ConflictError("x"), Page([thing("a", "1")], "9", "")], [[cut]]
    )
    items, told = await run(script)
    assert items == {"a": "a@1"}
    assert told == ["a@1"], "nothing changed, nobody is told"
