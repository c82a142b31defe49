"""Certificates between clusters: a certificate authority, the certificates that it issues, and their checks.

An instance proves its cluster by a certificate with one URI, as in SPIFFE. It may name a part of the cluster:

    spiffe://<trust domain>/cluster/<name>
    spiffe://<trust domain>/cluster/<name>/<part>        gateway or worker
    spiffe://<trust domain>/buyer/<name>

What each of them may do is in `prfaas.rights`. The trust domain is the installation's own: under an issuer that signs
for several installations, the hub of another one is a stranger. An authority of ours names it as `spiffe://<trust
domain>`, and signs for it.

Pod addresses change and clusters may share them, so host names prove nothing. Each certificate of the authority belongs
to a cluster of this installation. Clocks differ, so validity begins in the past. Certificates are renewed long before
their end. During a replacement of the authority, a bundle holds the old and the new one.

Every function computes only from its arguments. Times always have a time zone. Keys are elliptic curve keys (P-256).
All certificates and keys are PEM unless a name says DER.
"""

import datetime
import functools
import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from prfaas.errors import UNREADABLE, ConfigError, IdentityError
from prfaas.rights import BUYER, PARTS, Identity

DEFAULT_DOMAIN: Final = "prfaas.io"
"""The trust domain of an authority that names none."""
DNS_SUFFIX: Final = ".prfaas.internal"
CLOCK_SKEW: Final = datetime.timedelta(minutes=10)
"""Validity begins this long before the issue, for peers with slow clocks."""
RENEW_AFTER: Final = 2 / 3
"""Part of its life after which a certificate is renewed."""
_MAX_DEPTH: Final = 4
_UtcTime = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
_NAME: Final = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
"""A MemberCluster's name has the same form."""
_DOMAIN: Final = r"[a-z0-9](?:[-._a-z0-9]{0,253}[a-z0-9])?"
_AUTHORITY_URI: Final = re.compile(rf"spiffe://({_DOMAIN})")
_URI: Final = re.compile(rf"spiffe://({_DOMAIN})/(?:cluster/({_NAME})(?:/({'|'.join(PARTS)}))?|({BUYER}{_NAME}))")


class Validity(NamedTuple):
    """The time in which a certificate is valid."""

    not_before: datetime.datetime
    not_after: datetime.datetime


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, both PEM. The key is in no repr."""

    certificate: bytes
    key: bytes = field(repr=False)


class RanOut(NamedTuple):
    """Our own certificate has run out, because nobody renewed it: only our own cluster is accepted.

    Its certificates run out like ours, so expired ones count there. What ended before `since` does not: it was replaced
    while renewals still came.
    """

    cluster: str
    since: datetime.datetime


class PeerRules(NamedTuple):
    """Whom an instance accepts, beside what its authorities say."""

    revoked: Mapping[str, datetime.datetime] = {}
    """By cluster: its certificates that began before this time are refused, however long they are valid."""
    domain: str = ""
    """The installation's trust domain. Empty: any, for tools that belong to no installation."""
    ran_out: RanOut | None = None
    """None while our own certificate is good."""


class CertificateFacts(NamedTuple):
    identity: Identity
    validity: Validity
    authority: str
    """Digest of the trusted authority at the end of its chain."""
    domain: str
    """The trust domain of its installation."""

    @property
    def cluster(self) -> str:
        return self.identity.cluster


def valid_for(now: datetime.datetime, days: float) -> Validity:
    """Return a validity of some days from now. It begins a little earlier because of slow clocks."""
    now = now.replace(microsecond=0)  # certificates know no parts of a second
    return Validity(now - CLOCK_SKEW, now + datetime.timedelta(days=days))


def when_to_renew(not_before: datetime.datetime, not_after: datetime.datetime) -> datetime.datetime:
    """Return the time to replace a certificate: a third of its life before its end."""
    return not_before + (not_after - not_before) * RENEW_AFTER


def runs_out(validity: Validity) -> datetime.datetime:
    """Return when a certificate counts as run out: ten minutes before its end, less of one that lives for under a day.
    So all instances of a cluster agree on it before the first of them meets an end, whatever their clocks say."""
    return validity.not_after - min(CLOCK_SKEW, (validity.not_after - validity.not_before) / 144)


