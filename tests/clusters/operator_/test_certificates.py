"""Proves on real API servers that certificates reach the clusters, are kept there, and survive what people do to them.

The operator runs with the charts' rights, so RBAC is the real one. Every Secret is judged as the instances will: by
`prfaas.identity`.
"""

import base64
from datetime import UTC, datetime

import pytest

from prfaas import identity
from prfaas.errors import PrfaasError

pytestmark = pytest.mark.clusters

SECRET, GATEWAYS, AUTHORITY = "prfaas-tls", "prfaas-gateway-tls", "prfaas-ca"


@pytest.fixture(scope="module")
def joined(world):
    world.join("eu")
    world.hub.apply(world.pool("PrefillPool", "away", clusterName="eu"), world.pool("DecodePool", "home"))
    for place in (world.hub, world.member):
        world.eventually(lambda place=place: place.exists("secret", SECRET), f"{place.name} has a certificate")
    return world


def read(place, name: str = SECRET) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in place.get("secret", name)["data"].items()}


def facts(files: dict[str, bytes]) -> identity.CertificateFacts:
    return identity.check(files["tls.crt"], files["tls.key"], files["ca.crt"], datetime.now(UTC))


def usable(place, cluster: str) -> bool:
    """Tell whether a Secret holds what instances of a cluster can use."""
    if not place.exists("secret", SECRET):
        return False
    try:
        return facts(read(place)).cluster == cluster
    except (KeyError, ValueError, PrfaasError):
        return False


def patch(place, name: str, data: dict[str, str | None]) -> None:
    place.patch("secret", name, {"data": data})


def events(place) -> set[str]:
    return {event["reason"] for event in place.events()}


def warnings(place, name: str, reason: str) -> list[str]:
    """Return the messages of the Warnings with a reason about an object."""
    return place.messages(name, reason, "Warning")


def test_each_cluster_has_its_own_certificate_and_the_key_of_the_authority_stays_in_the_hub(joined):
    hub, member, authority = read(joined.hub), read(joined.member), read(joined.hub, AUTHORITY)
    assert (facts(hub).identity, facts(member).identity) == (("hub", "worker"), ("eu", ""))
    assert facts(read(joined.hub, GATEWAYS)).identity == ("hub", "gateway")
    assert facts(hub).authority == facts(member).authority == next(iter(identity.by_digest(authority["tls.crt"])))
    assert hub["tls.key"] != member["tls.key"]
    assert set(member) == {"tls.crt", "tls.key", "ca.crt", "settle-seconds"}
    assert authority["tls.key"] not in {*hub.values(), *member.values()}
    assert facts(member).validity.not_before < datetime.now(UTC) - identity.CLOCK_SKEW * 0.5
    condition = lambda: joined.hub.condition("pmc", "eu", "CertificateReady")["reason"] == "Issued"  # noqa: E731
    joined.eventually(condition, "the condition says so")
    joined.eventually(lambda: {"AuthorityCreated", "CertificateIssued"} <= events(joined.hub), "both Events")
    expiries = {name: value for name, value in joined.metrics().items() if "_expires_timestamp" in name}
    assert expiries['prfaas_operator_certificate_expires_timestamp_seconds{member_cluster="eu"}'] == (
        facts(member).validity.not_after.timestamp()
    ), expiries


def test_instances_mount_it_their_probes_stay_plain_and_the_gateway_has_the_hubs(joined):
    joined.eventually(lambda: joined.member.exists("deployment", "away"), "the pool runs")
    joined.eventually(lambda: joined.hub.exists("deployment", "home"), "the hub's too")
    for place, pool in ((joined.member, "away"), (joined.hub, "home")):
        pod = place.get("deployment", pool)["spec"]["template"]
        worker = pod["spec"]["containers"][0]
        assert worker["args"][-2:] == ["--tls-dir", "/etc/prfaas/tls"]
        assert {worker[probe]["httpGet"]["scheme"] for probe in ("readinessProbe", "livenessProbe")} == {"HTTP"}
        assert pod["metadata"]["annotations"]["prfaas.io/scheme"] == "https"
        volume = next(volume for volume in pod["spec"]["volumes"] if "secret" in volume)
        assert volume["secret"] == {"secretName": SECRET, "defaultMode": 0o440}


def test_what_is_edited_or_deleted_is_put_right(joined):
    foreign = identity.make_authority("foreign", identity.valid_for(datetime.now(UTC), 9))
    stranger = identity.issue(foreign, "eu", identity.valid_for(datetime.now(UTC), 5))
    encoded = {
        name: base64.b64encode(text).decode()
        for name, text in zip(
            ("tls.crt", "tls.key", "ca.crt"), (stranger.certificate, stranger.key, foreign.certificate), strict=True
        )
    }
    own = identity.by_digest(read(joined.hub)["ca.crt"])

    def is_right() -> bool:
        return usable(joined.member, "eu") and identity.by_digest(read(joined.member)["ca.crt"]) == own

    for change in (encoded, {"ca.crt": encoded["ca.crt"]}, {"tls.key": "bm90IGEga2V5"}, {"tls.crt": None}):
        patch(joined.member, SECRET, change)
        joined.eventually(is_right, f"{sorted(change)} are put right")
        assert identity.by_digest(read(joined.hub)["ca.crt"]) == own, "a member's word counts nothing in the hub"
    for place, cluster in ((joined.member, "eu"), (joined.hub, "hub")):
        place.delete("secret", SECRET)
        joined.eventually(lambda place=place, cluster=cluster: usable(place, cluster), f"{cluster} has one again")


