"""Proves that spec.replicas has one owner at a time, named in the status, and bounds that hold for all of them."""

import subprocess

import pytest

pytestmark = pytest.mark.clusters


@pytest.fixture(scope="module")
def pools(world):
    world.hub.apply(world.pool("DecodePool", "bound", minReplicas=0, maxReplicas=3), world.pool("DecodePool", "auto"))
    for name in ("bound", "auto"):
        world.hub.wait_reason("dcpool", name, "InstancesNotReady")
    return world.hub


def owner(home, name: str) -> str:
    return home.get("dcpool", name)["status"].get("replicasOwner", "")


@pytest.mark.parametrize("replicas", [4, 1000])
def test_no_scale_exceeds_the_bounds(pools, replicas):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        pools.kubectl("scale", "dcpool/bound", f"--replicas={replicas}")
    assert "must lie between minReplicas and maxReplicas" in refused.value.stderr
    assert pools.get("dcpool", "bound")["spec"]["replicas"] == 1


def test_bounds_that_leave_out_the_present_number_are_refused(pools):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        pools.kubectl("patch", "dcpool", "bound", "--type=merge", "-p", '{"spec": {"minReplicas": 2}}')
    assert "must lie between minReplicas and maxReplicas" in refused.value.stderr


def test_a_pool_goes_to_zero_and_comes_back(world, pools):
    pools.kubectl("scale", "dcpool/bound", "--replicas=0")
    assert pools.wait_reason("dcpool", "bound", "AllReady")["message"] == "scaled to zero"
    world.eventually(lambda: not pools.pods("bound"), "no instance is left")
    pools.kubectl("scale", "dcpool/bound", "--replicas=1")
    pools.ready_up("bound", "10.7.0")
    pools.wait_reason("dcpool", "bound", "AllReady")
    assert owner(pools, "bound") == "User"


def test_an_autoscaler_takes_over_replicas_and_is_named_until_a_person_writes_again(world, pools):
    assert owner(pools, "auto") == "User"
    target = {"apiVersion": "prfaas.io/v1alpha1", "kind": "DecodePool", "name": "auto"}
    cpu = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}}
    pools.apply(
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "auto"},
            "spec": {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 3, "metrics": [cpu]},
        }
    )
    # Nothing measures CPU here; that there are fewer than its least is enough for it to act.
    world.eventually(lambda: pools.get("dcpool", "auto")["spec"]["replicas"] == 2, "the autoscaler's minimum")
    world.eventually(lambda: owner(pools, "auto") == "Autoscaler", "the status names it")
    world.eventually(lambda: len(pools.pods("auto")) == 2, "two instances")
    pools.kubectl("scale", "dcpool/auto", "--replicas=0")
    world.eventually(lambda: owner(pools, "auto") == "User", "the status names the person")
    world.eventually(lambda: not pools.pods("auto"), "an autoscaler keeps a pool at zero")
    pools.kubectl("delete", "hpa", "auto")


def test_every_pool_has_a_disruption_budget_that_goes_with_its_deployment(world, pools):
    budget = pools.get("pdb", "bound")
    assert budget["spec"]["maxUnavailable"] == "10%"
    assert budget["metadata"]["ownerReferences"][0]["kind"] == "Deployment"
    world.eventually(lambda: pools.get("pdb", "bound")["status"].get("expectedPods") == 1, "it counts the instance")
    pools.delete_all("dcpool")
    world.eventually(lambda: not world.children(), "no child is left")