def new_domain() -> str:
    """Return a trust domain that no other installation has."""
    return f"{secrets.token_hex(8)}.{DEFAULT_DOMAIN}"


def make_authority(name: str, validity: Validity, domain: str = DEFAULT_DOMAIN) -> KeyPair:
    """Return a new certificate authority of a trust domain. It may sign certificates, but no further authorities.

    Raises ConfigError for what can be no trust domain.
    """
    check_domain(domain)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{domain}")])
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key.public_key(), validity)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(names, critical=False)
    return KeyPair(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def issue(authority: KeyPair, cluster: str, validity: Validity, part: str = "", domain: str = "") -> KeyPair:
    """Return a server and client certificate for a cluster, a part of it, or a buyer (BUYER + NAME), in a trust domain,
    by default the authority's own; raises ConfigError for what cannot be issued."""
    if not re.fullmatch(_NAME, cluster.removeprefix(BUYER)):
        raise ConfigError(f"{cluster!r} cannot be a cluster's name; use up to 63 lower case letters, digits and '-'")
    if part not in ("", *PARTS):
        raise ConfigError(f"{part!r} is no part of a cluster; give one of {', '.join(PARTS)}, or none")
    who = Identity(cluster, part)
    if who.is_buyer and part:
        raise ConfigError(f"a buyer has no parts; leave {part!r} out")
    uri = uri_of(who, domain or domain_of(authority.certificate))
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
    if not who.is_buyer:
        names.append(x509.DNSName(cluster + DNS_SUFFIX))
    return _issue(authority, _name(cluster), names, validity)


def uri_of(who: Identity, domain: str) -> str:
    """Return the URI by which a certificate names a cluster, a part of it, or a buyer. Raises ConfigError for what can
    be no trust domain."""
    check_domain(domain)
    path = ("" if who.is_buyer else "cluster/") + who.cluster + (f"/{who.part}" if who.part else "")
    return f"spiffe://{domain}/{path}"


def domain_of(authorities: bytes) -> str:
    """Return the trust domain that the first of some authorities (PEM) names; the common one if none does."""
    found = (_AUTHORITY_URI.fullmatch(uri) for one in _load_all(authorities) for uri in _uris(one))
    return next((match[1] for match in found if match), DEFAULT_DOMAIN)


def check_domain(domain: str) -> None:
    """Raise ConfigError for what can be no trust domain."""
    if not re.fullmatch(_DOMAIN, domain):
        raise ConfigError(
            f"{domain!r} can be no trust domain; use lower case letters, digits, and between them '.', '-', '_'"
        )


def issue_server(authority: KeyPair, name: str, hosts: Sequence[str], validity: Validity) -> KeyPair:
    """Return a server and client certificate for DNS names and IP addresses; raises ConfigError as `issue`."""
    return _issue(authority, _name(name), [_general_name(host) for host in hosts], validity)


def issue_client(authority: KeyPair, user: str, groups: Sequence[str], validity: Validity) -> KeyPair:
    """Return a client certificate that Kubernetes reads as `user` in `groups`; raises ConfigError as `issue`."""
    return _issue(authority, _name(user, groups), [], validity)


def _issue(authority: KeyPair, subject: x509.Name, names: Sequence[x509.GeneralName], validity: Validity) -> KeyPair:
    """Sign a certificate for servers and clients, or only for clients if `names` is empty."""
    signer = signing_certificate(authority)
    own = validity_of(signer)
    if validity.not_after > own.not_after or validity.not_after <= own.not_before:
        raise ConfigError(
            f"the authority is valid from {own.not_before:%F %R} to {own.not_after:%F %R} UTC, which does not cover a "
            f"certificate until {validity.not_after:%F %R}; ask for fewer days, or replace the authority"
        )
    validity = Validity(max(validity.not_before, own.not_before), validity.not_after)
    key = ec.generate_private_key(ec.SECP256R1())
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(subject, signer.subject, key.public_key(), validity, signer)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes if names else purposes[1:]), critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return KeyPair(_pem(builder.sign(_signing_key(authority.key), hashes.SHA256())), _key_pem(key))


def _name(common_name: str, organisations: Sequence[str] = ()) -> x509.Name:
    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, one) for one in organisations]
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def bundle(*authorities: bytes) -> bytes:
    """Return all authorities' certificates as one bundle, without duplicates, in order."""
    return b"".join(dict.fromkeys(_pem(certificate) for text in authorities for certificate in _load_all(text)))


