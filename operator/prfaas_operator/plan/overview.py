"""What `prfaas status` tells: both clusters, their pools, the links between them, the policies, and what is wrong.

All of it is what the objects' status says; nothing is asked of a member cluster, a gateway or a worker.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from prfaas import names
from prfaas.api import Condition, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.api.base import Resource
from prfaas_operator.plan.conditions import READY
from prfaas_operator.plan.pool import Pool, role_of

NOT_SEEN: Final = "NotSeenYet"
"""Why an object is not ready that no operator has looked at."""


@dataclass(frozen=True)
class PoolView:
    """A pool: how many of the instances wanted are ready, and why not all."""

    kind: str
    name: str
    role: str
    cluster: str
    ready_replicas: int
    replicas: int
    is_ready: bool
    reason: str


@dataclass(frozen=True)
class ClusterView:
    """A cluster with its pools; of a member also its link to the hub and since when it has been silent."""

    name: str
    is_ready: bool
    reason: str
    version: str
    link_mbps: int | None
    link_percent: int | None
    contact_seconds: int | None
    pools: tuple[PoolView, ...]


@dataclass(frozen=True)
class PolicyView:
    """A policy: what its endpoint serves, and from which length on a prompt is offloaded."""

    name: str
    model: str
    is_ready: bool
    reason: str
    mode: str
    threshold_tokens: int | None
    bandwidth: str
    offloaded_percent: int | None
    link_percent: int | None
    ready_prefill: int
    ready_decode: int


@dataclass(frozen=True)
class Trouble:
    """A condition that does not hold."""

    kind: str
    name: str
    condition: str
    reason: str
    message: str
    since: str


@dataclass(frozen=True)
class Overview:
    """All of one namespace."""

    namespace: str
    clusters: tuple[ClusterView, ...]
    policies: tuple[PolicyView, ...]
    troubles: tuple[Trouble, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class Seen:
    """The objects of one namespace as the API server gave them."""

    namespace: str
    members: Sequence[MemberCluster]
    pools: Sequence[Pool]
    policies: Sequence[PrfaaSPolicy]


def overview(seen: Seen, now: datetime) -> Overview:
    """Put the objects of a namespace in order: the hub first, then members by name."""
    members = sorted(seen.members, key=lambda member: member.metadata.name)
    hub = ClusterView(names.HUB, True, "", "", None, None, None, _pools(seen.pools, ""))
    everything: list[Resource] = [*seen.policies, *members, *seen.pools]
    return Overview(
        seen.namespace,
        (hub, *(_member(member, seen, now) for member in members)),
        tuple(_policy(policy) for policy in sorted(seen.policies, key=lambda policy: policy.metadata.name)),
        tuple(trouble for one in everything for trouble in _troubles(one)),
    )


def _conditions(one: Resource) -> Sequence[Condition]:
    return one.status.conditions  # pyright: ignore[reportAttributeAccessIssue]  # every kind of ours has a status


def _readiness(one: Resource) -> tuple[bool, str]:
    ready = next((condition for condition in _conditions(one) if condition.type == READY), None)
    return (ready.status == "True", ready.reason) if ready else (False, NOT_SEEN)


def _pools(pools: Iterable[Pool], cluster: str) -> tuple[PoolView, ...]:
    here = sorted((pool for pool in pools if pool.spec.cluster_name == cluster), key=lambda pool: pool.metadata.name)
    return tuple(_pool(pool) for pool in here)


def _pool(pool: Pool) -> PoolView:
    cluster = pool.spec.cluster_name or names.HUB
    counts = (pool.status.ready_replicas, pool.spec.replicas)
    return PoolView(pool.kind_name, pool.metadata.name, role_of(pool), cluster, *counts, *_readiness(pool))


def _member(member: MemberCluster, seen: Seen, now: datetime) -> ClusterView:
    name, contact = member.metadata.name, member.status.last_contact_time
    here = {
        pool.metadata.name for pool in seen.pools if isinstance(pool, PrefillPool) and pool.spec.cluster_name == name
    }
    through = [
        policy.status.link_utilisation_percent
        for policy in seen.policies
        if here & set(policy.spec.prefill_pools) and policy.status.link_utilisation_percent is not None
    ]
    return ClusterView(
        name,
        *_readiness(member),
        member.status.server_version,
        member.spec.link.capacity_mbps,
        max(through, default=None),
        max(0, round((now.astimezone(UTC) - datetime.fromisoformat(contact)).total_seconds())) if contact else None,
        _pools(seen.pools, name),
    )


def _policy(policy: PrfaaSPolicy) -> PolicyView:
    status = policy.status
    return PolicyView(
        policy.metadata.name,
        policy.spec.model,
        *_readiness(policy),
        policy.spec.threshold.mode,
        status.threshold_tokens,
        status.bandwidth or "",
        status.offloaded_percent,
        status.link_utilisation_percent,
        status.ready_prefill,
        status.ready_decode,
    )


def _troubles(one: Resource) -> Iterable[Trouble]:
    if not _conditions(one):
        message = "no operator has looked at it; see `kubectl get deploy prfaas-operator`"
        yield Trouble(one.kind_name, one.metadata.name, READY, NOT_SEEN, message, "")
    said: set[tuple[str, str]] = set()
    for condition in sorted(_conditions(one), key=lambda condition: condition.type != READY):
        if condition.status == "False" and (condition.reason, condition.message) not in said:
            said.add((condition.reason, condition.message))
            what = (condition.type, condition.reason, condition.message, condition.last_transition_time)
            yield Trouble(one.kind_name, one.metadata.name, *what)
