"""Rotation of certificates and authorities: decides the next step from the present state.

Two instances accept each other while each one trusts the authority of the other's certificate. The hard part is the
delay. Each instance reads a Secret some time after its write, each at another time. Instances in a cluster that is not
reached read nothing. So an authority passes three states. Each step waits until the writes of the step before it have
*settled* in every cluster:

    next        trusted; signs nothing yet
    current     trusted by every instance; signs
    previous    trusted; signs nothing any more

    ANNOUNCE  -> next        a successor is made, or the issuer begins to sign with another authority
    PROMOTE   next -> current, current -> previous       once every cluster has trusted it for the settling time
    RETIRE    previous -> gone                           once no cluster has shown a certificate of it for as long

All three are trusted, and every certificate that is written is signed by a current authority. So Secrets one step apart
accept each other. One Secret of the hub holds the states; a member's Secret is never believed about authorities. This
module knows authorities by their digests; the caller has keys and texts.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from prfaas import identity
from prfaas.conditions import rfc3339
from prfaas.errors import ConfigError
from prfaas.identity import Validity
from prfaas.names import HUB, TLS_SECRET
from prfaas.rights import GATEWAY, Identity
from prfaas_operator.plan.conditions import REVOKED, ConditionState, no, yes
from prfaas_operator.plan.pod_facts import PodFacts

MAX_CLOCK_ERROR: Final = timedelta(minutes=5)
"""A Secret dated later than this from now has a wrong date, and is written again."""
PENDING: Final = "CertificatePending"
GATEWAYS_APART: Final = "GatewaysApart"
"""Condition: the certificate of the hub's instances has no right of its gateways."""
LIVES: Final = 3
"""An authority's life is at least this many lives of a certificate: time to replace it before certificates expire."""
DEFAULT_CERTIFICATE_HOURS: Final = 24.0
DEFAULT_AUTHORITY_HOURS: Final = 365 * 24.0
DEFAULT_SETTLE_SECONDS: Final = 180.0
"""A kubelet reads a Secret about once a minute, and may read a copy that is a minute old."""


class CertificateMode(StrEnum):
    """The source of certificates."""

    OPERATOR = "Operator"
    ISSUER = "Issuer"
    DISABLED = "Disabled"


class Issuer(NamedTuple):
    """An issuer of cert-manager, by reference."""

    name: str
    kind: str
    group: str


class Terms(NamedTuple):
    """The operator's flags about certificates. In mode Issuer `issuer` makes and renews them. `domain` is the trust
    domain of a new installation; empty: a random one."""

    life: timedelta
    authority_life: timedelta
    settling: timedelta
    mode: CertificateMode = CertificateMode.OPERATOR
    issuer: Issuer | None = None
    domain: str = ""


class RotationStep(Enum):
    """A change of the authorities' states."""

    ANNOUNCE = "Announce"
    PROMOTE = "Promote"
    RETIRE = "Retire"


class Leaf(NamedTuple):
    """A certificate and what it proves. `authority` has signed it; `serial` distinguishes it from others."""

    identity: Identity
    authority: str
    validity: Validity
    serial: str = ""


Revoked = frozenset[tuple[str, datetime]]
"""Clusters, and the time since which their earlier certificates are refused."""


class SecretContent(NamedTuple):
    """The content of a holder's Secret. Without `leaf` it holds no usable certificate; `problem` says why."""

    leaf: Leaf | None = None
    trusted: frozenset[str] = frozenset()
    written: datetime | None = None
    problem: str = ""
    revoked: Revoked = frozenset()


class Holder(NamedTuple):
    """Who has a certificate: a cluster, and beside it the hub's gateways.

    `held` None: its cluster is not reached. `issued`: the issuer's certificate for it, if any. `beside`: the end of the
    other certificate of its cluster. Both end together: while one is good, its holder refuses an expired one.
    """

    identity: Identity
    held: SecretContent | None
    issued: Leaf | None = None
    beside: datetime | None = None

    @property
    def name(self) -> str:
        return holder_name(self.identity)


GATEWAYS: Final = f"{HUB}/{GATEWAY}"
"""The name of the hub's gateways among holders; no cluster has such a name."""


def holder_name(identity: Identity) -> str:
    """Return the name of a certificate's holder; the hub's workers go by its own."""
    return GATEWAYS if identity == Identity(HUB, GATEWAY) else identity.cluster


