"""Keeps every cluster's certificate: one loop over the hub's Secret of authorities and each cluster's own Secret.

The loop is level-based like every reconcile: a pass reads everything, asks the plan, and repairs the differences. So a
restart, an edit or a deletion at any moment is harmless. A failed read ends the pass, and a cluster that does not
answer keeps its certificate. The operator never replaces a lost authority by itself: that would cut off every instance.

In mode Issuer the certificates come from an issuer of cert-manager, which renews them and chooses their authority. Its
Secrets stay in the hub. Instances mount copies, which change only when every instance trusts the new authority.

The hub has two certificates: gateways may control instances and read their events, and an instance may not. Gateways of
an older operator mount the one that is now the instances', so it stays the whole hub's until the last of them is gone.
"""

import asyncio
import logging
import secrets as random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, Literal, NamedTuple

from prfaas import identity
from prfaas.errors import PrfaasError
from prfaas.identity import KeyPair, PeerRules
from prfaas.names import HUB, LABEL_CLUSTER, TLS_CERT, TLS_KEY, TLS_TRUSTED
from prfaas.rights import GATEWAY, WORKER, Identity
from prfaas.util import LogOnce
from prfaas_operator import metrics
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import (
    CERTIFICATE,
    DECODE_POOL,
    MEMBER_CLUSTER,
    POLICY,
    PREFILL_POOL,
    SECRET,
    Object,
    manifest,
)
from prfaas_operator.controller import events
from prfaas_operator.controller.hub import HubView
from prfaas_operator.errors import (
    AuthorityMissingError,
    CertificateNotReadyError,
    ChildConflictError,
    ConflictError,
    reason_of,
)
from prfaas_operator.plan import certificates as plan
from prfaas_operator.plan import certificates_read as read
from prfaas_operator.plan.certificates import (
    GATEWAYS,
    CertificateMode,
    Holder,
    ObservedTime,
    RotationStep,
    SecretChange,
    SecretContent,
    Terms,
)
from prfaas_operator.plan.certificates_read import Store
from prfaas_operator.plan.conditions import CERTIFICATE_READY, ConditionState, no
from prfaas_operator.plan.ownership import has_labels
from prfaas_operator.reconcile.issuer import Issued, ask_issuer, why_apart
from prfaas_operator.reconcile.members import Members
from prfaas_operator.render import certificates as render
from prfaas_operator.render.common import GROUP_MANAGED

log = logging.getLogger(__name__)

PASS_SECONDS: Final = 5.0
FIRST_PASS_SECONDS: Final = 8.0


class _Target(NamedTuple):
    """One holder: the place and content of its Secret, and the object that gets its Events.

    `cluster` None: it is not reached, or, with a `problem`, its Secret must not be read. `issued` is empty where the
    operator signs itself.
    """

    who: Identity
    labels: Mapping[str, str]
    subject: Object
    cluster: ClusterClient | None
    secret: Object | None = None
    problem: str = ""
    issued: Issued = Issued()

    @property
    def name(self) -> str:
        return plan.holder_name(self.who)

    @property
    def secret_name(self) -> str:
        return render.secret_of(self.name)


