"""Reads and writes the Secrets of certificates and authorities.

The hub checks a cluster's Secret against its own authorities, never against that Secret's `ca.crt`. An unreadable
Secret is a finding like any other: a damaged certificate is issued again. A damaged authority stays until a person has
looked at it. A new authority in its place would cut every instance off.
"""

import base64
import binascii
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from prfaas import identity
from prfaas.errors import UNREADABLE, IdentityError, PrfaasError
from prfaas.names import TLS_CERT, TLS_KEY, TLS_REVOKED, TLS_TRUSTED
from prfaas.rights import BUYER, Identity
from prfaas_operator.errors import AuthorityDamagedError
from prfaas_operator.plan.certificates import (
    Authorities,
    Holder,
    Leaf,
    Revocation,
    Revoked,
    RotationStep,
    SecretContent,
    SoldCertificate,
    Terms,
    after,
)

NEXT: Final = "next.crt"
NEXT_KEY: Final = "next.key"
PREVIOUS: Final = "previous.crt"
REVOCATIONS: Final = "revocations.json"
BUYERS: Final = "buyers.json"
"""Written by `prfaas cluster` alone: the operator reads it, and its applies leave it as it is."""
DOMAIN: Final = "trust-domain"
WRITTEN_AT: Final = "prfaas.io/written-at"

Secret = Mapping[str, Any]
T = TypeVar("T")
DAY: Final = timedelta(days=1)


class Store(NamedTuple):
    """The hub's Secret of authorities: certificates (PEM) by digest, and the keys of the current and next ones."""

    authorities: Authorities
    certificates: Mapping[str, bytes]
    domain: str
    key: bytes = b""
    next_key: bytes = b""
    revocations: Mapping[str, Revocation] = {}
    buyers: Mapping[str, SoldCertificate] = {}

    @property
    def revoked(self) -> dict[str, datetime]:
        """The time since which certificates of a cluster or a buyer are refused, by its name."""
        return dict(self.authorities.revoked)

    def buyers_at(self, now: datetime) -> list[Holder]:
        """Return the buyers whose certificate is good, as holders, one for each certificate."""
        found: list[Holder] = []
        for name, last in self.buyers.items():
            who, end = Identity(BUYER + name), last.refused_before
            for one in (last, *last.earlier):
                if now < one.ends and (end is None or end <= one.written):
                    leaf = Leaf(who, one.authority, identity.Validity(one.written, one.ends))
                    found.append(Holder(who, SecretContent(leaf, frozenset(one.trusted), one.written)))
        return found

    @property
    def peers(self) -> identity.PeerRules:
        """Whom the holders of certificates accept."""
        return identity.PeerRules(self.revoked, self.domain)

    @property
    def last_end(self) -> datetime:
        """The time after which no certificate of the trusted authorities is valid."""
        return max(identity.validity_of_pem(text).not_after for text in self.certificates.values())

    @property
    def bundle(self) -> bytes:
        """All trusted authorities, in a stable order."""
        return self.texts(self.authorities.trusted)

    def texts(self, digests: frozenset[str]) -> bytes:
        return b"".join(self.certificates[one] for one in sorted(digests))

    @property
    def data(self) -> dict[str, bytes]:
        """The Secret's content; an empty state or key has no entry."""
        states = self.authorities
        entries = {
            TLS_CERT: self.texts(states.current),
            TLS_KEY: self.key,
            NEXT: self.texts(states.next),
            NEXT_KEY: self.next_key,
            PREVIOUS: self.texts(states.previous),
            DOMAIN: self.domain.encode(),
            REVOCATIONS: msgspec.json.encode(self.revocations) if self.revocations else b"",
        }
        return {name: content for name, content in entries.items() if content}

    def __repr__(self) -> str:
        """Show the states only: the rest holds keys."""
        return f"Store({self.authorities!r})"


def content(secret: Secret, name: str) -> bytes:
    """Return one entry of a Secret's data, empty if it is missing or no base64."""
    try:
        return base64.b64decode((secret.get("data") or {}).get(name, ""), validate=True)
    except (binascii.Error, TypeError, ValueError):
        return b""


def read_store(secret: Secret, now: datetime) -> Store:
    """Read the Secret of authorities. One without a trust domain has that of its authority.

    Raises AuthorityDamagedError: it holds no authority, or a key that is not its certificate's.
    """
    texts = {name: content(secret, name) for name in (TLS_CERT, TLS_KEY, NEXT, NEXT_KEY, PREVIOUS)}
    try:
        current, following, previous = (identity.by_digest(texts[name]) for name in (TLS_CERT, NEXT, PREVIOUS))
        ends = None
        if texts[TLS_KEY]:
            signer = identity.signing_certificate(identity.KeyPair(texts[TLS_CERT], texts[TLS_KEY]))
            ends = identity.validity_of(signer).not_after
        if texts[NEXT_KEY]:
            identity.signing_certificate(identity.KeyPair(texts[NEXT], texts[NEXT_KEY]))
        if not current:
            raise AuthorityDamagedError(f"it has no {TLS_CERT}")
        revocations = _read_json(secret, REVOCATIONS, dict[str, Revocation])
        buyers = _read_json(secret, BUYERS, dict[str, SoldCertificate])
        domain = content(secret, DOMAIN).decode(errors="replace").strip() or identity.domain_of(texts[TLS_CERT])
        ends = ends or min(identity.validity_of_pem(text).not_after for text in current.values())
    except PrfaasError as error:
        raise AuthorityDamagedError(
            f"{error}; restore it from a backup. Certificates in use stay valid until they expire; none is renewed"
        ) from error
    states = Authorities(
        frozenset(current),
        frozenset(following) - frozenset(current),
        frozenset(previous) - frozenset(current) - frozenset(following),
        ends,
        signs=bool(texts[TLS_KEY]) and now < ends,
        revoked=frozenset((name, one.since) for name, one in revocations.items())
        | frozenset((BUYER + name, one.refused_before) for name, one in buyers.items() if one.refused_before),
    )
    certificates = {**current, **following, **previous}
    return Store(states, certificates, domain, texts[TLS_KEY], texts[NEXT_KEY], revocations, buyers)


