"""`prfaas preflight` on real API servers without nodes: what is missing is named, and what was made is removed.

The path itself is measured in tests/sandbox/test_preflight.py, where pods run.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
import yaml
from tests.waiting import eventually

from prfaas_operator.preflight import proposal
from prfaas_operator.preflight.facts import Accelerators, PathFacts
from prfaas_operator.preflight.jobs import SELECTOR
from prfaas_operator.preflight.proposal import Target

pytestmark = pytest.mark.clusters

PATH = PathFacts(ports={}, api="open", round_trip_seconds=0.01, mbps={"1": 900.0, "4": 20_000.0})
H200 = (Accelerators("nvidia.com/gpu", "NVIDIA-H200", None, "h200", 16, (8, 8)),)


def start(hub, member, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    kubeconfigs = f"{hub.kubeconfig}{os.pathsep}{member.kubeconfig}"
    command = [sys.executable, "-m", "prfaas.cli.main", "preflight", "--hub", "hub", "--member", "member", *arguments]
    return subprocess.Popen(
        command,
        env={**os.environ, "KUBECONFIG": kubeconfigs, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def preflight(hub, member, *arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, dict]]]:
    """Return the exit code, and the findings by cluster and check."""
    process = start(hub, member, *arguments, "-o", "json", **environment)
    said, complaint = process.communicate(timeout=240)
    assert said, complaint
    report = json.loads(said)
    assert report["file"] is None, "nothing was measured, so nothing is proposed"
    assert "requests/s" not in report["expectation"]
    return process.returncode, {
        where: {one["check"]: one for one in found} for where, found in report["findings"].items()
    }


def rooms(cluster) -> list[str]:
    """Return the probes' namespaces, without those that Kubernetes is removing."""
    chosen = ("-l", SELECTOR, "--field-selector", "status.phase=Active")
    return cluster.kubectl("get", "namespaces", *chosen, "-o", "jsonpath={.items[*].metadata.name}").split()


def failed(found: dict[str, dict]) -> dict[str, str]:
    return {check: one["message"] for check, one in found.items() if one["level"] == "failed"}


def test_a_probe_that_does_not_start_is_named_and_removed(hub, member):
    code, found = preflight(hub, member, "--wait-seconds", "0")
    assert code == 1
    assert failed(found["hub"]) == failed(found["member"]) == {}
    assert failed(found["path"]).keys() == {"probe"}
    assert "-member is not ready after 0 s" in failed(found["path"])["probe"]
    for cluster in (hub, member):
        assert found[cluster.name]["version"]["message"] == "v1.34.4"
        assert found[cluster.name]["accelerators"]["level"] == "warning"
        assert rooms(cluster) == []


def test_a_given_namespace_stays_and_its_refusal_is_the_servers_own_sentence(hub, member):
    name, quota = "preflight-given", {"hard": {"count/jobs.batch": "0", "pods": "0"}}
    for cluster in (hub, member):
        cluster.reader.create_namespace(name)
    hub.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    member.reader.apply(
        name, {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": quota}
    )
    eventually(
        lambda: (member.reader.get(name, "resourcequota", "none") or {}).get("status"), "the quota holds from now on"
    )
    code, found = preflight(hub, member, "--namespace", name)
    assert code == 1
    assert "a restricted pod is refused" in failed(found["member"])["pod security"]
    assert "exceeded quota: none" in failed(found["member"])["pod security"]
    assert failed(found["hub"]) == {}
    assert found["hub"]["pod security"]["message"] == "the namespace enforces restricted; a restricted pod is admitted"
    assert found["path"].keys() == {"clock"}
    assert hub.reader.list_all(name, "jobs") == []
    assert hub.kubectl("get", "namespace", name, "-o", "name")


def test_a_server_that_is_not_reached_is_named_beside_what_the_other_is(hub, member, tmp_path):
    gone = yaml.safe_load(member.kubeconfig.read_text())
    gone["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    path = tmp_path / "gone"
    path.write_text(json.dumps(gone))
    code, found = preflight(hub, member, KUBECONFIG=f"{hub.kubeconfig}{os.pathsep}{path}")
    assert code == 1
    assert failed(found["member"]).keys() == {"API server"}
    assert failed(found["hub"]) == {}
    assert found["path"] == {}


def test_rights_that_are_missing_are_named_one_by_one(hub, member, tmp_path):
    name = "preflight-weak"
    member.reader.create_namespace(name)
    member.reader.apply(name, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "weak"}})
    weak = yaml.safe_load(member.kubeconfig.read_text())
    weak["users"][0]["user"] = {"token": member.reader.token(name, "weak", 3600)}
    path = tmp_path / "weak"
    path.write_text(json.dumps(weak))
    code, found = preflight(hub, member, KUBECONFIG=f"{hub.kubeconfig}{os.pathsep}{path}")
    assert code == 1
    assert failed(found["member"]).keys() == {"rights", "namespace"}
    assert "create roles" in failed(found["member"])["rights"]
    assert "patch deployments" in failed(found["member"])["rights"]
    assert found["member"]["accelerators"]["message"] == "your account may not list nodes"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ctrl_c_leaves_nothing_and_what_a_kill_leaves_the_next_run_removes(hub, member, number, code):
    process = start(hub, member)
    eventually(lambda: any(member.reader.list_all(room, "jobs") for room in rooms(member)), "the server's Job is made")
    assert len(rooms(hub)) == len(rooms(member)) == 1
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    if number == signal.SIGKILL:
        assert rooms(hub)
        assert rooms(member)
        assert preflight(hub, member, "--wait-seconds", "0")[0] == 1
    for cluster in (hub, member):
        assert rooms(cluster) == []


@pytest.mark.parametrize("devices", [(), H200])
def test_the_api_server_takes_the_proposed_file(hub, devices):
    planned = proposal.expect(devices, devices, PATH)
    text = proposal.manifests(Target("hub", "member", None, None, PATH), None if isinstance(planned, str) else planned)
    assert ("qwen" in text.lower()) == bool(devices)
    hub.install_crds()
    for body in yaml.safe_load_all(text):
        hub.reader.apply("default", {**body, "metadata": {"name": body["metadata"]["name"]}}, is_dry_run=True)
