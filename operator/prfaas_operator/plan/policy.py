"""A policy: its objects, the routing table from these and from the pods of its pools, and the condition Ready.

The hard part of the table is the unknown. After a restart, or while a member's API server does not answer, the operator
has no list of pods there. Without them the gateway would lose working instances. So a cluster that was never listed
keeps the instances of the present table. The gateway itself ejects instances that refuse connections.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

from prfaas.api import DecodePool, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.engines import ENGINES
from prfaas.errors import PrfaasError
from prfaas.names import HUB, WORKER_API_PORT, WORKER_DATA_PORT
from prfaas.ports import url_host
from prfaas.routing.drafts import draft_layers, drafts_fit
from prfaas.wire import routes
from prfaas.wire.profile import PoolProfile
from prfaas.wire.routes import RoutingTable
from prfaas_operator.errors import reason_of
from prfaas_operator.plan.conditions import REVOKED, ConditionState, no, yes
from prfaas_operator.plan.member import place_of
from prfaas_operator.plan.pod_facts import PodFacts
from prfaas_operator.plan.pool_status import Counts, PoolObject, role_of
from prfaas_operator.plan.profile import seeds
from prfaas_operator.plan.roles import refusal, sharer_of


class PolicyFacts(NamedTuple):
    """The input of a policy's table and conditions: the policy, and objects of the hub by name; `datacenters` are those
    of all its MemberClusters, `clusters` only the policy's."""

    policy: PrfaaSPolicy
    decode_pools: Mapping[str, DecodePool]
    prefill_pools: Mapping[str, PrefillPool]
    clusters: Mapping[str, MemberCluster]
    datacenters: frozenset[str] = frozenset()

    @property
    def named_pools(self) -> tuple[PoolObject, ...]:
        """The policy's existing pools, decode pool first."""
        spec = self.policy.spec
        decode = (self.decode_pools[spec.decode_pool],) if spec.decode_pool in self.decode_pools else ()
        return decode + tuple(self.prefill_pools[name] for name in spec.prefill_pools if name in self.prefill_pools)

    @property
    def known_pools(self) -> tuple[PoolObject, ...]:
        """The policy's pools that have a model, of their own or their DecodePool's; its instances may be of another."""
        return tuple(pool for pool in self.named_pools if pool.spec.model.name)

    @property
    def routed_pools(self) -> tuple[PoolObject, ...]:
        """The pools that serve the policy's model; no request ever goes to another model."""
        return tuple(pool for pool in self.named_pools if pool.spec.model.name == self.policy.spec.model)

    @property
    def revoked(self) -> frozenset[str]:
        """The member clusters that are cut off: no prompt goes there, and no cache of theirs is used."""
        return frozenset(name for name, cluster in self.clusters.items() if cluster.spec.revoked)

    def pods_pool_uid(self, pool: PoolObject) -> str:
        """Return the uid in the labels of a routed pool's pods: its own, or its DecodePool's if it shares instances."""
        if isinstance(pool, PrefillPool) and pool.spec.share_with:
            return self.decode_pools[pool.spec.share_with].metadata.uid
        return pool.metadata.uid


def readiness(
    facts: PolicyFacts, table: RoutingTable, gateway: Counts, child_errors: Sequence[PrfaasError] = ()
) -> ConditionState:
    """Return the condition Ready of a policy; `child_errors` are those of its children that could not be applied."""
    failures = (
        _missing_pool(facts),
        _unshared_pool(facts),
        _model_mismatch(facts),
        _engine_mismatch(facts),
        _revoked_pool(facts),
        no(reason_of(child_errors[0]), str(child_errors[0])) if child_errors else None,
        _idle_pool(facts, table),
        _gateway(facts, gateway),
    )
    good = yes("AllReady", f"the gateway serves {facts.policy.spec.model}; every pool has a ready instance")
    return next((failure for failure in failures if failure), good)


def _missing_pool(facts: PolicyFacts) -> ConditionState | None:
    spec = facts.policy.spec
    if spec.decode_pool not in facts.decode_pools:
        return no(
            "DecodePoolNotFound", f"DecodePool {spec.decode_pool} does not exist; create it or change spec.decodePool"
        )
    missing = [name for name in spec.prefill_pools if name not in facts.prefill_pools]
    if missing:
        return no(
            "PrefillPoolNotFound", f"PrefillPool {missing[0]} does not exist; create it or change spec.prefillPools"
        )
    return None


def _unshared_pool(facts: PolicyFacts) -> ConditionState | None:
    sharers = [sharer_of(pool) for pool in facts.prefill_pools.values()]
    for pool in facts.named_pools:
        if isinstance(pool, PrefillPool) and pool.spec.share_with:
            refused = refusal(sharer_of(pool), facts.decode_pools.get(pool.spec.share_with), sharers)
            if refused is not None:
                return refused._replace(message=f"PrefillPool {pool.metadata.name}: {refused.message}")
    return None


