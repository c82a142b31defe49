"""Proves on real API servers that a pool is a Deployment in its own cluster, and stays what its spec says."""

import json
import time

import pytest

pytestmark = pytest.mark.clusters


@pytest.fixture(scope="module")
def joined(world):
    world.join("eu")
    return world


def test_pools_become_deployments_in_their_own_cluster(joined):
    joined.hub.apply(
        joined.pool("PrefillPool", "offload", clusterName="eu", replicas=2),
        joined.pool("PrefillPool", "local"),
        joined.pool("DecodePool", "decode"),
    )
    for where, name in ((joined.member, "offload"), (joined.hub, "local"), (joined.hub, "decode")):
        joined.eventually(lambda where=where, name=name: where.exists("deployment", name), f"Deployment {name}")
    assert not joined.hub.exists("deployment", "offload")
    assert not joined.member.exists("deployment", "local")
    offload = joined.member.get("deployment", "offload")
    assert offload["spec"]["replicas"] == 2
    assert "ownerReferences" not in offload["metadata"], "owners do not cross clusters"
    assert joined.hub.get("deployment", "local")["metadata"]["ownerReferences"][0]["name"] == "local"


def test_an_egress_cap_is_divided_again_when_instances_come_and_restarts_none(joined):
    joined.hub.apply(joined.pool("PrefillPool", "capped", clusterName="eu", replicas=2, egressMbps=101))

    def share() -> str:
        return joined.member.get("configmap", "capped-settings")["data"]["egress-mbps"]

    pods = joined.eventually(lambda: len(found := joined.member.pods("capped")) == 2 and found, "two pods")
    assert share() == "50"
    template = joined.member.get("deployment", "capped")["spec"]["template"]
    joined.hub.scale("pfpool", "capped", 4)
    joined.eventually(lambda: share() == "25", "a quarter each")
    joined.eventually(lambda: len(joined.member.pods("capped")) == 4, "four pods")
    assert joined.member.get("deployment", "capped")["spec"]["template"] == template
    assert set(pods) < set(joined.member.pods("capped"))
    joined.hub.delete("pfpool", "capped")
    assert not joined.member.exists("configmap", "capped-settings")


def test_kubectl_scale_works_on_both_pools_independently(joined):
    joined.hub.kubectl("scale", "pfpool/offload", "--replicas=3")
    joined.hub.kubectl("scale", "dcpool/decode", "--replicas=0")
    joined.eventually(lambda: joined.member.get("deployment", "offload")["spec"]["replicas"] == 3, "3 in the member")
    joined.eventually(lambda: joined.hub.get("deployment", "decode")["spec"]["replicas"] == 0, "0 in the hub")
    assert joined.hub.get("deployment", "local")["spec"]["replicas"] == 1
    ready = joined.hub.wait_reason("dcpool", "decode", "AllReady")
    assert ready["message"] == "scaled to zero"
    scale = json.loads(
        joined.hub.kubectl(
            "get", "--raw", f"/apis/prfaas.io/v1alpha1/namespaces/{joined.hub.name}/prefillpools/offload/scale"
        )
    )
    joined.eventually(lambda: joined.hub.get("pfpool", "offload")["status"]["replicas"] == 3, "status counts 3")
    selected = joined.member.listing("pods", scale["status"]["selector"])
    assert len(selected) == 3


def test_a_changed_spec_reaches_the_pods_and_keeps_the_selector(joined):
    before = joined.hub.get("deployment", "local")["spec"]["selector"]
    patch = {"spec": {"drainSeconds": 45, "template": {"nodeSelector": {"accelerator": "h200"}}}}
    joined.hub.patch("pfpool", "local", patch)

    def rolled() -> bool:
        spec = joined.hub.get("deployment", "local")["spec"]["template"]["spec"]
        return spec["terminationGracePeriodSeconds"] == 60 and spec.get("nodeSelector") == {"accelerator": "h200"}

    joined.eventually(rolled, "the pod template follows")
    assert joined.hub.get("deployment", "local")["spec"]["selector"] == before


