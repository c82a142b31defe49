"""Proves how a shared Deployment assigns roles: as few ready instances change sides as must, and it ends.

Exact cases say who changes; a model of the Deployment's controller, which takes pods by its own rules or by none, says
that every start comes to what the pools want, and that no role falls below one less on the way.
"""

import random
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_operator.plan.pod_facts import PodFacts, SharedPodFacts
from prfaas_operator.plan.roles import Assignment, RoleCounts, assign

ROLES = ("prefill", "decode")


def pod(name: str, role: str = "", *, ready: bool = True, template: str = "t1", **more) -> PodFacts:
    """Return a pod; the digit in its name is its age, 1 the oldest."""
    seat = SharedPodFacts(
        uid=f"uid-{name}", created=f"2026-01-01T00:00:{int(name[1:]):02}Z", template=template, gated=True,
        gate_open=bool(role), cheap=more.pop("cheap", False),
    )  # fmt: skip
    facts = {"pool_uid": "u", "pod_ip": "", "host_ip": "", "terminating": False, "problem": "", **more}
    return PodFacts(name=name, role=role, ready=ready, shared=seat, **facts)


def pods(text: str) -> list[PodFacts]:
    """Read pods such as `d1 p2 d3? 4 d5!`: role and age, ? not ready, ! of an older template."""
    made = []
    for word in text.split():
        core = word.rstrip("?!")
        role = {"d": "decode", "p": "prefill"}.get(core[0], "")
        name = core if role else f"n{core}"
        made.append(pod(name, role, ready="?" not in word and bool(role), template="old" if "!" in word else "t1"))
    return made


def roles(assigned: Iterable[Assignment]) -> dict[str, str]:
    return {one.pod.name: (one.role or "")[:1] + ("-" if one.cheap else "") for one in assigned}


@pytest.mark.parametrize(
    ("before", "prefill", "decode", "after"),
    [
        ("d1 d2 p3", 1, 2, "d1=d d2=d p3=p"),
        ("1 2 3", 1, 2, "n1=d n2=d n3=p"),
        ("1 2 3 4", 3, 1, "n1=d n2=p n3=p n4=p"),
        ("1", 3, 1, "n1=d"),
        # Conversion: the youngest changes, one that is not ready before it.
        ("d1 d2 d3 p4", 2, 2, "d1=d d2=d d3=p p4=p"),
        ("d1 d2? d3 p4", 2, 2, "d1=d d2=p d3=d p4=p"),
        ("p1 p2 p3 d4", 1, 3, "p1=p p2=d p3=d d4=d"),
        ("d1 d2 p3", 0, 3, "d1=d d2=d p3=d"),
        # Too many: the youngest of the role that has too many is cheap, and no pod changes sides.
        ("d1 d2 d3 p4", 1, 2, "d1=d d2=d d3=d- p4=p"),
        ("d1 p2 p3 d4", 1, 1, "d1=d p2=p p3=p- d4=d-"),
        # Too many, and one that is not ready: that one goes, so the rest is planned without it.
        ("d1 d2 d3 p4 p5?", 2, 2, "d1=d d2=d d3=p p4=p p5=p-"),
        ("d1 d2 d3? p4 p5", 1, 3, "d1=d d2=d d3=d- p4=p p5=d"),
        ("d1 p2 3", 1, 1, "d1=d p2=p n3=-"),
        # A pod that is missing: the first decode instance comes before any prefill.
        ("p1 2", 1, 1, "p1=d n2=p"),
        ("d1 2", 1, 1, "d1=d n2=p"),
        # No ready decode instance: a ready prefill instance takes its place.
        ("d1? p2", 1, 1, "d1=p p2=d"),
        ("d1? d2? p3 p4", 2, 2, "d1=d d2=p p3=d p4=p"),
        ("d1? p2?", 1, 1, "d1=d p2=p"),
        # A rollout: what comes takes a role, and an older one of that role is cheap.
        ("d1! d2! p3! 4", 1, 2, "d1=d d2=d- p3=p n4=d"),
        ("d2! p3! d4 5", 1, 2, "d2=d- p3=p d4=d n5=d"),
        ("p3! d4 d5 6", 1, 2, "p3=p- d4=d d5=d n6=p"),
        # The controller took the wrong one: one of the others changes sides.
        ("d1! d2! d4", 1, 2, "d1=d d2=p d4=d"),
    ],
)
def test_assigns_roles(before, prefill, decode, after):
    expected = dict(word.split("=") for word in after.split())
    assert roles(assign(pods(before), RoleCounts(prefill, decode), "t1")) == expected


