"""Proves on real API servers that a ResourceQuota on requests and limits refuses no pod that we render or chart."""

import json
import subprocess

import pytest
from tests.containers import containers_in

pytestmark = pytest.mark.clusters

HARD = {"requests.cpu": "8", "requests.memory": "64Gi", "limits.memory": "512Gi"}
QUOTA = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "compute"}, "spec": {"hard": HARD}}


@pytest.fixture(scope="module")
def bounded(world, rendered):
    """Both namespaces under a quota, with a policy and its pools, a pool of vLLM, and the chart's own pods."""
    for place in (world.hub, world.member):
        place.apply(QUOTA)
        enforced = lambda place=place: place.get("resourcequota", "compute").get("status", {}).get("hard")  # noqa: E731
        world.eventually(enforced, f"the quota of {place.name} is in force")
    world.join("eu")
    world.hub.apply(
        world.pool("PrefillPool", "offload", clusterName="eu"),
        world.pool("PrefillPool", "local"),
        world.pool("DecodePool", "decode"),
        world.pool(
            "DecodePool",
            "stock",
            model={"name": "m", "source": "/models/m"},
            engine={"type": "vllm", "image": "vllm/vllm-openai:v0"},
        ),
        world.resource(
            "PrfaaSPolicy",
            "kimi",
            model="kimi-linear-tiny",
            decodePool="decode",
            prefillPools=["offload", "local"],
            threshold={"mode": "Fixed", "tokens": 1000},
        ),
        *rendered("prfaas", world.hub.name, "operator.yaml", "tests/installation.yaml"),
    )
    return world


@pytest.mark.parametrize(
    ("cluster", "selector"),
    [
        ("member", "prfaas.io/pool=offload"),
        ("hub", "prfaas.io/pool=local"),
        ("hub", "prfaas.io/pool=decode"),
        ("hub", "prfaas.io/pool=stock"),
        ("hub", "prfaas.io/policy=kimi"),
        ("hub", "app.kubernetes.io/component=operator"),
        ("hub", "app.kubernetes.io/component=test"),
    ],
)
def test_a_quota_refuses_no_pod_of_ours(bounded, cluster, selector):
    place = getattr(bounded, cluster)
    bounded.eventually(lambda: place.listing("pods", selector), f"a pod {selector}")


def test_the_quota_refuses_a_gateways_pod_whose_scheduler_has_none(bounded):
    """A control: without it the test above could pass because the quota asks for nothing."""
    bounded.eventually(lambda: bounded.hub.exists("deployment", "kimi-gateway"), "the gateway's Deployment")
    spec = bounded.hub.get("deployment", "kimi-gateway")["spec"]["template"]["spec"]
    del spec["containers"][1]["resources"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "unbounded"}, "spec": spec}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        bounded.hub.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    assert "failed quota: compute: must specify" in refused.value.stderr
    assert "limits.memory for: scheduler" in refused.value.stderr


def test_the_policy_sizes_its_scheduler(bounded):
    limits = {"limits": {"memory": "300Mi"}}
    bounded.hub.patch("prfaas", "kimi", {"spec": {"gateway": {"schedulerResources": limits}}})

    def is_sized() -> bool:
        pods = bounded.hub.listing("pods", "prfaas.io/policy=kimi")
        sizes = [one["resources"] for pod in pods for one in containers_in(pod) if one["name"] == "scheduler"]
        return {"requests": {"cpu": "25m", "memory": "300Mi"}, **limits} in sizes

    bounded.eventually(is_sized, "a pod has the scheduler's new size")
