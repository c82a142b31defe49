"""Proves on real API servers that authorities change under a killed operator, and that an issuer is made use of.

Whatever is read on the way is set against what was read before: instances hold one or the other. Only what was read
within the time that the operator leaves between two steps, though: a slower machine may take both meanwhile.
"""

import base64
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from prfaas import identity

pytestmark = pytest.mark.clusters

CRD = Path(__file__).with_name("certificates.cert-manager.io.yaml")
Files = dict[str, bytes]
HOLDERS = {"hub": ("hub", "worker"), "hub.gateway": ("hub", "gateway"), "eu": ("eu", "")}
SETTLE_SECONDS = 3
"""Between two steps of the operators of this file."""


def read(place, name: str = "prfaas-tls") -> Files:
    found = place.find("secret", name)
    data = found["data"] if found else {}
    return {key: base64.b64decode(value) for key, value in data.items()}


def accepts(one: Files, other: Files) -> str:
    """Return the cluster that one side sees in the other's certificate; raises where it refuses it."""
    der = x509.load_pem_x509_certificate(other["tls.crt"]).public_bytes(Encoding.DER)
    return identity.check_peer(der, one["ca.crt"], datetime.now(UTC), identity.PeerRules()).cluster


def authority(files: Files) -> str:
    return identity.check(files["tls.crt"], files["tls.key"], files["ca.crt"], datetime.now(UTC)).authority


@pytest.fixture
def change(ground, operators, tmp_path) -> Iterator[SimpleNamespace]:
    """`start` and `kill` an operator of quick steps; `look` reads both Secrets and sets them against those before."""
    started, before = [], {}
    log, kubeconfig = tmp_path / "log", operators.kubeconfig(ground.hub, tmp_path / "kubeconfig")
    places = {"hub": ground.hub, "eu": ground.member}

    def start(*flags: str) -> None:
        flags = ("--certificate-settle-seconds", str(SETTLE_SECONDS), *flags)
        started.append(operators.start(ground.hub.name, kubeconfig, log, operators.free_ports(2), *flags))

    def kill() -> None:
        started[-1].kill()
        started[-1].wait()

    def look() -> dict[str, Files]:
        began = time.monotonic()
        now = {cluster: read(place) for cluster, place in places.items()}
        ended = time.monotonic()
        for others, since in ((now, began), before.get("last", ({}, ended))):
            if ended - since > SETTLE_SECONDS:
                continue
            for cluster, files in now.items():
                for other, theirs in others.items():
                    assert accepts(files, theirs) == other
                    assert accepts(theirs, files) == cluster
        before["last"] = now, began
        return now

    def has_both() -> bool:
        return all(read(place) for place in places.values())

    def is_lasting() -> bool:
        """Tell whether the certificates will not run out during a test."""
        soon = datetime.now(UTC) + timedelta(hours=1)
        return has_both() and all(
            identity.validity_of_pem(read(place)["tls.crt"]).not_after > soon for place in places.values()
        )

    yield SimpleNamespace(start=start, kill=kill, look=look, has_both=has_both, is_lasting=is_lasting)
    kill()


@pytest.fixture
def joined(ground, change) -> Callable[..., None]:
    """Start an operator, and give it a member with a pool."""

    def join(*flags: str) -> None:
        change.start(*flags)
        ground.join("eu")
        ground.hub.apply(ground.pool("PrefillPool", "away", clusterName="eu"))

    return join


