"""Proves on real API servers that a policy has its gateway with the least rights, and a routing table that is true."""

import base64
import json
import subprocess
import time

import pytest

from prfaas.wire import routes

pytestmark = pytest.mark.clusters


@pytest.fixture(scope="module")
def served(world):
    world.join("eu", datacenter="fra")
    world.hub.apply(
        world.pool("PrefillPool", "offload", clusterName="eu", replicas=2),
        world.pool("PrefillPool", "local"),
        world.pool("DecodePool", "decode"),
        policy(world, "kimi"),
    )
    return world


def policy(world, name: str, **spec):
    wanted = {
        "model": "kimi-linear-tiny",
        "decodePool": "decode",
        "prefillPools": ["offload", "local"],
        "threshold": {"mode": "Fixed", "tokens": 1000},
    }
    return world.resource("PrfaaSPolicy", name, **{**wanted, **spec})


def table_of(world, name: str = "kimi") -> routes.RoutingTable:
    return routes.decode(base64.b64decode(world.hub.get("configmap", f"{name}-routes")["binaryData"]["routes.json.gz"]))


def states(world) -> dict[str, tuple[str, str, str, str]]:
    return {one.url: (one.cluster, one.pool, one.role, one.state) for one in table_of(world).instances}


def test_the_routing_table_holds_the_policy_and_starts_without_instances(served):
    served.eventually(lambda: served.hub.exists("configmap", "kimi-routes"), "a table")
    table = table_of(served)
    assert (table.policy, table.namespace, table.model) == ("kimi", served.hub.name, "kimi-linear-tiny")
    assert (table.threshold.mode, table.threshold.tokens, table.generation) == ("Fixed", 1000, 1)
    assert table.instances == ()
    (cluster,) = table.clusters
    assert (cluster.name, cluster.datacenter, cluster.capacity_mbps) == ("eu", "fra", 100)
    assert 'cluster="eu"' in cluster.utilisation_query
    assert "DecodePool decode" in served.hub.wait_reason("prfaas", "kimi", "NoReadyInstances")["message"]


def test_instances_follow_readiness_in_both_clusters(served):
    served.hub.ready_up("decode", "10.1.1")
    served.hub.ready_up("local", "10.1.2")
    offloads = served.member.ready_up("offload", "10.2.1")
    expected = {
        "https://10.1.1.1:8000": ("hub", "decode", "decode", "Ready"),
        "https://10.1.2.1:8000": ("hub", "local", "prefill", "Ready"),
        "https://10.2.1.1:8000": ("eu", "offload", "prefill", "Ready"),
        "https://10.2.1.2:8000": ("eu", "offload", "prefill", "Ready"),
    }
    served.eventually(lambda: states(served) == expected, "every ready instance is in the table")
    served.hub.wait_reason("prfaas", "kimi", "GatewayNotReady")
    status = served.hub.get("prfaas", "kimi")["status"]
    assert (status["readyPrefill"], status["readyDecode"]) == (3, 1)
    served.member.set_pod(offloads[0], address="10.2.1.1", ready=False)
    del expected["https://10.2.1.1:8000"]
    served.eventually(lambda: states(served) == expected, "an unready instance leaves the table")
    served.member.set_pod(offloads[0], address="10.2.1.1")
    served.eventually(lambda: "https://10.2.1.1:8000" in states(served), "and comes back")


def test_an_instance_that_ends_is_draining_until_it_is_removed(served):
    name = served.member.pods("offload")[0]
    address = served.member.get("pod", name)["status"]["podIP"]
    bind(served.member, name, "somewhere")
    served.member.delete("pod", name, wait=False)
    url = f"https://{address}:8000"
    served.eventually(lambda: states(served).get(url, ("",) * 4)[3] == "Draining", "it is draining")
    served.member.kubectl("delete", "pod", name, "--force", "--grace-period=0")
    served.eventually(lambda: url not in states(served), "it leaves the table")
    served.member.kubectl("delete", "node", "somewhere")