def by_digest(text: bytes) -> dict[str, bytes]:
    """Return the PEM certificates of a bundle by their SHA-256 digests."""
    return {_digest(one): _pem(one) for one in _load_all(text)} if text.strip() else {}


def check(certificate: bytes, key: bytes, trusted: bytes, now: datetime.datetime) -> CertificateFacts:
    """Check an instance's credentials as its peers do: key, chain and cluster.

    Raises ConfigError for unreadable or unmatched texts, IdentityError for credentials that peers would refuse.
    """
    leaf, *intermediates = _load_all(certificate)
    if _load_key(key).public_key() != leaf.public_key():
        raise ConfigError("the private key is not the certificate's; issue both together")
    authority = _check_chain(leaf, intermediates, _load_all(trusted), now)
    domain, found = _named_by(leaf)
    return CertificateFacts(found, validity_of(leaf), _digest(authority), domain)


def check_peer(der: bytes, trusted: bytes | None, now: datetime.datetime, peers: PeerRules) -> Identity:
    """Return what a peer's certificate (DER) proves; with `trusted`, check its chain too. Raises IdentityError."""
    try:
        leaf, validity, domain, found = _read(der)
        # Where an expired one may count, it is judged as at its end.
        moment = now if peers.ran_out is None else min(now, validity.not_after)
        _check_time(leaf, validity, moment)
        if trusted is not None:
            _check_chain(leaf, [], _load_all(trusted), moment)
        if peers.ran_out is not None:
            _check_alone(leaf, found, peers.ran_out)
        if peers.domain not in ("", domain):
            raise IdentityError(
                f"{_describe(leaf)} is of another installation: its trust domain is {domain!r}, and ours is "
                f"{peers.domain!r}"
            )
        if is_revoked(found, validity, peers.revoked):
            again = "a new one" if found.is_buyer else f"`prfaas cluster join {found.cluster}`"
            raise IdentityError(
                f"{_describe(leaf)} is revoked since {peers.revoked[found.cluster]:%F %R} UTC; {again} admits it again"
            )
        return found
    except ValueError as error:
        raise IdentityError(f"the peer's certificate cannot be read: {error}") from error


class _Peer(NamedTuple):
    """What a peer's certificate says, whatever the time and our rules."""

    certificate: x509.Certificate
    validity: Validity
    domain: str
    identity: Identity


@functools.lru_cache(maxsize=256)
def _read(der: bytes) -> _Peer:
    """Read a certificate (DER). Each request on a kept connection shows the same one. Raises IdentityError for one that
    names no cluster, ValueError for what is none."""
    leaf = x509.load_der_x509_certificate(der)
    return _Peer(leaf, validity_of(leaf), *_named_by(leaf))


def _check_alone(leaf: x509.Certificate, found: Identity, ours: RanOut) -> None:
    if found.cluster != ours.cluster:
        raise IdentityError(
            f"{_describe(leaf)} is not of cluster {ours.cluster!r}, and nobody else is accepted while our own "
            "certificate has run out; renew ours"
        )
    if leaf.not_valid_after_utc < ours.since:
        raise IdentityError(
            f"{_describe(leaf)} expired at {leaf.not_valid_after_utc:%F %R} UTC, before ours began; renew it"
        )


def is_revoked(who: Identity, validity: Validity, revoked: Mapping[str, datetime.datetime]) -> bool:
    """Return True if a certificate began before its cluster was cut off."""
    since = revoked.get(who.cluster)
    return since is not None and validity.not_before < since


def write_revoked(revoked: Mapping[str, datetime.datetime]) -> bytes:
    """Return the file that tells instances which clusters were cut off, and when."""
    return msgspec.json.encode(dict(sorted(revoked.items())))