def test_reports_a_lost_or_damaged_authority_and_never_replaces_it(joined):
    backup = joined.hub.get("secret", AUTHORITY)
    before = read(joined.hub), read(joined.member)
    damaged = {"data": {**backup["data"], "tls.key": "bm90IGEga2V5"}}
    joined.hub.patch("secret", AUTHORITY, damaged)

    def says(reason: str) -> bool:
        return joined.hub.condition("pmc", "eu", "CertificateReady")["reason"] == reason

    joined.eventually(lambda: says("AuthorityDamaged"), "a damaged authority is reported")
    joined.hub.delete("secret", AUTHORITY)
    joined.eventually(lambda: says("AuthorityMissing"), "a lost authority is reported")
    assert not joined.hub.exists("secret", AUTHORITY)
    assert (read(joined.hub), read(joined.member)) == before
    joined.eventually(lambda: {"AuthorityDamaged", "AuthorityMissing"} <= events(joined.hub), "both Events")
    restored = {**backup, "metadata": {"name": AUTHORITY, "labels": backup["metadata"]["labels"]}}
    joined.hub.apply(restored)
    joined.eventually(lambda: says("Issued"), "restored from a backup, all is well")
    assert (read(joined.hub), read(joined.member)) == before


def test_keeps_another_hubs_certificate_and_pools_say_why(world, joined):
    label = ("prfaas.io/cluster-uid=somebody-elses", "--overwrite")
    joined.member.kubectl("label", "secret", SECRET, *label)

    def says() -> bool:
        return joined.hub.condition("pmc", "eu", "CertificateReady")["reason"] == "ChildConflict"

    joined.eventually(says, "the conflict is reported")
    theirs = read(joined.member)
    joined.hub.apply(joined.pool("PrefillPool", "late", clusterName="eu"))
    message = joined.hub.wait_reason("pfpool", "late", "CertificateNotReady")["message"]
    assert "belongs to somebody else" in message
    assert read(joined.member) == theirs
    joined.member.delete("secret", SECRET)
    joined.eventually(lambda: joined.member.exists("deployment", "late"), "and heals with its deletion")
    joined.hub.delete("pfpool", "late")


def test_a_second_registration_reports_whose_certificate_it_would_overwrite(joined):
    theirs = read(joined.member)
    joined.hub.apply(joined.member_cluster("twin", "eu"), joined.pool("PrefillPool", "second", clusterName="twin"))
    message = joined.hub.wait_reason("pfpool", "second", "CertificateNotReady")["message"]
    assert "twin shares its namespace with MemberCluster eu" in message
    assert "give twin another spec.namespace" in message
    verdict = lambda: joined.hub.condition("pmc", "twin", "CertificateReady")["message"]  # noqa: E731
    joined.eventually(lambda: "shares its namespace" in verdict(), "a condition of the MemberCluster")
    warned = lambda: warnings(joined.hub, "twin", "ChildConflict")  # noqa: E731
    assert "shares its namespace" in joined.eventually(warned, "an Event about the MemberCluster")[0]
    assert read(joined.member) == theirs
    joined.hub.kubectl("delete", "pfpool/second", "pmc/twin", "--timeout=60s")
    assert read(joined.member) == theirs, "and it takes along nothing that is not its own"


def test_a_policy_says_that_its_gateway_waits_for_a_certificate(joined):
    authority = joined.hub.get("secret", AUTHORITY)
    joined.hub.delete("secret", AUTHORITY, SECRET, GATEWAYS)
    policy = {"model": "kimi-linear-tiny", "decodePool": "home", "threshold": {"mode": "Disabled"}}
    joined.hub.apply(joined.resource("PrfaaSPolicy", "early", **policy))
    message = joined.hub.wait_reason("prfaas", "early", "CertificateNotReady")["message"]
    assert f"Secret {GATEWAYS} does not exist in cluster hub: AuthorityMissing" in message
    joined.hub.apply({**authority, "metadata": {"name": AUTHORITY, "labels": authority["metadata"]["labels"]}})
    joined.hub.wait_reason("prfaas", "early", "NoReadyInstances")
    joined.hub.delete("prfaas", "early")


def test_a_member_that_leaves_takes_its_certificate_along(joined):
    joined.hub.delete("pfpool", "away")
    joined.hub.delete("pmc", "eu")
    assert not joined.member.exists("secret", SECRET)


def test_of_two_registered_at_once_for_one_namespace_one_is_served_and_one_refused(joined):
    names = {"north", "south"}
    bodies = [joined.member_cluster(name, "eu") for name in sorted(names)]
    bodies += [joined.pool("PrefillPool", f"{name}-pool", clusterName=name) for name in sorted(names)]
    joined.hub.apply(*bodies)

    def refused() -> list[str]:
        """Return which one is refused, once the other one is served."""
        verdicts = {name: joined.hub.condition("pmc", name, "CertificateReady")["message"] for name in names}
        found = [name for name in names if "shares its namespace" in verdicts[name]]
        return found if len(found) == 1 and usable(joined.member, *(names - {*found})) else []

    (other,) = joined.eventually(refused, "one is served")
    (served,) = names - {other}
    assert (
        f"{other} shares its namespace with MemberCluster {served}"
        in joined.hub.wait_reason("pfpool", f"{other}-pool", "CertificateNotReady")["message"]
    )
    subjects = [event["involvedObject"]["name"] for event in joined.hub.events(reason="CertificateIssued")]
    assert other not in subjects, "nothing was ever overwritten"
    joined.hub.delete("pfpool", "north-pool", "south-pool")
    joined.hub.delete("pmc", *names)
