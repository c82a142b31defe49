"""Proves on real API servers that CRDs and objects of another version than ours are reported, harm nothing, heal.

The CRDs in the hub are changed under the running operator, as an upgrade or a rollback in the wrong order does it, and
put right in the end. Nothing is ever started again.
"""

import base64
import contextlib
import copy
import gzip
import json
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.clusters.reader import RefusedError

pytestmark = pytest.mark.clusters

CRDS = {
    crd["spec"]["names"]["kind"]: crd
    for crd in (
        yaml.load(path.read_text(), yaml.CSafeLoader) for path in (Path(__file__).parents[3] / "crds").glob("*.yaml")
    )
}
Change = Callable[[dict[str, Any]], object]
LOOKS = 5
"""How often a pool is looked at while nothing may be written."""
TURNS = count()
CHANGED: set[str] = set()
"""Kinds whose CRD is not ours now."""


def changed(kind: str, change: Change) -> dict[str, Any]:
    """Return a CRD with `change` made to the properties of its object."""
    crd = copy.deepcopy(CRDS[kind])
    change(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"])
    return crd


def install(world, crd: dict[str, Any]) -> None:
    """Replace a CRD; the API server takes a moment until it goes by it."""
    world.hub.kubectl("replace", "-f", "-", stdin=json.dumps(crd))
    kind = crd["spec"]["names"]["kind"]
    (CHANGED.discard if crd is CRDS[kind] else CHANGED.add)(kind)


@pytest.fixture(scope="module")
def hub(start_cluster):
    """A cluster of this file's own: CRDs are changed in it, which other files need as they are."""
    return start_cluster("other-versions")


@pytest.fixture(scope="module")
def operator_flags() -> tuple[str, ...]:
    return ("--certificates", "Disabled")


@pytest.fixture
def crds(world) -> Iterator[Callable[[str, Change], None]]:
    """Return how to change a CRD; all are put right in the end."""
    yield lambda kind, change: install(world, changed(kind, change))
    put_right(world)


def put_right(world) -> None:
    for kind in sorted(CHANGED):
        install(world, CRDS[kind])


def wait_collector(world) -> None:
    """Wait until the cluster's garbage collector has learned of our kinds, which it looks for each 30 s.

    Otherwise it asks repeatedly for the owners that it cannot find, and once may do so while their kind is not served:
    it takes that for their end, and deletes what they own.
    """
    absent = {"apiVersion": "prfaas.io/v1alpha1", "kind": "DecodePool", "name": "nobody", "uid": "nobody"}
    orphan = {"name": "orphan", "ownerReferences": [absent]}
    world.hub.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": orphan})
    world.eventually(lambda: not world.hub.exists("configmap", "orphan"), "the collector knows our kinds")


@pytest.fixture(scope="module")
def joined(world):
    """The member as eu, with the pool `away` in it, `home` in the hub, and a policy over both."""
    world.join("eu")
    world.hub.apply(
        world.pool("PrefillPool", "away", clusterName="eu"),
        world.pool("DecodePool", "home"),
        world.resource(
            "PrfaaSPolicy",
            "kimi",
            model="kimi-linear-tiny",
            decodePool="home",
            prefillPools=["away"],
            threshold={"mode": "Disabled"},
            gateway={"replicas": 0},
        ),
    )
    world.member.ready_up("away", "10.5.1")
    world.hub.ready_up("home", "10.5.2")
    world.hub.wait_reason("prfaas", "kimi", "AllReady")
    return world


def warnings(world, name: str, reason: str) -> list[dict[str, Any]]:
    """Return the Warnings with a reason about an object of the hub."""
    return world.hub.events(name, reason, "Warning")


def looks(world, kind: str) -> float:
    return world.metrics()[f'prfaas_operator_reconcile_seconds_count{{kind="{kind}"}}']


def is_unwritten(world, name: str) -> bool:
    """Have a pool looked at without writing it; return whether that wrote neither it nor an Event."""

    def written() -> tuple[str, int]:
        version = world.hub.get("pfpool", name)["metadata"]["resourceVersion"]
        return version, sum(event["count"] for event in warnings(world, name, "CRDMismatch"))

    before, before_looks = written(), looks(world, "PrefillPool")
    # A label, since an annotation would begin a new generation of the Deployment.
    world.member.patch("deployment", name, {"metadata": {"labels": {"turn": f"t{next(TURNS)}"}}})
    world.eventually(lambda: looks(world, "PrefillPool") > before_looks, "another look")
    return written() == before


def patched(world, name: str, patch: str, *more: str) -> dict[str, Any]:
    """Try to patch a PrefillPool; return it as it is then."""
    with contextlib.suppress(subprocess.CalledProcessError):
        return json.loads(world.hub.kubectl("patch", "pfpool", name, "--type=merge", "-p", patch, "-o", "json", *more))
    return world.hub.get("pfpool", name)


def assert_nothing_is_written(world, name: str) -> None:
    """See that an operator that has reported what is wrong rests."""
    world.eventually(lambda: is_unwritten(world, name), "all is reported")
    assert all(is_unwritten(world, name) for _ in range(LOOKS - 1))


def test_reports_a_field_that_an_older_crd_lacks_and_writes_all_others(joined, crds):
    crds("PrefillPool", lambda object_: object_["status"]["properties"].pop("replicasOwner"))

    def is_reported() -> bool:
        joined.hub.kubectl("annotate", "pfpool", "away", "look=again", "--overwrite")
        joined.hub.kubectl("annotate", "pfpool", "away", "look-")
        return joined.hub.condition("pfpool", "away", "CRDFits")["status"] == "False"

    joined.eventually(is_reported, "the condition is there")
    condition = joined.hub.condition("pfpool", "away", "CRDFits")
    assert condition["reason"] == "CRDMismatch"
    assert ".status.replicasOwner: field not declared in schema" in condition["message"]
    assert "apply the CRDs of the operator's version" in condition["message"]
    joined.eventually(lambda: warnings(joined, "away", "CRDMismatch"), "an Event")
    assert_nothing_is_written(joined, "away")
    joined.hub.scale("pfpool", "away", 2)
    scaled = lambda: joined.hub.get("pfpool", "away")["status"].get("replicas") == 2  # noqa: E731
    joined.eventually(scaled, "the rest of the status follows, and the pool works")
    assert joined.hub.get("pfpool", "away")["status"]["selector"], "autoscalers keep working"
    put_right(joined)
    joined.hub.scale("pfpool", "away", 1)
    whole = lambda: joined.hub.get("pfpool", "away")["status"].get("replicasOwner")  # noqa: E731
    joined.eventually(whole, "with the CRD put right the status is whole")
    fits = lambda: not joined.hub.condition("pfpool", "away", "CRDFits")["status"]  # noqa: E731
    joined.eventually(fits, "and mentions CRDs no longer")


def require_more(object_: dict[str, Any]) -> None:
    object_["status"]["properties"]["invented"] = {"type": "string"}
    object_["status"]["required"] = ["invented"]


def test_a_status_that_a_newer_crd_refuses_whole_becomes_one_event_and_the_pool_works(joined, crds):
    crds("PrefillPool", require_more)

    def is_reported() -> list[dict[str, Any]]:
        joined.hub.scale("pfpool", "away", 2)
        joined.hub.scale("pfpool", "away", 1)
        return [event for event in warnings(joined, "away", "CRDMismatch") if "status.invented" in event["message"]]

    (event,) = joined.eventually(is_reported, "an Event")
    assert event["count"] == 1
    assert_nothing_is_written(joined, "away")
    joined.hub.scale("pfpool", "away", 2)
    scaled = lambda: joined.member.get("deployment", "away")["spec"]["replicas"] == 2  # noqa: E731
    joined.eventually(scaled, "the pool works")
    put_right(joined)
    joined.hub.scale("pfpool", "away", 1)
    generation = joined.hub.get("pfpool", "away")["metadata"]["generation"]
    seen = lambda: joined.hub.get("pfpool", "away")["status"]["observedGeneration"] >= generation  # noqa: E731
    joined.eventually(seen, "with the CRD put right the status follows")


def table(world) -> dict[str, Any]:
    (packed,) = world.hub.get("configmap", "kimi-routes")["binaryData"].values()
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def allow_more(object_: dict[str, Any]) -> None:
    """Take an engine and a field of the future, with their own rules."""
    spec = object_["spec"]
    spec["properties"]["engine"]["properties"]["type"]["enum"].append("future")
    spec["properties"]["invented"] = {"type": "string"}
    del spec["x-kubernetes-validations"], spec["properties"]["engine"]["x-kubernetes-validations"]


def test_keeps_a_pool_of_a_newer_version_and_all_that_it_owns(joined, crds):
    crds("PrefillPool", allow_more)
    before, routes = joined.member.get("deployment", "away"), table(joined)
    newer = json.dumps({"spec": {"engine": {"type": "future"}, "invented": "x"}})

    joined.eventually(lambda: patched(joined, "away", newer)["spec"].get("invented") == "x", "the CRD takes it")
    message = joined.hub.wait_reason("pfpool", "away", "Invalid")["message"]
    assert "does not fit this version of prfaas" in message
    assert "engine.type" in message
    joined.eventually(lambda: warnings(joined, "away", "Invalid"), "an Event")
    # A removed pool leaves an orphan, so that the member is swept; what the newer pool owns is none.
    orphan = copy.deepcopy(before)
    orphan["metadata"] = {"name": "orphan", "labels": {**before["metadata"]["labels"], "prfaas.io/pool-uid": "nobody"}}
    orphan["spec"]["replicas"] = 0
    joined.member.apply({key: orphan[key] for key in ("apiVersion", "kind", "metadata", "spec")})
    joined.eventually(lambda: not joined.member.exists("deployment", "orphan"), "the member is swept")
    after = joined.member.get("deployment", "away")
    assert (after["metadata"]["uid"], after["spec"]) == (before["metadata"]["uid"], before["spec"])
    found = joined.hub.wait_reason("prfaas", "kimi", "Invalid")["message"]
    assert "PrefillPool away does not fit this version of prfaas" in found
    assert table(joined)["instances"] == routes["instances"], "the gateway keeps every instance"
    older = json.dumps({"spec": {"engine": {"type": "prfaas"}, "invented": None}})
    joined.hub.kubectl("patch", "pfpool", "away", "--type=merge", "-p", older)
    joined.hub.wait_reason("prfaas", "kimi", "AllReady")


def test_a_pool_of_a_newer_version_can_be_deleted(joined, crds):
    crds("PrefillPool", allow_more)
    newer = joined.pool("PrefillPool", "newer", clusterName="eu", invented="x")
    newer["spec"]["engine"] = {**newer["spec"].get("engine", {}), "type": "future"}

    def is_taken() -> bool:
        with contextlib.suppress(RefusedError):
            joined.hub.apply(newer)
        return joined.hub.exists("pfpool", "newer")

    joined.eventually(is_taken, "the CRD takes it")
    joined.hub.wait_reason("pfpool", "newer", "Invalid")
    # What it was before its kind of engine came to be, still runs.
    child = joined.member.get("deployment", "away")
    labels = {**child["metadata"]["labels"], "prfaas.io/pool-uid": joined.hub.get("pfpool", "newer")["metadata"]["uid"]}
    child["metadata"], child["spec"]["replicas"] = {"name": "newer", "labels": labels}, 0
    joined.member.apply({key: child[key] for key in ("apiVersion", "kind", "metadata", "spec")})

    joined.hub.delete("pfpool", "newer")
    assert not joined.member.exists("deployment", "newer"), "its Deployment went first"


def test_while_a_kind_is_not_served_nothing_changes_and_then_all_is_followed_again(joined, crds):
    wait_collector(joined)
    joined.hub.wait_reason("prfaas", "kimi", "AllReady")
    routes, children = table(joined), joined.children()
    unserved = copy.deepcopy(CRDS["DecodePool"])
    other = {**copy.deepcopy(unserved["spec"]["versions"][0]), "name": "v9", "storage": False}
    unserved["spec"]["versions"].append(other)
    unserved["spec"]["versions"][0]["served"] = False
    install(joined, unserved)

    served = lambda: joined.hub.kubectl("get", "--raw", "/apis/prfaas.io/v1alpha1")  # noqa: E731
    joined.eventually(lambda: '"decodepools"' not in served(), "the kind is not served")
    waits = lambda: "the watch of our kinds ended" in joined.log.read_text()  # noqa: E731
    joined.eventually(waits, "the operator waits for it")
    assert warnings(joined, "kimi", "DecodePoolNotFound") == [], "a pool that is not watched is not a removed pool"
    assert (table(joined)["instances"], joined.children()) == (routes["instances"], children)
    put_right(joined)

    def works() -> bool:
        joined.hub.kubectl("scale", "pfpool/away", "dcpool/home", "--replicas=2")
        kept = ((joined.member, "away"), (joined.hub, "home"))
        return all(where.get("deployment", name)["spec"]["replicas"] == 2 for where, name in kept)

    joined.eventually(works, "with its CRD back every kind is followed again")
    joined.hub.kubectl("scale", "pfpool/away", "dcpool/home", "--replicas=1")


def test_a_member_needs_no_crd_of_ours(joined):
    assert "prfaas.io" not in joined.member.kubectl("api-versions")


def test_deleting_everything_leaves_nothing(joined):
    joined.hub.delete_all("prfaas,pfpool,dcpool")
    joined.hub.delete_all("pmc")
    joined.eventually(lambda: not joined.children(), "no child is left")
