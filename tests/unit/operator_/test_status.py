"""Proves in memory that a status the hub's CRD refuses is written as far as it goes, and reported once."""

import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from prfaas.kube.session import ObjectKind
from prfaas_operator.clusters.kinds import DECODE_POOL, Object
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import ReconcileQueue, Ref
from prfaas_operator.controller.status import ReconcileResult, StatusWriter
from prfaas_operator.errors import InvalidObjectError, ServerFailedError
from prfaas_operator.plan.conditions import no, yes

REF = Ref(DECODE_POOL, "d")
RESULT = ReconcileResult({"Ready": yes("AllReady", "")}, {"replicas": 2, "replicasOwner": "User"}, again_seconds=300)


class Hub:
    """One object behind a CRD, which refuses what `refusal` says."""

    namespace = "ns"

    def __init__(self) -> None:
        metadata = {"name": "d", "namespace": "ns", "uid": "u", "generation": 1}
        self.live: Object = {"apiVersion": "prfaas.io/v1alpha1", "kind": "DecodePool", "metadata": metadata}
        self.events: list[str] = []
        self.lacks = ""
        self.asks = ""

    def now(self) -> datetime:
        return datetime(2026, 5, 1, tzinfo=UTC)

    async def create(self, kind: ObjectKind, body: Object) -> Object:  # noqa: ARG002
        self.events.append(body["reason"])
        return body

    async def apply(self, body: Object, *, subresource: str = "", dry_run: bool = False) -> Object:  # noqa: ARG002
        if self.lacks in body["status"]:
            raise ServerFailedError(f"hub, DecodePool d: .status.{self.lacks}: field not declared in schema")
        if self.asks and self.asks not in body["status"]:
            raise InvalidObjectError(f"hub, DecodePool d: status.{self.asks}: Required value")
        self.live["status"] = copy.deepcopy(body["status"])
        return self.live


async def written(hub: Hub, writer: StatusWriter) -> dict[str, Any]:
    result = await writer.write(REF, copy.deepcopy(hub.live), RESULT)
    conditions = {one["type"]: one for one in hub.live["status"]["conditions"]}
    return {**hub.live["status"], "conditions": conditions, "again": result.again_seconds}


async def test_omits_what_an_older_crd_lacks_and_reports_it_once():
    hub = Hub()
    writer = StatusWriter(HubView(hub, ReconcileQueue()))  # pyright: ignore[reportArgumentType]
    hub.lacks = "replicasOwner"
    for _ in range(3):
        found = await written(hub, writer)
        assert (found["replicas"], found["again"]) == (2, 30)
        assert "replicasOwner" not in found
        assert found["conditions"]["CRDFits"]["status"] == "False"
        assert ".status.replicasOwner: field not declared" in found["conditions"]["CRDFits"]["message"]
    assert hub.events.count("CRDMismatch") == 1
    hub.lacks = ""
    found = await written(hub, writer)
    assert (found["replicasOwner"], found["again"]) == ("User", 300)
    assert "CRDFits" not in found["conditions"]
    hub.lacks = "replicasOwner"
    del hub.live["status"]["replicasOwner"]  # pruned
    await written(hub, writer)
    assert hub.events.count("CRDMismatch") == 2, "once more is another time"


async def test_where_nothing_can_be_written_an_event_says_it_once():
    hub = Hub()
    writer = StatusWriter(HubView(hub, ReconcileQueue()))  # pyright: ignore[reportArgumentType]
    hub.asks = "invented"
    for _ in range(3):
        with pytest.raises(InvalidObjectError):
            await written(hub, writer)
    assert hub.events == ["CRDMismatch"]
    assert "status" not in hub.live


async def test_another_failure_is_no_fault_of_the_crd():
    hub = Hub()
    writer = StatusWriter(HubView(hub, ReconcileQueue()))  # pyright: ignore[reportArgumentType]

    async def fail(*_: Any, **__: Any) -> Object:
        raise ServerFailedError("hub, DecodePool d: etcdserver: no space")

    hub.apply = fail  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ServerFailedError):
        await written(hub, writer)
    assert not hub.events


def of_engine(hub: Hub, type_: str) -> None:
    model = {"name": "m", "source": "/models/m"}
    hub.live["spec"] = {"model": model, "engine": {"type": type_, "image": "e:1"}, "replicas": 1}


async def test_marks_an_experimental_engine_beside_every_ready_and_writes_it_once():
    hub = Hub()
    writer, seen = StatusWriter(HubView(hub, ReconcileQueue())), []  # pyright: ignore[reportArgumentType]
    of_engine(hub, "sglang")
    apply = hub.apply

    async def count(body: Object, **more: Any) -> Object:
        seen.append({one["type"]: one["status"] for one in body["status"]["conditions"]})
        return await apply(body, **more)

    hub.apply = count  # pyright: ignore[reportAttributeAccessIssue]
    failed = ReconcileResult({"Ready": no("ClusterUnreachable", "no answer")})
    for result in (RESULT, RESULT, failed, failed, RESULT):
        came_back = await writer.write(REF, copy.deepcopy(hub.live), result)
        assert came_back == result, "it is no reason to come again sooner"
    ready, failing = ({"Ready": status, "EngineProven": "False"} for status in ("True", "False"))
    assert seen == [ready, failing, ready]
    of_engine(hub, "vllm")
    await writer.write(REF, copy.deepcopy(hub.live), RESULT)
    assert seen[3:] == [{"Ready": "True"}], "it goes with the engine, or once a newer operator knows better"


async def test_a_spec_that_cannot_be_read_is_no_engine_and_hides_no_status():
    hub = Hub()
    of_engine(hub, "unheard-of")
    found = await written(hub, StatusWriter(HubView(hub, ReconcileQueue())))  # pyright: ignore[reportArgumentType]
    assert found["conditions"].keys() == {"Ready"}