def bind(place, pod: str, node: str) -> None:
    """Give a pod a node: a deleted one without any is soon failed and removed by the collector of garbage."""
    place.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    path = f"/api/v1/namespaces/{place.name}/pods/{pod}/binding"
    place.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def test_a_pod_that_has_ended_leaves_the_table_whatever_its_conditions_say(served):
    """As one that was evicted: it is not even listed, since Kubernetes keeps thousands of them."""
    for place, pool in ((served.hub, "decode"), (served.member, "offload")):
        addresses = {one: place.get("pod", one)["status"].get("podIP") for one in place.pods(pool)}
        name, address = next((one, address) for one, address in addresses.items() if address)
        url = f"https://{address}:8000"
        assert states(served)[url][3] == "Ready"
        place.set_pod(name, address=address, phase="Failed")
        served.eventually(lambda url=url: url not in states(served), "it leaves the table")
        place.delete("pod", name)
    served.hub.ready_up("decode", "10.1.1")
    served.eventually(lambda: "https://10.1.1.1:8000" in states(served), "its successor serves")


def test_the_table_is_written_at_most_once_a_second(served):
    name = served.hub.pods("decode")[0]
    seen = set()

    def are_many() -> bool:
        """Change the pod with every new table; a slow machine makes this longer, and the tables no more frequent."""
        served.hub.set_pod(name, address="10.1.1.1", ready=len(seen) % 2 == 0)
        seen.add(served.hub.get("configmap", "kimi-routes")["metadata"]["resourceVersion"])
        return len(seen) >= 8

    started = time.monotonic()
    served.eventually(are_many, "eight tables are written")
    took = time.monotonic() - started
    served.hub.set_pod(name, address="10.1.1.1")
    assert len(seen) <= took + 3, f"{len(seen)} tables in {took:.1f} s"  # the one before, and both ends of the time


def test_the_gateway_is_ready_last_and_then_all_is(served):
    pods = served.eventually(lambda: served.hub.listing("pods", "prfaas.io/policy=kimi"), "a gateway pod")
    served.hub.set_pod(pods[0]["metadata"]["name"], address="10.1.3.1")
    served.member.ready_up("offload", "10.2.5")
    served.hub.wait_reason("prfaas", "kimi", "AllReady")
    service = served.hub.get("service", "kimi-gateway")
    assert service["spec"]["ports"][0]["port"] == 80
    selected = served.hub.listing("pods", ",".join(f"{k}={v}" for k, v in service["spec"]["selector"].items()))
    assert [pod["metadata"]["name"] for pod in selected] == [pods[0]["metadata"]["name"]]


def test_gateway_pods_have_the_least_rights(served):
    account = f"system:serviceaccount:{served.hub.name}:kimi-gateway"

    def may(verb: str, what: str) -> bool:
        command = ["auth", "can-i", verb, *what.split(), "--as", account, "-q"]
        try:
            served.hub.kubectl(*command)
        except subprocess.CalledProcessError:
            return False
        return True

    allowed = [
        ("get", "configmap/kimi-routes"),
        ("watch", "configmap/kimi-routes"),
        ("patch", "prfaaspolicies.prfaas.io/kimi --subresource=status"),
        ("get", "lease.coordination.k8s.io/kimi-scheduler"),
        ("update", "lease.coordination.k8s.io/kimi-scheduler"),
    ]
    refused = [
        ("get", "configmap/other"),
        ("list", "configmaps"),
        ("patch", "configmap/kimi-routes"),
        ("get", "secrets"),
        ("patch", "prfaaspolicies.prfaas.io/kimi"),
        ("patch", "prfaaspolicies.prfaas.io/other --subresource=status"),
        ("create", "leases.coordination.k8s.io"),
        ("get", "pods"),
    ]
    assert [one for one in allowed if not may(*one)] == []
    assert [one for one in refused if may(*one)] == []


