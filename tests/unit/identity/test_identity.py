"""Proves what certificates say of clusters: which OpenSSL and we accept, at what time, and what refusals tell.

OpenSSL checks them too, by a handshake in memory, since it judges peers.
"""

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from prfaas import identity
from prfaas.errors import ConfigError, IdentityError
from prfaas.identity import KeyPair, Validity

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
DAY = datetime.timedelta(days=1)
YEAR = identity.valid_for(NOW, 365)
EVERYBODY = identity.PeerRules()


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return identity.make_authority("first", YEAR)


@pytest.fixture(scope="module")
def other() -> KeyPair:
    return identity.make_authority("second", YEAR)


def der(pair: KeyPair) -> bytes:
    return x509.load_pem_x509_certificate(pair.certificate).public_bytes(serialization.Encoding.DER)


def context(folder: Path, side: int, own: KeyPair, trusted: bytes) -> ssl.SSLContext:
    (folder / "c").write_bytes(own.certificate)
    (folder / "k").write_bytes(own.key)
    made = ssl.SSLContext(side)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    # What Python 3.13 requires by default.
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_cert_chain(folder / "c", folder / "k")
    made.load_verify_locations(cadata=trusted.decode())
    return made


def handshake(folder: Path, server: KeyPair, client: KeyPair, trusted: bytes) -> tuple[bytes | None, bytes | None]:
    """Return the certificates that server and client saw, DER; raises ssl.SSLError where one refuses."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        context(folder, ssl.PROTOCOL_TLS_SERVER, server, trusted).wrap_bio(up, down, server_side=True),
        context(folder, ssl.PROTOCOL_TLS_CLIENT, client, trusted).wrap_bio(down, up),
    ]
    for _ in range(4):
        for side in reversed(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return sides[0].getpeercert(True), sides[1].getpeercert(True)


def test_a_certificate_says_its_cluster_and_openssl_accepts_it_on_both_sides(tmp_path, authority):
    hub, eu = (identity.issue(authority, name, YEAR) for name in ("hub", "prefill-eu"))
    facts = identity.check(hub.certificate, hub.key, authority.certificate, NOW)
    assert facts == (("hub", ""), YEAR, *identity.by_digest(authority.certificate), identity.DEFAULT_DOMAIN)
    seen_by_server, seen_by_client = handshake(tmp_path, hub, eu, authority.certificate)
    assert (seen_by_server, seen_by_client) == (der(eu), der(hub))
    assert identity.check_peer(der(eu), authority.certificate, NOW, EVERYBODY) == ("prefill-eu", "")


def test_a_certificate_may_say_which_part_of_its_cluster_it_is(authority):
    for part in ("gateway", "worker"):
        pair = identity.issue(authority, "hub", YEAR, part)
        assert identity.check_peer(der(pair), authority.certificate, NOW, EVERYBODY) == ("hub", part)
    with pytest.raises(ConfigError, match="'king' is no part of a cluster; give one of gateway, worker"):
        identity.issue(authority, "hub", YEAR, "king")


def test_a_buyer_is_no_cluster_and_has_no_part(authority):
    pair = identity.issue(authority, "buyer/eu", YEAR)
    assert identity.check_peer(der(pair), authority.certificate, NOW, EVERYBODY) == ("buyer/eu", "")
    for name, part in (("buyer/", ""), ("buyer/eu/worker", ""), ("eu/x", ""), ("buyer/eu", "worker")):
        with pytest.raises(ConfigError):
            identity.issue(authority, name, YEAR, part)


def test_a_client_is_a_user_in_groups_and_no_server(authority):
    pair = identity.issue_client(authority, "system:node:n", ["system:nodes"], YEAR)
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    values = {each.oid: each.value for each in certificate.subject}
    assert values == {NameOID.COMMON_NAME: "system:node:n", NameOID.ORGANIZATION_NAME: "system:nodes"}
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_a_server_has_the_dns_names_and_addresses_that_it_was_issued_for_and_no_cluster(authority):
    pair = identity.issue_server(authority, "api", ["127.0.0.1", "::1", "kubernetes.default"], YEAR)
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["kubernetes.default"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    with pytest.raises(IdentityError, match="names no cluster"):
        identity.check_peer(der(pair), authority.certificate, NOW, EVERYBODY)


def test_openssl_and_we_refuse_another_authority(tmp_path, authority, other):
    ours, theirs = identity.issue(authority, "hub", YEAR), identity.issue(other, "hub", YEAR)
    with pytest.raises(ssl.SSLError):
        handshake(tmp_path, ours, theirs, authority.certificate)
    with pytest.raises(IdentityError, match=r"issued by CN=second, which is not trusted; trusted are: CN=first\."):
        identity.check_peer(der(theirs), authority.certificate, NOW, EVERYBODY)


def test_a_bundle_of_two_authorities_accepts_both_while_one_replaces_the_other(tmp_path, authority, other):
    both = identity.bundle(authority.certificate, other.certificate, authority.certificate)
    assert both == authority.certificate + other.certificate
    old, new = identity.issue(authority, "a", YEAR), identity.issue(other, "b", YEAR)
    handshake(tmp_path, old, new, both)
    assert [identity.check_peer(der(pair), both, NOW, EVERYBODY).cluster for pair in (old, new)] == ["a", "b"]


def test_the_signer_is_found_in_a_bundle_by_its_key(authority, other):
    both = KeyPair(authority.certificate + other.certificate, other.key)
    made = identity.issue(both, "hub", YEAR)
    assert identity.check_peer(der(made), other.certificate, NOW, EVERYBODY).cluster == "hub"
    with pytest.raises(ConfigError, match="fits none of its certificates"):
        identity.issue(KeyPair(authority.certificate, other.key), "hub", YEAR)


def test_a_clusters_certificate_can_issue_none(tmp_path, authority):
    leaf = identity.issue(authority, "hub", YEAR)
    with pytest.raises(ConfigError, match="not an authority's and cannot sign"):
        identity.issue(leaf, "evil", YEAR)
    # As a signer would that does not use this module.
    key = serialization.load_pem_private_key(leaf.key, None)
    signer = x509.load_pem_x509_certificate(leaf.certificate)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://prfaas.io/cluster/evil")])
    forged = (
        x509.CertificateBuilder(signer.subject, signer.subject, key.public_key(), 1, YEAR.not_before, YEAR.not_after)
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    with pytest.raises(IdentityError, match="not trusted"):
        identity.check_peer(forged.public_bytes(serialization.Encoding.DER), authority.certificate, NOW, EVERYBODY)
    chain = forged.public_bytes(serialization.Encoding.PEM) + leaf.certificate
    with pytest.raises(IdentityError, match="not trusted"):
        identity.check(chain, leaf.key, authority.certificate, NOW)


def test_validity_begins_before_now_for_slow_clocks_and_ends_when_requested(authority):
    pair = identity.issue(authority, "hub", identity.valid_for(NOW, 1))
    for moment in (NOW - identity.CLOCK_SKEW, NOW, NOW + DAY):
        assert identity.check_peer(der(pair), authority.certificate, moment, EVERYBODY).cluster == "hub"
    early = NOW - identity.CLOCK_SKEW - datetime.timedelta(seconds=1)
    with pytest.raises(IdentityError, match=r"is not valid before .* UTC; check both clocks"):
        identity.check_peer(der(pair), authority.certificate, early, EVERYBODY)
    with pytest.raises(IdentityError, match=r"expired at .* UTC; renew it"):
        identity.check_peer(der(pair), None, NOW + DAY + datetime.timedelta(seconds=1), EVERYBODY)


def test_an_expired_authority_takes_its_certificates_along():
    short = identity.make_authority("short", identity.valid_for(NOW, 1))
    pair = identity.issue(short, "hub", identity.valid_for(NOW, 1))
    with pytest.raises(IdentityError, match="expired"):
        identity.check(pair.certificate, pair.key, short.certificate, NOW + 2 * DAY)


def test_no_certificate_outlives_its_authority(authority):
    with pytest.raises(ConfigError, match="ask for fewer days"):
        identity.issue(authority, "hub", identity.valid_for(NOW, 366))
    early = identity.issue(authority, "hub", Validity(YEAR.not_before - DAY, NOW + DAY))
    assert identity.check(early.certificate, early.key, authority.certificate, NOW).validity == (
        YEAR.not_before,
        NOW + DAY,
    )


@pytest.mark.parametrize("name", ["", "Hub", "a.b", "-a", "a-", "a/b", "a" * 64, "a b", "hüb", "hub\n"])
def test_names_that_no_member_cluster_can_have_are_refused(authority, name: str):
    with pytest.raises(ConfigError, match="cannot be a cluster's name"):
        identity.issue(authority, name, YEAR)


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["spiffe://prfaas.io/cluster/"],
        ["spiffe://prfaas.io/cluster/a/b"],
        ["spiffe://prfaas.io/cluster/a/"],
        ["spiffe://prfaas.io/cluster/a/gateway/"],
        ["spiffe://prfaas.io/cluster/a/gateway/worker"],
        ["spiffe://prfaas.io/cluster//gateway"],
        ["spiffe://prfaas.io/cluster/HUB"],
        ["spiffe:///cluster/hub"],
        ["spiffe://EXAMPLE.com/cluster/hub"],
        ["spiffe://a/b/cluster/hub"],
        ["spiffe://prfaas.io"],
        ["https://prfaas.io/cluster/hub"],
        ["spiffe://prfaas.io/cluster/hub", "spiffe://prfaas.io/cluster/eu"],
        ["spiffe://prfaas.io/cluster/hub", "https://example.com"],
    ],
)
def test_a_certificate_that_names_no_cluster_or_two_proves_none(authority, uris: list[str]):
    key = serialization.load_pem_private_key(authority.key, None)
    signer = x509.load_pem_x509_certificate(authority.certificate)
    builder = x509.CertificateBuilder(
        signer.subject, x509.Name([]), key.public_key(), 1, YEAR.not_before, YEAR.not_after
    )
    if uris:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
        builder = builder.add_extension(names, critical=False)
    raw = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    with pytest.raises(IdentityError, match="names no cluster"):
        identity.check_peer(raw, authority.certificate, NOW, EVERYBODY)


def test_distinguishes_a_key_of_another_certificate_from_unreadable_files(authority):
    one, two = identity.issue(authority, "hub", YEAR), identity.issue(authority, "hub", YEAR)
    with pytest.raises(ConfigError, match="not the certificate's"):
        identity.check(one.certificate, two.key, authority.certificate, NOW)
    with pytest.raises(ConfigError, match="no certificate can be read"):
        identity.check(one.certificate[:200], one.key, authority.certificate, NOW)
    with pytest.raises(ConfigError, match="key cannot be read"):
        identity.check(one.certificate, one.key[:100], authority.certificate, NOW)
    with pytest.raises(IdentityError, match="cannot be read"):
        identity.check_peer(b"nothing", authority.certificate, NOW, EVERYBODY)


def test_certificates_of_other_issuers_may_have_other_kinds_of_keys(authority):
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    signer = x509.load_pem_x509_certificate(authority.certificate)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://prfaas.io/cluster/hub")])
    made = (
        x509.CertificateBuilder(signer.subject, x509.Name([]), key.public_key(), 1, YEAR.not_before, YEAR.not_after)
        .add_extension(names, critical=True)
        .sign(serialization.load_pem_private_key(authority.key, None), hashes.SHA256())
    )
    facts = identity.check(made.public_bytes(serialization.Encoding.PEM), pem, authority.certificate, NOW)
    assert facts.cluster == "hub"
    with pytest.raises(ConfigError, match="no elliptic curve key"):
        identity.issue(KeyPair(made.public_bytes(serialization.Encoding.PEM), pem), "hub", YEAR)


def test_renewal_is_due_when_a_third_of_the_life_is_left():
    assert identity.when_to_renew(NOW, NOW + 90 * DAY) == NOW + 60 * DAY


def test_a_key_is_in_no_repr(authority):
    assert "PRIVATE" in authority.key.decode()
    assert "PRIVATE" not in repr(authority)


def test_what_a_cluster_got_before_it_was_revoked_is_refused_and_what_it_gets_later_is_not(authority):
    """The control: the same certificate, while nobody is revoked."""
    old = identity.issue(authority, "eu", identity.valid_for(NOW, 1))
    cut = identity.PeerRules({"eu": NOW})
    with pytest.raises(IdentityError, match=r"is revoked since .*`prfaas cluster join eu` admits"):
        identity.check_peer(der(old), authority.certificate, NOW, cut)
    assert identity.check_peer(der(old), authority.certificate, NOW, EVERYBODY).cluster == "eu"
    new = identity.issue(authority, "eu", Validity(NOW, NOW + DAY))
    assert identity.check_peer(der(new), authority.certificate, NOW, cut).cluster == "eu"
    other_one = identity.issue(authority, "us", identity.valid_for(NOW, 1))
    assert identity.check_peer(der(other_one), authority.certificate, NOW, cut).cluster == "us"


def test_a_certificate_is_read_once_and_judged_at_each_request(authority, monkeypatch: pytest.MonkeyPatch):
    """The control is another certificate, which is read."""
    kept, another = (der(identity.issue(authority, "eu", identity.valid_for(NOW, 1))) for _ in range(2))
    load, read = x509.load_der_x509_certificate, []
    monkeypatch.setattr(x509, "load_der_x509_certificate", lambda text: read.append(text) or load(text))
    assert identity.check_peer(kept, None, NOW, EVERYBODY).cluster == "eu"
    with pytest.raises(IdentityError, match="is revoked since"):
        identity.check_peer(kept, None, NOW, identity.PeerRules({"eu": NOW}))
    with pytest.raises(IdentityError, match="expired at"):
        identity.check_peer(kept, None, NOW + 2 * DAY, EVERYBODY)
    with pytest.raises(IdentityError, match="of another installation"):
        identity.check_peer(kept, None, NOW, identity.PeerRules(domain="ours.prfaas.io"))
    assert read == [kept]
    assert identity.check_peer(another, None, NOW, EVERYBODY).cluster == "eu"
    assert read == [kept, another]


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b'{"eu": 1}', b'{"eu": "soon"}', b'{"eu": "2026-01-01T00:00:00"}', b"\xff"]
)
def test_a_list_of_revoked_clusters_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="no list of revoked clusters"):
        identity.read_revoked(text)
    assert identity.read_revoked(identity.write_revoked({"eu": NOW})) == {"eu": NOW}


def test_the_same_name_in_another_installation_is_a_stranger_even_under_the_same_authority(authority):
    """The control: its own installation accepts it, and so does a tool that belongs to none."""
    theirs = identity.issue(authority, "hub", identity.valid_for(NOW, 1), "gateway", "theirs.prfaas.io")
    with pytest.raises(IdentityError, match=r"of another installation: its trust domain is 'theirs\.prfaas\.io'"):
        identity.check_peer(der(theirs), authority.certificate, NOW, identity.PeerRules(domain="ours.prfaas.io"))
    for rules in (identity.PeerRules(domain="theirs.prfaas.io"), EVERYBODY):
        assert identity.check_peer(der(theirs), authority.certificate, NOW, rules) == ("hub", "gateway")
    facts = identity.check(theirs.certificate, theirs.key, authority.certificate, NOW)
    assert (facts.domain, facts.identity) == ("theirs.prfaas.io", ("hub", "gateway"))


def test_an_authority_signs_for_its_trust_domain_and_one_that_names_none_for_the_common_one(authority):
    ours = identity.make_authority("ours", YEAR, "ours.prfaas.io")
    for signer, domain in ((ours, "ours.prfaas.io"), (authority, "prfaas.io")):
        for name in ("hub", "buyer/acme"):
            pair = identity.issue(signer, name, identity.valid_for(NOW, 1))
            facts = identity.check(pair.certificate, pair.key, signer.certificate, NOW)
            assert (facts.domain, facts.cluster) == (domain, name)
    nameless = identity.issue_server(authority, "x", ["example.com"], YEAR).certificate
    assert identity.domain_of(nameless) == "prfaas.io"


@pytest.mark.parametrize("domain", ["A.b", "a/b", "a b", "a" * 256, "-", ".."])
def test_nothing_is_issued_under_what_can_be_no_trust_domain(authority, domain):
    with pytest.raises(ConfigError, match="can be no trust domain"):
        identity.issue(authority, "hub", identity.valid_for(NOW, 1), domain=domain)
    with pytest.raises(ConfigError, match="can be no trust domain"):
        identity.make_authority("ours", YEAR, domain)


def test_who_has_run_out_accepts_expired_certificates_of_its_own_cluster_and_nobody_elses(authority):
    """The control: while its own certificate is good, it refuses them."""
    late, rules = NOW + 2 * DAY, identity.PeerRules(ran_out=identity.RanOut("hub", NOW))
    beside = identity.issue(authority, "hub", identity.valid_for(NOW, 1), "worker")
    assert identity.check_peer(der(beside), authority.certificate, late, rules) == ("hub", "worker")
    with pytest.raises(IdentityError, match="expired at"):
        identity.check_peer(der(beside), authority.certificate, late, EVERYBODY)
    abroad = identity.issue(authority, "eu", identity.valid_for(NOW, 30))
    with pytest.raises(IdentityError, match=r"is not of cluster 'hub', and nobody else is accepted"):
        identity.check_peer(der(abroad), authority.certificate, late, rules)
    assert identity.check_peer(der(abroad), authority.certificate, late, EVERYBODY).cluster == "eu"


def test_who_has_run_out_still_refuses_what_was_replaced_revoked_or_is_not_yet_valid(authority):
    pair = der(identity.issue(authority, "hub", identity.valid_for(NOW, 1)))
    ours = identity.RanOut("hub", NOW + DAY + datetime.timedelta(seconds=1))
    with pytest.raises(IdentityError, match="before ours began"):
        identity.check_peer(pair, authority.certificate, NOW + 2 * DAY, identity.PeerRules(ran_out=ours))
    ours = ours._replace(since=NOW)
    with pytest.raises(IdentityError, match="is revoked"):
        identity.check_peer(pair, None, NOW + 2 * DAY, identity.PeerRules({"hub": NOW}, ran_out=ours))
    with pytest.raises(IdentityError, match="is not valid before"):
        identity.check_peer(pair, authority.certificate, NOW - DAY, identity.PeerRules(ran_out=ours))


@pytest.mark.parametrize(("hours", "minutes"), [(2, 2 * 60 / 144), (24, 10), (24 * 365, 10)])
def test_a_certificate_counts_as_run_out_at_most_ten_minutes_before_its_end(hours, minutes):
    begin, end = NOW, NOW + datetime.timedelta(hours=hours)
    assert end - identity.runs_out(Validity(begin, end)) == datetime.timedelta(minutes=minutes)