def _model_mismatch(facts: PolicyFacts) -> ConditionState | None:
    wanted = facts.policy.spec.model
    for pool in facts.named_pools:
        if pool.spec.model.name != wanted:
            what, found = f"{pool.kind_name} {pool.metadata.name}", pool.spec.model.name
            return no(
                "ModelMismatch",
                f"{what} serves {found}, the policy {wanted}; instances of {found} get no request until both agree",
            )
    return None


def _engine_mismatch(facts: PolicyFacts) -> ConditionState | None:
    """Return the condition for pools of different engines: caches of one engine do not fit another."""
    for pool in facts.routed_pools[1:]:
        first = facts.routed_pools[0]
        engine, wanted = pool.spec.engine.record, first.spec.engine.record
        if engine.name != wanted.name:
            return no(
                "EngineMismatch",
                f"{pool.kind_name} {pool.metadata.name} runs {engine.name} and {first.kind_name} {first.metadata.name} "
                f"{wanted.name}; they serve nothing together until both have one engine",
            )
        here, there = _tensor_ranks(pool), _tensor_ranks(first)
        if engine.tensor_sizes_divide and not routes.ranks_divide(here, there):
            return no(
                "EngineMismatch",
                f"{pool.kind_name} {pool.metadata.name} has parallelism.tensor {here} and {first.kind_name} "
                f"{first.metadata.name} {there}; {engine.title} carries caches only where one is a multiple of "
                "the other: they serve nothing together until then",
            )
        mine, theirs = _draft_layers(pool), _draft_layers(first)
        if not drafts_fit(mine, theirs):
            return no(
                "EngineMismatch",
                f"{pool.kind_name} {pool.metadata.name} has draft layers {mine} in {engine.draft_flag} and "
                f"{first.kind_name} {first.metadata.name} {theirs}; {engine.title} carries caches only between equal "
                "ones: they serve nothing together until both have the same, or none",
            )
        own, other = _stretch_of(pool), _stretch_of(first)
        if own != other:
            return no(
                "EngineMismatch",
                f"{pool.kind_name} {pool.metadata.name} has --stretch {own:g} and {first.kind_name} "
                f"{first.metadata.name} {other:g}: times of one are none of the other; give both the same",
            )
    return None


def _revoked_pool(facts: PolicyFacts) -> ConditionState | None:
    for pool in facts.routed_pools:
        if pool.spec.cluster_name in facts.revoked:
            what = f"{pool.kind_name} {pool.metadata.name}"
            return no(REVOKED, f"MemberCluster {pool.spec.cluster_name} is revoked: {what} gets no prompt")
    return None


def _tensor_ranks(pool: PoolObject) -> int:
    return pool.spec.parallelism.tensor if pool.spec.parallelism else 1


def _draft_layers(pool: PoolObject) -> str:
    engine = pool.spec.engine
    return draft_layers(engine.record.draft_flag, engine.args)


def _idle_pool(facts: PolicyFacts, table: RoutingTable) -> ConditionState | None:
    served = {(instance.role, instance.pool) for instance in table.instances if instance.state == "Ready"}
    for pool in facts.routed_pools:
        role = "decode" if isinstance(pool, DecodePool) else "prefill"
        if (role, pool.metadata.name) not in served:
            effect = "no request can be served" if role == "decode" else "other pools prefill its share"
            return no("NoReadyInstances", f"{pool.kind_name} {pool.metadata.name} has no ready instance: {effect}")
    return None


def _gateway(facts: PolicyFacts, gateway: Counts) -> ConditionState | None:
    wanted = facts.policy.spec.gateway.replicas
    if gateway.ready >= wanted:
        return None
    return no("GatewayNotReady", gateway.failure or f"{gateway.ready} of {wanted} gateway pods ready")


class ObservedCluster(NamedTuple):
    """The observed state of one cluster; None before its first list, and before its first contact."""

    pods: tuple[PodFacts, ...] | None = None
    reachable: bool | None = None


UNSEEN = ObservedCluster()


def routing_table(
    facts: PolicyFacts, views: Mapping[str, ObservedCluster], previous: routes.RoutingTable | None
) -> routes.RoutingTable:
    """Return the routing table; `views` by cluster name with HUB for the hub, `previous` the present table."""
    policy = facts.policy
    spec = policy.spec
    metrics = spec.metrics
    # Nothing is carried over to another model: no request ever goes to one.
    if previous is not None and previous.model != spec.model:
        previous = None
    instances = _instances(facts, views, previous)
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
        stretch=_stretch(facts),
        ttft_slo_millis=spec.slo.ttft_millis,
        gateways=max(1, spec.gateway.replicas),
        prometheus_url=metrics.prometheus_url if metrics else "",
        stale_after_seconds=metrics.stale_after_seconds if metrics else 10,
        prefer_datacenters=tuple(spec.datacenters.prefer),
        forbid_datacenters=tuple(spec.datacenters.forbid),
        clusters=_clusters(facts, views, previous, {instance.cluster for instance in instances}),
        instances=instances,
        profiles=_profiles(facts),
        datacenters=tuple(sorted(facts.datacenters)),
    )


def _stretch(facts: PolicyFacts) -> float:
    """Return how many times slower than the clock a policy's emulated instances live; 1 for real ones."""
    return _stretch_of(facts.routed_pools[0]) if facts.routed_pools else 1.0  # all have the same: `_engine_mismatch`


