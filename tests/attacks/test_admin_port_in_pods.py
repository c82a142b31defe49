"""A neighbour wants to read what clients of a gateway ask for, or to keep a worker's probes out: at the ports for those
who operate them."""

from prfaas import names
from prfaas.api import MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas_operator.render import gateway, pool_deployment, protection

IMAGE = gateway.GatewayImage("reg/g:1")

POLICY = PrfaaSPolicy.model_validate(
    {
        "metadata": {"name": "kimi", "namespace": "n", "uid": "1"},
        "spec": {"model": "m", "decodePool": "d", "threshold": {"mode": "Disabled"}},
    }
)


def open_to_anybody(policy: dict) -> set[int]:
    return {port["port"] for rule in policy["spec"]["ingress"] if "from" not in rule for port in rule["ports"]}


def test_nothing_but_the_clients_port_is_offered():
    (container, _) = gateway.deployment(POLICY, IMAGE)["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    offered = {ports[port["targetPort"]] for port in gateway.service(POLICY)["spec"]["ports"]}
    assert offered == open_to_anybody(protection.network_policy(POLICY)) == {names.GATEWAY_PORT}
    assert ports["admin"] == names.GATEWAY_ADMIN_PORT


def test_control_a_rule_with_that_port_would_open_it_to_every_pod():
    policy = protection.network_policy(POLICY)
    policy["spec"]["ingress"][0]["ports"].append({"protocol": "TCP", "port": names.GATEWAY_ADMIN_PORT})
    assert names.GATEWAY_ADMIN_PORT in open_to_anybody(policy)


def test_no_node_opens_a_workers_port_of_probes():
    """Another cluster reaches those that a node opens: of addressing HostIP, the two that it calls."""
    spec = {"model": {"name": "m", "source": "builtin:tiny"}, "clusterName": "eu"}
    pool = PrefillPool.model_validate({"metadata": {"name": "p", "namespace": "n", "uid": "1"}, "spec": spec})
    by_host = {"kubeconfigSecretRef": {"name": "s"}, "link": {"capacityMbps": 100}, "addressing": "HostIP"}
    member = MemberCluster.model_validate({"metadata": {"name": "eu", "namespace": "n", "uid": "2"}, "spec": by_host})
    (worker,) = pool_deployment.deployment(pool, member)["spec"]["template"]["spec"]["containers"]
    opened = {port["name"] for port in worker["ports"] if "hostPort" in port}
    probed = {worker[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")}
    assert (opened, probed) == ({"http", "data"}, {"admin"})
