"""PodDisruptionBudget and NetworkPolicy of a policy's gateway."""

from urllib.parse import urlsplit

from prfaas import names
from prfaas.api import PrfaaSPolicy
from prfaas_operator.render.common import Manifest, child_metadata, gateway_selector

DNS_PORT = 53
API_SERVER_PORTS = (443, 6443)  # in front of and behind the `kubernetes` Service; its address differs everywhere


def disruption_budget(policy: PrfaaSPolicy) -> Manifest | None:
    """Return the budget that keeps all but one gateway pod up; None for a single pod, which it would pin down."""
    if policy.spec.gateway.replicas <= 1:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(policy, names.gateway_name(policy.metadata.name)),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": gateway_selector(policy)}},
    }


def network_policy(policy: PrfaaSPolicy) -> Manifest:
    """Return what may reach gateway pods, and what they may reach: DNS, API server, workers and Prometheus, by port."""
    egress = [*API_SERVER_PORTS, names.WORKER_API_PORT, *_prometheus_port(policy)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(policy, names.gateway_name(policy.metadata.name)),
        "spec": {
            "podSelector": {"matchLabels": gateway_selector(policy)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [_tcp(names.GATEWAY_PORT), _tcp(names.SCHEDULER_METRICS_PORT)]}],
            "egress": [
                {"ports": [_tcp(DNS_PORT), {"protocol": "UDP", "port": DNS_PORT}]},
                {"ports": [_tcp(port) for port in sorted(set(egress))]},
            ],
        },
    }


def _tcp(port: int) -> Manifest:
    return {"protocol": "TCP", "port": port}


def _prometheus_port(policy: PrfaaSPolicy) -> tuple[int, ...]:
    if policy.spec.metrics is None:
        return ()
    try:
        url = urlsplit(policy.spec.metrics.prometheus_url)
        return (url.port or (443 if url.scheme == "https" else 80),)
    except ValueError:  # a port that is no number: the scheduler says so in MetricsFresh
        return ()
