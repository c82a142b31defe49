"""Proves on a real API server that two pools share one Deployment: roles are labels, and changing one restarts nothing.

A thread stands in for the kubelet: it makes pods ready whose gates are open, and keeps conditions of others.
"""

import json
import subprocess
from collections import Counter

import pytest
from tests.clusters.operator_.kubelet import ROLE, Kubelet, Pods, is_true, role

pytestmark = pytest.mark.clusters

GATE = "prfaas.io/role-assigned"


@pytest.fixture(scope="module")
def shared(world):
    """Return a world with a kubelet and pools `decode` and `swing`, which share 2 + 1 instances."""
    world.pods = Pods(world.hub)
    kubelet = world.kubelet = Kubelet(Pods(world.hub))
    kubelet.start()
    world.hub.apply(
        world.pool("DecodePool", "decode", replicas=2),
        world.resource("PrefillPool", "swing", shareWith="decode", replicas=1),
        # For the last test but one; an autoscaler looks every 15 s, beginning with the 15th.
        world.pool("DecodePool", "auto"),
        world.resource("PrefillPool", "auto-swing", shareWith="auto"),
        world.pool("DecodePool", "clash"),
        *(autoscaler(*target) for target in (("PrefillPool", "auto-swing"), ("DecodePool", "auto"))),
        *(autoscaler(*target) for target in (("DecodePool", "clash"), ("Deployment", "clash"))),
    )
    yield world
    kubelet.stop()
    world.pods.close()


def autoscaler(kind: str, name: str) -> dict:
    api_version = "apps/v1" if kind == "Deployment" else "prfaas.io/v1alpha1"
    metric = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": f"{kind.lower()}-{name}"},
        "spec": {
            "scaleTargetRef": {"apiVersion": api_version, "kind": kind, "name": name},
            "minReplicas": 1,
            "maxReplicas": 5,
            "metrics": [metric],
        },
    }


def instances(world, pool: str = "decode") -> dict[str, str]:
    """Return the roles of a shared Deployment's pods by name, of those that are not ending."""
    pods = world.pods.all(f"prfaas.io/pool={pool}")
    return {pod["metadata"]["name"]: role(pod) for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def scale(world, pool: str, replicas: int) -> None:
    world.hub.kubectl("scale", pool, f"--replicas={replicas}")


def wait_roles(world, pool: str = "decode", **wanted: int) -> dict[str, str]:
    """Return the instances once each role has as many as wanted, and no others exist."""

    def reached() -> dict[str, str] | None:
        found = instances(world, pool)
        return found if Counter(found.values()) == {name: count for name, count in wanted.items() if count} else None

    return world.eventually(reached, f"roles are {wanted}") if any(wanted.values()) else {}


def wait_ready(world) -> None:
    world.hub.wait_reason("dcpool", "decode", "AllReady")
    world.hub.wait_reason("pfpool", "swing", "AllReady")


def test_one_deployment_runs_the_instances_of_both_pools(shared):
    wait_ready(shared)  # before, the first ready instance decodes whatever it was to do
    found = wait_roles(shared, decode=2, prefill=1)
    assert shared.hub.get("deployment", "decode")["spec"]["replicas"] == 3
    assert not shared.hub.exists("deployment", "swing")
    assert not shared.hub.exists("configmap", "swing-settings")
    for pod in shared.hub.listing("pods", "prfaas.io/pool=decode"):
        assert pod["spec"]["readinessGates"] == [{"conditionType": GATE}]
        assert is_true(pod, GATE)
        assert pod["spec"]["containers"][0]["args"][pod["spec"]["containers"][0]["args"].index("--role") + 1] == "mixed"
    statuses = {
        name: shared.hub.get(kind, name)["status"] for kind, name in (("dcpool", "decode"), ("pfpool", "swing"))
    }
    assert {name: (one["replicas"], one["readyReplicas"]) for name, one in statuses.items()} == {
        "decode": (2, 2),
        "swing": (1, 1),
    }
    selected = {
        name: {pod["metadata"]["name"] for pod in shared.hub.listing("pods", one["selector"])}
        for name, one in statuses.items()
    }
    assert selected == {
        "decode": {name for name, role in found.items() if role == "decode"},
        "swing": {name for name, role in found.items() if role == "prefill"},
    }


@pytest.mark.parametrize(
    "changes",
    [[("pfpool/swing", 2), ("dcpool/decode", 1)], [("dcpool/decode", 2), ("pfpool/swing", 1)]],
    ids=["to prefill, growing first", "back, growing first"],
)
def test_a_conversion_is_a_changed_label_and_neither_starts_nor_ends_a_pod(shared, changes):
    convert(shared, changes)


def test_a_conversion_may_begin_with_the_pool_that_shrinks(shared):
    convert(shared, [("dcpool/decode", 1), ("pfpool/swing", 2)])
    convert(shared, [("pfpool/swing", 1), ("dcpool/decode", 2)])


def convert(world, changes) -> None:
    """Scale two pools so that one instance changes sides, and prove that it is the same instance."""
    before = instances(world)
    generation = world.hub.get("deployment", "decode")["metadata"]["generation"]
    bodies = {
        "decode": world.pool("DecodePool", "decode"),
        "swing": world.resource("PrefillPool", "swing", shareWith="decode"),
    }
    changed_pools = [bodies[pool.rpartition("/")[2]] for pool, _ in changes]
    for body, (_, replicas) in zip(changed_pools, changes, strict=True):
        body["spec"]["replicas"] = replicas
    world.hub.apply(*changed_pools)
    wanted = {"prefill" if "swing" in pool else "decode": replicas for pool, replicas in changes}
    after = wait_roles(world, **wanted)
    wait_ready(world)
    assert after.keys() == before.keys()
    assert world.hub.get("deployment", "decode")["metadata"]["generation"] == generation
    (changed,) = (name for name in before if before[name] != after[name])
    message = f"instance {changed} converts from {before[changed]} to {after[changed]}"
    for subject in ("decode", "swing"):
        seen = lambda subject=subject: message in {event["message"] for event in world.hub.events(subject)}  # noqa: E731
        world.eventually(seen, f"an Event about {subject}: {message}")  # Events are written later than what they report


def test_scaling_one_pool_down_takes_an_instance_of_its_role(shared):
    for pool, more, fewer, role_ in (("dcpool/decode", 3, 2, "decode"), ("pfpool/swing", 2, 1, "prefill")):
        scale(shared, pool, more)
        full = wait_roles(shared, **({"decode": 2, "prefill": 1} | {role_: more}))
        wait_ready(shared)
        scale(shared, pool, fewer)
        rest = wait_roles(shared, decode=2, prefill=1)
        (removed,) = full.keys() - rest.keys()
        assert full[removed] == role_
        assert rest.items() <= full.items(), "the others keep their role"
    wait_ready(shared)


def test_a_rollout_gives_every_role_to_new_instances_and_neither_runs_dry(shared):
    before = instances(shared)
    shared.kubelet.floor = Counter({"decode": 2, "prefill": 1})
    shared.hub.patch("dcpool", "decode", {"spec": {"drainSeconds": 7}})
    shared.eventually(lambda: not before.keys() & instances(shared).keys(), "all instances are new")
    wait_roles(shared, decode=2, prefill=1)
    wait_ready(shared)
    floor, shared.kubelet.floor = shared.kubelet.floor, None
    assert floor["decode"] >= 1
    for pod in shared.hub.listing("pods", "prfaas.io/pool=decode"):
        assert "controller.kubernetes.io/pod-deletion-cost" not in pod["metadata"].get("annotations", {})


def test_an_instance_that_vanished_is_not_made_by_telling_it_its_role(shared):
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "vanished", "uid": "8c5fb9a8-0000-4000-8000-000000000000", "labels": {ROLE: "decode"}},
    }
    account = f"system:serviceaccount:{shared.hub.name}:prfaas-operator"
    with pytest.raises(subprocess.CalledProcessError) as refused:
        shared.hub.kubectl("apply", "--server-side", "--as", account, "-f", "-", stdin=json.dumps(pod))
    assert "uid mismatch" in refused.value.stderr
    assert not shared.hub.exists("pod", "vanished")


