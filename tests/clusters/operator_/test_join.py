"""Proves that `prfaas cluster` registers and removes a member on real API servers, and makes what its chart makes."""

import base64
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from prfaas import identity
from prfaas.errors import IdentityError
from prfaas_operator.render.service_account import member_account

pytestmark = pytest.mark.clusters


def run(world, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `prfaas cluster ...` against the world's hub."""
    command = [sys.executable, "-m", "prfaas.cli.main", "cluster", *arguments]
    command += ["--hub-kubeconfig", str(world.hub.cluster.kubeconfig), "--namespace", world.hub.name]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def at_member(world, namespace: str) -> list[str]:
    return ["--kubeconfig", str(world.member.cluster.kubeconfig), "--member-namespace", namespace]


def test_a_cluster_joins_carries_a_pool_and_leaves_without_a_trace(world):
    namespace = f"{world.member.name}-fresh"
    joined = run(world, "join", "fresh", "--link-mbps", "250", *at_member(world, namespace), "-o", "json")
    assert joined.returncode == 0, joined.stderr
    assert json.loads(joined.stdout)["ready"] == "True"
    expires = world.hub.get("pmc", "fresh")["status"]["tokenExpirationTime"]
    days = (datetime.fromisoformat(expires) - datetime.now(UTC)) / timedelta(days=1)
    assert 29 < days <= 30
    again = run(world, "join", "fresh", "--link-mbps", "300", *at_member(world, namespace))
    assert again.returncode == 0, "joining again changes the registration"
    assert world.hub.get("pmc", "fresh")["spec"]["link"]["capacityMbps"] == 300
    world.hub.apply(world.pool("PrefillPool", "fresh-pool", clusterName="fresh"))
    member = world.member.cluster
    world.eventually(lambda: member.reader.list_all(namespace, "deployments"), "the pool runs there")
    assert json.loads(run(world, "list", "-o", "json").stdout)[0]["pools"] == ["fresh-pool"]
    stays = run(world, "leave", "fresh", "--wait-seconds", "2")
    assert stays.returncode == 1
    assert "PrefillPool fresh-pool" in stays.stderr
    assert "deletionTimestamp" not in world.hub.get("pmc", "fresh")["metadata"], "a refusal changes nothing"
    world.hub.delete("pfpool", "fresh-pool")
    left = run(world, "leave", "fresh", *at_member(world, namespace))
    assert left.returncode == 0, left.stderr
    assert not world.hub.exists("secret", "fresh-kubeconfig")
    kinds = "serviceaccounts,secrets,roles,rolebindings,deployments"
    leftovers = member.kubectl("-n", namespace, "get", kinds, "-l", "app.kubernetes.io/part-of=prfaas", "-o", "name")
    assert leftovers.strip() == ""


def test_a_cluster_is_cut_off_and_joins_again_with_another_certificate(world):
    there = at_member(world, world.member.name)
    assert run(world, "join", "away", "--link-mbps", "10", *there).returncode == 0
    world.hub.apply(world.pool("PrefillPool", "carried", clusterName="away"))
    world.eventually(lambda: world.member.exists("secret", "prfaas-tls"), "it has a certificate")
    stolen = tls_files(world.member)
    assert not refusal(world.hub, stolen), "the control: it is accepted, and valid for hours"
    cut = run(world, "revoke", "away", "-o", "json")
    assert cut.returncode == 0, cut.stderr
    said = json.loads(cut.stdout)
    assert (said["revoked"], said["pools"], "are refused" in said["certificate"]) == (True, ["carried"], True)
    for name in ("prfaas-tls", "prfaas-gateway-tls"):
        assert "is revoked since" in refusal(world.hub, stolen, name)
    world.hub.wait_reason("pfpool", "carried", "Revoked")
    again = run(world, "revoke", "away")
    assert (again.returncode, "its pools carried get no prompt" in again.stdout) == (0, True)
    assert run(world, "join", "away", "--link-mbps", "10", *there).returncode == 0
    world.eventually(lambda: not refusal(world.hub, tls_files(world.member)), "it has another certificate")
    assert "is revoked since" in refusal(world.hub, stolen)
    world.hub.delete("pfpool", "carried")
    assert run(world, "leave", "away", *there).returncode == 0


def tls_files(place, name: str = "prfaas-tls") -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in place.get("secret", name)["data"].items()}


