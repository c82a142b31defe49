"""Keep every cluster's certificate: one loop over the hub's Secret of authorities and each cluster's own Secret.

Level-based like every reconcile: a pass reads all of it, asks the plan, and writes what is wrong, so that a restart in
the middle of anything, an edit or a deletion is nothing special. What was not read is not there to be acted upon: a
failed read ends the pass, and a cluster that does not answer keeps what it has. One thing is never made anew by itself:
an authority that had been there, because every instance would be cut off.
"""

import asyncio
import logging
import secrets as random
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from prfaas import identity
from prfaas.errors import PrfaasError
from prfaas.identity import KeyPair
from prfaas.names import HUB, LABEL_CLUSTER
from prfaas_operator import metrics
from prfaas_operator.clusters.api import DECODE_POOL, MEMBER_CLUSTER, POLICY, PREFILL_POOL, SECRET, Cluster, Object
from prfaas_operator.errors import CertificateNotReadyError, ChildConflictError, ConflictError, reason_of
from prfaas_operator.plan import certificates as plan
from prfaas_operator.plan import certificates_read as read
from prfaas_operator.plan.certificates import Held, Holder, Moment, Step, Wanted
from prfaas_operator.plan.certificates_read import Store
from prfaas_operator.plan.certificates_settings import Mode, Settings
from prfaas_operator.plan.conditions import CERTIFICATE_READY, Verdict, no
from prfaas_operator.reconcile import certificates_issuer as issuers
from prfaas_operator.reconcile import events
from prfaas_operator.render import certificates as render

if TYPE_CHECKING:
    from prfaas_operator.reconcile.runtime import Runtime

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
FIRST_LOOK_SECONDS: Final = 8.0


class Place(NamedTuple):
    """One cluster: where its Secret is, what it holds, and what people look at when something is wrong with it.

    `cluster` None: it is not reached, or, with a `problem`, its Secret must not be read.
    """

    name: str
    labels: Mapping[str, str]
    subject: Object
    cluster: Cluster | None
    secret: Object | None = None
    problem: str = ""


