"""The document behind the live page: clusters, instances, threshold and links as this gateway sees them now."""

import msgspec

from prfaas.names import HUB
from prfaas.wire.control import Bandwidth, LinkUse
from prfaas.wire.routes import InstanceState, Role, ThresholdMode
from prfaas_gateway.dashboard.record import Moment, Placed, Record
from prfaas_gateway.state import GatewayState


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. `ejected_seconds` is for how long it is still left alone after it failed; 0: it is not."""

    name: str
    pool: str
    role: Role
    state: InstanceState
    in_flight: int
    ejected_seconds: float


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster with its instances; the hub has no link of its own."""

    name: str
    datacenter: str = ""
    reachable: bool = True
    in_use: bool = True
    capacity_mbps: int = 0
    link: LinkUse | None = None
    instances: tuple[InstanceView, ...] = ()


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the page draws. `placed` and `moments` hold only what is newer than what was asked for."""

    policy: str
    model: str
    now: float
    started: float
    """When the gateway did: another one counts anew."""
    draining: bool
    mode: ThresholdMode | None
    threshold_tokens: int | None
    bandwidth: Bandwidth | None
    reason: str
    in_flight: int
    offloaded: int
    local: int
    failed_offloads: int
    clusters: tuple[ClusterView, ...]
    placed: list[Placed]
    moments: list[Moment]


def view(state: GatewayState, record: Record, after_number: int, after_moment: float) -> View:
    """Return the document; before the first routing table it has no clusters."""
    rule, counters, table = state.rule(), state.counters, state.table
    return View(
        policy=table.policy if table else "",
        model=table.model if table else "",
        now=record.now(),
        started=record.started,
        draining=state.draining,
        mode=table.threshold.mode if table else None,
        threshold_tokens=rule.threshold_tokens if rule else None,
        bandwidth=rule.bandwidth if rule else None,
        reason=state.reason,
        in_flight=state.in_flight,
        offloaded=counters.offloaded,
        local=counters.local,
        failed_offloads=counters.failed_offloads,
        clusters=_clusters(state),
        placed=record.placed_after(after_number),
        moments=record.moments_after(after_moment),
    )


def _clusters(state: GatewayState) -> tuple[ClusterView, ...]:
    rule, table = state.rule(), state.table
    if table is None or rule is None:
        return ()
    links = {link.cluster: link for link in state.links}
    hub = ClusterView(name=HUB, instances=_instances(state, HUB))
    return hub, *(
        ClusterView(
            name=cluster.name,
            datacenter=cluster.datacenter,
            reachable=cluster.reachable,
            in_use=cluster.name in rule.offload_clusters and cluster.datacenter not in table.forbid_datacenters,
            capacity_mbps=cluster.capacity_mbps,
            link=links.get(cluster.name),
            instances=_instances(state, cluster.name),
        )
        for cluster in table.clusters
    )


def _instances(state: GatewayState, cluster: str) -> tuple[InstanceView, ...]:
    now_seconds, until = state.clock(), state.ejections.until_seconds
    found = state.table.instances if state.table else ()
    return tuple(
        InstanceView(
            name=one.name,
            pool=one.pool,
            role=one.role,
            state=one.state,
            in_flight=state.load(one.name),
            ejected_seconds=round(max(0.0, until.get(one.name, 0.0) - now_seconds), 1),
        )
        for one in sorted(found, key=lambda one: (one.role, one.name))
        if one.cluster == cluster
    )
