"""Proves what is made of Secrets with certificates: what is good, what is damaged, what each step leaves in them."""

import base64
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from prfaas import identity
from prfaas.errors import ConfigError, IdentityError
from prfaas.rights import Identity
from prfaas_operator.errors import AuthorityDamagedError
from prfaas_operator.plan import certificates_read as read
from prfaas_operator.plan.certificates import CertificateMode, RotationStep, SoldCertificate, Terms, terms_of
from prfaas_operator.render import certificates as render

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)
TERMS = Terms(life=30 * DAY, authority_life=365 * DAY, settling=timedelta(minutes=3))
ONE, TWO = (read.make_authority(name, NOW, TERMS, "ours.prfaas.io") for name in ("one", "two"))


def secret(data: dict[str, bytes], **metadata) -> dict:
    encoded = {name: base64.b64encode(content).decode() for name, content in data.items()}
    return {"metadata": {"name": "s", **metadata}, "data": encoded}


def store_of(pair: identity.KeyPair) -> read.Store:
    first = read.first_store(identity.by_digest(pair.certificate), "ours.prfaas.io", pair.key)
    return read.read_store(secret(first.data), NOW)


def test_an_authority_passes_its_three_states_and_leaves_nothing_behind():
    store = store_of(ONE)
    [old], [new] = identity.by_digest(ONE.certificate), identity.by_digest(TWO.certificate)
    announced = read.advance(store, RotationStep.ANNOUNCE, identity.by_digest(TWO.certificate), TWO.key)
    announced = read.read_store(secret(announced.data), NOW)
    assert announced.authorities[:3] == ({old}, {new}, set())
    assert (announced.key, announced.next_key) == (ONE.key, TWO.key)
    promoted = read.advance(announced, RotationStep.PROMOTE, {new: announced.certificates[new]}, announced.next_key)
    promoted = read.read_store(secret(promoted.data), NOW)
    assert promoted.authorities[:3] == ({new}, set(), {old})
    assert (promoted.key, promoted.next_key) == (TWO.key, b"")
    retired = read.advance(promoted, RotationStep.RETIRE, {}, b"")
    assert retired.data == store_of(TWO).data
    assert promoted.bundle == announced.bundle


def test_what_an_authority_signs_is_for_its_cluster_and_ends_before_it_does():
    store = store_of(ONE)
    pair = read.issue(store, Identity("eu"), NOW, TERMS)
    facts = identity.check(pair.certificate, pair.key, store.bundle, NOW)
    assert (facts.cluster, facts.validity.not_after) == ("eu", NOW + 30 * DAY)
    late = read.issue(store, Identity("eu"), NOW + 350 * DAY, TERMS)
    assert identity.validity_of_pem(late.certificate).not_after == store.authorities.ends


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"tls.key": ONE.key},
        {"tls.crt": b"not a certificate", "tls.key": ONE.key},
        {"tls.crt": ONE.certificate, "tls.key": TWO.key},
        {"tls.crt": ONE.certificate, "tls.key": b"no key"},
        {"tls.crt": ONE.certificate, "tls.key": ONE.key, "next.crt": TWO.certificate, "next.key": ONE.key},
        {"tls.crt": ONE.certificate, "tls.key": ONE.key, "previous.crt": b"nothing"},
    ],
)
def test_reports_a_damaged_authority_without_its_key(data):
    with pytest.raises(AuthorityDamagedError) as raised:
        read.read_store(secret(data), NOW)
    assert "PRIVATE" not in str(raised.value)


def test_an_authority_without_a_key_or_past_its_end_signs_nothing():
    assert not read.read_store(secret({"tls.crt": ONE.certificate}), NOW).authorities.signs
    data = {"tls.crt": ONE.certificate, "tls.key": ONE.key}
    assert read.read_store(secret(data), NOW).authorities.signs
    assert not read.read_store(secret(data), NOW + 366 * DAY).authorities.signs


def test_no_key_is_in_what_a_log_would_print():
    assert "PRIVATE" not in repr(store_of(ONE))
    assert "PRIVATE" not in repr(ONE)


