"""Assigns the roles in a shared Deployment: which instance prefills, which decodes, and which is deleted first.

Two pools want `wanted.prefill` and `wanted.decode` of the same pods. The roles are labels, which the Deployment's
controller does not read. Kubernetes deletes pods of an older template in a rollout first, then pods that are not ready.
Among ready ones it deletes that with the lowest deletion cost. So roles are planned again from the present pods after
each change, with as few conversions of ready pods as possible:

    1. pods of the present template keep their role as far as it is wanted, ready ones first
    2. pods without a role take the missing roles, decode first; in a rollout an older pod of that role becomes cheap
    3. older pods keep their role as far as it is still wanted
    4. roles that are still missing come from a role with too many: pods that are not ready before ready ones
    5. every other pod keeps its role, and is cheap

If all pods have one template and there are too many, those that are not ready are deleted first whatever their cost. So
the plan leaves them out. Decode comes before everything else: without a ready decode instance the policy serves
nothing. A decoding instance can prefill too, so a ready prefill instance takes its place.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from prfaas.api import DecodePool, PrefillPool
from prfaas.wire.routes import PoolRole
from prfaas_operator.plan.conditions import ConditionState, no, yes
from prfaas_operator.plan.pod_facts import PodFacts
from prfaas_operator.plan.pool_status import INSTANCES_NOT_READY


class RoleCounts(NamedTuple):
    """The wanted instances of each role for both pools together."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def of(self, role: PoolRole) -> int:
        return self.prefill if role == "prefill" else self.decode


class Assignment(NamedTuple):
    """The labels of one pod. Without a role its gate stays shut; a cheap pod is deleted first."""

    pod: PodFacts
    role: PoolRole | None
    cheap: bool

    @property
    def converts(self) -> bool:
        """True if an instance that has a role gets the other one."""
        return bool(self.pod.role) and self.role is not None and self.pod.role != self.role

    @property
    def labels_differ(self) -> bool:
        return (self.role or "", self.cheap) != (self.pod.role, self.pod.shared.cheap)

    @property
    def gate_differs(self) -> bool:
        return self.role is not None and self.pod.shared.gated and not self.pod.shared.gate_open


def assign(pods: Iterable[PodFacts], wanted: RoleCounts, template: str) -> tuple[Assignment, ...]:
    """Return the assignment of each pod that is not ending.

    Args:
        pods: of one shared Deployment.
        wanted: by both pools.
        template: digest of the present pod template; pods of another one are being replaced.
    """
    alive = sorted((pod for pod in pods if not pod.terminating), key=_worth)
    present = [pod for pod in alive if pod.shared.template == template]
    older = [pod for pod in alive if pod.shared.template != template]
    going = set() if older else _first_to_go(present, len(present) - wanted.total)
    staying = [pod for pod in present if pod.name not in going]
    roles = _roles(staying, older, wanted)
    fallback = _fallback_decoder([*staying, *older], roles) if wanted.decode else None
    if fallback is not None and (fallback.name in roles or fallback in staying):
        roles = _roles(staying, older, wanted, fallback)
    return tuple(
        Assignment(
            pod, "decode" if pod == fallback else roles.get(pod.name) or _role_of(pod), cheap=pod.name not in roles
        )
        for pod in alive
    )


def _fallback_decoder(pods: Sequence[PodFacts], roles: Mapping[str, PoolRole]) -> PodFacts | None:
    """Return a ready pod that must decode because no other ready pod does; a surplus pod, if there is any.

    In a rollout an older pod decodes in addition to the new pods, which would wait for a role otherwise. Every other
    such pod takes a wanted role.
    """
    ready = [pod for pod in pods if pod.ready]
    if any(roles.get(pod.name, pod.role) == "decode" for pod in ready):
        return None
    return min(ready, key=lambda pod: (pod.name in roles, pod.role != "decode"), default=None)


def _roles(
    present: Sequence[PodFacts], older: Sequence[PodFacts], wanted: RoleCounts, fallback: PodFacts | None = None
) -> dict[str, PoolRole]:
    """Return roles by pod, in the order of the module's docstring; `fallback` decodes in any case."""
    plan = _Plan(wanted)
    if fallback is not None:
        plan.give(fallback, "decode")
    plan.keep(present)
    plan.fill([pod for pod in present if not pod.role])
    plan.keep(older)
    plan.convert(present)
    plan.convert(older)
    return plan.roles


