"""Proves that what clusters refuse or cannot do becomes a reason, a sentence and an Event, and heals without a restart.

The causes are real: admission and quota of an API server, a scheduler without nodes, a revoked account. Only an image
that cannot be pulled is reported by the test, in the words of a kubelet.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clusters

SCHEDULER = "patient"


@pytest.fixture(scope="module")
def operator_flags() -> tuple[str, ...]:
    """Without certificates: these MemberClusters share a namespace, which can hold the certificate of one only."""
    return ("--certificates", "Disabled")


@pytest.fixture(scope="module")
def joined(world):
    world.join("eu")
    return world


def events(world, name: str, reason: str) -> list[str]:
    """Return the messages of the Warnings with a reason about an object of the hub."""
    return world.hub.messages(name, reason, "Warning")


def wait_warning(world, kind: str, name: str, reason: str) -> str:
    """Return the message of the condition and of the Event that a cause brings."""
    message = world.hub.wait_reason(kind, name, reason)["message"]
    return world.eventually(lambda: events(world, name, reason), f"an Event {reason} about {name}")[0] and message


@pytest.fixture
def scheduler(hub, tmp_path: Path) -> Iterator[None]:
    """A real scheduler that serves only pods that name it."""
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(hub.kubeconfig)},
        "leaderElection": {"leaderElect": False},
        "profiles": [{"schedulerName": SCHEDULER}],
    }
    (tmp_path / "scheduler.json").write_text(json.dumps(config))
    command = [hub.tools["kube-scheduler"], "--config", str(tmp_path / "scheduler.json"), "--secure-port=0"]
    with (tmp_path / "scheduler.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    yield
    process.kill()
    process.wait()


def test_cluster_and_pool_report_an_ended_credential_and_a_new_one_heals_both(joined):
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "guest"}}
    subject = {"kind": "ServiceAccount", "name": "guest", "namespace": joined.member.name}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "prfaas-operator"}
    binding = {"kind": "RoleBinding", "metadata": {"name": "guest"}, "roleRef": role, "subjects": [subject]}
    joined.member.apply(account, {"apiVersion": "rbac.authorization.k8s.io/v1", **binding})
    borrowed = joined.kubeconfig()
    borrowed["users"][0]["user"]["token"] = joined.member.token("guest")
    joined.hub.apply(
        joined.secret("guest", borrowed),
        joined.member_cluster("guest", "guest"),
        joined.pool("PrefillPool", "guests", clusterName="guest", replicas=0),
    )
    joined.hub.wait_reason("pfpool", "guests", "AllReady")
    joined.member.delete("serviceaccount", "guest")
    wait_warning(joined, "pmc", "guest", "Unauthorized")
    wait_warning(joined, "pfpool", "guests", "Unauthorized")
    joined.hub.apply(joined.secret("guest", joined.kubeconfig()))
    joined.hub.wait_reason("pmc", "guest", "AllReady")
    joined.hub.wait_reason("pfpool", "guests", "AllReady")
    joined.hub.delete("pfpool", "guests")
    joined.hub.delete("pmc", "guest")


def test_reports_a_used_up_quota_and_a_larger_one_heals(joined):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}}
    joined.member.apply({**quota, "spec": {"hard": {"requests.nvidia.com/gpu": "0"}}})
    enforced = lambda: joined.member.get("resourcequota", "gpus").get("status", {}).get("hard")  # noqa: E731
    joined.eventually(enforced, "the quota is in force")
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    joined.hub.apply(joined.pool("PrefillPool", "greedy", clusterName="eu", template=gpu))
    assert "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1" in wait_warning(
        joined, "pfpool", "greedy", "QuotaExceeded"
    )
    joined.member.delete("resourcequota", "gpus")
    joined.hub.wait_reason("pfpool", "greedy", "InstancesNotReady")
    joined.member.ready_up("greedy", "10.6.0")
    joined.hub.wait_reason("pfpool", "greedy", "AllReady")
    joined.hub.delete("pfpool", "greedy")


def test_reports_an_instance_without_a_node_and_a_node_heals(joined, scheduler):
    joined.hub.apply(joined.pool("PrefillPool", "homeless", template={"schedulerName": SCHEDULER}))
    assert "no nodes available" in wait_warning(joined, "pfpool", "homeless", "Unschedulable")
    joined.hub.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "late"}})
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    room = {"cpu": "8", "memory": "8Gi", "pods": "9"}
    status = {"conditions": [ready], "capacity": room, "allocatable": room}
    patch = json.dumps({"status": status})
    joined.hub.kubectl("patch", "node", "late", "--subresource=status", "--type=merge", "-p", patch)
    joined.hub.wait_reason("pfpool", "homeless", "InstancesNotReady")
    joined.hub.ready_up("homeless", "10.6.1")
    joined.hub.wait_reason("pfpool", "homeless", "AllReady")
    joined.hub.delete("pfpool", "homeless", wait=False)

    def is_removed() -> bool:
        # Only a kubelet ends a pod that has a node, and this node has none. Its Deployment replaces it until it goes.
        joined.hub.kubectl("delete", "pods", "-l", "prfaas.io/pool=homeless", "--force", "--grace-period=0")
        return not joined.hub.exists("pfpool", "homeless")

    joined.eventually(is_removed, "the pool is removed")
    joined.hub.kubectl("delete", "node", "late")


def test_reports_an_image_that_cannot_be_pulled_and_a_better_one_heals(joined):
    joined.hub.apply(joined.pool("DecodePool", "typo", engine={"image": "nowhere/worker:1"}))
    pod = joined.eventually(lambda: joined.hub.pods("typo"), "a pod")[0]
    container: dict[str, Any] = {"name": "worker", "ready": False, "restartCount": 0, "image": "x", "imageID": ""}
    for reason in ("ErrImagePull", "ImagePullBackOff", "ErrImagePull"):
        waiting = {"waiting": {"reason": reason, "message": "nowhere/worker:1: not found"}}
        patch = json.dumps({"status": {"containerStatuses": [container | {"state": waiting}]}})
        joined.hub.kubectl("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", patch)
        assert "nowhere/worker:1: not found" in wait_warning(joined, "dcpool", "typo", "ImagePullFailed")
    assert len(events(joined, "typo", "ImagePullFailed")) == 1, "the kubelet's back and forth is no news"
    image = {"spec": {"engine": {"image": "somewhere/worker:1"}}}
    joined.hub.patch("dcpool", "typo", image)
    fresh = joined.eventually(lambda: [one for one in joined.hub.pods("typo") if one != pod], "a pod of the new image")
    joined.hub.set_pod(fresh[0], address="10.6.2.1")
    joined.hub.wait_reason("dcpool", "typo", "AllReady")
    joined.hub.delete("dcpool", "typo")


def test_a_pool_that_would_read_the_operators_secrets_gets_no_instance_and_another_template_heals(joined):
    for name, secret in (("thief", "prfaas-ca"), ("burglar", "eu-kubeconfig")):
        volume = {"volumes": [{"name": "loot", "secret": {"secretName": secret}}]}
        joined.hub.apply(joined.pool("DecodePool", name, template=volume))
        assert f"Secret {secret} is the operator's or" in wait_warning(joined, "dcpool", name, "ForbiddenSecret")
        assert not joined.hub.exists("deployment", name)
    joined.hub.kubectl("patch", "dcpool", "thief", "--type=json", "-p", '[{"op": "remove", "path": "/spec/template"}]')
    joined.hub.ready_up("thief", "10.6.3")
    joined.hub.wait_reason("dcpool", "thief", "AllReady")
    harmful = {"env": [{"name": "E", "valueFrom": {"secretKeyRef": {"name": "prfaas-ca", "key": "tls.key"}}}]}
    joined.hub.patch("dcpool", "thief", {"spec": {"template": harmful}})
    wait_warning(joined, "dcpool", "thief", "ForbiddenSecret")
    worker = joined.hub.get("deployment", "thief")["spec"]["template"]["spec"]["containers"][0]
    assert "tls.key" not in json.dumps(worker)
    joined.hub.delete("dcpool", "thief", "burglar")


def test_the_operator_still_runs_afterwards_and_leaves_nothing(joined):
    joined.hub.delete_all("pmc")
    joined.eventually(lambda: not joined.children(), "no child is left")