def test_an_authority_is_replaced_although_the_operator_is_killed_at_every_step(ground, change, joined):
    joined()
    ground.eventually(change.has_both, "both clusters have a certificate")
    first = authority(change.look()["hub"])
    ground.hub.patch("secret", "prfaas-ca", {"data": {"tls.key": None}})
    seen: list[frozenset[str]] = [frozenset(("tls.crt",))]

    def moved() -> bool:
        change.look()
        state = frozenset(read(ground.hub, "prfaas-ca")) - {"trust-domain"}
        if state != seen[-1]:
            seen.append(state)
            change.kill()
            change.start()
        return state == {"tls.crt", "tls.key"} and len(seen) > 2

    ground.eventually(moved, "the authority has been replaced", 240)
    assert seen[1:] == [
        {"tls.crt", "next.crt", "next.key"},
        {"tls.crt", "tls.key", "previous.crt"},
        {"tls.crt", "tls.key"},
    ]

    def is_done() -> bool:
        now = change.look()
        return all(len(identity.by_digest(files["ca.crt"])) == 1 for files in now.values())

    ground.eventually(is_done, "the former authority is trusted nowhere")
    assert first not in {authority(files) for files in change.look().values()}


def test_a_certificate_is_renewed_by_the_same_authority(ground, change, joined):
    joined("--certificate-hours", "0.005")
    ground.hub.kubectl("delete", "secret", "prfaas-tls", "--ignore-not-found")
    ground.eventually(change.has_both, "both clusters have a certificate")
    first = read(ground.hub)
    renewed = lambda: read(ground.hub)["tls.crt"] != first["tls.crt"]  # noqa: E731
    ground.eventually(renewed, "it is renewed")
    assert read(ground.hub)["ca.crt"] == first["ca.crt"]
    assert read(ground.hub)["tls.key"] != first["tls.key"]


def test_an_issuers_certificates_are_requested_copied_and_change_their_authority_by_steps(ground, change, joined):
    joined()
    ground.eventually(change.is_lasting, "both clusters have certificates of the operator that last")
    change.kill()
    ground.hub.cluster.kubectl("apply", "-f", str(CRD))
    ground.hub.cluster.kubectl("wait", "--for=condition=Established", "-f", str(CRD), "--timeout=60s")
    verbs = "--verb=get,list,create,patch"
    ground.hub.kubectl("create", "role", "asks", verbs, "--resource=certificates.cert-manager.io")
    ground.hub.kubectl(
        "create", "rolebinding", "asks", "--role=asks", f"--serviceaccount={ground.hub.name}:prfaas-operator"
    )
    change.start("--certificates", "Issuer", "--certificate-issuer", "Issuer.cert-manager.io/ours")

    def requested() -> bool:
        return all(ground.hub.exists("certificates.cert-manager.io", f"prfaas-{name}") for name in HOLDERS)

    ground.eventually(requested, "all certificates are requested")
    spec = ground.hub.get("certificates.cert-manager.io", "prfaas-eu")["spec"]
    held = read(ground.hub)
    domain = identity.check(held["tls.crt"], held["tls.key"], held["ca.crt"], datetime.now(UTC)).domain
    assert spec["uris"] == [f"spiffe://{domain}/cluster/eu"]
    assert domain.endswith(".prfaas.io"), "the installation's own, whoever issues"
    assert spec["issuerRef"] == {"name": "ours", "kind": "Issuer", "group": "cert-manager.io"}
    validity = identity.valid_for(datetime.now(UTC), 5)

    def issue(signer: identity.KeyPair) -> None:
        """Do what cert-manager would."""
        for name, (cluster, part) in HOLDERS.items():
            pair = identity.issue(signer, cluster, validity, part, domain)
            data = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": signer.certificate}
            encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
            made = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "data": encoded}
            ground.hub.apply(made | {"metadata": {"name": spec["secretName"].replace("eu", name)}})

    for number in (1, 2):
        signer = identity.make_authority(f"issuer {number}", validity)
        [wanted] = identity.by_digest(signer.certificate)
        issue(signer)

        def uses_it(wanted: str = wanted) -> bool:
            now = change.look()
            return all(
                {authority(files)} == set(identity.by_digest(files["ca.crt"])) == {wanted} for files in now.values()
            )

        ground.eventually(uses_it, f"both clusters hold only certificates of issuer {number}")
        assert read(ground.member)["tls.key"] == read(ground.hub, "prfaas-eu-issued")["tls.key"]
    assert "tls.key" not in read(ground.hub, "prfaas-ca"), "the operator's own authority is removed with its key"