def _worth(pod: PodFacts) -> tuple[bool, str, str]:
    """Sort key of pods to keep: ready before unready, then the oldest, which has the fullest cache."""
    return not pod.ready, pod.shared.created, pod.name


def _first_to_go(pods: Sequence[PodFacts], too_many: int) -> set[str]:
    """Return the pods that a ReplicaSet deletes whatever their cost: those that are not ready, the youngest first."""
    unready = [pod.name for pod in pods if not pod.ready]
    return set(unready[max(0, len(unready) - too_many) :]) if too_many > 0 else set()


def _role_of(pod: PodFacts) -> PoolRole | None:
    return "prefill" if pod.role == "prefill" else "decode" if pod.role == "decode" else None


class _Plan:
    """The assigned roles by pod, and the missing roles."""

    def __init__(self, wanted: RoleCounts):
        self.roles: dict[str, PoolRole] = {}
        self._wanted = wanted
        self._missing: dict[PoolRole, int] = {"decode": wanted.decode, "prefill": wanted.prefill}

    def keep(self, pods: Iterable[PodFacts]) -> None:
        """Let pods keep their role as far as it is wanted."""
        for pod in pods:
            role = _role_of(pod)
            if role:
                self.give(pod, role)

    def fill(self, pods: Iterable[PodFacts]) -> None:
        """Give missing roles to pods without a role: the first decode instance, then the role that lacks most."""
        for pod in pods:
            none_decodes = self._missing["decode"] == self._wanted.decode
            decode_lacks_most = self._missing["decode"] >= self._missing["prefill"]
            decode = self._missing["decode"] and (none_decodes or decode_lacks_most)
            self.give(pod, "decode" if decode else "prefill")

    def convert(self, pods: Sequence[PodFacts]) -> None:
        """Take missing roles from surplus pods: those that are not ready first, then the youngest."""
        for pod in sorted(pods, key=_worth, reverse=True):
            self.give(pod, "decode" if self._missing["decode"] else "prefill")

    def give(self, pod: PodFacts, role: PoolRole) -> None:
        """Give a role to a pod without one, if the role is missing."""
        if self._missing[role] and pod.name not in self.roles:
            self._missing[role] -= 1
            self.roles[pod.name] = role


SETTLE_SECONDS: Final = 3.0
"""A conversion is two writes, one to each pool. Between them the sum is off by one. A Deployment that followed at once
would delete an instance that is wanted a moment later, or start an unwanted one.
"""


class Sharer(NamedTuple):
    """The part of a PrefillPool that others depend on; `share_with` is empty for a pool with its own instances.

    `cluster` is its MemberCluster, empty for the hub.
    """

    created: str
    name: str
    uid: str
    share_with: str
    replicas: int
    deleting: bool
    cluster: str = ""


def project_sharer(body: Mapping[str, Any]) -> Sharer:
    """Reduce a PrefillPool, as the API server returns it, to a sharer."""
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
    """Return the pools that want to share a DecodePool, the permitted one first; a deleted pool gives up its share."""
    # By `created`, a sharer's first field: the oldest one is permitted.
    return sorted(pool for pool in pools if pool.share_with == decode_pool and not pool.deleting)


def wanted(pool: DecodePool, sharer: Sharer | None) -> RoleCounts:
    """Return the wanted instances of each role in a DecodePool's Deployment."""
    return RoleCounts(prefill=sharer.replicas if sharer else 0, decode=pool.spec.replicas)


class Settling(NamedTuple):
    """The size of a shared Deployment, and the time since which both pools have wanted their present counts."""

    wanted: RoleCounts
    total: int
    since_seconds: float

    def left_seconds(self, now_seconds: float) -> float:
        """Return how long the size still waits; 0 once it is the wanted one."""
        return 0.0 if self.total == self.wanted.total else self.since_seconds + SETTLE_SECONDS - now_seconds