class Certificates:
    """The certificates of all clusters."""

    def __init__(self, hub: HubView, members: Members, terms: Terms):
        self._hub = hub
        self._members = members
        self._terms = terms
        self._new_domain = terms.domain or identity.new_domain()
        self._since: datetime | None = None
        self._wanted: set[str] = {HUB, GATEWAYS}
        self._states: dict[str, ConditionState] = {}
        self._delivered: set[str] = set()
        self._passed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._problems: dict[str, ConditionState] = {}
        self._members_revoked: dict[str, bool] = {}
        self._is_apart = False
        self._once = LogOnce(log)

    async def run(self) -> None:
        while self._terms.mode is not CertificateMode.DISABLED:
            self._wake.clear()
            try:
                await self._pass()
            except PrfaasError as error:
                log.warning("certificates: %s; retry soon", error)
            except Exception:  # a bug must not end the loop, and must be visible
                log.exception("certificates: internal error")
            async with self._passed:
                self._passed.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(PASS_SECONDS):
                    await self._wake.wait()

    def conditions(self, cluster: str) -> Mapping[str, ConditionState]:
        """Return the condition CertificateReady of a cluster, none with certificates disabled."""
        if self._terms.mode is CertificateMode.DISABLED:
            return {}
        return {
            CERTIFICATE_READY: self._states.get(cluster) or ConditionState("Unknown", "NotNeeded", "no pool runs here")
        }

    async def pool_uses_tls(self, cluster: str, deployed: Callable[[], Awaitable[Object | None]]) -> bool:
        """Return true if a pool's instances must use TLS; then their Secret exists. `deployed` reads its Deployment.

        Only a pool that is plain already may wait for TLS, while a gateway is plain: gateways change first, because one
        without TLS loses every instance that uses it. No other pod, and no lack of pods, makes a pool plain.

        Raises CertificateNotReadyError: the Secret does not exist, and a pod that mounts it could not start.
        """
        if self._terms.mode is CertificateMode.DISABLED:
            return False
        await self.wait_delivered(cluster)
        if all(pod.scheme == "https" for pod in self._hub.gateway_pods()):
            return True
        live = await deployed()
        return live is None or render.is_in_tls(live)

    async def wait_delivered(self, holder: str) -> None:
        """Request the Secret of a cluster, or of the hub's gateways, and wait a moment for it.

        Raises CertificateNotReadyError: it does not exist yet.
        """
        if self._terms.mode is CertificateMode.DISABLED:
            return
        self._wanted.add(holder)
        if holder not in self._delivered:
            self._wake.set()
        with suppress(TimeoutError):
            async with self._passed, asyncio.timeout(FIRST_PASS_SECONDS):
                await self._passed.wait_for(lambda: holder in self._delivered or self._is_refused(holder))
        if holder not in self._delivered:
            known = self._states.get(holder)
            why = f"{known.reason}: {known.message}" if known else "no pass has reached it yet"
            where = HUB if holder == GATEWAYS else holder
            secret = render.secret_of(holder)
            raise CertificateNotReadyError(f"Secret {secret} does not exist in cluster {where}: {why}")

    def _is_refused(self, holder: str) -> bool:
        return holder in self._states and self._states[holder].status == "False"

    def gateway_uses_tls(self, members: Iterable[str]) -> bool:
        """Return true if gateways need the hub's certificate: always, unless no instance has one any more."""
        if self._terms.mode is not CertificateMode.DISABLED:
            return True
        observed = [self._hub.observed(), *map(self._members.observed, members)]
        return any(pod.pool_uid and pod.scheme == "https" for each in observed for pod in each.pods or ())

    async def leave(self, name: str, member_uid: str) -> None:
        """Delete a member's Secret when the member itself is removed; a member that is not reached keeps it."""
        self._wanted.discard(name)
        self._delivered.discard(name)
        self._states.pop(name, None)
        metrics.CERTIFICATE_EXPIRES.remove(name)
        try:
            cluster = await self._members.cluster(name)
            live = await cluster.get(SECRET, render.SECRET)
            if live is not None and has_labels(live, render.labels(name, member_uid)):
                await cluster.delete(SECRET, render.SECRET, uid=live["metadata"]["uid"])
        except PrfaasError as error:
            log.warning("MemberCluster %s: its Secret %s stays: %s", name, render.SECRET, error)

    async def _pass(self) -> None:
        """Read everything, repair differences, and take the next step if one is due."""
        live = await self._hub.client.get(SECRET, render.AUTHORITY_SECRET)
        targets = await self._targets()
        now = self._hub.client.now()
        self._since = self._since or now  # not before the hub's first answer has set the clock
        try:
            store = _store_of(live, targets, now)
            targets = await self._ask_issuer(targets, store.peers if store else PeerRules(domain=self._new_domain))
            if live is None or store is None:
                await self._make_first(targets)
                return
            if self._terms.domain not in ("", store.domain):
                self._once.failed(
                    "domain",
                    f"certificates: the trust domain stays {store.domain}: an installation keeps its first one",
                )
            if await self._revoke(live, store, now):
                return
        except PrfaasError as error:
            await self._hold(targets, reason_of(error), str(error))
            return
        ends = {one.name: read.end_of(one.secret, store, now) for one in targets if one.who.cluster == HUB}
        if self._terms.mode is CertificateMode.ISSUER and (apart := why_apart(ends.get(HUB), ends.get(GATEWAYS))):
            self._once.failed("ends", apart)
        beside = {HUB: ends.get(GATEWAYS), GATEWAYS: ends.get(HUB)}
        holders = [await self._write(target, store, beside.get(target.name)) for target in targets]
        await self._step(live, store, holders, targets)
        self._once.forget("authority")  # a problem that comes again is logged again
        self._report(store, holders)

    async def _targets(self) -> list[_Target]:
        """Return the holders of a certificate and those that need one, the hub's first.

        A member that is not reached may hold one, so it counts.
        """
        found = [await self._own(who) for who in (Identity(HUB, GATEWAY), self._hubs_instances())]
        # Listed again: a cluster that kopf's watch has not delivered yet counts before an authority is retired.
        members = await self._hub.client.list_all(MEMBER_CLUSTER)
        self._members_revoked = {
            one["metadata"]["name"]: (one.get("spec") or {}).get("revoked") is True for one in members
        }
        admitted = [one for one in members if not self._members_revoked[one["metadata"]["name"]]]
        found += await asyncio.gather(*(self._member(member) for member in admitted))
        foreign = {one.name for one in found if one.secret is not None and not has_labels(one.secret, one.labels)}
        names = [member["metadata"]["name"] for member in members]
        self._problems = {
            target.name: _problem(target, names) for target in found if target.problem or target.name in foreign
        }
        return [
            target
            for target in found
            if target.name not in foreign
            and (target.cluster is None or target.secret is not None or target.name in self._wanted)
        ]

    def _hubs_instances(self) -> Identity:
        """Return what the certificate of the hub's instances proves: the whole hub until no gateway mounts it. One that
        does so later is of no older operator, and changes nothing."""
        self._is_apart = self._is_apart or not plan.old_gateways(self._hub.pods.items.values())
        return Identity(HUB, WORKER if self._is_apart else "")

    def separation(self, policy_uid: str) -> Mapping[str, ConditionState]:
        """Return the condition GatewaysApart of a policy, only while it has pods of older operators."""
        if self._terms.mode is CertificateMode.DISABLED:
            return {}
        pods = [pod for pod in self._hub.pods.items.values() if pod.policy_uid == policy_uid]
        return plan.separation(pods, is_apart=self._is_apart)

    async def _own(self, who: Identity) -> _Target:
        name, hub = render.secret_of(plan.holder_name(who)), self._hub.client
        return _Target(who, render.labels(HUB), self._subject(name), hub, await hub.get(SECRET, name))

    async def _member(self, member: Object) -> _Target:
        metadata = member["metadata"]
        name = metadata["name"]
        target = _Target(Identity(name), render.labels(name, metadata["uid"]), manifest(MEMBER_CLUSTER, metadata), None)
        if not self._members.observed(name).reachable:
            return target
        try:
            cluster = await self._members.cluster(name)
            return target._replace(cluster=cluster, secret=await cluster.get(SECRET, render.SECRET))
        except PrfaasError as error:
            return target._replace(problem=str(error))

    def _subject(self, secret: str) -> Object:
        """Return a Secret of the hub as the object of Events, with or without that Secret."""
        return manifest(SECRET, {"name": secret, "namespace": self._hub.client.namespace, "uid": ""})

    async def _revoke(self, live: Object, store: Store, now: datetime) -> bool:
        """Record who is cut off, and who is no longer; return True if the next pass must write it."""
        found = plan.revocations(store.revocations, self._members_revoked, store.last_end, now, self._terms.life)
        if found == store.revocations:
            return False
        with suppress(ConflictError):  # somebody changed it since it was read
            await self._hub.client.apply(render.authority_secret(store._replace(revocations=found).data, live))
        for name in sorted(found.keys() - store.revocations.keys()):
            log.info("MemberCluster %s is revoked: its certificates are refused", name)
        self._wake.set()
        return True

    async def _ask_issuer(self, targets: Sequence[_Target], peers: PeerRules) -> Sequence[_Target]:
        """Request a certificate for each holder from the issuer, if there is one, and add the issued ones.

        Raises InvalidObjectError: cert-manager is not installed.
        """
        hub, issuer = self._hub.client, self._terms.issuer
        if issuer is None:
            return targets
        known = {one["metadata"]["name"]: one for one in await hub.list_all(CERTIFICATE, selector=GROUP_MANAGED)}
        wanted = [(one, render.certificate(one.who, peers.domain, issuer, self._terms.life)) for one in targets]
        return [target._replace(issued=await ask_issuer(hub, target.name, known, one, peers)) for target, one in wanted]

    async def _make_first(self, targets: Sequence[_Target]) -> None:
        """Make the first authority; the next pass uses it."""
        if self._terms.mode is CertificateMode.ISSUER:
            store = read.first_store(_authorities_of(targets), self._new_domain)
            if not store.certificates:
                problems = (target.issued.problem for target in targets)
                await self._hold(targets, plan.PENDING, next(filter(None, problems), "nothing has been issued yet"))
                return
        else:
            pair = self._new_authority(self._new_domain)
            store = read.first_store(identity.by_digest(pair.certificate), self._new_domain, pair.key)
        # Server-side apply, because RBAC can limit an apply to one name even at the creation.
        await self._hub.client.apply(render.authority_secret(store.data, None))
        await self._say_of_authority(
            "Normal", "AuthorityCreated", "an authority for the clusters' certificates was made"
        )
        self._wake.set()

    def _new_authority(self, domain: str) -> KeyPair:
        now = self._hub.client.now()
        return read.make_authority(f"prfaas {now:%F}-{random.token_hex(4)}", now, self._terms, domain)

    async def _write(self, target: _Target, store: Store, beside: datetime | None) -> Holder:
        """Repair a holder's Secret if needed; return its content."""
        now, issued = self._hub.client.now(), target.issued
        held = None if target.cluster is None else read.read_held(target.secret, store, now)
        holder = Holder(target.who, held, issued.leaf, beside)
        what = plan.wanted(store.authorities, holder, self._terms, now)
        if target.cluster is None or held is None:
            return holder
        if what is SecretChange.NOTHING:
            return holder._replace(held=held._replace(problem=issued.problem or held.problem))
        try:
            if target.secret is None and await target.cluster.get(SECRET, target.secret_name) is not None:
                return holder  # another member in the same namespace wrote it a moment ago: the next pass reads it
            if what is SecretChange.TRUST:
                pair = _pair_of(target.secret)
            elif self._terms.mode is CertificateMode.ISSUER:
                pair = _pair_of(issued.secret)
            else:
                pair = read.issue(store, target.who, now, self._terms)
            name, labels, settling = target.secret_name, target.labels, self._terms.settling
            live = await target.cluster.apply(render.held_secret(name, labels, pair, store, now, settling))
        except PrfaasError as error:
            return holder._replace(held=SecretContent(problem=str(error)))
        written = read.read_held(live, store, now)
        if what is SecretChange.CERTIFICATE and written.leaf is not None:
            reason = "CertificateRenewed" if held.leaf else "CertificateIssued"
            message = f"{target.who} has a certificate until {written.leaf.validity.not_after:%F %R} UTC"
            log.info("%s: %s", reason, message)
            await events.post(self._hub.client, target.subject, "Normal", reason, message)
        return holder._replace(held=written)

    async def _step(self, live: Object, store: Store, holders: Sequence[Holder], targets: Sequence[_Target]) -> None:
        """Take the next step of the authorities; the next pass sees its result."""
        moment = self._moment()
        step = plan.step(store.authorities, [*holders, *store.buyers_at(moment.now)], self._terms, moment)
        if step is None:
            return
        added: Mapping[str, bytes] = {}
        key = b""
        if self._terms.mode is CertificateMode.ISSUER:
            added = _authorities_of(targets)
        elif step is RotationStep.ANNOUNCE:
            pair = self._new_authority(store.domain)
            added, key = identity.by_digest(pair.certificate), pair.key
        elif step is RotationStep.PROMOTE:
            added, key = {one: store.certificates[one] for one in store.authorities.next}, store.next_key
        try:
            await self._hub.client.apply(render.authority_secret(read.advance(store, step, added, key).data, live))
        except ConflictError:
            return  # somebody changed it since it was read
        await self._say_of_authority("Normal", f"Authority{step.value}d", _ROTATION_MESSAGES[step])
        self._wake.set()

    def _moment(self) -> ObservedTime:
        now = self._hub.client.now()
        return ObservedTime(now, self._since or now)

    def _report(self, store: Store, holders: Sequence[Holder]) -> None:
        """Update conditions and metrics, and wake the objects whose conditions changed."""
        authorities, moment = store.authorities, self._moment()
        everyone = [*holders, *store.buyers_at(moment.now)]
        held_up = plan.waiting_for(authorities, everyone, self._terms, moment) if authorities.next else ()
        leaves = {one.name: one.held.leaf for one in holders if one.held is not None and one.held.leaf is not None}
        states = {one.name: plan.condition(authorities, one, held_up, moment.now) for one in holders}
        for name in self._revoked_members:
            states[name] = plan.revoked_condition(name, authorities, holders)
        self._set(states, set(leaves))
        if authorities.ends is not None:
            metrics.AUTHORITY_EXPIRES.set(authorities.ends.timestamp())
        for name, leaf in leaves.items():
            metrics.CERTIFICATE_EXPIRES.labels(name).set(leaf.validity.not_after.timestamp())

    @property
    def _revoked_members(self) -> list[str]:
        return [name for name, revoked in self._members_revoked.items() if revoked]

    async def _hold(self, targets: Sequence[_Target], reason: str, message: str) -> None:
        """Change nothing, and say why: instances continue with their certificates."""
        self._set(
            {name: no(reason, message) for name in (*(target.name for target in targets), *self._revoked_members)},
            {target.name for target in targets if target.secret is not None},
        )
        await self._say_of_authority("Warning", reason, message)

    def _set(self, states: dict[str, ConditionState], delivered: set[str]) -> None:
        """Store the results of a pass; a cluster that was not reached keeps its last result."""
        unseen = {name for name, state in states.items() if state.status == "Unknown"}
        delivered |= self._delivered & unseen
        states |= self._problems
        if (states, delivered) != (self._states, self._delivered):
            self._states, self._delivered = states, delivered
            self._hub.queue.wake_kinds(MEMBER_CLUSTER, PREFILL_POOL, DECODE_POOL, POLICY)

    async def _say_of_authority(self, type_: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Report a state of the authorities once, until the state changes."""
        level = logging.INFO if type_ == "Normal" else logging.ERROR
        if self._once.failed("authority", f"certificates: {reason}: {message}", level=level):
            await events.post(self._hub.client, self._subject(render.AUTHORITY_SECRET), type_, reason, message)


_ROTATION_MESSAGES: Final[Mapping[RotationStep, str]] = {
    RotationStep.ANNOUNCE: "a successor is announced; it signs once every cluster trusts it",
    RotationStep.PROMOTE: "every cluster trusts the successor: it signs all certificates from now on",
    RotationStep.RETIRE: "no cluster shows a certificate of the former authority any more; it is trusted no longer",
}


def _store_of(live: Object | None, targets: Iterable[_Target], now: datetime) -> Store | None:
    """Return what the Secret of authorities holds; None if there never was one.

    Raises AuthorityMissingError before an issuer is asked for anything: the Secret alone knows the trust domain.
    """
    if live is not None:
        return read.read_store(live, now)
    if any(target.secret for target in targets):
        raise AuthorityMissingError(
            f"Secret {render.AUTHORITY_SECRET} is gone, and instances hold certificates of it; restore it from a "
            "backup, or see docs/operate/tls.md to continue without it. Certificates in use stay valid until they end"
        )
    return None


def _problem(target: _Target, members: Collection[str]) -> ConditionState:
    """Return why a Secret must not be touched, if so; `members` are the names of this hub's MemberClusters."""
    if target.problem:
        return no(
            "CertificateNotReadable",
            f"{target.problem}; run `prfaas cluster join {target.name}` again, "
            "or upgrade the chart prfaas-member there",
        )
    owner = ((target.secret or {"metadata": {}})["metadata"].get("labels") or {}).get(LABEL_CLUSTER, "")
    if owner in members and owner != target.name:
        return no(
            ChildConflictError.reason,
            f"{target.name} shares its namespace with MemberCluster {owner}, whose certificate lies there in Secret "
            f"{render.SECRET}, and a namespace holds one: give {target.name} another spec.namespace, register the "
            "cluster once, or switch certificates.mode to Disabled",
        )
    return no(
        ChildConflictError.reason,
        f"Secret {target.secret_name} exists in cluster {target.who.cluster} and belongs to somebody else; delete it, "
        "give this hub a namespace of its own there, or switch certificates.mode to Disabled",
    )


def _pair_of(secret: Object | None) -> KeyPair:
    return KeyPair(read.content(secret or {}, TLS_CERT), read.content(secret or {}, TLS_KEY))


def _authorities_of(targets: Iterable[_Target]) -> dict[str, bytes]:
    """Return the authorities (PEM) of the issued certificates by digest."""
    found: dict[str, bytes] = {}
    for leaf, secret, _ in (target.issued for target in targets):
        if leaf is not None and secret is not None:
            found[leaf.authority] = identity.by_digest(read.content(secret, TLS_TRUSTED))[leaf.authority]
    return found
