"""Proves on real API servers that the operator renews a member's token in time, and that an ended one heals."""

import base64
import json
import time
from typing import Any

import pytest
from tests.clusters.operator_.granted import MADE_BY_JOIN, secret_with

from prfaas_operator.plan.credentials import read_token

pytestmark = pytest.mark.clusters


def document_of(world, secret: str) -> dict[str, Any]:
    return json.loads(base64.b64decode(world.hub.get("secret", f"{secret}-kubeconfig")["data"]["kubeconfig"]))


def token_of(world, secret: str) -> str:
    return document_of(world, secret)["users"][0]["user"]["token"]


def test_a_token_past_half_its_life_is_replaced_and_nothing_else(world):
    body = secret_with(world, "ageing", -3600, 900, MADE_BY_JOIN)
    world.hub.apply(
        body, world.member_cluster("ageing", "ageing"), world.pool("PrefillPool", "p", clusterName="ageing")
    )
    before = json.loads(body["stringData"]["kubeconfig"])
    old = before["users"][0]["user"]["token"]
    world.eventually(lambda: token_of(world, "ageing") != old, "a new token")
    after = document_of(world, "ageing")
    assert read_token(after["users"][0]["user"]["token"]).lifetime.days == 30
    after["users"][0]["user"]["token"] = old
    assert after == before
    world.hub.wait_reason("pmc", "ageing", "AllReady")
    finalizers = lambda: world.hub.get("secret", "ageing-kubeconfig")["metadata"].get("finalizers")  # noqa: E731
    world.eventually(lambda: finalizers() == ["prfaas.io/cleanup"], "the Secret is guarded for the pool")
    world.hub.delete("pfpool", "p")
    world.eventually(lambda: not finalizers(), "and let go, with what is in it")
    assert read_token(token_of(world, "ageing")) is not None
    late = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 29 * 86_400))
    expires = lambda: world.hub.get("pmc", "ageing")["status"].get("tokenExpirationTime", "")  # noqa: E731
    world.eventually(lambda: expires() > late, "the status follows")
    metric = 'prfaas_operator_member_token_expires_timestamp_seconds{member_cluster="ageing"}'
    world.eventually(lambda: world.metrics()[metric] > time.time() + 29 * 86_400, "the metric follows")


def test_keeps_a_secret_of_another_owner_and_reports_its_end(world):
    body = secret_with(world, "theirs", -3600, 900, {})
    world.hub.apply(body, world.member_cluster("theirs", "theirs"))
    world.hub.wait_reason("pmc", "theirs", "AllReady")
    assert world.hub.get("pmc", "theirs")["status"]["tokenExpirationTime"]
    assert token_of(world, "theirs") == json.loads(body["stringData"]["kubeconfig"])["users"][0]["user"]["token"]


def test_a_renewal_that_is_refused_is_an_event_and_changes_nothing_else(world):
    rules = world.member.get("role", "prfaas-operator")["rules"]
    without = [rule for rule in rules if "serviceaccounts/token" not in rule["resources"]]
    world.member.patch("role", "prfaas-operator", {"rules": without})
    world.hub.apply(secret_with(world, "kept", -3600, 900, MADE_BY_JOIN), world.member_cluster("kept", "kept"))
    messages = world.eventually(lambda: world.hub.messages("kept", "TokenNotRenewed"), "an Event")
    assert "prfaas cluster join kept" in messages[0]
    world.hub.wait_reason("pmc", "kept", "AllReady")
    world.member.patch("role", "prfaas-operator", {"rules": rules})


def test_an_ended_token_is_reported_with_what_to_do_and_a_new_one_heals_it_without_a_restart(world):
    world.hub.apply(secret_with(world, "ended", -3600, -60, MADE_BY_JOIN), world.member_cluster("ended", "ended"))
    found = world.hub.wait_reason("pmc", "ended", "TokenExpired")
    assert "run `prfaas cluster join ended` again" in found["message"]
    assert world.hub.condition("pmc", "ended", "Reachable")["status"] == "True"
    world.hub.apply(world.secret("ended", world.kubeconfig()))
    world.hub.wait_reason("pmc", "ended", "AllReady")
    assert "eyJ" not in world.log.read_text(), "no token in the log"


def test_a_credential_without_an_end_has_none_in_the_status(world):
    world.hub.apply(world.secret("ended", json.loads(world.administrator())))
    removed = lambda: "tokenExpirationTime" not in world.hub.get("pmc", "ended")["status"]  # noqa: E731
    world.eventually(removed, "the end of the old credential is forgotten")
    world.hub.wait_reason("pmc", "ended", "AllReady")
