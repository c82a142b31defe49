"""Proves on an API server in memory that a status is always written, and that informers lose nothing."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.memory_cluster import MemoryCluster

from prfaas.telemetry.tracing import OFF
from prfaas_operator.clusters.kinds import DECODE_POOL, MEMBER_CLUSTER, PREFILL_POOL, SECRET, Object
from prfaas_operator.controller.children import Children
from prfaas_operator.controller.loop import RECONCILES_AT_ONCE, Controller, _pause_seconds
from prfaas_operator.controller.queue import ReconcileQueue, Ref
from prfaas_operator.controller.status import RESYNC_SECONDS, RETRY_SECONDS, ReconcileResult
from prfaas_operator.errors import ChildConflictError, ClusterUnreachableError, InvalidObjectError, NotLeaderError
from prfaas_operator.options import OperatorOptions
from prfaas_operator.plan.certificates import CertificateMode
from prfaas_operator.plan.conditions import no, yes
from prfaas_operator.plan.member import Contact
from prfaas_operator.plan.roles import Sharer
from prfaas_operator.reconcile.member import MemberReconciler, SecretGuard, TokenRenewal
from prfaas_operator.serve import assemble

REF = Ref(DECODE_POOL, "decode")


def decode_pool(**metadata: Any) -> Object:
    return {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "DecodePool",
        "metadata": {"name": "decode", "namespace": "ns", "uid": "u", "generation": 1, **metadata},
        "spec": {"model": {"name": "tiny", "source": "builtin:tiny"}},
    }


async def refuse(name: str, namespace: str, access: Any) -> Any:
    raise ClusterUnreachableError(f"{name} is not reached")


def make_controller(hub: MemoryCluster) -> Controller:
    options = OperatorOptions("ns", "reg/g:1", "reg/w:1", "reg/c:1", certificates=CertificateMode.DISABLED)
    return assemble(hub, refuse, ReconcileQueue(), options, OFF).controller  # pyright: ignore[reportArgumentType]  # only what these tests need


def make_children(hub: MemoryCluster) -> Children:
    return make_controller(hub)._children


async def look(controller: Controller, uid: str = "u") -> ReconcileResult:
    """Reconcile the pool once, as a resync does: from the API server."""
    return await controller.reconcile(REF, uid, is_resync=True)


def ready(hub: MemoryCluster) -> dict[str, Any]:
    return hub.objects["DecodePool", "decode"]["status"]["conditions"][0]


async def test_an_object_restored_with_an_older_version_does_not_count_as_deleted():
    hub = MemoryCluster(decode_pool(uid="restored"))
    controller = make_controller(hub)
    controller.hub.put(DECODE_POOL, decode_pool(uid="u", resourceVersion="1000000"))
    assert not (await controller.reconcile(REF, "restored")).gone
    assert ready(hub)


async def test_a_second_look_at_an_unchanged_object_writes_nothing():
    hub = MemoryCluster(decode_pool())
    controller = make_controller(hub)
    await look(controller)
    assert [body["kind"] for body in hub.applied] == ["Deployment", "PodDisruptionBudget", "DecodePool", "Event"]
    hub.applied.clear()
    await look(controller)
    assert hub.applied == []


async def test_a_bug_becomes_a_condition_and_the_loop_continues(monkeypatch: pytest.MonkeyPatch):
    async def broken(*_: Any) -> ReconcileResult:
        raise KeyError("surprise")

    hub = MemoryCluster(decode_pool())
    controller = make_controller(hub)
    monkeypatch.setitem(controller._reconciles, DECODE_POOL, broken)  # pyright: ignore[reportArgumentType]
    result = await look(controller)
    assert not result.gone
    assert (ready(hub)["status"], ready(hub)["reason"]) == ("False", "InternalError")
    assert "surprise" in ready(hub)["message"]


async def test_a_paused_object_changes_nothing_but_its_status_until_it_is_deleted():
    hub = MemoryCluster(decode_pool(annotations={"prfaas.io/paused": "true"}))
    controller = make_controller(hub)
    assert not (await look(controller)).gone
    assert [body["kind"] for body in hub.applied] == ["DecodePool", "Event"]
    assert (ready(hub)["status"], ready(hub)["reason"]) == ("Unknown", "Paused")
    hub.objects["DecodePool", "decode"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert (await look(controller)).gone


@pytest.mark.parametrize("value", ["false", "True", "yes", ""])
async def test_only_the_word_true_pauses(value: str):
    hub = MemoryCluster(decode_pool(annotations={"prfaas.io/paused": value}))
    await look(make_controller(hub))
    assert ("Deployment", "decode") in hub.objects


async def test_an_object_of_a_newer_version_is_reported_as_invalid():
    newer = decode_pool()
    newer["spec"]["engine"] = {"type": "quantum"}
    hub = MemoryCluster(newer)
    await look(make_controller(hub))
    assert ready(hub)["reason"] == "Invalid"
    assert "DecodePool decode does not fit this version of prfaas" in ready(hub)["message"]


async def test_a_status_of_a_newer_version_is_written_anew():
    newer = decode_pool()
    newer["status"] = {"replicasOwner": "Oracle", "replicas": 3}
    hub = MemoryCluster(newer)
    await look(make_controller(hub))
    assert ("Deployment", "decode") in hub.objects
    assert hub.objects["DecodePool", "decode"]["status"]["replicasOwner"] == "User"


async def test_a_failure_keeps_the_counts_that_were_known():
    known = decode_pool()
    known["status"] = {"replicas": 3, "readyReplicas": 2, "selector": "a=b"}
    hub = MemoryCluster(known, {"kind": "Deployment", "metadata": {"name": "decode", "labels": {"owner": "another"}}})
    await look(make_controller(hub))
    assert ready(hub)["reason"] == "ChildConflict"
    status = hub.objects["DecodePool", "decode"]["status"]
    assert (status["replicas"], status["readyReplicas"], status["selector"]) == (3, 2, "a=b")


async def test_a_hub_that_is_not_reached_ends_no_loop():
    hub = MemoryCluster(decode_pool())
    hub.failure = ClusterUnreachableError("the hub is not reached")
    result = await look(make_controller(hub))
    assert not result.gone
    assert result.again_seconds is not None


async def test_objects_that_wait_for_a_place_have_not_begun(monkeypatch: pytest.MonkeyPatch):
    hub = MemoryCluster()
    controller = make_controller(hub)
    begun: list[str] = []
    gate = asyncio.Event()

    async def slow(ref: Ref, uid: str, *, is_resync: bool) -> ReconcileResult:
        begun.append(ref.name)
        await gate.wait()
        return ReconcileResult(gone=True)

    monkeypatch.setattr(controller, "reconcile", slow)
    refs = [Ref(PREFILL_POOL, f"pool-{number}") for number in range(RECONCILES_AT_ONCE + 3)]
    tasks = [asyncio.create_task(controller.run(ref, ref.name)) for ref in refs]
    for _ in range(10):  # turns of the event loop, each far more than a task needs to get there
        await asyncio.sleep(0)
    assert len(begun) == RECONCILES_AT_ONCE
    gate.set()
    await asyncio.gather(*tasks)
    assert sorted(begun) == sorted(ref.name for ref in refs)


def test_a_cluster_delays_only_its_own_pools_and_no_probe():
    controller = make_controller(MemoryCluster())
    for name, cluster in (("near", ""), ("far", "eu"), ("far-too", "eu"), ("elsewhere", "us")):
        controller.hub.sharers[name] = Sharer("", name, name, "", 1, deleting=False, cluster=cluster)
    near, far, far_too, elsewhere = (
        controller.slot(Ref(PREFILL_POOL, name)) for name in ("near", "far", "far-too", "elsewhere")
    )
    assert far is far_too
    probes = [controller.slot(Ref(MEMBER_CLUSTER, name)) for name in ("eu", "us")]
    assert len({id(one) for one in (near, far, elsewhere, *probes)}) == 5


async def test_a_deleted_object_or_one_with_a_namesake_ends_its_loop():
    assert (await look(make_controller(MemoryCluster()))).gone
    assert (await look(make_controller(MemoryCluster(decode_pool(uid="new"))))).gone


async def test_a_deleted_pool_takes_its_deployment_along_before_it_goes():
    hub = MemoryCluster(decode_pool())
    controller = make_controller(hub)
    await look(controller)
    hub.objects["DecodePool", "decode"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not (await look(controller)).gone
    assert ("Deployment", "decode") not in hub.objects
    assert (await look(controller)).gone


def pair(value: str) -> list[Object]:
    """Return manifests of two children that belong together."""
    return [{"kind": kind, "metadata": {"name": "c", "labels": {}}, "data": value} for kind in ("ConfigMap", "Secret")]


async def test_what_stands_changes_only_when_every_change_is_accepted():
    hub = MemoryCluster()
    children = make_children(hub)
    await children.apply_all(REF, hub, pair("old"))  # pyright: ignore[reportArgumentType]
    assert hub.tried == [], "what is new may need other new ones"
    hub.refuses = "Secret"
    with pytest.raises(InvalidObjectError):
        await children.apply_all(REF, hub, pair("new"))  # pyright: ignore[reportArgumentType]
    assert {one["data"] for one in hub.objects.values()} == {"old"}
    hub.refuses = ""
    await children.apply_all(REF, hub, pair("new"))  # pyright: ignore[reportArgumentType]
    assert {one["data"] for one in hub.objects.values()} == {"new"}


async def test_a_start_tries_nothing_that_is_as_it_should_be():
    hub = MemoryCluster()
    await make_children(hub).apply_all(REF, hub, pair("old"))  # pyright: ignore[reportArgumentType]
    hub.applied.clear()
    await make_children(hub).apply_all(REF, hub, pair("old"))  # pyright: ignore[reportArgumentType]
    assert (hub.tried, len(hub.applied)) == ([], 2)


async def test_never_applies_to_a_foreign_object():
    hub = MemoryCluster({"kind": "Secret", "metadata": {"name": "s", "labels": {}}})
    manifest = {"kind": "Secret", "metadata": {"name": "s", "labels": {"app.kubernetes.io/managed-by": "x"}}}
    with pytest.raises(ChildConflictError, match="Secret s exists in namespace ns"):
        await make_children(hub).apply(REF, hub, manifest)  # pyright: ignore[reportArgumentType]
    assert hub.applied == []
    assert SECRET.path("ns", "s") == "/api/v1/namespaces/ns/secrets/s"


async def test_a_pod_of_an_untested_version_marks_its_pool_as_long_as_it_is_there(make):
    hub = MemoryCluster(decode_pool())
    controller = make_controller(hub)
    pods = controller.hub.pods
    pods.synced.set()
    seen: list[str] = []
    for words in ("", "vLLM 0.34.0 is new", ""):
        pods.items["p"] = make.pod("p", "decode", pool_uid="u", untested=words)
        await look(controller)
        conditions = hub.objects["DecodePool", "decode"]["status"]["conditions"]
        seen.append(next((one["message"] for one in conditions if one["reason"] == "UntestedVersion"), ""))
    assert seen == ["", "pod p: vLLM 0.34.0 is new", ""]


def test_an_unproven_engine_is_no_reason_to_come_again_soon():
    unproven = {"Ready": yes("AllReady", "1 of 1"), "EngineProven": no("UntestedVersion", "new")}
    assert _pause_seconds(ReconcileResult(unproven)) == RESYNC_SECONDS
    assert _pause_seconds(ReconcileResult({**unproven, "Ready": no("RollingOut", "0 of 1")})) == RETRY_SECONDS


async def test_a_lost_lead_is_no_condition(monkeypatch: pytest.MonkeyPatch):
    async def silenced(*_: Any) -> ReconcileResult:
        raise NotLeaderError("not written")

    hub = MemoryCluster(decode_pool())
    controller = make_controller(hub)
    monkeypatch.setitem(controller._reconciles, DECODE_POOL, silenced)  # pyright: ignore[reportArgumentType]
    assert not (await look(controller)).gone
    assert hub.applied == []


def member_cluster(*, revoked: bool, **metadata: Any) -> Object:
    return {
        "apiVersion": "prfaas.io/v1alpha1",
        "kind": "MemberCluster",
        "metadata": {"name": "eu", "namespace": "ns", "uid": "u", "generation": 2, **metadata},
        "spec": {"kubeconfigSecretRef": {"name": "k"}, "link": {"capacityMbps": 1}, "revoked": revoked},
        "status": {"admittedTime": "2026-01-01T00:00:00Z"},
    }


class Hostile:
    """A member that answers a probe, and no list."""

    async def contact(self, *_: Any) -> Contact:
        return Contact("v1.34.0")

    def owners(self, _: str) -> None:
        return None

    async def owned(self, _: str) -> Any:
        raise ClusterUnreachableError("eu hung up")


async def look_at_member(live: Object) -> tuple[str, str | None]:
    """Return the reason of Ready and the admittedTime after a look at a member that is hostile."""
    hub = MemoryCluster(live)
    controller = make_controller(hub)
    none: Any = SimpleNamespace(conditions=lambda _: {})
    members: Any = Hostile()
    reconciler = MemberReconciler(controller.hub, members, none, SecretGuard(controller.hub), TokenRenewal(30))
    controller._reconciles = {MEMBER_CLUSTER: reconciler.reconcile}
    await controller.reconcile(Ref(MEMBER_CLUSTER, "eu"), "u", is_resync=True)
    status = hub.objects["MemberCluster", "eu"]["status"]
    (reason,) = (one["reason"] for one in status["conditions"] if one["type"] == "Ready")
    return reason, status.get("admittedTime")


PAUSES = {"annotations": {"prfaas.io/paused": "true"}}
LEAVES = {"deletionTimestamp": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("metadata", "reason"), [({}, "Revoked"), (PAUSES, "Paused"), (LEAVES, "ClusterUnreachable")], ids=str
)
async def test_a_revoked_member_is_the_place_it_was_no_more_whatever_else_fails(metadata: Any, reason: str):
    assert await look_at_member(member_cluster(revoked=True, **metadata)) == (reason, None)


@pytest.mark.parametrize(("metadata", "reason"), [({}, "ClusterUnreachable"), (PAUSES, "Paused")], ids=str)
async def test_another_member_stays_the_place_it_is_while_it_fails(metadata: Any, reason: str):
    assert await look_at_member(member_cluster(revoked=False, **metadata)) == (reason, "2026-01-01T00:00:00Z")