def settle(last: Settling | None, wanted_now: RoleCounts, now_seconds: float) -> Settling:
    """Return the size to run at: the last one until both pools have been unchanged for a while.

    `last` is this function's last result; None, as after a restart of the operator, takes the wanted size at once.
    """
    if last is None:
        return Settling(wanted_now, wanted_now.total, now_seconds)
    if last.wanted != wanted_now:
        last = Settling(wanted_now, last.total, now_seconds)
    return last if last.left_seconds(now_seconds) > 0 else last._replace(total=wanted_now.total)


def refusal(pool: Sharer, decode_pool: DecodePool | None, pools: Iterable[Sharer]) -> ConditionState | None:
    """Return why a PrefillPool cannot share its DecodePool; None if it can."""
    name = pool.share_with
    if decode_pool is None:
        return no("DecodePoolNotFound", f"DecodePool {name} does not exist; create it, or delete this pool")
    if decode_pool.metadata.deletion_timestamp:
        return no("DecodePoolDeleting", f"DecodePool {name} is being deleted, and the instances with it")
    engine = decode_pool.spec.engine.record
    if not engine.serves_both_roles:
        message = (
            f"an instance of {engine.name} gets one role when it starts, so DecodePool {name} cannot share its "
            "instances; give this pool its own, or use vllm with connector Prfaas"
        )
        return no("EngineHasOneRole", message)
    first = sharers_of(name, pools)[:1]
    if first and first[0].uid != pool.uid:
        message = f"DecodePool {name} is shared with PrefillPool {first[0].name} already; delete one of the two"
        return no("AlreadyShared", message)
    return None


def resolved(pools: Iterable[PrefillPool], decode_pools: Mapping[str, DecodePool]) -> list[PrefillPool]:
    """Return the pools; a sharing pool gets its DecodePool's model and engine, a refused one gets none."""
    found = list(pools)
    sharers = [sharer_of(pool) for pool in found]
    return [
        pool
        if not pool.spec.share_with or refusal(sharer, decode_pools.get(pool.spec.share_with), sharers)
        else _with_model(pool, decode_pools[pool.spec.share_with])
        for pool, sharer in zip(found, sharers, strict=True)
    ]


def sharer_of(pool: PrefillPool) -> Sharer:
    """Return the part of a PrefillPool that the other pools of its Deployment depend on."""
    metadata, spec = pool.metadata, pool.spec
    deleting = metadata.deletion_timestamp is not None
    return Sharer(metadata.creation_timestamp, metadata.name, metadata.uid, spec.share_with, spec.replicas, deleting)


def _with_model(pool: PrefillPool, decode_pool: DecodePool) -> PrefillPool:
    theirs = {"model": decode_pool.spec.model, "engine": decode_pool.spec.engine}
    return pool.model_copy(update={"spec": pool.spec.model_copy(update=theirs)})


class Side(NamedTuple):
    """One role of a shared Deployment: its instances that are not ending, and the number of ready ones."""

    role: PoolRole
    wanted: int
    pods: tuple[PodFacts, ...]

    @property
    def ready(self) -> int:
        return sum(pod.ready for pod in self.pods)


def side(role: PoolRole, wanted_: RoleCounts, pods: Iterable[PodFacts]) -> Side:
    """Return one side of a shared Deployment; `pods` are all of its pods."""
    mine = tuple(pod for pod in pods if pod.role == role and not pod.terminating)
    return Side(role, wanted_.of(role), mine)


def readiness(side_: Side, deployment: str, whole: ConditionState | None = None) -> ConditionState:
    """Return the condition Ready of one side; `whole` is the condition of the whole Deployment."""
    shared = f"in Deployment {deployment}, which both roles share"
    if side_.ready >= side_.wanted == len(side_.pods):
        return yes("AllReady", f"{side_.ready} of {side_.wanted} instances ready {shared}")
    progress = f"{side_.ready} of {side_.wanted} {side_.role} instances ready {shared}"
    waiting = sorted((pod.name, pod.problem) for pod in side_.pods if pod.problem)
    if whole is not None and not whole.good:
        return no(whole.reason, f"{progress}; as a whole {whole.message}")
    obstacle = f"pod {waiting[0][0]}: {waiting[0][1]}" if waiting else ""
    return no(INSTANCES_NOT_READY, "; ".join(filter(None, (progress, obstacle))))