def _stretch_of(pool: PoolObject) -> float:
    engine, found = pool.spec.engine, 1.0
    words = [word for arg in engine.args for word in arg.split("=", 1)] if engine.record.is_emulated else []
    for flag, value in pairwise(words):
        found = _factor(value) or found if flag == "--stretch" else found
    return found


def _factor(text: str) -> float | None:
    """Return a factor of times; None for a text that the worker refuses."""
    try:
        factor = float(text)
    except ValueError:
        return None
    return factor if 0 < factor < math.inf else None


def _profiles(facts: PolicyFacts) -> tuple[PoolProfile, ...]:
    """Return the pools' seeds, under the names by which their instances are measured."""
    clusters = {pool.metadata.name: pool.spec.cluster_name or HUB for pool in facts.routed_pools}
    return tuple(
        PoolProfile(cluster=clusters[name], pool=name, profile=seed)
        for name, seed in sorted(seeds(facts.routed_pools).items())
    )


def _clusters(
    facts: PolicyFacts,
    views: Mapping[str, ObservedCluster],
    previous: routes.RoutingTable | None,
    with_instances: Set[str],
) -> tuple[routes.Cluster, ...]:
    was_reachable = {cluster.name: cluster.reachable for cluster in (previous.clusters if previous else ())}
    used = with_instances | {pool.spec.cluster_name for pool in facts.routed_pools}
    return tuple(
        routes.Cluster(
            name=name,
            namespace=cluster.spec.namespace,
            place=place_of(cluster),
            datacenter=cluster.spec.datacenter,
            reachable=_reachable(views.get(name, UNSEEN).reachable, was_reachable.get(name, False)),
            capacity_mbps=cluster.spec.link.capacity_mbps,
            # Not `str.format`: PromQL has braces of its own.
            utilisation_query=cluster.spec.link.utilisation_query.replace("$cluster", name),
            round_trip_millis=cluster.spec.link.round_trip_millis,
        )
        for name, cluster in sorted(facts.clusters.items())
        if name in used and name not in facts.revoked
    )


def _reachable(seen: bool | None, before: bool) -> bool:
    return before if seen is None else seen


def _instances(
    facts: PolicyFacts, views: Mapping[str, ObservedCluster], previous: routes.RoutingTable | None
) -> tuple[routes.Instance, ...]:
    found: list[routes.Instance] = []
    for pool in facts.known_pools:
        name = pool.spec.cluster_name or HUB
        if name in facts.revoked:
            continue
        pods = views.get(name, UNSEEN).pods
        if pods is None:
            found += _carried(pool, name, previous)
        else:
            mine = [
                pod
                for pod in pods
                if (pod.pool_uid, pod.role) == (facts.pods_pool_uid(pool), role_of(pool))
                and (pod.instance.model or pool.spec.model.name) == facts.policy.spec.model
            ]
            found += _of_pool(pool, name, mine, facts.clusters.get(name))
    return tuple(sorted(found, key=lambda instance: (instance.cluster, instance.pool, instance.name)))


def _carried(pool: PoolObject, cluster: str, previous: routes.RoutingTable | None) -> list[routes.Instance]:
    wanted = (pool.metadata.name, cluster, role_of(pool))
    return [one for one in (previous.instances if previous else ()) if (one.pool, one.cluster, one.role) == wanted]


def _of_pool(
    pool: PoolObject, cluster: str, pods: Iterable[PodFacts], member: MemberCluster | None
) -> list[routes.Instance]:
    is_by_host = member is not None and member.spec.addressing == "HostIP"
    instances: list[routes.Instance] = []
    for pod in pods:
        by_host = is_by_host if pod.instance.by_host is None else pod.instance.by_host
        engine = _engine_of(pod, pool)
        address = pod.host_ip if by_host else pod.pod_ip
        # A pod that ends has streams to finish, ready or not.
        if not address or not (pod.ready or pod.terminating):
            continue
        instances.append(
            routes.Instance(
                name=pod.name,
                pool=pool.metadata.name,
                cluster=cluster,
                role=role_of(pool),
                url=f"{pod.scheme}://{url_host(address)}:{WORKER_API_PORT}",
                state="Draining" if pod.terminating else "Ready",
                convertible=pod.shared.gated,
                engine=engine,
                data_port=pod.instance.data_port or WORKER_DATA_PORT,
                # Gateways refuse a whole table with more.
                ranks=min(pod.instance.ranks, routes.MAX_RANKS),
                rank_ports=pod.instance.rank_ports,
                draft_layers=pod.instance.draft_layers,
            )
        )
    return instances


def _engine_of(pod: PodFacts, pool: PoolObject) -> routes.EngineName:
    """Return the engine that a pod runs, by its pool if the pod does not say a known one."""
    return pod.instance.engine if pod.instance.engine in ENGINES else pool.spec.engine.record.name


def ready_by_role(table: routes.RoutingTable, role: routes.PoolRole) -> int:
    """Return how many instances of a role take new requests."""
    return sum(instance.role == role and instance.state == "Ready" for instance in table.instances)
