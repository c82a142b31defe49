"""Proves that no order of events makes two instances refuse each other while authorities and certificates change.

A model of clusters is driven by the plan: instances see each Secret late, each at its own time; clusters fall
silent, operators restart, Secrets are deleted, issuers change their minds. After every event each version that any
instance may hold is set against each other's.
"""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.identity import CLOCK_SKEW, Validity
from prfaas.rights import Identity
from prfaas_operator.plan import certificates as plan
from prfaas_operator.plan.certificates import (
    Authorities,
    Holder,
    Leaf,
    ObservedTime,
    RotationStep,
    SecretChange,
    SecretContent,
    Terms,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
CLUSTERS = ("hub", "eu", "us")
TERMS = Terms(life=30 * MINUTE, authority_life=300 * MINUTE, settling=5 * MINUTE)


class Version(NamedTuple):
    """One version of a cluster's Secret."""

    written: datetime
    leaf: Leaf
    trusted: frozenset[str]


class World:
    """Clusters, their Secrets' histories, and the operator's passes. An instance may be as late as steps settle."""

    def __init__(self, terms: Terms):
        self.terms = terms
        self.now = self.since = START
        self.made = 0
        self.history: dict[str, list[Version]] = {name: [] for name in CLUSTERS}
        self.deleted: set[str] = set()
        self.silent: set[str] = set()
        self.left_behind: set[str] = set()
        self.steps: list[RotationStep] = []
        self.issued: dict[str, Leaf | None] = dict.fromkeys(CLUSTERS)
        self.authorities = Authorities() if terms.mode is plan.CertificateMode.ISSUER else self._own(self._name())
        if terms.mode is plan.CertificateMode.ISSUER:
            self.issuer = self._name()
            self.authorities = Authorities(frozenset({self.issuer}))
            for name in CLUSTERS:
                self.issue(name)

    def _name(self) -> str:
        self.made += 1
        return f"ca{self.made}"

    def _own(self, name: str) -> Authorities:
        self.ends = self.now + self.terms.authority_life
        return Authorities(frozenset({name}), ends=self.ends, signs=True)

    def _leaf(self, cluster: str, authority: str) -> Leaf:
        self.made += 1
        return Leaf(
            Identity(cluster), authority, Validity(self.now - CLOCK_SKEW, self.now + self.terms.life), str(self.made)
        )

    def issue(self, cluster: str) -> None:
        self.issued[cluster] = self._leaf(cluster, self.issuer)

    def holders(self) -> list[Holder]:
        return [Holder(Identity(name), self._held(name), self.issued[name]) for name in CLUSTERS]

    def _held(self, name: str) -> SecretContent | None:
        if name in self.silent:
            return None
        if name in self.deleted or not self.history[name]:
            return SecretContent()
        last = self.history[name][-1]
        leaf = last.leaf if last.leaf.validity.not_after > self.now else None
        return SecretContent(leaf, last.trusted, last.written)

    def tick(self) -> None:
        """Do what the operator does in one pass: write Secrets, then take one step."""
        for holder in self.holders():
            if holder.held is not None:
                self._write(holder)
        moment = ObservedTime(self.now, self.since)
        chosen = plan.step(self.authorities, self.holders(), self.terms, moment)
        if chosen is None:
            return
        self.steps.append(chosen)
        if chosen is RotationStep.PROMOTE:
            self.left_behind |= self.silent
        if self.terms.mode is plan.CertificateMode.ISSUER:
            self.authorities = plan.after(self.authorities, chosen, plan.offered_by(self.holders()))
        elif chosen is RotationStep.ANNOUNCE:
            self.authorities = plan.after(self.authorities, chosen, frozenset({self._name()}))
            self.next_ends = self.now + self.terms.authority_life
        else:
            done = plan.after(self.authorities, chosen, self.authorities.next)
            if chosen is RotationStep.PROMOTE:
                self.ends = self.next_ends
            self.authorities = done._replace(ends=self.ends, signs=True)

    def _write(self, holder: Holder) -> None:
        name, held = holder.name, holder.held or SecretContent()
        what = plan.wanted(self.authorities, holder, self.terms, self.now)
        if what is SecretChange.NOTHING:
            if name in self.deleted:  # nothing can be put in its place yet: it counts as a new cluster's
                self.history[name].clear()
            return
        if what is SecretChange.TRUST:
            assert held.leaf is not None
            leaf = held.leaf
        else:
            leaf = holder.issued or self._leaf(name, *self.authorities.current)
        self.history[name].append(Version(self.now, leaf, self.authorities.trusted))
        self.deleted.discard(name)

    def possible(self, name: str) -> list[Version]:
        """Return every version of a Secret that some instance may hold now."""
        versions = self.history[name]
        newer = [version for version in versions if version.written > self.now - TERMS.settling]
        present = versions[: len(versions) - len(newer)][-1:] + newer
        # With a certificate that has ended an instance reaches no other.
        return [version for version in present if version.leaf.validity.not_after > self.now]

    def refusals(self) -> list[str]:
        present = [name for name in CLUSTERS if name not in self.left_behind]
        return [
            f"{one} (trusts {sorted(mine.trusted)}) refuses {other} of {theirs.leaf.authority} after {self.steps}"
            for one in present
            for other in present
            for mine in self.possible(one)
            for theirs in self.possible(other)
            if theirs.leaf.authority not in mine.trusted
        ]


events = st.lists(
    st.tuples(
        st.sampled_from(("pass", "pass", "silence", "speak", "restart", "delete", "issue", "change")),
        st.sampled_from(CLUSTERS),
        st.integers(0, 9),
    ),
    min_size=5,
    max_size=50,
)


def happen(world: World, event: str, cluster: str, minutes: int) -> None:
    world.now += minutes * MINUTE
    if event == "silence" and cluster != "hub":
        world.silent.add(cluster)
    elif event == "speak":
        world.silent.discard(cluster)
    elif event == "restart":
        world.since = world.now
    elif event == "delete":
        world.deleted.add(cluster)
    elif event == "change" and world.terms.mode is plan.CertificateMode.ISSUER:
        world.issuer = world._name()
    elif event == "issue" and world.terms.mode is plan.CertificateMode.ISSUER:
        world.issue(cluster)
    world.tick()


@pytest.mark.parametrize("mode", [plan.CertificateMode.OPERATOR, plan.CertificateMode.ISSUER])
@given(story=events, due=st.integers(0, 210))
@settings(max_examples=60, deadline=None)
def test_no_instance_ever_refuses_another(mode, story, due):
    world = World(TERMS._replace(mode=mode))
    world.tick()
    world.now += due * MINUTE  # so that stories begin everywhere in an authority's life
    for event, cluster, minutes in story:
        happen(world, event, cluster, minutes)
        assert world.refusals() == []


@pytest.mark.parametrize("mode", [plan.CertificateMode.OPERATOR, plan.CertificateMode.ISSUER])
def test_authorities_change_in_three_steps_again_and_again_and_no_certificate_runs_out(mode):
    world = World(TERMS._replace(mode=mode))
    for minute in range(1000):
        if mode is plan.CertificateMode.ISSUER and minute % 200 == 100:
            world.issuer = world._name()
        if mode is plan.CertificateMode.ISSUER and minute % 10 == 0:
            for name in CLUSTERS:
                world.issue(name)
        happen(world, "pass", "hub", 1)
        assert world.refusals() == []
        assert all(world.history[name][-1].leaf.validity.not_after > world.now for name in CLUSTERS)
    assert world.steps[:6] == [RotationStep.ANNOUNCE, RotationStep.PROMOTE, RotationStep.RETIRE] * 2
    assert len(world.steps) >= 12
    assert world.authorities.previous == frozenset()


def test_a_silent_cluster_holds_the_step_and_is_named_until_other_certificates_are_at_stake():
    world = World(TERMS)
    world.tick()
    world.silent.add("us")
    world.now += 201 * MINUTE
    promoted = None
    while promoted is None:
        happen(world, "pass", "hub", 1)
        if RotationStep.PROMOTE in world.steps:
            promoted = world.now
        else:
            assert plan.waiting_for(world.authorities, world.holders(), TERMS, ObservedTime(world.now, START)) != ()
    assert promoted == START + 270 * MINUTE, "300 of the authority less 30 of a whole certificate"
    assert "us" in world.left_behind
    world.silent.clear()
    for _ in range(20):
        happen(world, "pass", "hub", 1)
    assert world.history["us"][-1].leaf.authority in world.authorities.current


EU = Identity("eu")


def leaf(authority: str = "a", cluster: str = "eu", **more: timedelta) -> Leaf:
    begin, end = more.get("begin", -CLOCK_SKEW), more.get("end", 30 * MINUTE)
    return Leaf(Identity(cluster), authority, Validity(START + begin, START + end))


STEADY = Authorities(frozenset("a"), ends=START + 300 * MINUTE, signs=True)


@pytest.mark.parametrize(
    ("held", "what"),
    [
        (SecretContent(), SecretChange.CERTIFICATE),
        (SecretContent(problem="damaged"), SecretChange.CERTIFICATE),
        (SecretContent(leaf(), frozenset("a"), START), SecretChange.NOTHING),
        (SecretContent(leaf(), frozenset("ax"), START), SecretChange.TRUST),
        (SecretContent(leaf(), frozenset("a"), None), SecretChange.TRUST),
        (SecretContent(leaf(), frozenset("a"), START + 365 * 24 * 60 * MINUTE), SecretChange.TRUST),
        (SecretContent(leaf(cluster="hub"), frozenset("a"), START), SecretChange.CERTIFICATE),
        (SecretContent(leaf("x"), frozenset("a"), START), SecretChange.CERTIFICATE),
        (
            SecretContent(leaf(end=10 * MINUTE, begin=-20 * MINUTE - CLOCK_SKEW), frozenset("a"), START),
            SecretChange.CERTIFICATE,
        ),
        (
            SecretContent(leaf(end=11 * MINUTE, begin=-20 * MINUTE - CLOCK_SKEW), frozenset("a"), START),
            SecretChange.NOTHING,
        ),
    ],
)
def test_a_secret_is_written_exactly_when_something_is_wrong_with_it(held, what):
    assert plan.wanted(STEADY, Holder(EU, held), TERMS, START) is what


def test_a_lost_key_brings_a_successor_and_meanwhile_nothing_is_taken_away():
    keyless = STEADY._replace(signs=False)
    holders = [Holder(EU, SecretContent(leaf(), frozenset("a"), START))]
    assert plan.step(keyless, holders, TERMS, ObservedTime(START, START)) is RotationStep.ANNOUNCE
    due = SecretContent(leaf(end=MINUTE, begin=-99 * MINUTE), frozenset("a"), START)
    assert plan.wanted(keyless, Holder(EU, due), TERMS, START) is SecretChange.NOTHING


def test_uses_an_issuers_certificate_only_once_every_cluster_trusts_its_authority():
    terms, moment = TERMS._replace(mode=plan.CertificateMode.ISSUER), ObservedTime(START + 60 * MINUTE, START)
    holder = Holder(EU, SecretContent(leaf("a"), frozenset("a"), START), leaf("b"))
    assert plan.wanted(STEADY, holder, terms, START) is SecretChange.NOTHING
    assert plan.step(STEADY, [holder], terms, moment) is RotationStep.ANNOUNCE
    announced = plan.after(STEADY, RotationStep.ANNOUNCE, frozenset("b"))
    assert plan.wanted(announced, holder, terms, START) is SecretChange.TRUST
    trusting = holder._replace(held=SecretContent(leaf("a"), frozenset("ab"), START))
    assert plan.step(announced, [trusting], terms, moment) is RotationStep.PROMOTE
    promoted = plan.after(announced, RotationStep.PROMOTE, frozenset("b"))
    assert plan.wanted(promoted, trusting, terms, START) is SecretChange.CERTIFICATE
    assert promoted.trusted == frozenset("ab")


@pytest.mark.parametrize(
    ("holder", "status", "reason"),
    [
        (Holder(EU, None), "Unknown", "ClusterUnreachable"),
        (Holder(EU, SecretContent(problem="why")), "False", "CertificatePending"),
        (Holder(EU, SecretContent(leaf("x"), frozenset("a"), START)), "False", "CertificateRefused"),
        (Holder(EU, SecretContent(leaf(end=-MINUTE), frozenset("a"), START)), "False", "CertificateRefused"),
        (Holder(EU, SecretContent(leaf(), frozenset("a"), START)), "True", "Issued"),
    ],
)
def test_the_condition_tells_causes_apart(holder, status, reason):
    assert plan.condition(STEADY, holder, (), START)[:2] == (status, reason)


def test_the_condition_names_the_clusters_that_a_change_of_authority_waits_for():
    found = plan.condition(STEADY, Holder(EU, SecretContent(leaf(), frozenset("a"), START)), ("us",), START)
    assert (found.status, found.reason) == ("True", "AuthorityChanging")
    assert "waits for us" in found.message


def sold(trusted: str, ends: timedelta = 60 * MINUTE) -> Holder:
    """Return a buyer whose certificate of the authority `a` came with these."""
    who = Identity("buyer/acme")
    return Holder(who, SecretContent(Leaf(who, "a", Validity(START, START + ends)), frozenset(trusted), START))


@pytest.mark.parametrize(("trusted", "step"), [("a", None), ("ab", RotationStep.PROMOTE)])
def test_a_promotion_waits_for_a_buyer_who_does_not_trust_the_next_authority(trusted, step):
    announced = STEADY._replace(next=frozenset("b"))
    ready = Holder(EU, SecretContent(leaf(), frozenset("ab"), START))
    moment = ObservedTime(START + 10 * MINUTE, START)
    assert plan.step(announced, [ready, sold(trusted)], TERMS, moment) is step
    assert plan.step(announced, [ready], TERMS, moment) is RotationStep.PROMOTE, "the control: nobody buys"
    late = ObservedTime(START + 270 * MINUTE, START)
    assert plan.step(announced, [ready, sold(trusted)], TERMS, late) is RotationStep.PROMOTE, "others are at stake"


def test_an_authority_stays_trusted_while_a_buyers_certificate_is_of_it():
    promoted = Authorities(frozenset("b"), frozenset(), frozenset("a"), START + 300 * MINUTE, signs=True)
    ready = Holder(EU, SecretContent(leaf("b"), frozenset("ab"), START))
    moment = ObservedTime(START + 10 * MINUTE, START)
    assert plan.step(promoted, [ready, sold("ab")], TERMS, moment) is None
    assert plan.step(promoted, [ready], TERMS, moment) is RotationStep.RETIRE


def test_an_issuer_that_gives_buyers_nothing_still_changes_its_authority():
    terms, moment = TERMS._replace(mode=plan.CertificateMode.ISSUER), ObservedTime(START + 60 * MINUTE, START)
    holder = Holder(EU, SecretContent(leaf("a"), frozenset("a"), START), leaf("b"))
    assert plan.step(STEADY, [holder, sold("a")], terms, moment) is RotationStep.ANNOUNCE


def test_a_buyers_certificate_that_ends_soon_leaves_no_silent_cluster_behind():
    """The control: one of a cluster that an issuer has not renewed does."""
    terms, moment = TERMS._replace(mode=plan.CertificateMode.ISSUER), ObservedTime(START + 10 * MINUTE, START)
    announced = STEADY._replace(next=frozenset("b"))
    silent = Holder(Identity("us"), None, leaf("b", "us"))

    def ready(end: timedelta) -> Holder:
        return Holder(EU, SecretContent(leaf("a", end=end), frozenset("ab"), START), leaf("b"))

    assert plan.step(announced, [ready(60 * MINUTE), silent, sold("ab", 12 * MINUTE)], terms, moment) is None
    assert plan.step(announced, [ready(12 * MINUTE), silent], terms, moment) is RotationStep.PROMOTE


def test_an_old_gateway_is_named_before_and_after_the_instances_certificate_lost_its_rights(make):
    old = make.pod("old", "", policy_uid="p", secrets=frozenset({"prfaas-tls"}))
    for is_apart, says in ((False, "may do what only gateways may, until it ends"), (True, "refuse it what only gate")):
        (found,) = plan.separation([old], is_apart=is_apart).values()
        assert found.message.startswith("pod old of an older version mounts prfaas-tls")
        assert says in found.message
        assert plan.separation([old._replace(secrets=frozenset())], is_apart=is_apart) == {}
