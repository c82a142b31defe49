"""Who shares a DecodePool's instances, what that makes of both pools, and when their Deployment follows.

A DecodePool takes one sharer, the one that was there first; a second one is refused by condition, and comes in when the
first is gone. All of this is read from what exists, so that the order in which pools come and go does not matter.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from prfaas.api import DecodePool, PrefillPool
from prfaas.wire.routes import Role
from prfaas_operator.plan.conditions import Verdict, no, yes
from prfaas_operator.plan.pods import PodFacts
from prfaas_operator.plan.pool import INSTANCES_NOT_READY
from prfaas_operator.plan.roles import Wanted

SETTLE_SECONDS: Final = 3.0
"""A conversion is two writes, one to each pool. Between them the sum is off by one; a Deployment that followed at once
would end an instance that is wanted a moment later, or start one that is not."""


class Sharer(NamedTuple):
    """A PrefillPool as far as others go by it; `share_with` is empty for one that has instances of its own.

    `cluster` is the MemberCluster that it runs in, empty for the hub.
    """

    created: str
    name: str
    uid: str
    share_with: str
    replicas: int
    deleting: bool
    cluster: str = ""


def project_sharer(body: Mapping[str, Any]) -> Sharer:
    """Reduce a PrefillPool, as the API server gives it, to a sharer."""
    metadata, spec = body["metadata"], body.get("spec") or {}
    return Sharer(
        created=metadata.get("creationTimestamp", ""),
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        share_with=spec.get("shareWith") or "",
        replicas=spec.get("replicas", 1),
        deleting="deletionTimestamp" in metadata,
        cluster=spec.get("clusterName") or "",
    )


def sharers_of(decode_pool: str, pools: Iterable[Sharer]) -> list[Sharer]:
    """Return who wants to share a DecodePool, the one that may first; one that is being deleted gives up its share."""
    return sorted(pool for pool in pools if pool.share_with == decode_pool and not pool.deleting)


def wanted(pool: DecodePool, sharer: Sharer | None) -> Wanted:
    """Return how many instances of each role a DecodePool's Deployment has to run."""
    return Wanted(prefill=sharer.replicas if sharer else 0, decode=pool.spec.replicas)


class Settling(NamedTuple):
    """The size of a shared Deployment, and since when both pools have wanted what they want now."""

    wanted: Wanted
    total: int
    since_seconds: float

    def left_seconds(self, now_seconds: float) -> float:
        """Return how long the size still waits; 0 when it is what the pools want."""
        return 0.0 if self.total == self.wanted.total else self.since_seconds + SETTLE_SECONDS - now_seconds


def settle(last: Settling | None, wanted_now: Wanted, now_seconds: float) -> Settling:
    """Return the size to run at: as before until both pools have been left alone for a while.

    `last` is what this returned before; None, as after a restart of the operator, takes what is wanted at once.
    """
    if last is None:
        return Settling(wanted_now, wanted_now.total, now_seconds)
    if last.wanted != wanted_now:
        last = Settling(wanted_now, last.total, now_seconds)
    return last if last.left_seconds(now_seconds) > 0 else last._replace(total=wanted_now.total)


def refusal(pool: Sharer, decode_pool: DecodePool | None, pools: Iterable[Sharer]) -> Verdict | None:
    """Return why a PrefillPool cannot share the DecodePool that it names; None when it does."""
    name = pool.share_with
    if decode_pool is None:
        return no("DecodePoolNotFound", f"DecodePool {name} does not exist; create it, or delete this pool")
    if decode_pool.metadata.deletion_timestamp:
        return no("DecodePoolDeleting", f"DecodePool {name} is being deleted, and the instances with it")
    first = sharers_of(name, pools)[:1]
    if first and first[0].uid != pool.uid:
        message = f"DecodePool {name} is shared with PrefillPool {first[0].name} already; delete one of the two"
        return no("AlreadyShared", message)
    return None


def resolved(pools: Iterable[PrefillPool], decode_pools: Mapping[str, DecodePool]) -> list[PrefillPool]:
    """Return the pools, those that share with their DecodePool's model and engine; one that is refused keeps none."""
    found = list(pools)
    sharers = [sharer_of(pool) for pool in found]
    return [
        pool
        if not pool.spec.share_with or refusal(sharer, decode_pools.get(pool.spec.share_with), sharers)
        else _with_model(pool, decode_pools[pool.spec.share_with])
        for pool, sharer in zip(found, sharers, strict=True)
    ]


def sharer_of(pool: PrefillPool) -> Sharer:
    """Return a PrefillPool as far as sharing goes."""
    metadata, spec = pool.metadata, pool.spec
    deleting = metadata.deletion_timestamp is not None
    return Sharer(metadata.creation_timestamp, metadata.name, metadata.uid, spec.share_with, spec.replicas, deleting)


def _with_model(pool: PrefillPool, decode_pool: DecodePool) -> PrefillPool:
    theirs = {"model": decode_pool.spec.model, "engine": decode_pool.spec.engine}
    return pool.model_copy(update={"spec": pool.spec.model_copy(update=theirs)})


class Side(NamedTuple):
    """One role of a shared Deployment: its instances that are not ending, and how many of them are ready."""

    role: Role
    wanted: int
    pods: tuple[PodFacts, ...]

    @property
    def ready(self) -> int:
        """Instances that serve in this role."""
        return sum(pod.ready for pod in self.pods)


def side(role: Role, wanted_: Wanted, pods: Iterable[PodFacts]) -> Side:
    """Return one side of a shared Deployment; `pods` are all of its pods."""
    mine = tuple(pod for pod in pods if pod.role == role and not pod.terminating and not pod.seat.over)
    return Side(role, wanted_.of(role), mine)


def readiness(side_: Side, deployment: str, trouble: Verdict | None = None) -> Verdict:
    """Return the condition Ready of one side; `trouble` is what holds up the Deployment as a whole."""
    shared = f"in Deployment {deployment}, which both roles share"
    if side_.ready >= side_.wanted == len(side_.pods):
        return yes("AllReady", f"{side_.ready} of {side_.wanted} instances ready {shared}")
    progress = f"{side_.ready} of {side_.wanted} {side_.role} instances ready {shared}"
    waiting = sorted((pod.name, pod.problem) for pod in side_.pods if pod.problem)
    if trouble is not None and not trouble.good:
        return no(trouble.reason, f"{progress}; as a whole {trouble.message}")
    obstacle = f"pod {waiting[0][0]}: {waiting[0][1]}" if waiting else ""
    return no(INSTANCES_NOT_READY, "; ".join(filter(None, (progress, obstacle))))