def test_a_clusters_secret_is_judged_by_the_hubs_authorities_and_not_by_its_own():
    store, pair = store_of(ONE), read.issue(store_of(ONE), Identity("eu"), NOW, TERMS)
    manifest = render.held_secret("prfaas-tls", render.labels("eu"), pair, store, NOW, TERMS.settling)
    held = read.read_held(manifest, store, NOW)
    assert held.leaf is not None
    assert (held.leaf.identity.cluster, held.trusted, held.written) == ("eu", store.authorities.trusted, NOW)
    stranger = read.issue(store_of(TWO), Identity("eu"), NOW, TERMS)
    forged = render.held_secret("prfaas-tls", render.labels("eu"), stranger, store_of(TWO), NOW, TERMS.settling)
    found = read.read_held(forged, store, NOW)
    assert found.leaf is None
    assert "not trusted" in found.problem
    assert read.read_held(None, store, NOW) == read.SecretContent()
    assert read.read_held(secret({"tls.crt": b"?"}, annotations={read.WRITTEN_AT: "soon"}), store, NOW).written is None


def test_a_template_inside_tls_changes_nothing_that_was_there():
    container = {
        "args": ["--x", "1"],
        "volumeMounts": [],
        "readinessProbe": {"httpGet": {"port": "api"}},
        "livenessProbe": {"httpGet": {"port": "admin"}},
    }
    plain = {"spec": {"template": {"metadata": {"labels": {}}, "spec": {"containers": [container], "volumes": []}}}}
    changed = render.worker_in_tls(plain, render.TLS_DIR_ARGS)
    template = changed["spec"]["template"]
    inside = template["spec"]["containers"][0]
    assert inside["args"] == ["--x", "1", "--tls-dir", "/etc/prfaas/tls"]
    assert inside["readinessProbe"]["httpGet"] == {"port": "api", "scheme": "HTTPS"}
    assert inside["livenessProbe"] == container["livenessProbe"], "the port of probes alone is plain"
    assert template["metadata"]["annotations"] == {"prfaas.io/scheme": "https"}
    assert container["args"] == ["--x", "1"]
    assert "annotations" not in plain["spec"]["template"]["metadata"]


def test_requests_the_uri_both_usages_and_a_renewal_at_two_thirds_of_cert_manager():
    terms = terms_of(CertificateMode.ISSUER, "ClusterIssuer.cert-manager.io/ours", 2160, 0.1, 60)
    assert terms.issuer is not None
    spec = render.certificate(Identity("eu"), "ours.prfaas.io", terms.issuer, terms.life)["spec"]
    assert spec["uris"] == ["spiffe://ours.prfaas.io/cluster/eu"]
    assert {"client auth", "server auth"} <= set(spec["usages"])
    assert (spec["duration"], spec["renewBefore"]) == ("2160h0m0s", "720h0m0s")
    assert spec["issuerRef"] == {"name": "ours", "kind": "ClusterIssuer", "group": "cert-manager.io"}


