"""Proves that NetworkPolicies deny what they do not name, and name what the parts need of each other.

Whether they are enforced is the cluster network's business; here their rules are read against the labels that pods
carry and the ports that processes listen on.
"""

from pathlib import Path
from typing import Any

import pytest

from prfaas import names
from prfaas.api import DecodePool, PrfaaSPolicy
from prfaas_operator.render import pool_deployment, protection
from prfaas_operator.render.common import PART_OF

ROOT = Path(__file__).parents[2]
VARIANTS = sorted((ROOT / "charts").glob("*/ci/*-values.yaml"))
WORKER = {**PART_OF, names.LABEL_COMPONENT: "worker", names.LABEL_ENGINE: "prfaas"}
OF_ENGINES = [f"prfaas-workers-{engine}" for engine in ("sglang", "vllm-mooncake", "vllm-nixl", "vllm-prfaas")]
MODEL = {"name": "m", "source": "/models/m"}
POLICY = {
    "metadata": {"name": "p", "namespace": "n", "uid": "1"},
    "spec": {"model": "m", "decodePool": "d", "threshold": {"mode": "Disabled"}},
}
LARGEST = {
    "vllm-prfaas": {"engine": {"type": "vllm", "image": "v:1"}, "parallelism": {"tensor": 2, "data": 16}},
    "vllm-nixl": {
        "engine": {"type": "vllm", "image": "v:1", "transfer": {"connector": "Nixl"}},
        "parallelism": {"data": 16},
    },
    "vllm-mooncake": {
        "engine": {"type": "vllm", "image": "v:1", "transfer": {"connector": "Mooncake"}},
        "parallelism": {"data": 16},
    },
    "sglang": {"engine": {"type": "sglang", "image": "s:1"}, "parallelism": {"data": 16}},
    "tensorrt-llm": {"engine": {"type": "tensorrt-llm", "image": "t:1"}},
    "dynamo": {"engine": {"type": "dynamo", "image": "d:1"}},
}
"""Pools with as many ports as their engine may have."""
GATEWAY = {**PART_OF, names.LABEL_COMPONENT: "gateway"}
WORKER_PORTS = {names.WORKER_API_PORT, names.WORKER_DATA_PORT}