class SoldCertificate(NamedTuple):
    """The last certificate that a buyer of prefills got, the authorities that came with it, and since when earlier ones
    are refused. Nobody renews it but the buyer's seller. `earlier` ones end later, so the buyer may still use them."""

    authority: str
    trusted: list[str]
    written: datetime
    ends: datetime
    refused_before: datetime | None = None
    earlier: tuple["SoldCertificate", ...] = ()

    @property
    def last_end(self) -> datetime:
        return max(one.ends for one in (self, *self.earlier))

    def after(self, known: "SoldCertificate | None") -> "SoldCertificate":
        """Return this certificate as the last one of a buyer of whom another was known."""
        if known is None:
            return self
        earlier = tuple(one._replace(earlier=()) for one in (known, *known.earlier) if one.ends > self.ends)
        return self._replace(refused_before=known.refused_before, earlier=earlier)


class Authorities(NamedTuple):
    """Digests by state; `ends` is the expiry of the current one, and `signs` is true if its key is at hand. `revoked`
    goes wherever the trusted authorities go."""

    current: frozenset[str] = frozenset()
    next: frozenset[str] = frozenset()
    previous: frozenset[str] = frozenset()
    ends: datetime | None = None
    signs: bool = False
    revoked: Revoked = frozenset()

    @property
    def trusted(self) -> frozenset[str]:
        return self.current | self.next | self.previous


class ObservedTime(NamedTuple):
    """The present time, and the start of this operator's observation; older events count as not seen."""

    now: datetime
    since: datetime


def step(
    authorities: Authorities, holders: Sequence[Holder], terms: Terms, moment: ObservedTime
) -> RotationStep | None:
    """Return the next step for the authorities, None while none is due or the last step has not settled."""
    if terms.mode is CertificateMode.ISSUER:
        announced = offered_by(holders) - authorities.current
        promotes = offered_by(holders) not in (frozenset(), authorities.current)
        announces = promotes and announced != authorities.next
    else:
        promotes = bool(authorities.next)
        announces = not promotes and _successor_is_due(authorities, terms, moment.now)
    if announces:
        return RotationStep.ANNOUNCE
    if promotes:
        return None if waiting_for(authorities, holders, terms, moment) else RotationStep.PROMOTE
    if authorities.previous and _is_out_of_use(authorities.previous, holders, terms, moment):
        return RotationStep.RETIRE
    return None


def after(authorities: Authorities, chosen: RotationStep, announced: frozenset[str]) -> Authorities:
    """Return the states after a step; `announced` are the authorities that the step adds or promotes."""
    current, previous = authorities.current, authorities.previous
    if chosen is RotationStep.ANNOUNCE:
        return authorities._replace(next=announced - current, previous=previous - announced)
    if chosen is RotationStep.PROMOTE:
        replaced = (current | previous | authorities.next) - announced
        return Authorities(announced, frozenset(), replaced, revoked=authorities.revoked)
    return authorities._replace(previous=frozenset())


def offered_by(holders: Iterable[Holder]) -> frozenset[str]:
    """Return the authorities of an issuer's certificates; none until all are issued, because the issuer may change. It
    gives none to buyers."""
    issued = [holder.issued for holder in holders if not holder.identity.is_buyer]
    return frozenset() if None in issued else frozenset(leaf.authority for leaf in issued if leaf is not None)


def waiting_for(
    authorities: Authorities, holders: Sequence[Holder], terms: Terms, moment: ObservedTime
) -> tuple[str, ...]:
    """Return the holders that delay a promotion, sorted: not reached, or written to a short while ago, and buyers whose
    certificate came without the next authority.

    A cluster that is not reached, and a buyer, delay it only until the other clusters' certificates are at risk.
    """
    patient = moment.now < _end_of_patience(authorities, holders, terms)

    def is_behind(holder: Holder) -> bool:
        if holder.held is None:
            return patient
        if holder.held.leaf is None:
            # Without any Secret no instance has started there; a damaged Secret's instances use its old content.
            remembers = holder.held.written is not None or bool(holder.held.trusted)
            return (remembers and patient) or wanted(authorities, holder, terms, moment.now) is SecretChange.CERTIFICATE
        is_ready = authorities.next <= holder.held.trusted and _settled(holder.held, terms, moment)
        return not is_ready and (patient or not holder.identity.is_buyer)

    return tuple(sorted({holder.name for holder in holders if is_behind(holder)}))