def test_pods_that_end_count_for_nothing():
    ending = [pod("d1", "decode", terminating=True), pod("p3", "prefill")]
    assert roles(assign([*ending, pod("n4", ready=False)], RoleCounts(1, 1), "t1")) == {"p3": "d", "n4": "p"}


def test_what_is_written_is_what_differs():
    (same, flipped, fresh) = assign(
        [pod("d1", "decode"), pod("d2", "decode"), pod("n3", ready=False)], RoleCounts(2, 1), "t1"
    )
    assert (same.labels_differ, same.gate_differs, same.converts) == (False, False, False)
    assert (fresh.labels_differ, fresh.gate_differs, fresh.converts) == (True, True, False)
    assert (flipped.role, flipped.labels_differ, flipped.converts) == ("prefill", True, True)


some_pods = st.lists(
    st.tuples(st.sampled_from(("", *ROLES)), st.booleans(), st.sampled_from(("t1", "old"))), max_size=9
).map(
    lambda drawn: [
        pod(f"x{age}", role, ready=ready and bool(role), template=template)
        for age, (role, ready, template) in enumerate(drawn, start=1)
    ]
)
some_wanted = st.builds(RoleCounts, st.integers(0, 5), st.integers(0, 5))


def after(assigned: Iterable[Assignment]) -> list[PodFacts]:
    """Return the pods once everything is written."""
    return [
        one.pod._replace(
            role=one.role or "", shared=one.pod.shared._replace(cheap=one.cheap, gate_open=one.role is not None)
        )
        for one in assigned
    ]


@given(some_pods, some_wanted)
def test_assignment_ends_and_no_ready_instance_changes_sides_twice(existing, wanted):
    states = [existing]
    for _ in range(3):
        states.append(after(assign(states[-1], wanted, "t1")))
    assert states[2:] == [states[2]] * 2
    history = {one.name: [one.role] for one in existing if one.ready}
    for state in states[1:]:
        for one in state:
            if one.name in history and history[one.name][-1] != one.role:
                history[one.name].append(one.role)
    assert all(len(roles) <= 2 for roles in history.values())


@given(some_pods, some_wanted)
def test_every_role_has_what_is_wanted_as_far_as_there_are_pods(existing, wanted):
    assigned = [one for one in assign(existing, wanted, "t1") if not one.cheap]
    counts = {role: sum(one.role == role for one in assigned) for role in ROLES}
    assert sum(counts.values()) == min(len(existing), wanted.total)
    assert all(counts[role] <= wanted.of(role) for role in ROLES)


@given(some_pods, some_wanted)
def test_no_more_instances_change_sides_than_are_missing_elsewhere(existing, wanted):
    existing = [one._replace(ready=True, shared=one.shared._replace(template="t1")) for one in existing if one.role]
    kept = sum(min(wanted.of(role), sum(one.role == role for one in existing)) for role in ROLES)
    needed = min(len(existing), wanted.total) - kept
    converted = sum(one.converts for one in assign(existing, wanted, "t1"))
    lone = bool(wanted.decode) and not any(one.role == "decode" for one in existing)
    assert needed <= converted <= needed + lone


