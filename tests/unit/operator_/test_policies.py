"""Proves what a routing table holds, what it keeps of an unseen cluster, and which check names a policy's reason."""

import pytest

from prfaas.wire import routes as wire
from prfaas_operator.errors import ForbiddenError
from prfaas_operator.plan.policy import ObservedCluster, readiness, ready_by_role, routing_table
from prfaas_operator.plan.pool_status import Counts
from prfaas_operator.render.gateway import config_map, read_config_map

GATEWAY_UP = Counts(replicas=1, ready=1, updated=1)


def views(hub: tuple, eu: tuple | None, reachable: bool | None = True) -> dict[str, ObservedCluster]:
    return {"hub": ObservedCluster(hub, reachable=True), "eu": ObservedCluster(eu, reachable)}


def all_up(make) -> dict[str, ObservedCluster]:
    hub = (make.pod("d-1", "decode", pod_ip="10.0.0.2"), make.pod("l-1", "local", pod_ip="10.0.0.3"))
    return views(hub, (make.pod("o-1", "offload", pod_ip="10.1.0.4"),))


def urls(found: wire.RoutingTable) -> dict[str, str]:
    return {one.url: one.state for one in found.instances}


def test_ready_instances_of_all_pools_are_listed_with_their_place(make):
    found = routing_table(make.facts(), all_up(make), None)
    assert [(one.name, one.pool, one.cluster, one.role, one.url) for one in found.instances] == [
        ("o-1", "offload", "eu", "prefill", "http://10.1.0.4:8000"),
        ("d-1", "decode", "hub", "decode", "http://10.0.0.2:8000"),
        ("l-1", "local", "hub", "prefill", "http://10.0.0.3:8000"),
    ]
    assert (ready_by_role(found, "prefill"), ready_by_role(found, "decode")) == (2, 1)


def test_the_link_of_each_member_in_use_is_listed_with_its_query(make):
    facts = make.facts(clusters={"eu": make.member(datacenter="fra"), "idle": make.member("idle")})
    (cluster,) = routing_table(facts, all_up(make), None).clusters
    assert (cluster.name, cluster.datacenter, cluster.capacity_mbps, cluster.reachable) == ("eu", "fra", 100, True)
    assert 'cluster="eu"' in cluster.utilisation_query
    assert "$cluster" not in cluster.utilisation_query


def test_a_cluster_that_was_admitted_again_is_another_place_also_before_its_status_says_so(make):
    def place(generation: int, **status: str) -> str:
        there = make.member(meta={"generation": generation})
        there = there.model_copy(update={"status": there.status.model_copy(update=status)})
        (cluster,) = routing_table(make.facts(clusters={"eu": there}), all_up(make), None).clusters
        return cluster.place

    since = "2026-01-01T00:00:00Z"
    assert place(1) != place(3)
    assert place(1, admitted_time=since) == place(3, admitted_time=since), "the control: other edits change nothing"


def test_unready_pods_pods_without_address_and_pods_of_others_are_left_out(make):
    hub = (make.pod("a", "decode", ready=False), make.pod("b", "decode", pod_ip=""), make.pod("c", "stranger"))
    assert routing_table(make.facts(), views(hub, ()), None).instances == ()


def test_a_terminating_pod_is_draining_whether_ready_or_not(make):
    hub = (
        make.pod("a", "decode", terminating=True, pod_ip="10.0.0.1"),
        make.pod("b", "decode", terminating=True, ready=False, pod_ip="10.0.0.2"),
    )
    assert urls(routing_table(make.facts(), views(hub, ()), None)) == {
        "http://10.0.0.1:8000": "Draining",
        "http://10.0.0.2:8000": "Draining",
    }


@pytest.mark.parametrize(
    ("addressing", "host_ip", "url"),
    [("PodIP", "192.168.0.9", "http://10.1.0.4:8000"), ("HostIP", "fd00::9", "http://[fd00::9]:8000")],
)
def test_addresses_follow_the_members_addressing(make, addressing, host_ip, url):
    facts = make.facts(clusters={"eu": make.member(addressing=addressing)})
    eu = (make.pod("o-1", "offload", pod_ip="10.1.0.4", host_ip=host_ip),)
    assert url in urls(routing_table(facts, views((), eu), None))


def test_a_pool_of_another_model_gets_no_request(make):
    other = {"name": "other", "source": "builtin:other"}
    facts = make.facts(prefill_pools={"offload": make.prefill_pool(model=other)})
    found = routing_table(facts, all_up(make), None)
    assert {one.pool for one in found.instances} == {"decode"}
    assert found.clusters == ()


