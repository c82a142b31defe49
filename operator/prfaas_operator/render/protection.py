"""PodDisruptionBudgets of gateways and pools, and the NetworkPolicy of a policy's gateway."""

from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from prfaas import names
from prfaas.api import PrfaaSPolicy
from prfaas.wire.routes import Instance
from prfaas_operator.clusters.kinds import DISRUPTION_BUDGET, NETWORK_POLICY, Object, manifest
from prfaas_operator.render.common import child, gateway_selector

DNS_PORT = 53
API_SERVER_PORTS = (443, 6443)  # in front of and behind the `kubernetes` Service; its address differs everywhere


def disruption_budget(policy: PrfaaSPolicy) -> Object | None:
    """Return the budget that keeps all but one gateway pod up; a single pod has none: its node could never drain."""
    if policy.spec.gateway.replicas <= 1:
        return None
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": gateway_selector(policy)}}
    return child(policy, DISRUPTION_BUDGET, names.gateway_name(policy.metadata.name), spec=spec)


def pool_budget(deployment: Object, live: Object) -> Object:
    """Return the budget by which a drain or an upgrade may take a tenth of a pool at a time, at least one instance.

    It blocks no drain: the only instance of a pool may go too. The live Deployment owns it, and both go together.
    """
    metadata = deployment["metadata"]
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": live["metadata"]["uid"]}
    spec = {
        "maxUnavailable": "10%",
        "selector": deployment["spec"]["selector"],
        # An instance that is not ready serves no request: it must not hold up the drain of its node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    own = {"name": metadata["name"], "labels": metadata["labels"], "ownerReferences": [owner]}
    return manifest(DISRUPTION_BUDGET, own, spec=spec)


def network_policy(policy: PrfaaSPolicy, instances: Iterable[Instance] = ()) -> Object:
    """Return the permitted traffic of gateway pods by port: clients, DNS, API server, workers and Prometheus.

    Who may read its metrics, the chart says in a policy of its own: rules of several policies add up.
    """
    others = [port for instance in instances for port in _called_ports(instance)]
    egress = [*API_SERVER_PORTS, names.WORKER_API_PORT, *others, *_prometheus_port(policy)]
    spec = {
        "podSelector": {"matchLabels": gateway_selector(policy)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"ports": [_tcp(names.GATEWAY_PORT)]}],
        "egress": [
            {"ports": [_tcp(DNS_PORT), {"protocol": "UDP", "port": DNS_PORT}]},
            {"ports": [_tcp(port) for port in sorted(set(egress))]},
        ],
    }
    return child(policy, NETWORK_POLICY, names.gateway_name(policy.metadata.name), spec=spec)


def _called_ports(instance: Instance) -> Iterator[int]:
    """Yield the ports of an instance that a gateway asks beside its API's: cache events of every rank, and more."""
    engine = instance.record
    if engine.events == "Mover":
        yield from (instance.data_port + rank * instance.rank_ports for rank in range(instance.ranks))
    if engine.events == "Zmq":
        yield from range(names.KV_EVENTS_PORT, names.kv_log_port(instance.ranks) + instance.ranks)
    yield from (port for one in engine.ports if one.is_called for port in range(one.first, one.last + 1))


def _tcp(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def _prometheus_port(policy: PrfaaSPolicy) -> tuple[int, ...]:
    if policy.spec.metrics is None:
        return ()
    try:
        url = urlsplit(policy.spec.metrics.prometheus_url)
        return (url.port or (443 if url.scheme == "https" else 80),)
    except ValueError:  # a port that is no number: the scheduler reports it in MetricsFresh
        return ()