def _read_json(secret: Secret, entry: str, form: type[T]) -> T:
    """Return an entry of this form, empty without it."""
    try:
        return msgspec.json.decode(content(secret, entry) or b"{}", type=form)
    except UNREADABLE as error:
        raise AuthorityDamagedError(f"{entry} cannot be read: {error}") from error


def first_store(certificates: Mapping[str, bytes], domain: str, key: bytes = b"") -> Store:
    """Return the store of an installation that never had an authority."""
    return Store(Authorities(frozenset(certificates), signs=bool(key)), certificates, domain, key)


def advance(store: Store, step: RotationStep, added: Mapping[str, bytes], key: bytes = b"") -> Store:
    """Return the store after a step; `added` ones are announced or promoted, `key` signs for them."""
    states = after(store.authorities, step, frozenset(added))
    known = {**store.certificates, **added}
    certificates = {one: known[one] for one in sorted(states.trusted)}
    after_it = store._replace(authorities=states, certificates=certificates)
    if step is RotationStep.ANNOUNCE:
        return after_it._replace(next_key=key)
    return after_it._replace(key=key if step is RotationStep.PROMOTE else store.key, next_key=b"")


def make_authority(name: str, now: datetime, terms: Terms, domain: str) -> identity.KeyPair:
    """Return a new authority of a trust domain that is valid for as long as the flags say."""
    return identity.make_authority(name, identity.valid_for(now, terms.authority_life / DAY), domain)


def issue(store: Store, who: Identity, now: datetime, terms: Terms) -> identity.KeyPair:
    """Return a new certificate of the current authority; it ends no later than that, and begins after a revocation."""
    validity = identity.valid_for(now, terms.life / DAY)
    if store.authorities.ends is not None:
        validity = validity._replace(not_after=min(validity.not_after, store.authorities.ends))
    since = store.revoked.get(who.cluster, validity.not_before)
    validity = validity._replace(not_before=max(validity.not_before, since))
    authority = identity.KeyPair(store.texts(store.authorities.current), store.key)
    return identity.issue(authority, who.cluster, validity, who.part, store.domain)


def read_held(secret: Secret | None, store: Store, now: datetime) -> SecretContent:
    """Return the content of a cluster's Secret; what cannot be read is left out."""
    if secret is None:
        return SecretContent()
    try:
        trusted = frozenset(identity.by_digest(content(secret, TLS_TRUSTED)))
    except PrfaasError:
        trusted = frozenset()
    try:
        leaf, problem = _leaf(secret, store.bundle, store.peers, now), ""
    except PrfaasError as error:
        leaf, problem = None, str(error)
    return SecretContent(leaf, trusted, _written_at(secret), problem, revoked_by(secret))


def end_of(secret: Secret | None, store: Store, now: datetime) -> datetime | None:
    """Return when the certificate of a Secret ends; None: it has no usable one."""
    leaf = read_held(secret, store, now).leaf
    return leaf.validity.not_after if leaf is not None else None


def read_issued(secret: Secret, peers: identity.PeerRules, now: datetime) -> Leaf:
    """Read an issuer's certificate for a holder. Raises PrfaasError: it cannot be used."""
    return _leaf(secret, content(secret, TLS_TRUSTED), peers, now)


def revoked_by(secret: Secret) -> Revoked:
    """Return whom the holders of a Secret refuse, and since when."""
    text = content(secret, TLS_REVOKED)
    try:
        return frozenset(identity.read_revoked(text).items()) if text else frozenset()
    except PrfaasError:
        return frozenset()


def _leaf(secret: Secret, trusted: bytes, peers: identity.PeerRules, now: datetime) -> Leaf:
    certificate = content(secret, TLS_CERT)
    facts = identity.check(certificate, content(secret, TLS_KEY), trusted, now)
    if facts.domain != peers.domain:
        raise IdentityError(
            f"the trust domain of the certificate of {facts.identity} is {facts.domain!r}, and {peers.domain!r} was "
            "expected; renew it"
        )
    if identity.is_revoked(facts.identity, facts.validity, peers.revoked):
        raise IdentityError(f"the certificate of {facts.identity} is from before it was revoked; renew it")
    return Leaf(facts.identity, facts.authority, facts.validity, next(iter(identity.by_digest(certificate))))


def _written_at(secret: Secret) -> datetime | None:
    text = (secret["metadata"].get("annotations") or {}).get(WRITTEN_AT, "")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None