def policies(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = (each for each in objects if each["kind"] == "NetworkPolicy")
    return {each["metadata"]["name"]: each["spec"] for each in found}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items()


def about(found: dict[str, dict[str, Any]], labels: dict[str, str]) -> dict[str, Any]:
    """Return the only policy that selects pods with these labels."""
    (policy,) = (each for each in found.values() if selects(each["podSelector"], labels))
    return policy


def numbers(port: dict[str, Any]) -> range:
    return range(port["port"], port.get("endPort", port["port"]) + 1)


def ports_open_to(policy: dict[str, Any], labels: dict[str, str]) -> set[int]:
    """Return the ports that pods of the same namespace with these labels may reach."""
    return {
        number
        for rule in policy["ingress"]
        for port in rule["ports"]
        for number in numbers(port)
        if "from" not in rule
        or any(
            selects(peer["podSelector"], labels)
            for peer in rule["from"]
            if "podSelector" in peer and "namespaceSelector" not in peer
        )
    }


def ports_open_to_namespace(policy: dict[str, Any], name: str) -> set[int]:
    wanted = {"matchLabels": {"kubernetes.io/metadata.name": name}}
    return {
        number
        for rule in policy["ingress"]
        for port in rule["ports"]
        for number in numbers(port)
        if any(peer.get("namespaceSelector") == wanted for peer in rule.get("from", ()))
    }


def ports_reached(policy: dict[str, Any]) -> set[int]:
    return {number for rule in policy["egress"] for port in rule["ports"] for number in numbers(port)}


def test_only_prometheus_and_the_helm_test_reach_the_operator(hub):
    policy = policies(hub)["prfaas-operator"]
    (test,) = (each for each in hub if each["kind"] == "Pod")
    assert ports_open_to_namespace(policy, "monitoring") == {names.OPERATOR_METRICS_PORT}
    health = {names.OPERATOR_METRICS_PORT, names.OPERATOR_HEALTH_PORT}
    assert ports_open_to(policy, test["metadata"]["labels"]) == health
    assert ports_open_to(policy, WORKER) == ports_open_to(policy, GATEWAY) == set()


def test_operator_reaches_only_names_and_api_servers(hub):
    assert ports_reached(policies(hub)["prfaas-operator"]) == {53, 443, 6443}


def test_operators_policy_is_about_the_operators_pods(hub):
    (deployment,) = (each for each in hub if each["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert selects(policies(hub)["prfaas-operator"]["podSelector"], labels)
    assert not selects(policies(hub)["prfaas-operator"]["podSelector"], WORKER)


def test_workers_of_the_hub_hear_gateways_each_other_and_prometheus(hub):
    policy = policies(hub)["prfaas-workers"]
    assert selects(policy["podSelector"], WORKER)
    assert not selects(policy["podSelector"], GATEWAY)
    assert ports_open_to(policy, WORKER) == ports_open_to(policy, GATEWAY) == WORKER_PORTS
    assert ports_open_to(policy, {"app": "neighbour"}) == set()
    assert ports_open_to_namespace(policy, "monitoring") == {names.WORKER_API_PORT, names.WORKER_ADMIN_PORT}
    assert ports_open_to_namespace(policy, "default") == set()
    assert ports_reached(policy) == {53} | WORKER_PORTS


def test_workers_of_a_member_hear_the_hub_and_each_other(render):
    policy = about(policies(render("prfaas-member", "--set", "networkPolicy.hubCidrs={192.0.2.0/24}")), WORKER)
    assert selects(policy["podSelector"], WORKER)
    blocks = [peer["ipBlock"]["cidr"] for rule in policy["ingress"] for peer in rule["from"] if "ipBlock" in peer]
    assert blocks == ["192.0.2.0/24"]
    assert ports_open_to(policy, WORKER) == WORKER_PORTS
    assert ports_open_to(policy, {"app": "neighbour"}) == set()


def test_workers_of_a_member_need_no_route_back(member):
    """Nothing but names and other workers of the same namespace."""
    policy = about(policies(member), WORKER)
    assert all(list(peer) == ["podSelector"] for rule in policy["egress"] for peer in rule.get("to", ()))
    assert {port["port"] for rule in policy["egress"] if "to" not in rule for port in rule["ports"]} == {53}


def test_without_the_hubs_addresses_a_member_opens_its_ports_to_its_own_workers_alone(member, render):
    """The control: a range opens them to everybody."""

    everybody = {"ipBlock": {"cidr": "0.0.0.0/0"}}

    def open_to_all(objects: list[dict[str, Any]]) -> set[int]:
        rules = [rule for policy in policies(objects).values() for rule in policy["ingress"]]
        opened = [rule for rule in rules if "from" not in rule or everybody in rule["from"]]
        return {number for rule in opened for port in rule["ports"] for number in numbers(port)}

    assert open_to_all(member) == set()
    assert open_to_all(render("prfaas-member", "--set", "networkPolicy.hubCidrs={0.0.0.0/0}")) >= WORKER_PORTS
    policy = about(policies(member), WORKER)
    assert ports_open_to(policy, WORKER) == WORKER_PORTS
    assert ports_open_to(policy, {"app": "anybody"}) == set()


@pytest.mark.parametrize("values", VARIANTS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_every_policy_denies_both_ways_and_every_rule_names_its_ports(render, values):
    for policy in policies(render(values.parts[-3], "--values", str(values))).values():
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        rules = [*policy["ingress"], *policy.get("egress", ())]
        assert rules
        assert all(rule["ports"] for rule in rules)
        assert all(rule["from"] for rule in policy["ingress"]), "an empty list would admit all"


def test_admits_no_scraper_where_none_is_named(render):
    found = policies(render("prfaas", "--set-json", "networkPolicy.metricsFrom=[]"))
    assert ports_open_to_namespace(found["prfaas-operator"], "monitoring") == set()
    assert ports_open_to(found["prfaas-workers"], {"app": "neighbour"}) == set()
    assert "prfaas-gateways" not in found


def test_only_prometheus_reads_what_a_gateway_shows_to_those_who_operate_it(hub):
    """The operator's own policy of a gateway opens the clients' port to everybody, and no other."""
    shown = {names.GATEWAY_ADMIN_PORT, names.SCHEDULER_METRICS_PORT}
    policy = about(policies(hub), GATEWAY)
    assert ports_open_to_namespace(policy, "monitoring") == shown
    assert ports_open_to(policy, WORKER) == ports_open_to(policy, {"app": "neighbour"}) == set()
    rendered = protection.network_policy(PrfaaSPolicy.model_validate(POLICY))["spec"]
    assert ports_open_to(rendered, {"app": "neighbour"}) == {names.GATEWAY_PORT}


@pytest.mark.parametrize("chart", ["prfaas", "prfaas-member"])
def test_a_workers_probes_and_metrics_are_open_to_prometheus_alone(render, chart):
    """Not to gateways, other workers, or another cluster, whose addresses are given here."""
    other = ["--set", "networkPolicy.hubCidrs={192.0.2.0/24}"] if chart == "prfaas-member" else []
    policy = about(policies(render(chart, *other)), WORKER)
    rules = [rule for rule in policy["ingress"] for port in rule["ports"] if names.WORKER_ADMIN_PORT in numbers(port)]
    assert [list(peer) for rule in rules for peer in rule["from"]] == [["namespaceSelector"]]
    assert names.WORKER_ADMIN_PORT in ports_open_to_namespace(policy, "monitoring")


@pytest.mark.parametrize(
    ("chart", "off", "left"),
    [
        ("prfaas", "networkPolicy.enabled=false", ["prfaas-gateways", "prfaas-workers", *OF_ENGINES]),
        ("prfaas", "workers.networkPolicy.enabled=false", ["prfaas-gateways", "prfaas-operator"]),
        ("prfaas-member", "networkPolicy.enabled=false", []),
    ],
)
def test_policies_can_be_left_out(render, chart, off, left):
    assert sorted(policies(render(chart, "--set", off))) == left


@pytest.mark.parametrize("engine", LARGEST)
@pytest.mark.parametrize("chart", ["prfaas", "prfaas-member"])
def test_every_port_that_the_operator_renders_for_an_engine_is_open_to_its_peers_and_to_no_other_engine(
    render, chart, engine
):
    """Gateways follow cache events, other workers fetch caches; both are beyond the API port and the data port."""
    pool = DecodePool.model_validate(
        {"metadata": {"name": "p", "uid": "1"}, "spec": {"model": MODEL, **LARGEST[engine]}}
    )
    template = pool_deployment.deployment(pool, None)["spec"]["template"]
    labels, (container,) = template["metadata"]["labels"], template["spec"]["containers"]
    opened = {port["containerPort"] for port in container["ports"]}
    found = policies(render(chart))
    mine = [policy for policy in found.values() if selects(policy["podSelector"], labels)]
    assert opened <= {number for policy in mine for number in ports_open_to(policy, WORKER)}
    assert opened <= {number for policy in mine for number in ports_reached(policy)}
    assert all(ports_open_to(policy, {"app": "neighbour"}) == set() for policy in mine)
    if chart == "prfaas":
        assert opened <= {number for policy in mine for number in ports_open_to(policy, GATEWAY)}
    if "link-metrics" in {port["name"] for port in container["ports"]}:
        (metrics,) = (port["containerPort"] for port in container["ports"] if port["name"] == "link-metrics")
        assert metrics in {number for policy in mine for number in ports_open_to_namespace(policy, "monitoring")}


@pytest.mark.parametrize(
    ("name", "image"), [("gateway", "gateway"), ("worker", "worker"), ("connector", "vllm-connector")]
)
def test_an_image_lies_beside_the_operators_or_is_the_one_that_is_named(render, name, image):
    """Once an operator of REGISTRY took gateways of another registry, whose names anybody might own."""

    def flag(*arguments: str) -> str:
        (operator,) = (each for each in render("prfaas", *arguments) if each["kind"] == "Deployment")
        words = operator["spec"]["template"]["spec"]["containers"][0]["args"]
        return words[words.index(f"--{name}-image") + 1]

    assert flag() == f"prfaas/{image}:0.1.0"
    own = ("--set", "operator.image.repository=reg.example:5000/team/operator")
    assert flag(*own) == f"reg.example:5000/team/{image}:0.1.0"
    assert flag(*own, "--set", "operator.image.tag=v7") == f"reg.example:5000/team/{image}:v7"
    assert flag("--set", f"{name}Image=reg.example/c@sha256:1") == "reg.example/c@sha256:1"


@pytest.mark.parametrize("image", ["repository=reg.example/prfaas-operator", f"digest=sha256:{'0' * 64}"])
def test_where_the_operators_image_does_not_tell_the_others_they_are_named(render, image):
    """By a digest the operator was fixed, and its gateways took whatever a tag pointed to."""
    own, others = ("--set", f"operator.image.{image}"), {"gatewayImage=g:1", "workerImage=w:1", "connectorImage=c:1"}
    for missing in others:
        with pytest.raises(Exception, match=f"{missing.partition('=')[0]}: the operator's image .* set it to"):
            render("prfaas", *own, "--set", ",".join(others - {missing}))
    assert render("prfaas", *own, "--set", ",".join(others))