class Certificates:
    """The certificates of all clusters.

    Args:
        runtime: the hub and its members.
        settings: where certificates come from, and for how long.

    """

    def __init__(self, runtime: "Runtime", settings: Settings):
        self._runtime = runtime
        self._settings = settings
        self._since: datetime | None = None
        self._asked: set[str] = {HUB}
        self._verdicts: dict[str, Verdict] = {}
        self._delivered: set[str] = set()
        self._looked = asyncio.Condition()
        self._wake = asyncio.Event()
        self._problems: dict[str, Verdict] = {}
        self._said = ""

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while self._settings.mode is not Mode.DISABLED:
            self._wake.clear()
            try:
                await self._look()
            except PrfaasError as error:
                log.warning("certificates: %s; again soon", error)
            except Exception:  # a bug must not end the loop, and has to be seen
                log.exception("certificates: internal error")
            async with self._looked:
                self._looked.notify_all()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def conditions(self, cluster: str) -> Mapping[str, Verdict]:
        """Return the condition CertificateReady of a cluster, nothing where nobody keeps certificates."""
        if self._settings.mode is Mode.DISABLED:
            return {}
        return {CERTIFICATE_READY: self._verdicts.get(cluster) or Verdict("Unknown", "NotNeeded", "no pool runs here")}

    async def pool_uses_tls(self, cluster: str) -> bool:
        """Tell whether instances in a cluster are to be inside TLS, once their Secret is there.

        Gateways come first: one that cannot speak TLS would lose every instance that goes over to it.

        Raises:
            CertificateNotReadyError: the Secret is not there, and a pod that mounts it could not start.

        """
        if self._settings.mode is Mode.DISABLED:
            return False
        await self.wait_delivered(cluster)
        return all(pod.scheme == "https" for pod in self._runtime.gateway_pods())

    async def wait_delivered(self, cluster: str) -> None:
        """Have a cluster's Secret made, and wait a moment for it.

        Raises:
            CertificateNotReadyError: it is not there yet.

        """
        if self._settings.mode is Mode.DISABLED:
            return
        self._asked.add(cluster)
        if cluster not in self._delivered:
            self._wake.set()
        with suppress(TimeoutError):
            async with self._looked, asyncio.timeout(FIRST_LOOK_SECONDS):
                await self._looked.wait_for(lambda: cluster in self._delivered or self._is_refused(cluster))
        if cluster not in self._delivered:
            known = self._verdicts.get(cluster)
            why = f"{known.reason}: {known.message}" if known else "it has not been looked at yet"
            raise CertificateNotReadyError(f"Secret {render.SECRET} is not in cluster {cluster}: {why}")

    def _is_refused(self, cluster: str) -> bool:
        return cluster in self._verdicts and self._verdicts[cluster].status == "False"

    def gateway_uses_tls(self, members: Iterable[str]) -> bool:
        """Tell whether gateways need the hub's certificate: always, but where no instance has one any more."""
        return self._settings.mode is not Mode.DISABLED or self._runtime.any_worker_in_tls(members)

    async def leave(self, name: str, member_uid: str) -> None:
        """Remove a member's Secret when the member itself is taken out; one that is not reached keeps it."""
        self._asked.discard(name)
        self._delivered.discard(name)
        self._verdicts.pop(name, None)
        metrics.forget_certificate(name)
        try:
            cluster = await self._runtime.members.cluster(name)
            live = await cluster.get(SECRET, render.SECRET)
            if live is not None and _has(live, render.labels(name, member_uid)):
                await cluster.delete(SECRET, render.SECRET, uid=live["metadata"]["uid"])
        except PrfaasError as error:
            log.warning("MemberCluster %s: its Secret %s stays: %s", name, render.SECRET, error)

    async def _look(self) -> None:
        """Read everything, write what is wrong, and take the next step if one is due."""
        live = await self._runtime.hub.get(SECRET, render.AUTHORITY_SECRET)
        places = await self._places()
        now = self._runtime.hub.now()
        self._since = self._since or now  # not before the hub has told what its clock shows
        try:
            issued = await self._issued(places)
            store = read.read_store(live, now) if live is not None else await self._first(places, issued)
        except PrfaasError as error:
            await self._hold(places, reason_of(error), str(error))
            return
        if store is None:
            return
        holders = [await self._write(place, self._holder(place, store, issued, now), store, issued) for place in places]
        await self._step(live, store, holders, issued)
        self._tell(store, holders)

    async def _places(self) -> list[Place]:
        """Return the clusters that hold a certificate or need one, the hub first.

        Of a member that is not reached nobody knows whether it holds one, so it counts.
        """
        hub, found = self._runtime.hub, []
        subject: Object = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": render.SECRET, "namespace": hub.namespace, "uid": ""},
        }
        found.append(Place(HUB, render.labels(HUB), subject, hub, await hub.get(SECRET, render.SECRET)))
        members = await hub.list_all(MEMBER_CLUSTER)
        found += await asyncio.gather(*(self._member(member) for member in members))
        foreign = {place.name for place in found if not _is_ours(place)}
        names = [member["metadata"]["name"] for member in members]
        self._problems = {
            place.name: _problem(place, names) for place in found if place.problem or place.name in foreign
        }
        return [
            place
            for place in found
            if place.name not in foreign
            and (place.cluster is None or place.secret is not None or place.name in self._asked)
        ]

    async def _member(self, member: Object) -> Place:
        metadata = member["metadata"]
        name = metadata["name"]
        subject = {"apiVersion": MEMBER_CLUSTER.api_version, "kind": MEMBER_CLUSTER.name, "metadata": metadata}
        place = Place(name, render.labels(name, metadata["uid"]), subject, None)
        if not self._runtime.members.view(name).reachable:
            return place
        try:
            cluster = await self._runtime.members.cluster(name)
            return place._replace(cluster=cluster, secret=await cluster.get(SECRET, render.SECRET))
        except PrfaasError as error:
            return place._replace(problem=str(error))

    async def _issued(self, places: Sequence[Place]) -> Mapping[str, issuers.Issued] | None:
        """Return what the issuer has for each cluster, None where the operator signs itself."""
        if self._settings.issuer is None:
            return None
        names = [place.name for place in places]
        return await issuers.gather(self._runtime.hub, names, self._settings.issuer, self._settings.terms)

    async def _first(self, places: Sequence[Place], issued: Mapping[str, issuers.Issued] | None) -> Store | None:
        """Begin with an authority where there never was one; None until the next look."""
        if any(place.secret for place in places):
            await self._hold(
                places,
                "AuthorityMissing",
                f"Secret {render.AUTHORITY_SECRET} is gone, and instances hold certificates of it; restore it from a "
                "backup, or see docs/tls.md for going on without. Certificates in use go on until they end",
            )
            return None
        if issued is None:
            now = self._runtime.hub.now()
            pair = read.make_authority(f"prfaas {now:%F}-{random.token_hex(4)}", now, self._settings.terms)
            store = read.first_store(identity.fingerprints(pair.certificate), pair.key)
        else:
            store = read.first_store(issuers.authorities(issued))
            if not store.certificates:
                await self._hold(places, plan.PENDING, issuers.why_not(issued))
                return None
        # By server-side apply, because RBAC limits that to a name even where it creates.
        await self._runtime.hub.apply(render.authority_secret(store.data, None))
        await self._say_of_authority(
            "Normal", "AuthorityCreated", "an authority for the clusters' certificates was made"
        )
        self._wake.set()
        return None

    def _holder(self, place: Place, store: Store, issued: Mapping[str, issuers.Issued] | None, now: datetime) -> Holder:
        held = None if place.cluster is None else read.read_held(place.secret, store, now)
        return Holder(place.name, held, issued[place.name].leaf if issued else None)

    async def _write(
        self, place: Place, holder: Holder, store: Store, issued: Mapping[str, issuers.Issued] | None
    ) -> Holder:
        """Write a cluster's Secret if something is wrong with it; return what it holds then."""
        now = self._runtime.hub.now()
        what = plan.wanted(store.authorities, holder, self._settings.terms, now)
        source = issued[place.name] if issued else None
        if what is Wanted.NOTHING or place.cluster is None:
            problem = source.problem if source else ""
            held = holder.held
            return holder._replace(held=held._replace(problem=problem) if held and problem else held)
        try:
            if place.secret is None and await place.cluster.get(SECRET, render.SECRET) is not None:
                return holder  # of another member in the same namespace, a moment ago: the next look judges it
            if what is Wanted.TRUST:
                pair = _pair_of(place.secret)
            elif source is not None:
                pair = _pair_of(source.secret)
            else:
                pair = read.issue(store, place.name, now, self._settings.terms)
            manifest = render.cluster_secret(place.labels, pair, store.bundle, now)
            live = await place.cluster.apply(manifest)
        except PrfaasError as error:
            return holder._replace(held=Held(problem=str(error)))
        held = read.read_held(live, store, now)
        if what is Wanted.CERTIFICATE and held.leaf is not None:
            reason = "CertificateRenewed" if holder.held and holder.held.leaf else "CertificateIssued"
            message = f"cluster {place.name} has a certificate until {held.leaf.validity.not_after:%F %R} UTC"
            log.info("%s: %s", reason, message)
            await events.post(self._runtime.hub, place.subject, "Normal", reason, message)
        return holder._replace(held=held)

    async def _step(
        self,
        live: Object | None,
        store: Store,
        holders: Sequence[Holder],
        issued: Mapping[str, issuers.Issued] | None,
    ) -> None:
        """Take the next step of the authorities; the next look sees what came of it."""
        now, terms = self._runtime.hub.now(), self._settings.terms
        step = plan.step(store.authorities, holders, terms, Moment(now, self._since or now))
        if step is None:
            return
        newcomers: Mapping[str, bytes] = {}
        key = b""
        if issued is not None:
            newcomers = issuers.authorities(issued)
        elif step is Step.ANNOUNCE:
            pair = read.make_authority(f"prfaas {now:%F}-{random.token_hex(4)}", now, terms)
            newcomers, key = identity.fingerprints(pair.certificate), pair.key
        elif step is Step.PROMOTE:
            newcomers, key = {one: store.certificates[one] for one in store.authorities.next}, store.next_key
        try:
            await self._runtime.hub.apply(render.authority_secret(read.advance(store, step, newcomers, key).data, live))
        except ConflictError:
            return  # somebody changed it since it was read
        await self._say_of_authority("Normal", f"Authority{step.value}d", _TOLD[step])
        self._wake.set()

    def _tell(self, store: Store, holders: Sequence[Holder]) -> None:
        """Keep what conditions and metrics say, and wake whom it concerns."""
        now = self._runtime.hub.now()
        held_up: tuple[str, ...] = ()
        if store.authorities.next:
            moment = Moment(now, self._since or now)
            held_up = plan.waiting_for(store.authorities, holders, self._settings.terms, moment)
        self._set(
            {one.cluster: plan.verdict(store.authorities, one, held_up, now) for one in holders},
            {one.cluster for one in holders if one.held is not None and one.held.leaf is not None},
        )
        if store.authorities.ends is not None:
            metrics.AUTHORITY_EXPIRES.set(store.authorities.ends.timestamp())
        for one in holders:
            if one.held is not None and one.held.leaf is not None:
                metrics.CERTIFICATE_EXPIRES.labels(one.cluster).set(one.held.leaf.validity.not_after.timestamp())

    async def _hold(self, places: Sequence[Place], reason: str, message: str) -> None:
        """Change nothing, and say why: instances that have certificates go on with them."""
        self._set(
            {place.name: no(reason, message) for place in places},
            {place.name for place in places if place.secret is not None},
        )
        await self._say_of_authority("Warning", reason, message)

    def _set(self, verdicts: dict[str, Verdict], delivered: set[str]) -> None:
        """Take in what a look has found; a cluster that was not reached keeps what was delivered before."""
        unseen = {name for name, verdict in verdicts.items() if verdict.status == "Unknown"}
        delivered |= self._delivered & unseen
        verdicts |= self._problems
        if (verdicts, delivered) != (self._verdicts, self._delivered):
            self._verdicts, self._delivered = verdicts, delivered
            self._runtime.wakers.wake_kinds(MEMBER_CLUSTER, PREFILL_POOL, DECODE_POOL, POLICY)

    async def _say_of_authority(self, type_: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Say something of the authorities once, until something else is to be said."""
        said = f"{reason}: {message}"
        if said == self._said:
            return
        self._said = said
        log.log(logging.INFO if type_ == "Normal" else logging.ERROR, "certificates: %s", said)
        namespace = self._runtime.hub.namespace
        metadata = {"name": render.AUTHORITY_SECRET, "namespace": namespace, "uid": ""}
        subject = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
        await events.post(self._runtime.hub, subject, type_, reason, message)


_TOLD: Final[Mapping[Step, str]] = {
    Step.ANNOUNCE: "a successor is made known; it signs once every cluster trusts it",
    Step.PROMOTE: "every cluster trusts the successor: certificates are issued anew by it",
    Step.RETIRE: "no cluster shows a certificate of the former authority any more; it is trusted no longer",
}


def _is_ours(place: Place) -> bool:
    return place.secret is None or _has(place.secret, place.labels)


def _has(live: Object, wanted: Mapping[str, str]) -> bool:
    present = live["metadata"].get("labels") or {}
    return all(present.get(label) == value for label, value in wanted.items())


def _problem(place: Place, members: Collection[str]) -> Verdict:
    """Say why a Secret is left alone; `members` are the names of this hub's MemberClusters."""
    if place.problem:
        return no(
            "CertificateNotReadable",
            f"{place.problem}; run `prfaas cluster join {place.name}` again, or upgrade the chart prfaas-member there",
        )
    owner = ((place.secret or {"metadata": {}})["metadata"].get("labels") or {}).get(LABEL_CLUSTER, "")
    if owner in members and owner != place.name:
        return no(
            ChildConflictError.reason,
            f"{place.name} shares its namespace with MemberCluster {owner}, whose certificate lies there in Secret "
            f"{render.SECRET}, and a namespace holds one: give {place.name} another spec.namespace, register the "
            "cluster once, or switch certificates.mode to Disabled",
        )
    return no(
        ChildConflictError.reason,
        f"Secret {render.SECRET} exists in cluster {place.name} and belongs to somebody else; delete it, give this hub "
        "a namespace of its own there, or switch certificates.mode to Disabled",
    )


def _pair_of(secret: Object | None) -> KeyPair:
    return KeyPair(read.content(secret or {}, read.CERTIFICATE), read.content(secret or {}, read.KEY))
