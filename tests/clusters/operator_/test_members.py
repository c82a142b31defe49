"""Proves on real API servers that one member's trouble is named, stays its own, heals, and blocks no deletion."""

import socket
import time

import pytest
import yaml
from tests.waiting import within

pytestmark = pytest.mark.clusters


@pytest.fixture(scope="module")
def operator_flags() -> tuple[str, ...]:
    """Without certificates: these MemberClusters share a namespace, which can hold the certificate of one only."""
    return ("--certificates", "Disabled")


def test_a_missing_secret_is_named_and_its_creation_heals_cluster_and_pool(world):
    world.hub.apply(world.member_cluster("late", "late"), world.pool("PrefillPool", "late-pool", clusterName="late"))
    assert "Secret late-kubeconfig" in world.hub.wait_reason("pmc", "late", "SecretNotFound")["message"]
    assert "Secret late-kubeconfig" in world.hub.wait_reason("pfpool", "late-pool", "SecretNotFound")["message"]
    assert world.hub.condition("pmc", "late", "Reachable")["status"] == "Unknown"
    other = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "late-kubeconfig"}, "data": {"x": ""}}
    world.hub.apply(other)
    world.hub.wait_reason("pmc", "late", "ForbiddenSecret")
    other["metadata"]["labels"] = {"prfaas.io/secret": "kubeconfig"}
    world.hub.apply(other)
    found = world.hub.wait_reason("pmc", "late", "SecretNotFound")["message"]
    assert found == "Secret late-kubeconfig has no key kubeconfig: correct one of the two"
    world.hub.apply(world.secret("late", world.kubeconfig()))
    world.hub.wait_reason("pmc", "late", "AllReady")
    world.eventually(lambda: world.member.exists("deployment", "late-pool"), "the pool heals too")
    status = world.hub.get("pmc", "late")["status"]
    assert status["serverVersion"] == "v1.34.4"
    assert status["lastContactTime"]


def test_a_kubeconfig_that_would_run_a_command_is_refused_and_runs_nothing(world, tmp_path):
    trap = tmp_path / "ran"
    bad = world.kubeconfig()
    bad["users"][0]["user"] = {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "touch", "args": [str(trap)]}
    }
    world.hub.apply(world.secret("bad", bad), world.member_cluster("bad", "bad"))
    found = world.hub.wait_reason("pmc", "bad", "KubeconfigRefused")
    assert "exec is refused" in found["message"]
    assert not trap.exists()
    world.hub.apply(world.secret("bad", world.kubeconfig()))
    world.hub.wait_reason("pmc", "bad", "AllReady")
    world.hub.delete("pmc", "bad")


def test_a_client_certificate_serves_as_well_as_a_token(world, member):
    administrator = yaml.safe_load(member.kubeconfig.read_text())
    assert "client-certificate-data" in administrator["users"][0]["user"]
    world.hub.apply(world.secret("cert", administrator), world.member_cluster("cert", "cert"))
    world.hub.wait_reason("pmc", "cert", "AllReady")
    world.hub.delete("pmc", "cert")


def test_distinguishes_a_refused_or_weak_credential_from_an_unreachable_server(world):
    unknown, weak = world.kubeconfig(), world.kubeconfig()
    unknown["users"][0]["user"]["token"] = "nobody"
    world.member.kubectl("create", "serviceaccount", "weak")
    weak["users"][0]["user"]["token"] = world.member.token("weak")
    for name, document in (("unknown", unknown), ("weak", weak)):
        world.hub.apply(world.secret(name, document), world.member_cluster(name, name))
    world.hub.wait_reason("pmc", "unknown", "Unauthorized")
    assert "deployments" in world.hub.wait_reason("pmc", "weak", "Forbidden")["message"]
    assert world.hub.condition("pmc", "weak", "Reachable")["status"] == "True"
    world.hub.delete("pmc", "unknown", "weak")


@pytest.mark.quiet
def test_dead_and_frozen_servers_are_unreachable_within_ten_seconds_while_others_work(world):
    pool = world.pool("PrefillPool", "well-pool", clusterName="well")
    world.hub.apply(world.secret("well", world.kubeconfig()), world.member_cluster("well", "well"), pool)
    world.eventually(lambda: world.member.exists("deployment", "well-pool"), "the healthy member has its pool")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as frozen, socket.create_server(("127.0.0.1", 0)) as held:
        dead_port = held.getsockname()[1]
        held.close()
        ports = {"dead": dead_port, "frozen": frozen.getsockname()[1]}
        started = time.monotonic()
        for name, port in ports.items():
            document = world.kubeconfig(server=f"https://127.0.0.1:{port}")
            world.hub.apply(
                world.secret(name, document),
                world.member_cluster(name, name, deletionDeadlineSeconds=0),
                world.pool("PrefillPool", f"{name}-pool", clusterName=name),
            )
        world.hub.apply(world.pool("DecodePool", "meanwhile"))
        within(10, lambda: world.hub.exists("deployment", "meanwhile"), "the hub's pool is not held up")
        for name in ports:
            left = started + 30 - time.monotonic()
            world.hub.wait_reason("pmc", name, "ClusterUnreachable", left)
            assert world.hub.condition("pmc", name, "Reachable")["status"] == "False"
            world.hub.wait_reason("pfpool", f"{name}-pool", "ClusterUnreachable", left + 5)
        world.hub.scale("pfpool", "well-pool", 2)
        healthy = lambda: world.member.get("deployment", "well-pool")["spec"]["replicas"] == 2  # noqa: E731
        within(10, healthy, "a pool in a healthy member is not held up")
        world.hub.delete("pfpool", "dead-pool", "frozen-pool", "well-pool")
        world.hub.delete("pmc", "dead", "frozen", "well")