@pytest.mark.parametrize("where", ["hub", "member"])
def test_a_hand_edited_child_is_put_back(joined, where):
    cluster, name = (joined.hub, "local") if where == "hub" else (joined.member, "offload")
    wanted = cluster.get("deployment", name)["spec"]["replicas"]
    patch = {"spec": {"replicas": wanted + 4, "template": {"spec": {"automountServiceAccountToken": True}}}}
    cluster.kubectl("patch", "deployment", name, "-p", json.dumps(patch))

    def restored() -> bool:
        spec = cluster.get("deployment", name)["spec"]
        return spec["replicas"] == wanted and spec["template"]["spec"]["automountServiceAccountToken"] is False

    joined.eventually(restored, "the Deployment is as rendered again")


def test_a_deleted_child_comes_back(joined):
    old = joined.member.get("deployment", "offload")["metadata"]["uid"]
    joined.member.delete("deployment", "offload", wait=False)

    def fresh() -> bool:
        return joined.member.exists("deployment", "offload") and (
            joined.member.get("deployment", "offload")["metadata"]["uid"] != old
        )

    joined.eventually(fresh, "a new Deployment")


def test_a_pool_that_names_no_cluster_says_so_and_heals(joined):
    joined.hub.apply(joined.pool("PrefillPool", "stray", clusterName="asia"))
    assert "MemberCluster asia" in joined.hub.wait_reason("pfpool", "stray", "ClusterNotFound")["message"]
    joined.hub.delete("pfpool", "stray")


def test_a_pool_that_names_an_unknown_profile_gets_no_instance_and_says_the_nearest_names(joined):
    pool = joined.pool("PrefillPool", "guessed", clusterName="eu", profile={"builtin": "qwen3.5-35b-bf16-2xl40"})
    joined.hub.apply(pool)
    refused = joined.hub.wait_reason("pfpool", "guessed", "ProfileNotFound")
    assert "near it are qwen3.5-35b-bf16-2xl40s" in refused["message"]
    assert not joined.member.exists("deployment", "guessed")
    joined.hub.delete("pfpool", "guessed")


def test_repeats_an_api_servers_refusal_and_heals(joined):
    rules = joined.member.get("role", "prfaas-operator")["rules"]
    others = [[verb for verb in rule["verbs"] if verb != "create"] for rule in rules]
    weaker = [{**rule, "verbs": verbs} for rule, verbs in zip(rules, others, strict=True) if verbs]
    joined.member.patch("role", "prfaas-operator", {"rules": weaker})
    joined.hub.apply(joined.pool("PrefillPool", "barred", clusterName="eu"))
    assert "cannot create resource" in joined.hub.wait_reason("pfpool", "barred", "Forbidden")["message"]
    joined.member.patch("role", "prfaas-operator", {"rules": rules})
    joined.hub.wait_reason("pfpool", "barred", "InstancesNotReady")
    joined.hub.delete("pfpool", "barred")


def test_nothing_is_written_when_nothing_changes(joined):
    def written() -> tuple[float, list[str]]:
        listed = joined.hub.listing("deployments,configmaps")
        return joined.writes(), [one["metadata"]["resourceVersion"] for one in listed]

    def rests() -> bool:
        """On a busy machine what the tests before this one changed may still be followed."""
        before = written()
        time.sleep(6)  # more than one probe and one retry
        return written() == before

    joined.eventually(rests, "nothing is written for six seconds")


def test_deleting_pools_and_cluster_leaves_nothing(joined):
    joined.hub.delete_all("pfpool,dcpool")
    joined.hub.delete_all("pmc")
    joined.eventually(lambda: not joined.children(), "no child is left")
    assert joined.hub.get("secret", "eu-kubeconfig")["metadata"].get("finalizers", []) == []
