"""Proves on real API servers that the operator's own clock may be hours off: what servers have dated, servers judge.

All tests run with an operator whose clock is ahead, and again with one whose clock is behind. Leases are proved with
the elections.
"""

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from tests.clusters.operator_.clock import WrongClock
from tests.clusters.operator_.conftest import Tap, tapped
from tests.clusters.operator_.granted import MADE_BY_JOIN, secret_with

from prfaas import identity

pytestmark = pytest.mark.clusters

OFF = timedelta(hours=3)
CLOSE = timedelta(minutes=5)
"""As near as a time that was written a moment ago is, on whatever machine."""
SECRET = "prfaas-tls"


@pytest.fixture(scope="module")
def operator_flags() -> tuple[str, ...]:
    """Certificates that end before a clock that is so wrong would see them begin, or after it saw them end."""
    return ("--certificate-hours", "1", "--authority-hours", "4")


@pytest.fixture(scope="module", params=[1, -1], ids=["ahead", "behind"])
def operator_variables(request, tmp_path_factory) -> dict[str, str]:
    off_seconds = request.param * int(OFF.total_seconds())
    return WrongClock(tmp_path_factory.mktemp("clock"), off_seconds).variables


@pytest.fixture(scope="module")
def line(member) -> Iterator[Tap]:
    yield from tapped(member)


@pytest.fixture(scope="module")
def joined(world, line):
    """The member under the name eu, with a pool, and one at home; all of it goes in the end."""
    young = secret_with(world, "eu", -60, 3600, MADE_BY_JOIN, line.url)
    world.hub.apply(
        young,
        world.member_cluster("eu", "eu"),
        world.pool("PrefillPool", "away", clusterName="eu"),
        world.pool("DecodePool", "home"),
    )
    world.hub.wait_reason("pmc", "eu", "AllReady")
    yield world
    world.hub.delete_all("pfpool,dcpool")
    world.hub.delete_all("pmc")
    world.hub.delete("secret", "prfaas-ca", SECRET, "prfaas-gateway-tls")


def is_close(time: str) -> bool:
    return abs(datetime.now(UTC) - datetime.fromisoformat(time)) < CLOSE


def usable(place) -> bool:
    """Tell whether instances would be accepted now with what their cluster's Secret holds."""
    if not place.exists("secret", SECRET):
        return False
    data = {key: base64.b64decode(value) for key, value in place.get("secret", SECRET)["data"].items()}
    try:
        identity.check(data["tls.crt"], data["tls.key"], data["ca.crt"], datetime.now(UTC))
    except identity.IdentityError:
        return False
    return True


def probes(world) -> float:
    """Return how many requests the member got so far."""
    return sum(value for name, value in world.metrics().items() if "requests_total" in name and 'cluster="eu"' in name)


def test_certificates_are_good_now(joined):
    for place in (joined.hub, joined.member):
        joined.eventually(lambda place=place: usable(place), f"{place.name} has a good certificate")
    issued = lambda: joined.hub.condition("pmc", "eu", "CertificateReady")["reason"] == "Issued"  # noqa: E731
    joined.eventually(issued, "the operator finds them good as well")


def test_what_is_written_carries_the_servers_time(joined):
    joined.member.ready_up("away", "10.8.1")
    joined.hub.wait_reason("pfpool", "away", "AllReady")
    status = joined.hub.get("pmc", "eu")["status"]
    assert is_close(status["lastContactTime"])
    for kind, name in (("pmc", "eu"), ("pfpool", "away"), ("dcpool", "home")):
        dated = lambda kind=kind, name=name: joined.hub.condition(kind, name).get("lastTransitionTime")  # noqa: E731
        assert is_close(joined.eventually(dated, f"{name} has a condition"))
    found = joined.hub.events()
    ours = [event for event in found if event["source"].get("component") == "prfaas-operator"]
    assert ours
    assert all(is_close(event["lastTimestamp"]) for event in ours)


def test_a_contact_in_the_future_is_dated_again(joined):
    future = (datetime.now(UTC) + OFF).strftime("%Y-%m-%dT%H:%M:%SZ")
    patch = json.dumps({"status": {"lastContactTime": future}})
    joined.hub.kubectl("patch", "pmc", "eu", "--subresource=status", "--type=merge", "-p", patch)
    contact = lambda: is_close(joined.hub.get("pmc", "eu")["status"]["lastContactTime"])  # noqa: E731
    joined.eventually(contact, "the time of contact is right again")


def test_a_young_token_is_kept_and_an_old_one_renewed(joined, line):
    token = lambda: joined.hub.get("secret", "eu-kubeconfig")["data"]["kubeconfig"]  # noqa: E731
    young, before = token(), probes(joined)
    joined.eventually(lambda: probes(joined) > before + 3, "a few looks at the member")
    assert token() == young
    joined.hub.apply(secret_with(joined, "eu", -3600, 900, MADE_BY_JOIN, line.url))
    old = token()
    joined.eventually(lambda: token() != old, "a new token")
    fresh, before = token(), probes(joined)
    joined.eventually(lambda: probes(joined) > before + 3, "a few looks at the member")
    assert token() == fresh


def test_a_deletion_waits_for_a_dead_cluster_until_its_deadline(joined, line):
    patient = json.dumps({"spec": {"deletionDeadlineSeconds": 3600}})
    joined.hub.kubectl("patch", "pmc", "eu", "--type=merge", "-p", patient)
    line.freeze()
    joined.hub.wait_reason("pfpool", "away", "ClusterUnreachable")
    joined.hub.delete("pfpool", "away", wait=False)

    def waits_until() -> str:
        message = joined.hub.condition("pfpool", "away")["message"]
        before, _, until = message.rpartition("the pool is released without that at ")
        return until if before else ""

    until = datetime.fromisoformat(joined.eventually(waits_until, "the deadline is reported"))
    assert abs(until - datetime.now(UTC) - timedelta(hours=1)) < CLOSE
    hasty = json.dumps({"spec": {"deletionDeadlineSeconds": 1}})
    joined.hub.kubectl("patch", "pmc", "eu", "--type=merge", "-p", hasty)
    joined.eventually(lambda: not joined.hub.exists("pfpool", "away"), "past its deadline the pool goes")
    line.thaw()
    joined.eventually(lambda: not joined.member.exists("deployment", "away"), "what was left is swept up")