def read_revoked(text: bytes) -> dict[str, datetime.datetime]:
    """Read such a file. Raises ConfigError: it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, _UtcTime])
    except UNREADABLE as error:
        raise ConfigError(f'no list of revoked clusters: {error}; want {{"CLUSTER": "TIME"}}') from error


def is_authority(certificate: bytes) -> bool:
    """Return True if the first certificate of a PEM text may sign others; False for what cannot be read."""
    try:
        return _is_authority(_load_all(certificate)[0])
    except (ConfigError, ValueError):  # no certificate, or extensions that no reader understands
        return False


def signing_certificate(authority: KeyPair) -> x509.Certificate:
    """Return the authority's certificate that belongs to its key; raise ConfigError if none does."""
    public = _signing_key(authority.key).public_key()
    for certificate in _load_all(authority.certificate):
        if certificate.public_key() == public:
            if not _is_authority(certificate):
                raise ConfigError("the certificate is not an authority's and cannot sign; give the authority's")
            return certificate
    raise ConfigError("the authority's key fits none of its certificates; give a certificate with its own key")


def validity_of(certificate: x509.Certificate) -> Validity:
    """Return the time in which a certificate is valid."""
    return Validity(certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def validity_of_pem(certificate: bytes) -> Validity:
    """Return the validity of the first certificate of a PEM text."""
    return validity_of(_load_all(certificate)[0])


def _check_chain(
    leaf: x509.Certificate,
    intermediates: Sequence[x509.Certificate],
    trusted: Sequence[x509.Certificate],
    now: datetime.datetime,
) -> x509.Certificate:
    """Check the chain from issuer to issuer up to a trusted authority. OpenSSL checks more at the handshake."""
    current = leaf
    for _ in range(_MAX_DEPTH):
        _check_time(current, validity_of(current), now)
        issuer = _issuer(current, trusted)
        if issuer is not None:
            _check_time(issuer, validity_of(issuer), now)
            return issuer
        issuer = _issuer(current, intermediates)
        if issuer is None:
            break
        current = issuer
    known = ", ".join(certificate.subject.rfc4514_string() for certificate in trusted)
    raise IdentityError(
        f"{_describe(leaf)} was issued by {leaf.issuer.rfc4514_string()}, which is not trusted; trusted are: {known}. "
        "Add its authority to ca.crt, or issue the certificate anew"
    )


def _issuer(certificate: x509.Certificate, candidates: Sequence[x509.Certificate]) -> x509.Certificate | None:
    for candidate in candidates:
        try:
            certificate.verify_directly_issued_by(candidate)
        except (ValueError, TypeError, InvalidSignature):  # other name, other kind of key, other key
            continue
        if _is_authority(candidate):
            return candidate
    return None


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _check_time(certificate: x509.Certificate, validity: Validity, now: datetime.datetime) -> None:
    if now > validity.not_after:
        raise IdentityError(f"{_describe(certificate)} expired at {validity.not_after:%F %R} UTC; renew it")
    if now < validity.not_before:
        raise IdentityError(
            f"{_describe(certificate)} is not valid before {validity.not_before:%F %R} UTC; check both clocks"
        )


def _named_by(certificate: x509.Certificate) -> tuple[str, Identity]:
    """Return the trust domain and the one cluster that a certificate names. Two names are refused: each reader could
    pick another."""
    uris = _uris(certificate)
    named = _URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if named is None:
        raise IdentityError(
            f"{_describe(certificate)} names no cluster: its URIs are {uris}, and one spiffe://DOMAIN/cluster/NAME is "
            f"needed, or one of NAME/{' and NAME/'.join(PARTS)}; "
            "issue it with `prfaas certs issue`"
        )
    domain, cluster, part, buyer = named.groups("")
    return domain, Identity(cluster or buyer, part)


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _describe(certificate: x509.Certificate) -> str:
    return f"the certificate of {certificate.subject.rfc4514_string() or 'nobody'} ({certificate.serial_number:x})"


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    validity: Validity,
    signer: x509.Certificate | None = None,
) -> x509.CertificateBuilder:
    own = x509.SubjectKeyIdentifier.from_public_key(key)
    if signer is None:
        signers = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
    else:
        extension = signer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        signers = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(extension.value)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity.not_before)
        .not_valid_after(validity.not_after)
        .add_extension(own, critical=False)
        .add_extension(signers, critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _load_all(text: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError as error:
        raise ConfigError(f"no certificate can be read here: {error}; give PEM files") from error


def _load_key(text: bytes) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # the error's text may hold parts of the key
        raise ConfigError("the private key cannot be read; give an unencrypted PEM file") from None


def _signing_key(text: bytes) -> ec.EllipticCurvePrivateKey:
    key = _load_key(text)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the authority's key is no elliptic curve key; make the authority with `prfaas certs init`")
    return key


def _digest(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
