"""The routing table of a policy, from its spec and the pods of its pools.

The hard part is what is not known. After a restart, or while a member's API server does not answer, the operator has no
list of pods there; leaving them out would take working instances away from the gateway. So a cluster that was never
listed keeps the instances of the table that stands, and the gateway itself ejects those that refuse connections.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prfaas.api import MemberCluster
from prfaas.names import HUB, WORKER_API_PORT
from prfaas.wire import routes
from prfaas_operator.plan.pods import PodFacts
from prfaas_operator.plan.policy import PolicyFacts
from prfaas_operator.plan.pool import Pool, engine_name, role_of


class ClusterView(NamedTuple):
    """What the operator sees of one cluster; None before it was first listed, and before it was first contacted."""

    pods: tuple[PodFacts, ...] | None = None
    reachable: bool | None = None


UNSEEN = ClusterView()


def table(
    facts: PolicyFacts, views: Mapping[str, ClusterView], previous: routes.RoutingTable | None
) -> routes.RoutingTable:
    """Return the routing table; `views` by cluster name with HUB for the hub, `previous` the table that stands."""
    policy = facts.policy
    spec = policy.spec
    metrics = spec.metrics
    return routes.RoutingTable(
        policy=policy.metadata.name,
        namespace=policy.metadata.namespace,
        generation=policy.metadata.generation,
        model=spec.model,
        on_offload_failure=spec.on_offload_failure,
        threshold=routes.Threshold(
            mode=spec.threshold.mode,
            tokens=spec.threshold.tokens,
            min_tokens=spec.threshold.min,
            max_tokens=spec.threshold.max,
        ),
        watermarks=routes.LinkWatermarks(
            high_percent=spec.link.high_utilisation_percent, low_percent=spec.link.low_utilisation_percent
        ),
        short_interval_seconds=spec.intervals.short_seconds,
        ttft_slo_millis=spec.slo.ttft_millis,
        prometheus_url=metrics.prometheus_url if metrics else "",
        stale_after_seconds=metrics.stale_after_seconds if metrics else 10,
        prefer_datacenters=tuple(spec.datacenters.prefer),
        forbid_datacenters=tuple(spec.datacenters.forbid),
        clusters=_clusters(facts, views, previous),
        instances=_instances(facts, views, previous),
    )


def _clusters(
    facts: PolicyFacts, views: Mapping[str, ClusterView], previous: routes.RoutingTable | None
) -> tuple[routes.Cluster, ...]:
    was_reachable = {cluster.name: cluster.reachable for cluster in (previous.clusters if previous else ())}
    used = {pool.spec.cluster_name for pool in facts.routed_pools if pool.spec.cluster_name}
    return tuple(
        routes.Cluster(
            name=name,
            datacenter=cluster.spec.datacenter,
            reachable=_known(views.get(name, UNSEEN).reachable, was_reachable.get(name, False)),
            capacity_mbps=cluster.spec.link.capacity_mbps,
            utilisation_query=cluster.spec.link.utilisation_query.replace("$cluster", name),
            round_trip_millis=cluster.spec.link.round_trip_millis,
        )
        for name, cluster in sorted(facts.clusters.items())
        if name in used
    )


def _known(seen: bool | None, before: bool) -> bool:
    return before if seen is None else seen


def _instances(
    facts: PolicyFacts, views: Mapping[str, ClusterView], previous: routes.RoutingTable | None
) -> tuple[routes.Instance, ...]:
    found: list[routes.Instance] = []
    for pool in facts.routed_pools:
        name = pool.spec.cluster_name or HUB
        pods = views.get(name, UNSEEN).pods
        if pods is None:
            found += _carried(pool, name, previous)
        else:
            mine = [pod for pod in pods if (pod.pool_uid, pod.role) == (facts.home_uid(pool), role_of(pool))]
            found += _of_pool(pool, name, mine, facts.clusters.get(name))
    return tuple(sorted(found, key=lambda instance: (instance.cluster, instance.pool, instance.name)))


def _carried(pool: Pool, cluster: str, previous: routes.RoutingTable | None) -> list[routes.Instance]:
    wanted = (pool.metadata.name, cluster, role_of(pool))
    return [one for one in (previous.instances if previous else ()) if (one.pool, one.cluster, one.role) == wanted]


def _of_pool(pool: Pool, cluster: str, pods: Iterable[PodFacts], member: MemberCluster | None) -> list[routes.Instance]:
    by_host = member is not None and member.spec.addressing == "HostIP"
    instances: list[routes.Instance] = []
    for pod in pods:
        address = pod.host_ip if by_host else pod.pod_ip
        if not address or not (pod.ready or pod.terminating):
            continue
        instances.append(
            routes.Instance(
                name=pod.name,
                pool=pool.metadata.name,
                cluster=cluster,
                role=role_of(pool),
                url=f"{pod.scheme}://{_host(address)}:{WORKER_API_PORT}",
                state="Draining" if pod.terminating else "Ready",
                convertible=pod.seat.gated and engine_name(pool) == "prfaas",
                engine=engine_name(pool),
            )
        )
    return instances


def _host(address: str) -> str:
    """Return an address as a URL writes it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def ready_by_role(table_: routes.RoutingTable, role: routes.Role) -> int:
    """Return how many instances of a role take new requests."""
    return sum(instance.role == role and instance.state == "Ready" for instance in table_.instances)