def test_a_cluster_that_was_never_listed_keeps_the_instances_that_stand(make):
    before = routing_table(make.facts(), all_up(make), None)
    after = routing_table(make.facts(), views((), None, None), before)
    assert urls(after) == {"http://10.1.0.4:8000": "Ready"}
    assert after.clusters[0].reachable
    assert not routing_table(make.facts(), views((), None, None), None).clusters[0].reachable


def test_a_cluster_that_was_listed_as_empty_keeps_nothing(make):
    before = routing_table(make.facts(), all_up(make), None)
    assert routing_table(make.facts(), views((), ()), before).instances == ()


def test_an_unreachable_cluster_is_marked_and_keeps_its_pods(make):
    seen = all_up(make)
    found = routing_table(make.facts(), seen | {"eu": seen["eu"]._replace(reachable=False)}, None)
    assert not found.clusters[0].reachable
    assert "http://10.1.0.4:8000" in urls(found)


def test_the_table_survives_its_config_map(make):
    found = routing_table(make.facts(), all_up(make), None)
    manifest = config_map(make.policy(), found)
    assert manifest["metadata"]["name"] == "kimi-routes"
    assert read_config_map(manifest) == found
    assert config_map(make.policy(), found) == manifest, "equal tables give equal bytes"


@pytest.mark.parametrize("data", [{}, {"routes.json.gz": ""}, {"routes.json.gz": "AAAA"}, {"routes.json.gz": "%"}])
def test_a_config_map_that_cannot_be_read_counts_as_none(data):
    assert read_config_map({"binaryData": data}) is None


def judged(make, **changes):
    facts = make.facts(**changes)
    return readiness(facts, routing_table(facts, all_up(make), None), GATEWAY_UP)


def test_a_policy_with_every_pool_and_a_gateway_is_ready(make):
    assert judged(make).reason == "AllReady"


def test_the_first_failing_check_gives_the_reason(make):
    other = make.decode_pool(model={"name": "other", "source": "builtin:other"})
    assert judged(make, decode_pools={}).reason == "DecodePoolNotFound"
    assert judged(make, decode_pools={}, prefill_pools={}).reason == "DecodePoolNotFound"
    assert judged(make, prefill_pools={}).reason == "PrefillPoolNotFound"
    assert judged(make, decode_pools={"decode": other}).reason == "ModelMismatch"


def test_a_pool_without_ready_instance_is_named_decode_first(make):
    facts, seen = make.facts(), all_up(make)
    nothing = readiness(facts, routing_table(facts, views((), ()), None), GATEWAY_UP)
    assert (nothing.reason, nothing.message[:17]) == ("NoReadyInstances", "DecodePool decode")
    offload = readiness(
        facts, routing_table(facts, seen | {"eu": ObservedCluster((), reachable=True)}, None), GATEWAY_UP
    )
    assert (offload.reason, offload.message[:19]) == ("NoReadyInstances", "PrefillPool offload")


def test_children_that_cannot_be_applied_and_a_gateway_that_is_down_are_reasons(make):
    facts = make.facts()
    full = routing_table(facts, all_up(make), None)
    assert readiness(facts, full, GATEWAY_UP, [ForbiddenError("no")])[1:] == ("Forbidden", "no")
    down = readiness(facts, full, Counts(replicas=1))
    assert down[1:] == ("GatewayNotReady", "0 of 1 gateway pods ready")


@pytest.mark.parametrize(("replicas", "gateways"), [(0, 1), (1, 1), (3, 3)])
def test_a_table_says_how_many_gateways_share_the_requests(make, replicas, gateways):
    facts = make.facts(policy=make.policy(gateway={"replicas": replicas}))
    assert routing_table(facts, all_up(make), None).gateways == gateways


@pytest.mark.parametrize(
    ("engine", "stretch"),
    [
        ({"type": "emulated", "args": ["--emulate=p", "--stretch=2.5"]}, 2.5),
        ({"type": "emulated", "args": ["--stretch", "2", "--emulate", "p", "--stretch", "4"]}, 4.0),
        ({"type": "emulated", "args": ["--emulate=p"]}, 1.0),
        ({"type": "emulated", "args": ["--emulate=p", "--stretch=fast"]}, 1.0),
        ({"type": "emulated", "args": ["--emulate=p", "--stretch=inf"]}, 1.0),
        ({"type": "prfaas", "args": ["--stretch=4"]}, 1.0),
    ],
)
def test_a_table_says_how_much_slower_than_the_clock_emulated_instances_live(make, engine, stretch):
    facts = make.facts(decode_pools={"decode": make.decode_pool(engine=engine)})
    assert routing_table(facts, all_up(make), None).stretch == stretch