def _end_of_patience(authorities: Authorities, holders: Sequence[Holder], terms: Terms) -> datetime:
    """Return when an authority can sign no full-length certificate, or an issuer's renewals are long overdue.

    A buyer's certificate says nothing about that: nobody renews it here.
    """
    if terms.mode is not CertificateMode.ISSUER and authorities.ends is not None:
        return authorities.ends - terms.life
    leaves = [one.held.leaf for one in holders if one.held is not None and not one.identity.is_buyer]
    ends = [leaf.validity.not_after for leaf in leaves if leaf is not None]
    # A renewal is due with a third of the life left (`renewBefore`); half of that is the limit.
    return min(ends, default=datetime.max.replace(tzinfo=UTC)) - terms.life / 6


def _successor_is_due(authorities: Authorities, terms: Terms, now: datetime) -> bool:
    if not authorities.signs or authorities.ends is None:
        return True
    return now >= authorities.ends - terms.authority_life * (1 - identity.RENEW_AFTER)


def _is_out_of_use(authorities: frozenset[str], holders: Iterable[Holder], terms: Terms, moment: ObservedTime) -> bool:
    """Return true if no instance uses a certificate of these any more."""
    return all(
        holder.held is not None
        and (holder.held.leaf is None or holder.held.leaf.authority not in authorities)
        and _settled(holder.held, terms, moment)
        for holder in holders
    )


def _settled(held: SecretContent, terms: Terms, moment: ObservedTime) -> bool:
    written = held.written
    return written is not None and moment.now - max(written, moment.since) >= terms.settling


class SecretChange(Enum):
    """The new content of a cluster's Secret."""

    NOTHING = "the certificate is unchanged"
    TRUST = "the same certificate, other authorities or other revoked clusters"
    CERTIFICATE = "another certificate"


def wanted(authorities: Authorities, holder: Holder, terms: Terms, now: datetime) -> SecretChange:
    """Return the change for the Secret of a cluster that is reached."""
    held = holder.held or SecretContent()
    if _wants_certificate(authorities, held.leaf, holder, terms, now):
        return SecretChange.CERTIFICATE
    if held.leaf is None:
        return SecretChange.NOTHING  # and none can be had yet
    stale = held.written is None or held.written > now + MAX_CLOCK_ERROR
    differs = (held.trusted, held.revoked) != (authorities.trusted, authorities.revoked)
    return SecretChange.TRUST if differs or stale else SecretChange.NOTHING


def _wants_certificate(
    authorities: Authorities, leaf: Leaf | None, holder: Holder, terms: Terms, now: datetime
) -> bool:
    """Return true if a cluster needs another certificate and can get one, under a current authority only."""
    if terms.mode is CertificateMode.ISSUER:
        return holder.issued is not None and holder.issued != leaf and holder.issued.authority in authorities.current
    if not authorities.signs:
        return False
    return (
        leaf is None
        or leaf.identity != holder.identity
        or leaf.authority not in authorities.current
        or _is_due(leaf, terms, now)
        or (holder.beside is not None and holder.beside - leaf.validity.not_after > identity.CLOCK_SKEW)
    )


def _is_due(leaf: Leaf, terms: Terms, now: datetime) -> bool:
    """Return true if two thirds of a certificate's life are over; the backdating for slow clocks does not count.

    One that outlives a new one was made before lives were shortened.
    """
    begin = min(leaf.validity.not_before + identity.CLOCK_SKEW, leaf.validity.not_after)
    if leaf.validity.not_after > now + terms.life + MAX_CLOCK_ERROR:
        return True
    return now >= identity.when_to_renew(begin, leaf.validity.not_after)


def old_gateways(pods: Iterable[PodFacts]) -> list[str]:
    """Return the gateways' pods that mount the certificate of the hub's instances, as those of older operators do."""
    return sorted(pod.name for pod in pods if pod.policy_uid and TLS_SECRET in pod.secrets)


def separation(pods: Iterable[PodFacts], *, is_apart: bool) -> dict[str, ConditionState]:
    """Return the condition GatewaysApart of a policy, whose gateways' pods these are, only while it is false.

    `is_apart`: the certificate of the hub's instances has no right of gateways any more.
    """
    old = old_gateways(pods)
    if not old:
        return {}
    effect = (
        "so the certificate of the hub's instances may do what only gateways may, until it ends; delete it if it does "
        "not end by itself"
    )
    if is_apart:
        effect = (
            "which is the certificate of the hub's instances alone, so these refuse it what only gateways may do; "
            "delete it, and its Deployment makes one of this version"
        )
    return {GATEWAYS_APART: no("OldGateway", f"pod {old[0]} of an older version mounts {TLS_SECRET}, {effect}")}


