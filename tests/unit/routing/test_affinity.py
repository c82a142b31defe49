"""Proves how load and cache choose an instance together: a prefix draws requests until more waits there than it saves,
decoding counts, and a prefix is fetched from another instance only where bringing it is quicker than computing it.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import make_instance, make_table

from prfaas.names import HUB
from prfaas.routing.affinity import ANSWER_TOKENS, cost_tokens
from prfaas.routing.decide import decide
from prfaas.routing.facts import Route, RoutingFacts, RoutingRule
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Cluster, EngineName, Threshold

QUICK_TO_SEND = Profile(state_bytes=10_000, token_bytes=100, token_seconds=1e-3, samples=9)
SLOW_TO_SEND = Profile(state_bytes=10_000_000_000, token_bytes=100, token_seconds=1e-3, samples=9)


def facts(
    names: str, *, total: int = 10_000, bandwidth: str = "Scarce", threshold: int = 100_000, **more
) -> RoutingFacts:
    world = make_table(
        *map(make_instance, names.split()),
        threshold=Threshold(mode="Auto", tokens=threshold, min_tokens=1, max_tokens=threshold),
        clusters=(Cluster(name="eu", capacity_mbps=1000, utilisation_query="", round_trip_millis=10),),
    )
    rule = RoutingRule(threshold_tokens=threshold, bandwidth=bandwidth, offload_clusters=frozenset({"eu"}))
    more.setdefault("profiles", {})
    return RoutingFacts(now_seconds=0, request_id="r", total_tokens=total, rule=rule, table=world, **more)


def route(case: RoutingFacts) -> Route:
    decision = decide(case)
    assert isinstance(decision, Route)
    return decision


@pytest.mark.parametrize(("engine", "fetches"), [("prfaas", True), ("vllm-prfaas", True), ("vllm-nixl", False)])
def test_fetches_a_prefix_only_for_engines_with_our_mover(engine: EngineName, fetches: bool):
    """Other engines have profiles, too, and cannot learn where a prefix lies."""
    profiles = dict.fromkeys(("d0", "d1"), QUICK_TO_SEND)
    case = facts("d0 d1", cached_on={"d1": 9_024}, profiles=profiles, queued_tokens={"d1": 1_000_000})
    instances = tuple(msgspec.structs.replace(one, engine=engine) for one in case.table.instances)
    case = msgspec.structs.replace(case, table=msgspec.structs.replace(case.table, instances=instances))
    chosen = route(case)
    assert chosen.decode.name == "d0"
    assert (chosen.prefix and chosen.prefix.name, chosen.prefix_tokens) == (("d1", 9_024) if fetches else (None, 0))
    assert chosen.work is not None, "its work is known all the same"
    no_hand_off = msgspec.structs.replace(case, no_hand_off=frozenset({engine}))
    assert route(no_hand_off).prefix is None, "one transfer cannot carry what such a request needs"


def test_a_prefix_is_named_by_what_its_source_has_also_beyond_a_length_that_is_estimated():
    profiles = dict.fromkeys(("d0", "d1"), QUICK_TO_SEND)
    case = facts("d0 d1", total=9_000, cached_on={"d1": 9_024}, profiles=profiles, queued_tokens={"d1": 1_000_000})
    assert route(case).prefix_tokens == 9_024


def test_of_idle_instances_the_one_with_the_prefix_serves():
    for name in ("d0", "d1", "d2"):
        assert route(facts("d0 d1 d2", cached_on={name: 64})).decode.name == name
    assert route(facts("d0 p0 p1", cached_on={"p1": 640})).prefill.name == "p1"
    assert route(facts("d0 x0 x1", threshold=1, cached_on={"x1": 640})).prefill.name == "x1"


@pytest.mark.parametrize("more_queued", [-1, 1])
def test_a_prefix_draws_requests_until_more_waits_there_than_it_saves(more_queued):
    chosen = route(facts("d0 d1", cached_on={"d0": 4096}, queued_tokens={"d0": 4096 + more_queued}))
    assert chosen.decode.name == ("d1" if more_queued > 0 else "d0")


def test_requests_that_decode_weigh_as_much_as_they_still_have_to_generate():
    few, many = (5 * ANSWER_TOKENS + more for more in (1, -1))
    for saved, chosen in ((few, "d0"), (many, "d1")):
        assert route(facts("d0 d1", cached_on={"d0": saved}, in_flight={"d0": 5})).decode.name == chosen
    queue = facts("d0 p0 p1", in_flight={"p0": 3}, queued_tokens={"p1": 10})
    assert route(queue).prefill.name == "p0", "a prefill instance decodes nothing"


def test_a_hot_prefix_spreads_as_soon_as_its_instance_has_more_to_do_than_the_prefix_is_long():
    cached, queued, in_flight = {"d0": 3000}, {}, {}
    for number in range(40):
        case = facts("d0 d1 d2 d3", total=4000, cached_on=cached, queued_tokens=queued, in_flight=in_flight)
        chosen = route(msgspec.structs.replace(case, request_id=str(number)))
        name = chosen.decode.name
        queued[name] = queued.get(name, 0) + chosen.prefill_tokens
        in_flight[name] = in_flight.get(name, 0) + 1
        cached[name] = 3000
    assert len(cached) == 4
    assert max(in_flight.values()) - min(in_flight.values()) <= 1 + -(-3000 // (1000 + ANSWER_TOKENS))


@given(
    cached=st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), st.integers(0, 20_000)),
    queued=st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), st.integers(0, 20_000)),
    in_flight=st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), st.integers(0, 20)),
)
def test_no_instance_costs_less_than_the_chosen_one(cached, queued, in_flight):
    case = facts("d0 d1 d2", cached_on=cached, queued_tokens=queued, in_flight=in_flight)
    chosen = route(case)
    assert cost_tokens(case, chosen.decode) == min(cost_tokens(case, one) for one in case.table.instances)
    assert chosen.prefill_tokens == 10_000 - min(cached.get(chosen.decode.name, 0), 10_000)


def busy(names: str, busy_ones: str, **more) -> RoutingFacts:
    """RoutingFacts by which some instances are too busy to be chosen for what they have cached."""
    return facts(names, queued_tokens=dict.fromkeys(busy_ones.split(), 50_000), **more)


def test_a_prefix_is_fetched_inside_the_cluster_where_that_is_quicker_than_computing_it():
    case = busy("d0 d1", "d0", cached_on={"d0": 8000, "d1": 64}, profiles={"d1": QUICK_TO_SEND})
    chosen = route(case)
    assert (chosen.decode.name, chosen.prefix) == ("d1", make_instance("d0"))
    assert (chosen.prefill_tokens, chosen.computed_tokens) == (10_000 - 64, 10_000 - 8000)
    slow = msgspec.structs.replace(case, profiles={"d1": SLOW_TO_SEND})
    assert route(slow).prefix is None
    assert route(slow).computed_tokens == 10_000 - 64
    assert route(msgspec.structs.replace(case, profiles={})).prefix is None, "what is not measured is computed"
    assert route(msgspec.structs.replace(case, cached_on={"d0": 64, "d1": 64})).prefix is None
    ejected = msgspec.structs.replace(case, ejected_until_seconds={"d0": 5.0})
    assert route(ejected).prefix is None


def test_the_decode_instance_of_a_route_is_fetched_from_as_any_other():
    case = facts("d0 p0", cached_on={"d0": 8000}, profiles={"p0": QUICK_TO_SEND})
    assert route(case).prefix == make_instance("d0")


def test_a_prefix_crosses_to_the_hub_only_where_bandwidth_is_abundant_and_never_from_it():
    def with_bandwidth(bandwidth: str) -> RoutingFacts:
        return facts(
            "d0 x0",
            bandwidth=bandwidth,
            cached_on={"x0": 8000},
            cached_tokens={"eu": 8000},
            profiles={"d0": QUICK_TO_SEND},
        )

    assert route(with_bandwidth("Abundant")).prefix == make_instance("x0")
    assert route(with_bandwidth("Scarce")).prefix is None
    no_link = msgspec.structs.replace(with_bandwidth("Abundant").rule, offload_clusters=frozenset())
    assert route(msgspec.structs.replace(with_bandwidth("Abundant"), rule=no_link)).prefix is None
    away = facts(
        "d0 d1 x0",
        bandwidth="Abundant",
        threshold=1,
        cached_on={"d0": 8000},
        in_flight={"d0": 100},
        profiles={"x0": QUICK_TO_SEND},
    )
    assert (route(away).prefill.name, route(away).prefix) == ("x0", None)


def test_where_only_clusters_are_known_only_load_chooses():
    for name, other in (("d0", "d1"), ("d1", "d0")):
        chosen = route(facts("d0 d1", cached_tokens={HUB: 5000}, in_flight={other: 1}))
        assert (chosen.decode.name, chosen.prefill_tokens) == (name, 5000)


@given(
    cached=st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), st.integers(0, 20_000)),
    loads=st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), st.integers(0, 20_000)),
            st.dictionaries(st.sampled_from(["d0", "d1", "d2"]), st.integers(0, 20)),
        ),
        min_size=2,
        max_size=4,
    ),
)
def test_a_replica_misses_at_most_what_the_others_have_placed_where_it_goes(cached, loads):
    """Each gateway knows only its own load. Judged by all loads, its choice costs more than the best one by no more
    than the others' load at its choice, less theirs at the best."""
    names = "d0 d1 d2"
    queued, in_flight = (
        {name: sum(one[kind].get(name, 0) for one in loads) for name in names.split()} for kind in (0, 1)
    )
    whole = facts(names, cached_on=cached, queued_tokens=queued, in_flight=in_flight)
    costs = {one.name: cost_tokens(whole, one) for one in whole.table.instances}
    best = min(costs, key=lambda name: costs[name])
    for mine in loads:
        chosen = route(facts(names, cached_on=cached, queued_tokens=mine[0], in_flight=mine[1])).decode.name
        others = {
            name: queued[name] - mine[0].get(name, 0) + ANSWER_TOKENS * (in_flight[name] - mine[1].get(name, 0))
            for name in names.split()
        }
        assert 0 <= costs[chosen] - costs[best] <= others[chosen] - others[best]