@given(some_pods, some_wanted)
def test_something_decodes_where_anything_is_ready(existing, wanted):
    decodes = [one.pod.ready for one in assign(existing, wanted, "t1") if one.role == "decode"]
    planned = [one.pod.ready for one in assign(existing, wanted, "t1") if not one.cheap]
    assert any(decodes) or not wanted.decode or not any(planned)


class Cluster(NamedTuple):
    """A Deployment with one ReplicaSet a template, and what its pools want."""

    pods: list[PodFacts]
    wanted: RoleCounts
    template: str
    obeys: bool
    chance: random.Random

    def step(self, born: int) -> "Cluster":
        """Let operator, controller and kubelet each do what is due; `born` names the next pod."""
        planned = after(assign(self.pods, self.wanted, self.template))
        # A pod becomes ready once its gate is open; a kubelet may take its time.
        planned = [
            one if one.ready or not one.role else one._replace(ready=self.chance.random() < 0.7) for one in planned
        ]
        older = [one for one in planned if one.shared.template != self.template]
        total, ready = self.wanted.total, sum(one.ready for one in planned)
        if len(planned) < total + bool(older):  # surge by one in a rollout
            planned.append(pod(f"x{born}", ready=False, template=self.template))
        elif older:
            self._take(planned, [one for one in older if ready > total or not one.ready])
        elif len(planned) > total:
            self._take(planned, planned)
        return self._replace(pods=planned)

    def _take(self, planned: list[PodFacts], candidates: list[PodFacts]) -> None:
        """Take one as a ReplicaSet does: not ready, cheap, youngest; or any of them, where the hint is lost."""
        if not candidates:
            return
        hinted = min(candidates, key=lambda one: (one.ready, not one.shared.cheap, -int(one.name[1:])))
        planned.remove(hinted if self.obeys else self.chance.choice(candidates))

    def ready(self, role: str) -> int:
        return sum(one.ready and one.role == role for one in self.pods)

    @property
    def settled(self) -> bool:
        counts = {role: sum(one.role == role for one in self.pods) for role in ROLES}
        return all(counts[role] == self.wanted.of(role) == self.ready(role) for role in ROLES) and all(
            one.shared.template == self.template and not one.shared.cheap for one in self.pods
        )


def run(cluster: Cluster, steps: int = 80) -> list[Cluster]:
    """Return the states on the way to where nothing is left to do."""
    history = [cluster]
    for born in range(20, 20 + steps):
        if history[-1].settled:
            return history
        history.append(history[-1].step(born))
    raise AssertionError(f"not settled: {history[-1]}")


@given(some_pods, some_wanted, st.booleans(), st.integers(0, 2**32))
@settings(max_examples=40)
def test_every_start_comes_to_what_the_pools_want(existing, wanted, obeys, seed):
    run(Cluster(existing, wanted, "t1", obeys, random.Random(seed)))


def running(wanted: RoleCounts) -> list[PodFacts]:
    names = ["prefill"] * wanted.prefill + ["decode"] * wanted.decode
    return [pod(f"x{age}", role, template="t1") for age, role in enumerate(names, start=1)]


@given(some_wanted, st.booleans(), st.integers(0, 2**32))
@settings(max_examples=40)
def test_a_rollout_leaves_each_role_at_most_one_short_and_none_where_the_hint_is_heard(wanted, obeys, seed):
    history = run(Cluster(running(wanted), wanted, "t2", obeys, random.Random(seed)))
    short = 0 if obeys else 1
    for state in history:
        assert all(state.ready(role) >= wanted.of(role) - short for role in ROLES), state


@given(some_wanted, some_wanted, st.integers(0, 2**32))
@settings(max_examples=40)
def test_shrinking_takes_from_the_role_that_shrinks(before, less, seed):
    wanted = RoleCounts(min(before.prefill, less.prefill), min(before.decode, less.decode))
    history = run(Cluster(running(before), wanted, "t1", True, random.Random(seed)))
    sides = {one.name: one.role for one in history[0].pods}
    assert all(sides[one.name] == one.role for state in history for one in state.pods)
