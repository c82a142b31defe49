"""Proves with the real kubectl that people can read what stands: columns, Events in `describe`, and the plugin."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clusters

COLUMNS = 120
MODEL = {"name": "moonshotai/Kimi-Linear-48B-A3B-Instruct", "source": "/models/kimi"}
MESSAGE = "3 of 4 instances ready, 4 of the present template"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def conditions(ready: str, reason: str, **more: str) -> list[dict[str, Any]]:
    found = [("Ready", ready, reason), *((type_, status, "Answered") for type_, status in more.items())]
    return [
        {"type": t, "status": s, "reason": r, "message": MESSAGE, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for t, s, r in found
    ]


@pytest.fixture(scope="module")
def scene(ground):
    """Objects as a platform team names them, with the longest reasons and versions that there are."""
    pool = {"model": MODEL, "replicas": 4}
    bodies = [
        (ground.member_cluster("prefill-eu-west-1", "s"), {"serverVersion": "v1.34.4-eks-1a2b3c4", "conditions":
            conditions("False", "ClusterUnreachable", Reachable="False"), "lastContactTime": "2026-01-01T00:00:00Z"}),
        (ground.resource("PrefillPool", "offload-eu-west-1", **pool, clusterName="prefill-eu-west-1"),
            {"replicas": 4, "readyReplicas": 3, "conditions": conditions("False", "InstancesNotReady")}),
        (ground.resource("PrefillPool", "local-prefill", **pool),
            {"replicas": 4, "readyReplicas": 4, "conditions": conditions("True", "AllReady")}),
        (ground.resource("DecodePool", "decode", **pool),
            {"replicas": 4, "readyReplicas": 4, "conditions": conditions("True", "AllReady")}),
        (ground.resource("PrfaaSPolicy", "kimi-linear", model=MODEL["name"], decodePool="decode",
            prefillPools=["offload-eu-west-1"], threshold={"mode": "Fixed", "tokens": 131072}),
            {"thresholdTokens": 131072, "bandwidth": "Abundant", "offloadedPercent": 100,
            "linkUtilisationPercent": 100, "readyPrefill": 1000, "readyDecode": 1000,
            "conditions": conditions("False", "PrefillPoolNotFound")}),
    ]  # fmt: skip
    for body, status in bodies:
        ground.hub.apply(body)
        name = f"{body['kind'].lower()}.prfaas.io/{body['metadata']['name']}"
        patch = json.dumps({"status": status})
        ground.hub.kubectl("patch", name, "--subresource=status", "--type=merge", "-p", patch)
    return ground


def test_all_kinds_at_once_fit_120_columns_and_answer_every_question(scene):
    text = scene.hub.kubectl("get", "prfaas-all")
    assert max(len(line.rstrip()) for line in text.splitlines()) <= COLUMNS, text
    assert len([line for line in text.splitlines() if line.startswith("NAME")]) == 4
    for question in ("READY", "INSTANCES", "WANTED", "THRESHOLD", "LINK %", "WHY"):
        assert question in text, question
    for answer in ("131072", "InstancesNotReady", "PrefillPoolNotFound", "ClusterUnreachable"):
        assert answer in text, answer


def kubectl_prfaas(scene, *arguments: str, **options: Any) -> list[str]:
    kubectl = scene.hub.cluster.tools["kubectl"]
    kubeconfig = scene.hub.cluster.kubeconfig
    return [str(kubectl), "prfaas", "status", "--kubeconfig", str(kubeconfig), "-n", scene.hub.name, *arguments]


def run(scene, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": PATH}
    return subprocess.run(
        kubectl_prfaas(scene, *arguments), env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_kubectl_finds_the_plugin_and_it_prints_lines_and_json(scene):
    assert shutil.which("kubectl-prfaas", path=PATH)
    plain = run(scene)
    assert plain.returncode == 0, plain.stderr
    assert "prefill pool offload-eu-west-1: 3 of 4 ready (InstancesNotReady)" in plain.stdout
    assert "offloads above 131,072 tokens" in plain.stdout
    assert f"wrong: PrefillPool offload-eu-west-1: InstancesNotReady: {MESSAGE}" in plain.stdout
    facts = json.loads(run(scene, "-o", "json").stdout)
    assert [cluster["name"] for cluster in facts["clusters"]] == ["hub", "prefill-eu-west-1"]
    assert facts["clusters"][1]["link_percent"] == 100


def test_reports_a_missing_context_in_a_sentence(scene):
    done = run(scene, "--context", "nowhere")
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def hear_ctrl_c() -> None:
    """Undo what a shell does to its background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_live_view_is_drawn_and_ends_cleanly_with_ctrl_c(scene):
    leader, follower = pty.openpty()
    environment = {**os.environ, "PATH": PATH, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        kubectl_prfaas(scene, "--watch"),
        env=environment,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        preexec_fn=hear_ctrl_c,  # noqa: PLW1509  # no thread of ours holds anything
    )
    os.close(follower)
    shown = read_until(leader, "offload-eu-west-1")
    assert "╭" in shown
    # To the program itself, as a terminal does: kubectl has replaced itself by it.
    process.send_signal(signal.SIGINT)
    shown = read_until(leader, "")
    assert process.wait(30) == 0, shown
    assert "\x1b[?1049l" in shown, "the terminal is as it was"
    assert "Traceback" not in shown
    os.close(leader)


def read_until(terminal: int, text: str) -> str:
    """Return what a terminal shows until `text` appears, or to its end where that is empty."""
    shown = b""
    while not text or text.encode() not in shown:
        readable, _, _ = select.select([terminal], [], [], 120)
        assert readable, f"nothing came after {shown[-500:]!r}"
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    return shown.decode(errors="replace")


def test_prints_changes_line_by_line_without_a_terminal(scene):
    command = kubectl_prfaas(scene, "--watch", "-o", "json")
    environment = {**os.environ, "PATH": PATH}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,  # noqa: PLW1509  # no thread of ours holds anything
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["clusters"][0]["pools"][0]["ready_replicas"] == 4
        patch = '{"status": {"readyReplicas": 2}}'
        scene.hub.kubectl("patch", "dcpool", "decode", "--subresource=status", "--type=merge", "-p", patch)
        second = json.loads(process.stdout.readline())
        assert second["clusters"][0]["pools"][0]["ready_replicas"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