@pytest.mark.parametrize(
    ("mode", "issuer", "hours", "authority_hours"),
    [
        (CertificateMode.ISSUER, "", 90, 900),
        (CertificateMode.OPERATOR, "Issuer.cert-manager.io/x", 90, 900),
        (CertificateMode.ISSUER, "x", 90, 900),
        (CertificateMode.ISSUER, "Issuer/x", 90, 900),
        (CertificateMode.OPERATOR, "", 90, 200),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(mode, issuer, hours, authority_hours):
    with pytest.raises(ConfigError):
        terms_of(mode, issuer, hours, authority_hours, 60)


@pytest.mark.parametrize(
    ("mode", "issuer"), [(CertificateMode.OPERATOR, ""), (CertificateMode.ISSUER, "Issuer.cert-manager.io/x")]
)
def test_a_certificate_that_may_end_before_every_pod_has_the_next_one_is_refused(mode, issuer):
    """The controls: a second less, and no certificates."""
    with pytest.raises(ConfigError, match=r"the last third of --certificate-hours 0\.15 is 180 s, less than .* 181: "):
        terms_of(mode, issuer, 0.15, 240, 181)
    assert terms_of(mode, issuer, 0.15, 240, 180).settling == timedelta(minutes=3)
    terms_of(CertificateMode.DISABLED, "", 0.15, 240, 181)


def test_what_can_be_no_trust_domain_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="can be no trust domain"):
        terms_of(CertificateMode.OPERATOR, "", 24, 240, 60, "Example.com")
    assert terms_of(CertificateMode.OPERATOR, "", 24, 240, 60, "example.com").domain == "example.com"


def test_an_installation_keeps_its_trust_domain_and_one_from_before_there_were_any_the_common_one():
    store = store_of(ONE)
    promoted = read.advance(store, RotationStep.PROMOTE, identity.by_digest(TWO.certificate), TWO.key)
    assert read.read_store(secret(promoted.data), NOW).domain == "ours.prfaas.io"
    # A person put back the certificate alone: it names the domain.
    assert read.read_store(secret({"tls.crt": ONE.certificate}), NOW).domain == "ours.prfaas.io"
    stranger = identity.issue_server(ONE, "an issuer's", ["example.com"], identity.valid_for(NOW, 1))
    of_an_issuer = {"tls.crt": stranger.certificate}
    assert read.read_store(secret(of_an_issuer), NOW).domain == "prfaas.io"
    assert read.read_store(secret(of_an_issuer | {"trust-domain": b"ours.prfaas.io\n"}), NOW).domain == "ours.prfaas.io"


def test_a_certificate_of_another_trust_domain_is_replaced_although_the_same_authority_signed_it():
    """The control: one of this installation is not."""
    store = store_of(ONE)
    for domain, problem in (("theirs.prfaas.io", "the trust domain"), ("ours.prfaas.io", "")):
        pair = read.issue(store._replace(domain=domain), Identity("eu"), NOW, TERMS)
        written = render.held_secret("prfaas-tls", render.labels("eu"), pair, store, NOW, TERMS.settling)
        found = read.read_held(written, store, NOW)
        assert (found.leaf is None, problem in found.problem) == (bool(problem), True)
        issued = secret({"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": store.bundle})
        if problem:
            with pytest.raises(IdentityError, match=r"is 'theirs\.prfaas\.io', and 'ours\.prfaas\.io' was expected"):
                read.read_issued(issued, store.peers, NOW)
        else:
            assert read.read_issued(issued, store.peers, NOW) == found.leaf


def with_buyers(**buyers: SoldCertificate) -> read.Store:
    data = store_of(ONE).data | {"buyers.json": msgspec.json.encode(buyers)}
    return read.read_store(secret(data), NOW)


def test_a_buyer_counts_while_its_certificate_is_good_and_not_refused():
    good = SoldCertificate("a", ["a"], NOW, NOW + DAY)
    store = with_buyers(
        acme=good,
        ended=good._replace(ends=NOW),
        out=good._replace(refused_before=NOW + timedelta(seconds=1)),
        back=good._replace(refused_before=NOW),
    )
    assert [one.name for one in store.buyers_at(NOW)] == ["buyer/acme", "buyer/back"]
    assert store.revoked == {"buyer/out": NOW + timedelta(seconds=1), "buyer/back": NOW}
    assert "buyers.json" not in store.data, "the operator writes none of it"


def test_a_buyer_that_was_cut_off_is_refused_until_it_gets_another_certificate():
    """The control: the same certificate, while nobody is cut off."""
    acme = Identity("buyer/acme")
    first = read.issue(store_of(ONE), acme, NOW, TERMS)
    since = NOW + timedelta(minutes=1)
    store = with_buyers(acme=SoldCertificate("a", ["a"], NOW, NOW + DAY, since))
    later = read.issue(store, acme, since + timedelta(minutes=1), TERMS)
    assert check_peer(first, store_of(ONE)) == acme
    with pytest.raises(IdentityError, match=r"is revoked since .*; a new one admits it again"):
        check_peer(first, store)
    assert check_peer(later, store) == acme


def check_peer(pair: identity.KeyPair, store: read.Store) -> Identity:
    der = x509.load_pem_x509_certificate(pair.certificate).public_bytes(Encoding.DER)
    return identity.check_peer(der, store.bundle, NOW + timedelta(minutes=3), store.peers)


def test_an_entry_of_buyers_that_cannot_be_read_stops_the_operator_and_says_so():
    with pytest.raises(AuthorityDamagedError, match=r"buyers\.json cannot be read"):
        read.read_store(secret(store_of(ONE).data | {"buyers.json": b"[]"}), NOW)
