"""What the table of rights promises, said apart from the table."""

import pytest

from prfaas.names import HUB
from prfaas.rights import BUYER, PREFILLS, RIGHTS, STEER, TRANSFER, Identity, counted_as, is_open, refusal
from prfaas.wire.kvevents import EVENTS_PATH

PROBES = {"/health", "/healthz", "/readyz", "/metrics"}
CONTROL = {STEER, EVENTS_PATH, "/v1/role", "/v1/egress", "/v1/cache/reset"}


def may(identity: Identity | None, own_cluster: str) -> set[str]:
    return {endpoint for endpoint in RIGHTS if not refusal(endpoint, identity, own_cluster)}


@pytest.mark.parametrize("own_cluster", [HUB, "eu"])
def test_without_a_right_there_are_probes(own_cluster: str):
    assert may(None, own_cluster) == may(Identity("us"), own_cluster) == PROBES
    assert {endpoint for endpoint in RIGHTS if is_open(endpoint)} == PROBES


@pytest.mark.parametrize("own_cluster", [HUB, "eu"])
def test_the_hub_may_do_everything_its_gateways_all_but_fetch_and_its_workers_no_control(own_cluster: str):
    assert may(Identity(HUB), own_cluster) == RIGHTS.keys()
    assert may(Identity(HUB, "gateway"), own_cluster) == RIGHTS.keys() - {TRANSFER}
    assert may(Identity(HUB, "worker"), own_cluster) == RIGHTS.keys() - CONTROL


def test_a_member_uses_its_own_workers_and_neither_controls_nor_steers_them():
    own = may(Identity("eu"), "eu")
    assert {"/v1/completions", "/v1/profile", TRANSFER} < own
    assert not own & (CONTROL | {"/v1/prefills"})


@pytest.mark.parametrize("own_cluster", [HUB, "eu", "acme"])
def test_a_buyer_has_prompts_prefilled_fetches_caches_and_reads_the_price_and_no_more(own_cluster: str):
    wanted = PROBES | {PREFILLS, TRANSFER, "/v1/profile", "/v1/models", "/openapi.json"}
    assert may(Identity(f"{BUYER}acme"), own_cluster) == wanted


def test_a_buyers_own_instances_serve_it_and_nobody_else():
    own = f"{BUYER}acme"
    assert may(Identity(own), own) == RIGHTS.keys()
    for other in (f"{BUYER}other", HUB, "acme"):
        assert may(Identity(other), own) == PROBES


@pytest.mark.parametrize(
    ("identity", "own_cluster", "name"),
    [
        (Identity(HUB), HUB, ""),
        (Identity(HUB, "gateway"), "eu", ""),
        (Identity(HUB, "worker"), "eu", ""),
        (Identity("eu"), "eu", ""),
        (Identity("us"), "eu", "us"),
        (Identity("eu"), HUB, "eu"),
        (Identity(f"{BUYER}acme"), "eu", f"{BUYER}acme"),
        (Identity(f"{BUYER}acme"), f"{BUYER}acme", ""),
        (Identity(HUB), f"{BUYER}acme", HUB),
    ],
)
def test_all_but_the_hub_and_the_own_cluster_count_by_name(identity: Identity, own_cluster: str, name: str):
    assert counted_as(identity, own_cluster) == name


@pytest.mark.parametrize("part", ["gateway", "worker"])
def test_a_member_that_calls_itself_a_gateway_gains_nothing(part: str):
    for own_cluster in (HUB, "eu", "us"):
        assert may(Identity("eu", part), own_cluster) == may(Identity("eu"), own_cluster)


def test_a_path_that_nobody_listed_is_for_gateways():
    assert not refusal("/v2/new", Identity(HUB, "gateway"), "eu")
    assert not is_open("/v2/new")
    assert refusal("/v2/new", Identity(HUB, "worker"), "eu") == (
        "only gateways of the hub may use this, and the caller's certificate is of cluster 'hub', part 'worker'"
    )
    assert refusal("/v2/new", None, "eu").endswith("and the caller shows no certificate")
