"""Proves on real API servers that `prfaas cluster check` answers each question, and that each answer can be a no."""

import json
import subprocess
import sys

import pytest

from prfaas_operator.render import service_account

pytestmark = pytest.mark.clusters


def check(world, *arguments: str) -> tuple[int, dict[str, dict[str, dict]]]:
    """Return the exit code, and the findings by cluster and check."""
    command = [sys.executable, "-m", "prfaas.cli.main", "cluster", "check", *arguments, "-o", "json"]
    command += ["--hub-kubeconfig", str(world.hub.cluster.kubeconfig), "--namespace", world.hub.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "eyJ" not in done.stdout, "no token is shown"
    report = json.loads(done.stdout)
    assert report["well"] == (done.returncode == 0)
    found = {name: {finding["check"]: finding for finding in findings} for name, findings in report["clusters"].items()}
    return done.returncode, found


def test_a_healthy_member_is_well_in_every_respect(world):
    world.join("eu")
    code, found = check(world, "eu")
    assert code == 0, found
    names = {"operator", "last contact", "kubeconfig", "token", "from here", "version", "clock", "rights", "namespace"}
    assert names == found["eu"].keys()
    assert {finding["level"] for finding in found["eu"].values()} == {"ok"}
    assert "v1.34.4" in found["eu"]["version"]["message"]
    assert len(found["hub"]) == 4, "every kind's CRD"


def test_checks_the_data_path_where_a_pool_runs(world):
    world.hub.apply(world.pool("PrefillPool", "offload", clusterName="eu"))
    assert check(world, "eu")[1]["eu"]["data path"]["level"] == "warning"


def test_a_right_that_is_missing_is_named_and_fails(world):
    rules = world.member.get("role", "prfaas-operator")["rules"]
    weaker = [{**rule, "verbs": [verb for verb in rule["verbs"] if verb != "patch"]} for rule in rules]
    world.member.patch("role", "prfaas-operator", {"rules": weaker})
    code, found = check(world, "eu")
    world.member.patch("role", "prfaas-operator", {"rules": rules})
    assert code == 1
    missing = found["eu"]["rights"]["message"].partition(";")[0]
    assert missing.startswith("missing: ")
    assert {"patch configmaps", "patch deployments"} <= set(missing.removeprefix("missing: ").split(", "))
    assert "list pods" not in missing


def test_a_namespace_that_is_not_there_is_named(world):
    namespace = "nowhere"
    member = world.member_cluster("astray", "astray")
    member["spec"]["namespace"] = namespace
    world.hub.apply(world.secret("astray", json.loads(world.administrator())), member)
    world.hub.wait_reason("pmc", "astray", "AllReady", 120)
    code, found = check(world, "astray")
    assert code == 1
    assert namespace in found["astray"]["namespace"]["message"]


def test_an_unreachable_server_fails_and_a_bad_secret_is_reported(world):
    far = world.secret("far", world.kubeconfig(server="https://127.0.0.1:1"))
    bad = world.secret("bad", {})
    world.hub.apply(far, bad, world.member_cluster("far", "far"), world.member_cluster("bad", "bad"))
    world.hub.wait_reason("pmc", "far", "ClusterUnreachable", 120)
    world.hub.wait_reason("pmc", "bad", "KubeconfigRefused", 120)
    code, found = check(world)
    assert code == 1
    assert found["far"]["from here"]["level"] == "failed"
    assert "has no list of clusters" in found["bad"]["kubeconfig"]["message"]
    assert found["eu"]["from here"]["level"] == "ok", "all members are checked"


def test_the_command_makes_the_account_that_it_checks(world):
    rights = check(world, "eu")[1]["eu"]["rights"]["message"]
    (role,) = [one for one in service_account.member_account("x") if one["kind"] == "Role"]
    for rule in role["rules"]:
        for verb in rule["verbs"]:
            assert f"{verb} {rule['resources'][0]}" in rights
