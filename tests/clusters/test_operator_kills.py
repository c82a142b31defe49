"""Proves that an operator killed at any moment of a life continues where it was, and restarts no instance for nothing.

One life with a kill in each of its steps, at moments of a fixed seed; `prfaas bench operator_kills` has more of them.
"""

import random

import pytest
from benchmarks import operator_kills as kills

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(1800)]

SEED = 20
STEPS = 7


def test_a_life_with_a_kill_in_every_step_ends_as_one_without(hub, member, tools, tmp_path):
    here = kills.Place(tools["kubectl"], hub.kubeconfig, kills.HUB)
    there = kills.Place(tools["kubectl"], member.kubeconfig, kills.MEMBER)
    kills.prepare(here, there, tools["helm"])
    stage, secret = kills.open_stage(here, there, tmp_path)
    try:
        outcomes = list(kills.live(stage, secret, random.Random(SEED), STEPS))
    finally:
        stage.end()
    assert [outcome.step for outcome in outcomes] == [name for name, _, _ in kills.life(secret)]
    assert [outcome for outcome in outcomes if outcome.problem] == []


def test_a_template_that_changed_and_a_scale_that_did_not_happen_are_seen():
    """The judge itself: what it would have to find is found."""

    class Found(kills.Stage):
        def __init__(self, replicas: int, templates: int):
            self._replicas, self._templates = replicas, templates
            self.hub = self.member = self  # pyright: ignore[reportAttributeAccessIssue]

        def listing(self, kinds: str) -> list[dict]:
            name = {"metadata": {"name": "d", "generation": 1, "ownerReferences": [{"name": "d"}]}}
            if kinds == "replicasets":
                return [name] * self._templates
            return [{**name, "spec": {"replicas": self._replicas}, "status": {"observedGeneration": 1}}]

    want = kills.Want({"d": 2}, {"d": 2})
    assert Found(2, 1).differs(want) == ""  # each of the two places has one
    assert "replicas" in Found(3, 1).differs(want)
    assert "templates" in Found(2, 2).differs(want)