def test_keeps_what_other_writers_put_in_the_status(served):
    other = {
        "type": "MetricsFresh",
        "status": "True",
        "reason": "Fresh",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    body = served.resource("PrfaaSPolicy", "kimi")
    del body["spec"]
    body["status"] = {"thresholdTokens": 777, "conditions": [other]}
    served.hub.kubectl(
        "apply", "--server-side", "--field-manager=prfaas-scheduler", "--subresource=status", "-f", "-",
        stdin=json.dumps(body),
    )  # fmt: skip
    served.hub.set_pod(served.hub.pods("decode")[0], address="10.1.1.1", ready=False)
    served.hub.wait_reason("prfaas", "kimi", "NoReadyInstances")
    status = served.hub.get("prfaas", "kimi")["status"]
    assert status["thresholdTokens"] == 777
    ours = {"Ready", "Encrypted", "IntegrityChecked", "CallersChecked"}
    assert {one["type"] for one in status["conditions"]} == {*ours, "MetricsFresh"}
    served.hub.set_pod(served.hub.pods("decode")[0], address="10.1.1.1")
    served.hub.wait_reason("prfaas", "kimi", "AllReady")


def test_a_second_gateway_brings_a_disruption_budget_and_one_takes_it_away(served):
    served.hub.patch("prfaas", "kimi", {"spec": {"gateway": {"replicas": 2}}})
    served.eventually(lambda: served.hub.exists("pdb", "kimi-gateway"), "a budget for two")
    served.hub.patch("prfaas", "kimi", {"spec": {"gateway": {"replicas": 1}}})
    served.eventually(lambda: not served.hub.exists("pdb", "kimi-gateway"), "none for one")


def test_a_pool_that_does_not_exist_or_serves_another_model_is_named_and_heals(served):
    served.hub.apply(policy(served, "odd", decodePool="nobody", prefillPools=["nothing"]))
    assert "DecodePool nobody" in served.hub.wait_reason("prfaas", "odd", "DecodePoolNotFound")["message"]
    served.hub.apply(served.pool("DecodePool", "nobody", model={"name": "other", "source": "builtin:other"}))
    assert "PrefillPool nothing" in served.hub.wait_reason("prfaas", "odd", "PrefillPoolNotFound")["message"]
    served.hub.apply(served.pool("PrefillPool", "nothing", replicas=0))
    assert "DecodePool nobody serves other" in served.hub.wait_reason("prfaas", "odd", "ModelMismatch")["message"]
    served.hub.ready_up("nobody", "10.1.7")
    time.sleep(2)
    assert table_of(served, "odd").instances == (), "no request ever reaches another model"
    model = json.dumps({"spec": {"model": {"name": "kimi-linear-tiny", "source": "builtin:kimi-linear-tiny"}}})
    served.hub.kubectl("patch", "dcpool", "nobody", "--type=merge", "-p", model)
    served.hub.wait_reason("prfaas", "odd", "NoReadyInstances")
    assert served.hub.condition("prfaas", "kimi")["reason"] in {"AllReady", "GatewayNotReady"}, "the other continues"


def test_hand_edited_children_of_a_policy_are_put_back(served):
    served.hub.patch("service", "kimi-gateway", {"spec": {"selector": {"a": "b"}}})
    served.hub.patch("role", "kimi-gateway", {"rules": []})
    served.hub.kubectl("delete", "networkpolicy", "kimi-gateway")
    served.hub.kubectl(
        "patch", "configmap", "kimi-routes", "--type=merge", "-p", '{"binaryData": {"routes.json.gz": ""}}'
    )

    def restored() -> bool:
        selector = served.hub.get("service", "kimi-gateway")["spec"]["selector"]
        return (
            "prfaas.io/policy" in selector
            and served.hub.get("role", "kimi-gateway")["rules"]
            and served.hub.exists("networkpolicy", "kimi-gateway")
            and served.hub.get("configmap", "kimi-routes")["binaryData"]["routes.json.gz"]
        )

    served.eventually(restored, "every child is as rendered again")


def test_deleting_everything_leaves_nothing(served):
    served.hub.delete_all("prfaas,pfpool,dcpool")
    served.hub.delete_all("pmc")
    served.eventually(lambda: not served.children(), "no child is left")
