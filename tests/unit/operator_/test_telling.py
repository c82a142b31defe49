"""Proves that what the operator tells can be used: Events and drift are counted, log lines name their object."""

# ruff: noqa: ARG002  # the fake takes what the Protocol passes
import json
import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from prfaas.kube.session import ObjectKind
from prfaas.telemetry.logs import JsonFormatter, TextFormatter
from prfaas_operator import logs, metrics
from prfaas_operator.clusters.kinds import DECODE_POOL, Object
from prfaas_operator.controller import events
from prfaas_operator.controller import queue as queues
from prfaas_operator.controller.children import Children
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import ReconcileQueue, Ref
from prfaas_operator.errors import ConflictError

SUBJECT = {
    "apiVersion": "prfaas.io/v1alpha1", "kind": "DecodePool", "metadata": {"name": "d", "namespace": "ns", "uid": "u"}
}  # fmt: skip
REF = Ref(DECODE_POOL, "d")


class Hub:
    """An API server in memory that knows creation, merge patches and apply, and forgets on demand."""

    namespace = "ns"

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}

    def now(self) -> datetime:
        return datetime(2026, 5, 1, tzinfo=UTC)

    async def create(self, kind: ObjectKind, body: Object) -> Object:
        if body["metadata"]["name"] in self.objects:
            raise ConflictError("exists")
        return self.objects.setdefault(body["metadata"]["name"], body)

    async def get(self, kind: ObjectKind, name: str) -> Object | None:
        return self.objects.get(name)

    async def merge(self, kind: ObjectKind, name: str, patch: Object) -> Object:
        self.objects[name] = {**self.objects[name], **patch}
        return self.objects[name]

    async def apply(self, body: Object) -> Object:
        self.objects[body["metadata"]["name"]] = json.loads(json.dumps(body))
        self.objects[body["metadata"]["name"]]["metadata"]["uid"] = "c"
        return self.objects[body["metadata"]["name"]]


async def test_the_same_words_are_counted_and_other_words_are_another_event():
    hub: Any = Hub()
    for message in ("a", "a", "b", "a"):
        await events.post(hub, SUBJECT, "Warning", "Broken", message)
    assert sorted((one["message"], one["count"]) for one in hub.objects.values()) == [("a", 3), ("b", 1)]


async def test_a_recreated_namesake_has_its_own_events():
    hub: Any = Hub()
    again = {**SUBJECT, "metadata": {**SUBJECT["metadata"], "uid": "u2"}}
    for subject in (SUBJECT, again):
        await events.post(hub, subject, "Normal", "Fine", "a")
    assert [one["count"] for one in hub.objects.values()] == [1, 1]


def line_of(formatter: logging.Formatter, **extra: Any) -> str:
    record = logging.LogRecord("prfaas_operator.x", logging.WARNING, "", 0, "it %s", ("broke",), None)
    record.__dict__.update(extra)
    return formatter.format(record)


@pytest.fixture
def about_a_pool() -> None:
    logs.about(kind="DecodePool", namespace="ns", name="d", uid="u", cluster="")
    logs.add(cluster="hub")


def test_a_json_line_names_its_object_and_a_text_line_too(about_a_pool):
    fields = json.loads(line_of(JsonFormatter("operator", logs.keys_of)))
    assert {key: fields[key] for key in ("level", "message", *logs.KEYS)} == {
        "level": "warning", "message": "it broke", "kind": "DecodePool", "namespace": "ns", "name": "d",
        "cluster": "hub", "uid": "u",
    }  # fmt: skip
    text = line_of(TextFormatter("operator", logs.keys_of))
    assert text.endswith("it broke kind=DecodePool namespace=ns name=d cluster=hub uid=u")


def test_a_line_of_kopf_names_the_object_that_kopf_attached():
    reference = {"apiVersion": "x", "kind": "PrefillPool", "name": "p", "namespace": "ns", "uid": "v"}
    token = logs.OBJECT.set(None)
    fields = json.loads(line_of(JsonFormatter("operator", logs.keys_of), k8s_ref=reference))
    logs.OBJECT.reset(token)
    assert (fields["kind"], fields["name"], fields["uid"]) == ("PrefillPool", "p", "v")


def counted(kind: str) -> float:
    return metrics.DRIFT_REVERTED.labels(kind)._value.get()  # pyright: ignore[reportAttributeAccessIssue]


async def test_our_own_change_is_no_drift_and_a_foreign_one_is():
    hub: Any = Hub()
    children = Children(HubView(hub, ReconcileQueue()), lambda _: None)
    manifest = {"kind": "ConfigMap", "metadata": {"name": "c", "labels": {}}, "data": {"a": "1"}}
    before = counted("ConfigMap")
    await children.apply(REF, hub, manifest)
    await children.apply(REF, hub, {**manifest, "data": {"a": "2"}})
    assert counted("ConfigMap") == before
    hub.objects["c"]["data"]["a"] = "theirs"
    await children.apply(REF, hub, {**manifest, "data": {"a": "2"}})
    assert hub.objects["c"]["data"]["a"] == "2"
    del hub.objects["c"]
    await children.apply(REF, hub, {**manifest, "data": {"a": "2"}})
    assert counted("ConfigMap") == before + 2


def test_what_waits_is_counted_until_it_is_looked_at():
    queue = ReconcileQueue()
    waker = queue.of(REF, "u")
    assert queue.depth() == 0
    queue.wake(REF)
    queue.wake(REF)
    assert queue.depth() == 1
    with waker.reconciling():
        assert queue.depth() == 0
        queue.wake(REF)  # while it is being looked at: another look is due
    assert queue.depth() == 1


def test_a_look_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch):
    queue = ReconcileQueue()
    with queue.of(REF, "u").reconciling():
        assert queue.stuck() == ""
        now = queues.time.monotonic()
        monkeypatch.setattr(queues.time, "monotonic", lambda: now + queues.STUCK_SECONDS + 1)
        assert queue.stuck().startswith("DecodePool d has been reconciled for 301 s")
    assert queue.stuck() == ""
