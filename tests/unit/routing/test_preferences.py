"""Proves that a request's preferences narrow where it may be prefilled, and never widen it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.tables import make_instance, make_table

from prfaas.errors import RequestError
from prfaas.routing.decide import decide
from prfaas.routing.facts import Refusal, Route, RoutingFacts, check_places, rule_in_force, usable_places
from prfaas.routing.facts import narrow as narrowed_parts
from prfaas.wire.control import Price, ThresholdUpdate
from prfaas.wire.preferences import Preferences, forbids
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Cluster, RoutingTable, Threshold, decode, encode

PLACES = {"a": "eu-west", "b": "eu-north", "c": "us-east", "d": ""}
LONG, SHORT, TINY = 5000, 500, 50


def table(mode: str = "Fixed", **more) -> RoutingTable:
    return make_table(
        *map(make_instance, ("d0", "p0")),
        *(make_instance(f"x{name}", cluster=name) for name in PLACES),
        threshold=Threshold(mode=mode, tokens=1000, min_tokens=100, max_tokens=2000),
        clusters=tuple(
            Cluster(name=name, datacenter=place, capacity_mbps=1, utilisation_query="")
            for name, place in PLACES.items()
        ),
        **more,
    )


def facts(tokens: int, world: RoutingTable | None = None, update: ThresholdUpdate | None = None) -> RoutingFacts:
    world = world or table()
    return RoutingFacts(
        now_seconds=0, request_id="r", total_tokens=tokens, table=world, rule=rule_in_force(world, update)
    )


def narrowed(original: RoutingFacts, preferences: Preferences) -> RoutingFacts:
    rule, world = narrowed_parts(original.rule, original.table, preferences)
    return replace(original, rule=rule, table=world)


def decided(tokens: int, *, world: RoutingTable | None = None, **preferences) -> Route:
    decision = decide(narrowed(facts(tokens, world), Preferences(**preferences)))
    assert isinstance(decision, Route)
    return decision


def test_without_preferences_the_facts_are_the_very_same():
    original = facts(LONG)
    rule, world = narrowed_parts(original.rule, original.table, Preferences())
    assert rule is original.rule
    assert world is original.table


def test_preferred_datacenters_come_first_and_in_their_order():
    assert decided(LONG, prefer=("us-east", "eu-west")).prefill.cluster == "c"
    assert decided(LONG, prefer=("mars", "eu-north", "us-east")).prefill.cluster == "b"


def test_a_request_prefers_before_its_policy_does_and_within_what_that_permits():
    assert decided(LONG, world=table(prefer_datacenters=("eu-west",)), prefer=("us",)).prefill.cluster == "c"
    strict = table(prefer_datacenters=("eu-west",), forbid_datacenters=("us-east",))
    assert decided(LONG, world=strict, prefer=("us",)).prefill.cluster == "a"


def test_a_forbidden_datacenter_is_not_used_even_where_the_policy_prefers_it():
    world = table(prefer_datacenters=("us-east",))
    assert decided(LONG, world=world).prefill.cluster == "c"
    assert decided(LONG, world=world, forbid=("us",)).prefill.cluster != "c"


def test_where_every_datacenter_is_forbidden_the_prompt_stays_at_home():
    assert decided(LONG, forbid=("us", "eu")).kind == "local", "d names no datacenter, so it may be in either"
    assert decided(LONG, world=table(forbid_datacenters=("us", "eu"))).kind == "local"


@pytest.mark.parametrize("name", ["us", "US", "us-east", "Us-East"])
def test_policy_and_request_forbid_by_one_rule(name):
    here = replace(table(prefer_datacenters=("us",)), clusters=table().clusters[2:3])
    assert decided(LONG, world=here).kind == "offload"
    assert decided(LONG, world=here, forbid=(name,)).kind == "local"
    assert decided(LONG, world=replace(here, forbid_datacenters=(name,))).kind == "local"


def test_a_policy_prefers_what_its_names_cover_as_a_request_does():
    assert decided(LONG, world=table(prefer_datacenters=("US", "eu"))).prefill.cluster == "c"


def test_a_request_may_forbid_only_places_that_somebody_knows():
    world = table(forbid_datacenters=("cn",))
    for known in ("us", "EU", "eu-west", "eu-west-1a", "cn"):
        check_places(Preferences(forbid=(known,)), world)
    for unknown in ("us-eats", "eu-south", "usa"):
        with pytest.raises(RequestError, match=f"forbids '{unknown}', where no cluster is; the places are: cn, eu-"):
            check_places(Preferences(forbid=("us", unknown)), world)
    for nowhere in ((), tuple(replace(one, datacenter="") for one in world.clusters)):
        lost = replace(world, clusters=nowhere, forbid_datacenters=())
        check_places(Preferences(forbid=("anywhere",)), lost)
        assert decided(LONG, world=lost, forbid=("anywhere",)).kind == "local"


def test_never_keeps_the_longest_prompt_at_home():
    assert (decided(LONG).kind, decided(LONG, offload="never").kind) == ("offload", "local")


def test_always_offloads_below_the_threshold_and_not_below_the_least_that_the_policy_allows():
    assert (decided(SHORT).kind, decided(SHORT, offload="always").kind) == ("local", "offload")
    assert decided(TINY, offload="always").kind == "local"


def test_always_opens_neither_a_disabled_policy_nor_a_dead_link():
    assert decided(LONG, world=table("Disabled"), offload="always").kind == "local"
    dead = ThresholdUpdate(tokens=500, bandwidth="Scarce", offload_clusters=(), expires_seconds=9, reason="")
    assert decide(narrowed(facts(LONG, None, dead), Preferences(offload="always"))).kind == "local"


def price(cluster: str, token_seconds: float) -> Price:
    profile = Profile(state_bytes=0, token_bytes=0, samples=5, token_seconds=token_seconds)
    return Price(cluster=cluster, profile=profile, link_mbps=800.0)


@pytest.mark.parametrize(
    ("offload", "home_seconds", "kind"),
    [("auto", 1e-4, "local"), ("always", 1e-4, "offload"), ("auto", 1.0, "offload"), ("never", 1.0, "local")],
)
def test_preferences_hold_where_prices_decide(offload, home_seconds, kind):
    world = table("Priced")
    prices = (price("hub", home_seconds), price("a", 1e-2))
    update = ThresholdUpdate(
        tokens=1000, bandwidth="Scarce", offload_clusters=("a",), expires_seconds=9, reason="", prices=prices
    )
    assert decide(narrowed(facts(SHORT, world, update), Preferences(offload=offload))).kind == kind


@pytest.mark.parametrize(
    ("policy", "preferences", "usable"),
    [
        ((), Preferences(), ["*", "a", "b", "c", "d"]),
        (("us",), Preferences(), ["a", "b"]),
        ((), Preferences(forbid=("EU-west",)), ["b", "c"]),
        (("us",), Preferences(forbid=("eu",)), []),
        ((), Preferences(prefer=("us",), offload="always"), ["*", "a", "b", "c", "d"]),
        ((), Preferences(offload="never"), []),
    ],
)
def test_cached_bytes_serve_a_request_from_where_its_prompt_may_go(policy, preferences, usable):
    assert usable_places(table(forbid_datacenters=policy), preferences) == usable


def test_cached_bytes_go_by_the_place_of_their_cluster():
    world = table()
    known = tuple(replace(one, place=f"{one.name}@1") for one in world.clusters)
    assert usable_places(replace(world, clusters=known), Preferences()) == ["*", "a@1", "b@1", "c@1", "d@1"]


def test_the_permitted_clusters_of_a_table_are_found_once():
    world = table(forbid_datacenters=("us",))
    assert [one.name for one in world.permitted_clusters] == ["a", "b"]
    assert world.permitted_clusters is world.permitted_clusters
    assert decode(encode(world)) == world, "and are no part of the document"


NAMES = st.sampled_from(["eu", "eu-west", "eu-north", "us", "us-east", "mars"])


@given(
    tokens=st.integers(0, 20_000),
    mode=st.sampled_from(["Auto", "Fixed", "Disabled"]),
    forbidden=st.lists(NAMES, unique=True),
    preferences=st.builds(
        Preferences,
        st.lists(NAMES, unique=True).map(tuple),
        st.lists(NAMES, unique=True).map(tuple),
        st.sampled_from(["auto", "never", "always"]),
    ),
)
def test_no_preference_reaches_a_cluster_that_policy_or_request_forbid(tokens, mode, forbidden, preferences):
    world = table(mode, forbid_datacenters=tuple(forbidden))
    decision = decide(narrowed(facts(tokens, world), preferences))
    assert not isinstance(decision, Refusal)
    place = PLACES.get(decision.prefill.cluster) if decision.prefill else None
    if decision.kind == "offload":
        assert mode != "Disabled"
        assert not forbids(forbidden, place)
        assert not forbids(preferences.forbid, place)
        assert preferences.offload != "never"
        assert tokens > world.threshold.min_tokens
