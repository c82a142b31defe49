"""A prompt that may not reach a place is sent there by a name that is written in another way, or by no name at all."""

import pytest
from msgspec.structs import replace
from tests.tables import make_instance, make_table

from prfaas.errors import RequestError
from prfaas.routing import decide, facts
from prfaas.wire import routes
from prfaas.wire.preferences import Preferences
from prfaas.wire.routes import Cluster, RoutingTable

LONG_TOKENS = 5000
WAYS = [
    ("us", "us-east-1"),
    ("US", "us-east-1"),
    ("us-east-1", "US-East-1"),
    ("us", "US"),
    ("us", ""),
    ("us-east-1", "us"),
]
"""What is forbidden, and the datacenter of the only other cluster."""
each_way = pytest.mark.parametrize(("name", "datacenter"), WAYS)


def world(datacenter: str, *forbidden: str) -> RoutingTable:
    cluster = Cluster(name="eu", datacenter=datacenter, capacity_mbps=100, utilisation_query="")
    return make_table(
        make_instance("d0"), make_instance("x0"), mode="Fixed", clusters=(cluster,), forbid_datacenters=forbidden
    )


def leaves(table: RoutingTable, *forbidden: str) -> bool:
    """Return whether a long prompt goes to the other cluster."""
    rule, seen = facts.narrow(facts.rule_in_force(table, None), table, Preferences(forbid=forbidden))
    decision = decide.decide(
        facts.RoutingFacts(now_seconds=0, request_id="r", total_tokens=LONG_TOKENS, table=seen, rule=rule)
    )
    assert isinstance(decision, facts.Route)
    return decision.kind == "offload"


@each_way
def test_the_policys_word_holds(name, datacenter):
    assert leaves(world(datacenter))
    assert not leaves(world(datacenter, name))


@each_way
def test_the_requests_word_holds(name, datacenter):
    assert not leaves(world(datacenter), name)


@pytest.mark.parametrize("misspelt", ["us-eats", "ues", "us-west-1"])
def test_a_word_that_means_nothing_is_refused(misspelt):
    with pytest.raises(RequestError) as refused:
        facts.check_places(Preferences(forbid=(misspelt,)), world("us-east-1"))
    assert refused.value.status == 400


def equal(names, datacenter) -> bool:
    return datacenter in names


@each_way
def test_control_where_names_are_only_compared_the_prompt_leaves(name, datacenter, monkeypatch):
    for module in (facts, routes):
        monkeypatch.setattr(module, "forbids", equal)
    monkeypatch.setattr(routes, "unknown_places", lambda _names, _known: [])
    assert leaves(world(datacenter, name))
    assert leaves(world(datacenter), name)


@pytest.mark.parametrize("misspelt", ["us-eats", "ues", "us-west-1"])
def test_a_misspelt_word_of_the_policy_keeps_every_prompt_at_home(misspelt):
    assert not leaves(world("us-east-1", misspelt))
    assert not leaves(world("us-east-1", misspelt, "eu"))
    assert facts.usable_places(world("us-east-1", misspelt), Preferences()) == []


def test_a_word_that_the_policy_only_prefers_is_no_known_place():
    preferring = replace(world("us-east-1"), prefer_datacenters=("us-eats",))
    with pytest.raises(RequestError):
        facts.check_places(Preferences(forbid=("us-eats",)), preferring)


def test_control_without_this_rule_the_prompt_leaves(monkeypatch):
    monkeypatch.setattr(routes, "unknown_places", lambda _names, _known: [])
    assert leaves(world("us-east-1", "us-eats"))


def test_control_without_the_refusal_a_misspelt_word_forbids_nothing():
    assert leaves(world("us-east-1"), "us-eats")


@pytest.mark.parametrize("datacenters", [("cn",), ("cn-north", "us-east-1")])
def test_a_place_of_any_member_cluster_may_be_forbidden(datacenters):
    """Also of one that is revoked, or that this policy does not use. The control knows only the policy's."""
    known = replace(world("us-east-1", "cn"), datacenters=datacenters)
    assert leaves(known)
    facts.check_places(Preferences(forbid=("cn",)), replace(known, forbid_datacenters=()))
    alone = world("us-east-1", "cn")
    assert not leaves(alone)
    with pytest.raises(RequestError):
        facts.check_places(Preferences(forbid=("cn",)), replace(alone, forbid_datacenters=()))
