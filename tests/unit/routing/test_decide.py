"""Proves the routing rules: when a request is offloaded, which instances are never chosen, and what follows a failure.

Exact cases state the paper's two rules (section 3.4.3); the properties hold for any table, load, cache and history of
failures.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.tables import make_table

from prfaas.names import HUB
from prfaas.routing.decide import decide, decide_again, decide_at_last
from prfaas.routing.facts import Refusal, Route, RoutingFacts, RoutingRule, rule_in_force
from prfaas.wire.control import ThresholdUpdate
from prfaas.wire.preferences import forbids
from prfaas.wire.routes import Cluster, Instance, RoutingTable, Threshold

NOW = 100.0


def instance(name: str, role: str = "decode", cluster: str = HUB, state: str = "Ready") -> Instance:
    return Instance(name=name, pool=f"{role}-pool", cluster=cluster, role=role, url=f"http://{name}:8000", state=state)


def cluster(name: str, datacenter: str = "", reachable: bool = True) -> Cluster:
    return Cluster(
        name=name, datacenter=datacenter, reachable=reachable, capacity_mbps=100, utilisation_query="vector(0)"
    )


def table(
    *instances: Instance, clusters: tuple[Cluster, ...] = (cluster("eu"),), mode: str = "Auto", **more
) -> RoutingTable:
    threshold = Threshold(mode=mode, tokens=1000, min_tokens=100, max_tokens=5000)
    return make_table(*instances, clusters=clusters, threshold=threshold, **more)


TWO_CLUSTERS = table(instance("d0"), instance("d1"), instance("p0", "prefill"), instance("x0", "prefill", "eu"))


def facts(total: int = 2000, world: RoutingTable = TWO_CLUSTERS, **more) -> RoutingFacts:
    more.setdefault("rule", rule_in_force(world, None))
    return RoutingFacts(now_seconds=NOW, request_id="r1", total_tokens=total, table=world, **more)


def rule(bandwidth: str, tokens: int = 1000) -> RoutingRule:
    return RoutingRule(threshold_tokens=tokens, bandwidth=bandwidth, offload_clusters=frozenset({"eu"}))


def route(decision) -> Route:
    assert isinstance(decision, Route)
    return decision


# Exact cases


def test_a_prompt_longer_than_the_threshold_is_offloaded():
    chosen = route(decide(facts(1001)))
    assert (chosen.kind, chosen.reason, chosen.prefill.name, chosen.incremental_tokens) == (
        "offload",
        "AboveThreshold",
        "x0",
        1001,
    )


def test_a_prompt_of_exactly_the_threshold_stays_local():
    chosen = route(decide(facts(1000)))
    assert (chosen.kind, chosen.reason, chosen.prefill.name) == ("local", "WithinThreshold", "p0")


def test_without_a_local_prefill_instance_the_decode_instance_prefills_itself():
    assert route(decide(facts(10, table(instance("d0"))))).prefill is None


@pytest.mark.parametrize(
    ("bandwidth", "cached", "kind"),
    [
        ("Scarce", {HUB: 1000}, "local"),  # l = 2000 - 1000
        ("Scarce", {HUB: 999}, "offload"),
        ("Scarce", {"eu": 1999}, "offload"),  # a cache there does not shorten what the hub would compute
        ("Abundant", {HUB: 1000}, "local"),
        ("Abundant", {"eu": 1000, HUB: 10}, "local"),  # the longer cache may cross
        ("Abundant", {"eu": 999}, "offload"),
    ],
)
def test_the_state_of_the_link_says_whose_cache_counts(bandwidth, cached, kind):
    assert route(decide(facts(2000, rule=rule(bandwidth), cached_tokens=cached))).kind == kind


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (table(instance("d0"), instance("x0", "prefill", "eu"), mode="Disabled"), "OffloadDisabled"),
        (
            table(instance("d0"), instance("x0", "prefill", "eu"), clusters=(cluster("eu", reachable=False),)),
            "NoOffloadCluster",
        ),
        (
            table(
                instance("d0"),
                instance("x0", "prefill", "eu"),
                clusters=(cluster("eu", "dc1"),),
                forbid_datacenters=("dc1",),
            ),
            "NoOffloadCluster",
        ),
        (table(instance("d0"), instance("x0", "prefill", "eu", "Draining")), "NoOffloadInstance"),
    ],
)
def test_a_long_prompt_that_may_not_leave_says_why(world, reason):
    assert route(decide(facts(9999, world))).reason == reason


HANDLESS = table(*(replace(one, engine="vllm-prfaas") for one in TWO_CLUSTERS.instances))


def test_prefills_a_request_that_its_engine_cannot_split_where_it_decodes():
    for total, reason in ((10, "WithinThreshold"), (9999, "NoHandOff")):
        chosen = route(decide(facts(total, HANDLESS, no_hand_off={"vllm-prfaas"})))
        assert (chosen.kind, chosen.reason, chosen.prefill) == ("local", reason, None)


def test_an_engine_that_can_split_the_request_offloads_it():
    assert route(decide(facts(9999, HANDLESS, no_hand_off={"vllm-nixl"}))).kind == "offload"
    assert route(decide(facts(9999, no_hand_off={"vllm-prfaas"}))).kind == "offload"


def test_a_dead_link_turns_offload_off():
    update = ThresholdUpdate(tokens=1000, bandwidth="Scarce", offload_clusters=(), expires_seconds=5, reason="LinkDown")
    assert route(decide(facts(9999, rule=rule_in_force(TWO_CLUSTERS, update)))).reason == "OffloadDisabled"


def test_without_a_decode_instance_the_request_is_refused():
    assert decide(facts(10, table(instance("p0", "prefill")))) == Refusal(reason="NoDecodeInstance")
    assert decide(facts(9999, table(instance("x0", "prefill", "eu")))) == Refusal(reason="NoDecodeInstance")


def test_the_least_loaded_instance_is_chosen():
    assert route(decide(facts(10, in_flight={"d0": 3, "d1": 2}))).decode.name == "d1"


def test_equals_are_spread_by_request_id_and_the_same_id_always_takes_the_same():
    ids = [f"request-{n}" for n in range(64)]
    chosen = [route(decide(msgspec.structs.replace(facts(10), request_id=one))).decode.name for one in ids]
    assert chosen == [route(decide(msgspec.structs.replace(facts(10), request_id=one))).decode.name for one in ids]
    assert 16 < chosen.count("d0") < 48


def test_an_ejection_ends_at_its_time():
    assert route(decide(facts(10, ejected_until_seconds={"d0": NOW + 0.1}))).decode.name == "d1"
    assert route(decide(facts(10, ejected_until_seconds={"d0": NOW}, in_flight={"d1": 1}))).decode.name == "d0"


def test_a_preferred_datacenter_comes_first_then_the_longest_cache_then_load():
    world = table(
        instance("d0"),
        *(instance(f"x-{name}", "prefill", name) for name in ("a", "b", "c")),
        clusters=(cluster("a", "dc-a"), cluster("b", "dc-b"), cluster("c", "dc-c")),
    )
    preferring = msgspec.structs.replace(world, prefer_datacenters=("dc-c", "dc-b"))
    assert route(decide(facts(9000, preferring, in_flight={"x-c": 9}))).prefill.name == "x-c"
    assert route(decide(facts(9000, preferring, tried={"x-c"}))).prefill.name == "x-b"
    assert route(decide(facts(9000, world, cached_tokens={"b": 5}, in_flight={"x-b": 9}))).prefill.name == "x-b"
    assert route(decide(facts(9000, world, in_flight={"x-a": 1, "x-b": 1}))).prefill.name == "x-c"


# After a failure


def test_a_failed_offload_falls_back_to_local_prefill():
    failed = route(decide(facts(9000)))
    after = route(decide_again(facts(9000, tried={"x0"}), failed, "prefill", "PrefillLocally"))
    assert (after.kind, after.reason, after.prefill.name) == ("local", "OffloadFailed", "p0")


def test_a_failed_offload_is_rejected_where_the_policy_says_so():
    failed = route(decide(facts(9000)))
    assert decide_again(facts(9000, tried={"x0"}), failed, "prefill", "Reject") == Refusal(reason="OffloadRejected")


def test_reject_does_not_concern_a_dead_decode_instance():
    failed = route(decide(facts(9000)))
    after = route(decide_again(facts(9000, tried={failed.decode.name}), failed, "decode", "Reject"))
    assert after.kind == "offload"
    assert after.decode.name != failed.decode.name


def test_a_fallback_never_leaves_the_hub_again():
    fallen = route(decide_again(facts(9000, tried={"x0"}), route(decide(facts(9000))), "prefill", "PrefillLocally"))
    after = route(decide_again(facts(9000, tried={"x0", fallen.decode.name}), fallen, "decode", "PrefillLocally"))
    assert (after.kind, after.reason) == ("local", "OffloadFailed")


def test_a_failed_local_prefill_instance_leaves_the_decode_instance_to_prefill():
    failed = route(decide(facts(10)))
    after = route(decide_again(facts(10, tried={"p0"}), failed, "prefill", "Reject"))
    assert (after.kind, after.prefill) == ("local", None)


# The last resort

BOTH_EJECTED = {"d0": NOW + 1, "d1": NOW + 4}


def test_the_last_resort_is_an_ejected_decode_instance():
    world = facts(10, ejected_until_seconds=BOTH_EJECTED, in_flight={"d0": 1})
    assert decide(world) == Refusal(reason="NoDecodeInstance")
    assert route(decide_at_last(world, set(), decide)).decode.name == "d1"


def test_the_last_resort_is_an_instance_where_the_request_did_not_just_fail_if_there_is_one():
    cached_on = {"d0": 9000}
    world = facts(9000, ejected_until_seconds=BOTH_EJECTED, cached_on=cached_on, cached_tokens={HUB: 9000})
    assert route(decide_at_last(world, set(), decide)).decode.name == "d0"
    assert route(decide_at_last(world, {"d0"}, decide)).decode.name == "d1"
    assert route(decide_at_last(replace(world, tried={"d1"}), {"d0"}, decide)).decode.name == "d0"


def test_no_last_resort_is_full_or_tried_already():
    world = facts(10, ejected_until_seconds=BOTH_EJECTED, tried={"d0", "d1"})
    assert decide_at_last(world, set(), decide) == Refusal(reason="NoDecodeInstance")


def test_the_last_resort_leaves_ejected_prefill_instances_alone():
    world = facts(9000, ejected_until_seconds=BOTH_EJECTED | {"x0": NOW + 1, "p0": NOW + 1})
    chosen = route(decide_at_last(world, set(), decide))
    assert (chosen.kind, chosen.prefill) == ("local", None)
    assert route(decide_at_last(facts(9000, ejected_until_seconds=BOTH_EJECTED), set(), decide)).kind == "offload"


# The rule in force


@pytest.mark.parametrize(("pushed", "in_force"), [(50, 100), (700, 700), (9999, 5000)])
def test_a_pushed_threshold_stays_within_the_policys_bounds(pushed, in_force):
    update = ThresholdUpdate(
        tokens=pushed, bandwidth="Abundant", offload_clusters=("eu",), expires_seconds=5, reason=""
    )
    assert rule_in_force(TWO_CLUSTERS, update).threshold_tokens == in_force


@pytest.mark.parametrize("alive", [("eu",), ()])
def test_fixed_keeps_its_own_threshold_but_avoids_dead_links(alive):
    update = ThresholdUpdate(tokens=1, bandwidth="Abundant", offload_clusters=alive, expires_seconds=5, reason="")
    got = rule_in_force(table(mode="Fixed"), update)
    assert (got.threshold_tokens, got.offload_clusters) == (1000, set(alive))


def test_disabled_ignores_the_scheduler():
    update = ThresholdUpdate(tokens=1, bandwidth="Abundant", offload_clusters=("eu",), expires_seconds=5, reason="")
    got = rule_in_force(table(mode="Disabled"), update)
    assert (got.threshold_tokens, got.offload_clusters) == (1000, set())


def test_a_scheduler_cannot_name_a_cluster_that_the_table_lacks():
    update = ThresholdUpdate(tokens=500, bandwidth="Scarce", offload_clusters=("us",), expires_seconds=5, reason="")
    assert rule_in_force(TWO_CLUSTERS, update).offload_clusters == frozenset()


# Properties

CLUSTER_NAMES = ("eu", "us", "ap")
NAMES = [f"i{n}" for n in range(8)]
tokens = st.integers(0, 10_000)


@st.composite
def worlds(draw) -> RoutingFacts:
    instances = tuple(
        instance(
            name,
            draw(st.sampled_from(["prefill", "decode"])),
            draw(st.sampled_from([HUB, *CLUSTER_NAMES, "unknown"])),
            draw(st.sampled_from(["Ready", "Ready", "Draining"])),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    )
    clusters = tuple(cluster(name, f"dc-{name}", draw(st.booleans())) for name in CLUSTER_NAMES)
    datacenters = st.lists(st.sampled_from([f"dc-{name}" for name in CLUSTER_NAMES]), unique=True, max_size=2)
    forbid = tuple(draw(datacenters))
    world = table(*instances, clusters=clusters, forbid_datacenters=forbid, prefer_datacenters=tuple(draw(datacenters)))
    in_force = RoutingRule(
        threshold_tokens=draw(tokens),
        bandwidth=draw(st.sampled_from(["Scarce", "Abundant"])),
        offload_clusters=frozenset(draw(st.sets(st.sampled_from(CLUSTER_NAMES)))),
    )
    return facts(
        draw(tokens),
        world,
        rule=in_force,
        cached_tokens=draw(st.dictionaries(st.sampled_from([HUB, *CLUSTER_NAMES]), tokens)),
        in_flight=draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3))),
        ejected_until_seconds=draw(st.dictionaries(st.sampled_from(NAMES), st.floats(NOW - 5, NOW + 5))),
        tried=draw(st.sets(st.sampled_from(NAMES), max_size=3)),
    )


def usable(one: Instance, world: RoutingFacts) -> bool:
    return (
        one.state == "Ready"
        and one.name not in world.tried
        and world.ejected_until_seconds.get(one.name, 0) <= world.now_seconds
    )


def check(decision, world: RoutingFacts) -> None:
    """Check every promise that holds for any decision."""
    if isinstance(decision, Refusal):
        return
    legs = [decision.decode] + ([decision.prefill] if decision.prefill else [])
    assert all(usable(one, world) for one in legs)
    assert decision.decode.role == "decode"
    assert decision.prefill is None or decision.prefill.role == "prefill"
    if decision.kind == "local":
        assert decision.prefill is None or decision.prefill.cluster == HUB
        return
    assert decision.incremental_tokens > world.rule.threshold_tokens
    at = {one.name: one for one in world.table.clusters}[decision.prefill.cluster]
    assert at.reachable
    assert at.name in world.rule.offload_clusters
    assert not forbids(world.table.forbid_datacenters, at.datacenter)


@given(worlds())
def test_only_instances_that_may_serve_are_chosen(world):
    check(decide(world), world)


@given(worlds(), st.integers(1, 10_000))
def test_what_is_offloaded_stays_offloaded_when_it_is_longer(world, more_tokens):
    decision = decide(world)
    if isinstance(decision, Route) and decision.kind == "offload":
        longer = route(decide(msgspec.structs.replace(world, total_tokens=world.total_tokens + more_tokens)))
        assert (longer.kind, longer.prefill, longer.decode) == ("offload", decision.prefill, decision.decode)


@given(worlds())
def test_a_request_is_refused_only_when_no_decode_instance_may_serve(world):
    refused = isinstance(decide(world), Refusal)
    assert refused == (not any(one.role == "decode" and usable(one, world) for one in world.table.instances))


@given(worlds(), st.sets(st.sampled_from(NAMES)))
def test_a_last_resort_is_refused_only_where_no_decode_instance_is_left(world, failed):
    decodes = {one.name for one in world.table.instances if one.role == "decode"}
    ejected = {name: until for name, until in world.ejected_until_seconds.items() if name not in decodes}
    readmitted = replace(world, ejected_until_seconds=ejected)
    decision = decide_at_last(world, failed, decide)
    check(decision, readmitted)
    left = [one.name for one in world.table.instances if one.role == "decode" and usable(one, readmitted)]
    assert isinstance(decision, Refusal) == (not left)
    if isinstance(decision, Route) and set(left) - failed:
        assert decision.decode.name not in failed


@given(worlds())
def test_no_usable_instance_of_the_chosen_kind_is_less_loaded(world):
    decision = decide(world)
    if isinstance(decision, Route):
        loads = [
            world.in_flight.get(one.name, 0)
            for one in world.table.instances
            if one.role == "decode" and usable(one, world)
        ]
        assert world.in_flight.get(decision.decode.name, 0) == min(loads)


@given(worlds(), st.data(), st.sampled_from(["PrefillLocally", "Reject"]))
def test_failures_end_after_each_instance_failed_at_most_once(world, data, policy):
    decision = decide(world)
    left_the_hub = [isinstance(decision, Route) and decision.kind == "offload"]
    for _ in range(len(NAMES) + 1):
        check(decision, world)
        if isinstance(decision, Refusal):
            break
        leg = data.draw(st.sampled_from(["prefill", "decode"])) if decision.prefill else "decode"
        at_fault = decision.prefill if leg == "prefill" else decision.decode
        world = msgspec.structs.replace(world, tried=world.tried | {at_fault.name})
        decision = decide_again(world, decision, leg, policy)
        left_the_hub.append(isinstance(decision, Route) and decision.kind == "offload")
    assert isinstance(decision, Refusal)
    assert sorted(left_the_hub, reverse=True) == left_the_hub  # once local, always local


def in_tls(one: Instance) -> Instance:
    return msgspec.structs.replace(one, url=one.url.replace("http:", "https:"))


@pytest.mark.parametrize(
    ("decodes", "prefills", "kind", "chosen"),
    [
        ([in_tls(instance("d"))], [instance("p", "prefill", "eu")], "local", ("d", None)),
        ([instance("d")], [in_tls(instance("p", "prefill", "eu"))], "local", ("d", None)),
        ([instance("d"), in_tls(instance("e"))], [in_tls(instance("p", "prefill", "eu"))], "offload", ("e", "p")),
        (
            [in_tls(instance("d"))],
            [instance("o", "prefill", "eu"), in_tls(instance("p", "prefill", "eu"))],
            "offload",
            ("d", "p"),
        ),
        ([in_tls(instance("d"))], [instance("h", "prefill"), in_tls(instance("i", "prefill"))], "local", ("d", "i")),
    ],
)
def test_instances_inside_tls_and_plain_ones_are_never_paired(decodes, prefills, kind, chosen):
    world = table(*decodes, *prefills)
    for request in range(8):
        found = route(decide(msgspec.structs.replace(facts(world=world), request_id=str(request))))
        assert found.kind == kind
        assert (found.decode.name, found.prefill.name if found.prefill else None) == chosen


def test_instances_are_paired_where_their_tensor_sizes_divide():
    def with_ranks(one: Instance, ranks: int) -> Instance:
        return msgspec.structs.replace(one, engine="vllm-prfaas", rank_ports=ranks)

    away = with_ranks(instance("p", "prefill", "eu"), 8)
    three, four = with_ranks(instance("d", "decode"), 3), with_ranks(instance("e", "decode"), 4)
    sixteen = with_ranks(instance("f", "decode"), 16)
    cases = [([three], "local", "d"), ([three, four], "offload", "e"), ([sixteen], "offload", "f")]
    for decodes, kind, chosen in cases:
        found = route(decide(facts(world=table(*decodes, away))))
        assert (found.kind, found.decode.name) == (kind, chosen)


def test_instances_with_other_draft_layers_are_never_paired_and_unknown_ones_are():
    def with_drafts(one: Instance, layers: str) -> Instance:
        return msgspec.structs.replace(one, engine="vllm-prfaas", draft_layers=layers)

    away = with_drafts(instance("p", "prefill", "eu"), "mtp")
    none, same = with_drafts(instance("d", "decode"), "none"), with_drafts(instance("e", "decode"), "mtp")
    unknown = with_drafts(instance("f", "decode"), "")
    for decodes, kind, chosen in [([none], "local", "d"), ([none, same], "offload", "e"), ([unknown], "offload", "f")]:
        found = route(decide(facts(world=table(*decodes, away))))
        assert (found.kind, found.decode.name) == (kind, chosen)


def test_instances_of_two_engines_never_serve_together():
    ours, theirs = instance("d0"), msgspec.structs.replace(instance("d1"), engine="sglang")
    away = msgspec.structs.replace(instance("x0", "prefill", "eu"), engine="sglang")
    chosen = route(decide(facts(5000, table(ours, theirs, away))))
    assert (chosen.prefill, chosen.decode) == (away, theirs)
    chosen = route(decide(facts(5000, table(ours, away))))
    assert (chosen.kind, chosen.prefill, chosen.decode) == ("local", None, ours)