def refusal(place, certificate: dict[str, bytes], name: str = "prfaas-tls") -> str:
    """Return why the holders of a Secret refuse a certificate; empty if they accept it."""
    own = tls_files(place, name)
    der = x509.load_pem_x509_certificate(certificate["tls.crt"]).public_bytes(Encoding.DER)
    revoked = identity.read_revoked(own["revoked.json"]) if "revoked.json" in own else {}
    try:
        identity.check_peer(der, own["ca.crt"], datetime.now(UTC), identity.PeerRules(revoked))
    except IdentityError as error:
        return str(error)
    return ""


def test_a_buyer_gets_a_certificate_that_is_refused_when_it_is_cut_off_and_another_one_later(world, tmp_path):
    world.hub.apply(world.pool("DecodePool", "selling"))
    world.eventually(lambda: world.hub.exists("secret", "prfaas-tls"), "the hub's instances have a certificate")
    sold = run(world, "buyer", "acme", "--out", str(tmp_path / "first"))
    assert sold.returncode == 0, sold.stderr
    first = {file.name: file.read_bytes() for file in (tmp_path / "first").iterdir()}
    assert first.keys() == {"tls.crt", "tls.key", "ca.crt"}
    assert not refusal(world.hub, first), "the control"
    cut = run(world, "revoke", "buyer/acme")
    assert (cut.returncode, "buyer/acme is revoked" in cut.stdout) == (0, True), cut.stderr
    assert "is revoked since" in refusal(world.hub, first)
    assert run(world, "buyer", "acme", "--out", str(tmp_path / "second")).returncode == 0
    second = {file.name: file.read_bytes() for file in (tmp_path / "second").iterdir()}
    assert not refusal(world.hub, second)
    assert "is revoked since" in refusal(world.hub, first)
    world.hub.delete("dcpool", "selling")


def test_nobody_is_cut_off_by_a_wrong_name(world):
    tried = run(world, "revoke", "nobody")
    assert (tried.returncode, "MemberCluster nobody does not exist" in tried.stderr) == (1, True)


def test_join_uses_the_chart_where_it_is_installed_and_leaves_it_there(world):
    before = world.member.get("role", "prfaas-operator")["metadata"]["resourceVersion"]
    assert run(world, "join", "charted", "--link-mbps", "10", *at_member(world, world.member.name)).returncode == 0
    assert run(world, "leave", "charted", *at_member(world, world.member.name)).returncode == 0
    assert world.member.get("role", "prfaas-operator")["metadata"]["resourceVersion"] == before


def test_join_gives_the_same_rights_as_the_chart(world):
    made = {manifest["kind"]: manifest for manifest in member_account(world.member.name)}
    assert made["Role"]["rules"] == world.member.get("role", "prfaas-operator")["rules"]


def test_a_cluster_that_the_hub_cannot_reach_is_reported_with_its_reason(world):
    tried = run(
        world, "join", "astray", "--link-mbps", "1", "--server", "https://127.0.0.1:1", "--wait-seconds", "6",
        *at_member(world, world.member.name),
    )  # fmt: skip
    assert tried.returncode == 1
    assert "ClusterUnreachable" in tried.stderr
    assert run(world, "leave", "astray").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["join", "x", "--link-mbps", "1"], "--context, --kubeconfig or both"),
        (["join", "x", "--link-mbps", "1", "--kubeconfig", "/nowhere"], "/nowhere"),
        (["leave", "nobody"], "MemberCluster nobody does not exist"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(world, arguments, message):
    done = run(world, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_token_is_not_shown_anywhere(world):
    assert "eyJ" not in world.log.read_text(), "no token in the operator's log"
    listing = run(world, "list", "-o", "json").stdout
    assert "eyJ" not in listing
    assert yaml.safe_load(listing) == []