class Revocation(NamedTuple):
    """A member that was cut off: its certificates that began before `since` are refused. After `until` none is valid.

    It outlives the member's return, since its old certificates do; `stands` is false from then on.
    """

    since: datetime
    until: datetime
    stands: bool = True


def revocations(
    known: Mapping[str, Revocation], members: Mapping[str, bool], ends: datetime, now: datetime, life: timedelta
) -> dict[str, Revocation]:
    """Return who is cut off. `members` has for each member whether it is to be; certificates of the known authorities
    end by `ends`. An authority that ended does not end a revocation: else it would be made anew at each look."""
    now = now.replace(microsecond=0)  # certificates know no parts of a second
    ends = max(ends, now + life)
    found = {name: one for name, one in known.items() if one.until > now}
    for name, revoked in members.items():
        before = found.get(name)
        if revoked and (before is None or not before.stands):
            found[name] = Revocation(now, ends)
        elif before is not None and before.stands and not revoked:
            found[name] = before._replace(stands=False)
    return found


def revoked_condition(name: str, authorities: Authorities, holders: Iterable[Holder]) -> ConditionState:
    """Return the condition CertificateReady of a member that is cut off."""
    since = dict(authorities.revoked).get(name)
    if since is None:
        return no("Revoking", "its certificates are about to be refused")
    behind = [one.name for one in holders if one.held is None or (name, since) not in one.held.revoked]
    still = f"; their Secrets do not list it yet: {', '.join(behind)}" if behind else ""
    return no(
        "Revoking" if HUB in behind or GATEWAYS in behind else REVOKED,
        f"its certificates from before {rfc3339(since)} are refused{still}",
    )


def condition(authorities: Authorities, holder: Holder, held_up_by: Sequence[str], now: datetime) -> ConditionState:
    """Return the condition CertificateReady of a cluster."""
    if holder.held is None:
        return ConditionState("Unknown", "ClusterUnreachable", "not seen; see condition Ready")
    leaf = holder.held.leaf
    if leaf is None:
        return no(PENDING, holder.held.problem or "no certificate has been issued yet")
    ends = rfc3339(leaf.validity.not_after)
    if leaf.authority not in authorities.trusted or leaf.validity.not_after < now:
        return no(
            "CertificateRefused", f"peers refuse the certificate in use (until {ends}), and there is no other yet"
        )
    if held_up_by:
        message = f"in use until {ends}; the next authority waits for {', '.join(held_up_by)} to trust it"
        return yes("AuthorityChanging", message)
    return yes("Issued", f"the certificate in use is good until {ends}")


def terms_of(
    mode: CertificateMode,
    issuer: str,
    certificate_hours: float,
    authority_hours: float,
    settle_seconds: float,
    domain: str = "",
) -> Terms:
    """Return the terms of the command line; `issuer` is KIND.GROUP/NAME.

    Raises ConfigError: the flags do not fit together.
    """
    if (mode is CertificateMode.ISSUER) != bool(issuer):
        raise ConfigError("--certificate-issuer names the issuer of --certificates Issuer: give both or neither")
    if mode is CertificateMode.OPERATOR and authority_hours < LIVES * certificate_hours * (
        1 - 1e-9
    ):  # 3 * 1.1 is more than 3.3
        raise ConfigError(
            f"--authority-hours {authority_hours:g} is less than {LIVES} times --certificate-hours "
            f"{certificate_hours:g}: an authority could not be replaced before certificates of it run out"
        )
    life, authority_life = timedelta(hours=certificate_hours), timedelta(hours=authority_hours)
    settling, last_third = timedelta(seconds=settle_seconds), life * (1 - identity.RENEW_AFTER)
    if mode is not CertificateMode.DISABLED and last_third < settling:
        raise ConfigError(
            f"the last third of --certificate-hours {certificate_hours:g} is {last_third.total_seconds():.0f} s, less "
            f"than --certificate-settle-seconds {settle_seconds:g}: a certificate would end before every pod has read "
            "the next one; raise the hours"
        )
    if domain:
        identity.check_domain(domain)
    reference = _reference(issuer) if issuer else None
    return Terms(life, authority_life, settling, mode, reference, domain)


def _reference(issuer: str) -> Issuer:
    resource, _, name = issuer.rpartition("/")
    kind, _, group = resource.partition(".")
    if not (name and kind and group):
        raise ConfigError(f"--certificate-issuer is {issuer!r}; want KIND.GROUP/NAME, as Issuer.cert-manager.io/prfaas")
    return Issuer(name, kind, group)