def test_a_server_that_freezes_and_thaws_is_noticed_both_times_and_keeps_its_instances(world, tap):
    world.hub.apply(
        world.secret("tapped", world.kubeconfig(server=tap.url)),
        world.member_cluster("tapped", "tapped"),
        world.pool("PrefillPool", "tapped-pool", clusterName="tapped"),
    )
    world.hub.wait_reason("pmc", "tapped", "AllReady")
    world.member.ready_up("tapped-pool", "10.9.0")
    world.hub.wait_reason("pfpool", "tapped-pool", "AllReady")
    tap.freeze()
    world.hub.wait_reason("pmc", "tapped", "ClusterUnreachable")
    world.hub.wait_reason("pfpool", "tapped-pool", "ClusterUnreachable")
    assert world.hub.get("pfpool", "tapped-pool")["status"]["readyReplicas"] == 1, "the last known count stays"
    tap.thaw()
    world.hub.wait_reason("pmc", "tapped", "AllReady")
    world.hub.wait_reason("pfpool", "tapped-pool", "AllReady")


def test_a_member_and_its_secret_stay_while_a_pool_needs_them(world):
    secret = world.hub.get("secret", "late-kubeconfig")
    assert secret["metadata"]["finalizers"] == ["prfaas.io/cleanup"]
    world.hub.kubectl("delete", "pmc/late", "secret/late-kubeconfig", "--wait=false")
    assert "late-pool" in world.hub.wait_reason("pmc", "late", "InUse")["message"]
    world.hub.scale("pfpool", "late-pool", 2)
    scaled = lambda: world.member.get("deployment", "late-pool")["spec"]["replicas"] == 2  # noqa: E731
    world.eventually(scaled, "the pool still works")
    world.hub.delete("pfpool", "late-pool")
    removed = lambda: not (world.hub.exists("pmc", "late") or world.hub.exists("secret", "late-kubeconfig"))  # noqa: E731
    world.eventually(removed, "both go with the last pool")
    assert not world.member.exists("deployment", "late-pool")


def test_a_secret_that_a_member_names_no_more_is_let_go(world):
    world.join("moving")
    world.hub.apply(world.pool("PrefillPool", "stays", clusterName="moving"))
    world.eventually(lambda: world.member.exists("deployment", "stays"), "its Deployment")
    world.hub.apply(world.secret("another", world.kubeconfig()), world.member_cluster("moving", "another"))
    world.eventually(lambda: world.hub.get("secret", "another-kubeconfig")["metadata"].get("finalizers"), "it is kept")
    world.hub.delete("secret", "moving-kubeconfig")
    world.hub.delete("pfpool", "stays")
    world.hub.delete("pmc", "moving")


def test_past_the_deadline_a_pool_goes_without_its_cluster_which_is_swept_when_it_is_back(world, tap):
    world.hub.apply(
        world.secret("cut", world.kubeconfig(server=tap.url)),
        world.member_cluster("cut", "cut", deletionDeadlineSeconds=14),
        world.pool("PrefillPool", "cut-pool", clusterName="cut"),
    )
    world.eventually(lambda: world.member.exists("deployment", "cut-pool"), "the pool runs")
    tap.freeze()
    world.hub.wait_reason("pfpool", "cut-pool", "ClusterUnreachable")
    world.hub.delete("pfpool", "cut-pool", wait=False)

    def waiting() -> bool:
        return "the pool is released without that at" in world.hub.condition("pfpool", "cut-pool")["message"]

    world.eventually(waiting, "the deadline is reported")
    world.eventually(lambda: not world.hub.exists("pfpool", "cut-pool"), "the pool goes at its deadline")
    world.eventually(lambda: world.hub.events("cut-pool", "ChildrenLeftBehind"), "an Event tells what is left behind")
    assert world.member.exists("deployment", "cut-pool")
    tap.thaw()
    world.eventually(lambda: not world.member.exists("deployment", "cut-pool"), "what was left is swept up")


def test_deleting_everything_leaves_nothing(world):
    world.hub.delete_all("pfpool,dcpool")
    world.hub.delete_all("pmc")
    world.eventually(lambda: not world.children(), "no child is left")