def test_a_second_sharer_is_refused_until_the_first_is_deleted(shared):
    shared.hub.apply(shared.resource("PrefillPool", "late", shareWith="decode", replicas=2))
    refused = shared.hub.wait_reason("pfpool", "late", "AlreadyShared")
    assert "PrefillPool swing" in refused["message"]
    assert shared.hub.get("deployment", "decode")["spec"]["replicas"] == 3
    shared.hub.delete("pfpool", "swing")
    before = wait_roles(shared, decode=2, prefill=2)
    shared.hub.wait_reason("pfpool", "late", "AllReady")
    shared.hub.delete("pfpool", "late")
    after = wait_roles(shared, decode=2)
    assert after.items() <= before.items(), "the share is removed, and the others run on as they were"
    shared.hub.wait_reason("dcpool", "decode", "AllReady")
    shared.hub.apply(shared.resource("PrefillPool", "swing", shareWith="decode", replicas=1))
    assert after.items() <= wait_roles(shared, decode=2, prefill=1).items()
    wait_ready(shared)


def test_a_pool_that_shares_with_no_pool_says_so_and_recovers(shared):
    shared.hub.delete("dcpool", "decode")
    missing = shared.hub.wait_reason("pfpool", "swing", "DecodePoolNotFound")
    assert "DecodePool decode does not exist" in missing["message"]
    assert shared.hub.get("pfpool", "swing")["status"]["replicas"] == 0
    shared.hub.apply(shared.pool("DecodePool", "decode", replicas=1))
    wait_roles(shared, decode=1, prefill=1)
    wait_ready(shared)


def test_two_autoscalers_may_scale_the_two_pools_of_one_deployment(shared):
    def reason(name: str) -> str:
        status = shared.hub.get("hpa", name).get("status", {})
        reasons = {one["type"]: one["reason"] for one in status.get("conditions", [])}
        return reasons.get("ScalingActive", "")

    names = ("prefillpool-auto-swing", "decodepool-auto", "decodepool-clash", "deployment-clash")
    # There are no metrics here: an autoscaler that asks for them has accepted its target. One that looked before it saw
    # the other asks, too, and looks again 15 s later.
    wanted = ["FailedGetResourceMetric"] * 2 + ["AmbiguousSelector"] * 2
    found = lambda: [reason(name) for name in names]  # noqa: E731
    shared.eventually(lambda: found() == wanted, "two are accepted and two clash", found=found)


def test_deleting_the_pools_leaves_nothing(shared):
    shared.hub.delete_all("hpa")
    shared.hub.delete_all("dcpool,pfpool")
    shared.eventually(lambda: not shared.children(), "no child is left")
