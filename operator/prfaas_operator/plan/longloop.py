"""The policy's long loop between custom resources and `prfaas.capacity.longloop`: translates facts in and status out.

Only the questions of Kubernetes are decided here. Such questions are other writers of a pool's replicas, unsettled
pools, and a change of two pools that was interrupted half-way. Times show an interrupted change. The pool's replicas
differ from the plan, and their last write is older than the plan.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from prfaas.api import PrfaaSPolicy
from prfaas.capacity.installation import Installation, ttft_p90_seconds
from prfaas.capacity.longloop import InstallationState, LongLoopDecision, Rules
from prfaas_operator.plan import installation as installed
from prfaas_operator.plan import ownership
from prfaas_operator.plan.conditions import READY, ConditionState
from prfaas_operator.plan.policy import PolicyFacts
from prfaas_operator.plan.pool_status import PoolObject

BALANCED: Final = "Balanced"
METRICS_FRESH: Final = "MetricsFresh"
MAX_AGE_SECONDS: Final = 120.0
"""The scheduler renews a summary every half minute."""
NEVER: Final = 2**31 - 1


class Summary(NamedTuple):
    """The scheduler's last summary: its own time, its age at its first sight here, and the time of that sight.

    A scheduler uses its own machine's clock, so from the second summary on the time of its arrival here counts. The
    first summary may come from any scheduler, so only its date is known. The further that date is off, the less the
    summary counts.
    """

    time: str
    age_seconds: float
    seen_at_seconds: float


def refreshed(last: Summary | None, time: str, now: datetime, monotonic_seconds: float) -> Summary:
    """Return the summary in a policy's present status, with its age and the time of its first sight."""
    if last is not None and last.time == time:
        return last
    age_seconds = abs(_age_seconds(time, now)) if last is None else 0.0
    return Summary(time, age_seconds, monotonic_seconds)


class LongLoopResult(NamedTuple):
    """The long loop's last result for a policy, and its expiry in monotonic seconds."""

    generation: int
    again_at_seconds: float
    conditions: Mapping[str, ConditionState]
    fields: Mapping[str, Any]


class PoolSeen(NamedTuple):
    """One of the policy's pools: as read, and as the API server returned it."""

    pool: PoolObject
    live: Mapping[str, Any]


def acts(policy: PrfaaSPolicy) -> bool:
    """Return true if the policy lets the long loop change replicas."""
    return policy.spec.conversion.enabled or policy.spec.scaling.mode == "Auto"


def rules(policy: PrfaaSPolicy) -> Rules:
    """Return the long loop's rules that a policy's spec sets."""
    conversion, scaling, slo = policy.spec.conversion, policy.spec.scaling, policy.spec.slo
    return Rules(
        converts=conversion.enabled,
        min_prefill=conversion.min_prefill,
        min_decode=conversion.min_decode,
        conversion_cooldown_seconds=conversion.cooldown_seconds,
        scales=scaling.mode == "Auto",
        target_load=scaling.target_load_percent / 100,
        scaling_cooldown_seconds=scaling.cooldown_seconds,
        ttft_seconds=slo.ttft_millis / 1000 if slo.ttft_millis is not None else None,
    )


def refusals(policy: PrfaaSPolicy, pools: Iterable[PoolSeen], policies: Iterable[PrfaaSPolicy]) -> dict[str, str]:
    """Return, by pool, why this policy must not write its replicas."""
    others = [other for other in policies if acts(other) and _precedes(other, policy)]
    found = {one.pool.metadata.name: _refusal(one, others) for one in pools}
    return {name: why for name, why in found.items() if why}


def _precedes(other: PrfaaSPolicy, policy: PrfaaSPolicy) -> bool:
    first, second = other.metadata, policy.metadata
    # Kubernetes dates in whole seconds, so names decide between policies that were applied together.
    return (first.creation_timestamp, first.name) < (second.creation_timestamp, second.name)


def _refusal(one: PoolSeen, others: Sequence[PrfaaSPolicy]) -> str:
    name, kind = one.pool.metadata.name, one.pool.kind_name
    for other in others:
        if name in (other.spec.decode_pool, *other.spec.prefill_pools):
            return f"PrfaaSPolicy {other.metadata.name} owns the replicas of {kind} {name}"
    writer = ownership.owner(one.live)
    if writer == "Autoscaler":
        return f"an autoscaler owns the replicas of {kind} {name}: delete it, or remove the pool from the policy"
    is_permitted = ownership.says_yes(one.live, ownership.SCALED_BY_POLICY)
    if writer == "User" and not ownership.is_default(one.live) and not is_permitted:
        give = f"kubectl annotate {type(one.pool).plural} {name} {ownership.SCALED_BY_POLICY}=true"
        return f"a user owns the replicas of {kind} {name}: give them to the policy with `{give}`"
    return ""


def moment(facts: PolicyFacts, found: Installation, now: datetime, summary_seconds: float) -> InstallationState:
    """Return the state of the policy's pools; `summary_seconds` is the age of the scheduler's summary."""
    policy = facts.policy
    plan = policy.status.plan
    counted = {pool.name for pool in found.pools}
    within = (pool for pool in facts.routed_pools if pool.metadata.name in counted)
    unsettled = next(filter(None, map(_unsettled, within)), None)
    return InstallationState(
        arrivals_per_second=installed.arrivals_per_second(policy) if policy.status.observed else None,
        waiting_prefills=installed.waiting_prefills(policy),
        since_change_seconds=max(0.0, _age_seconds(plan.last_change_time, now)) if plan else math.inf,
        stale=_stale(policy, summary_seconds),
        unknown=installed.unknown(found, facts),
        under_way=unsettled[1] if unsettled else "",
        ours=unsettled is not None and plan is not None and plan.replicas.get(unsettled[0]) is not None,
    )


def _stale(policy: PrfaaSPolicy, summary_seconds: float) -> str:
    fresh = next((one for one in policy.status.conditions if one.type == METRICS_FRESH), None)
    if fresh is not None and fresh.status == "False":
        return f"measurements are stale ({fresh.reason}; see the condition {METRICS_FRESH})"
    if policy.status.observed is not None and summary_seconds > MAX_AGE_SECONDS:
        return f"the scheduler's last summary is {summary_seconds:.0f} s old"
    return ""


def _age_seconds(time: str, now: datetime) -> float:
    return (now.astimezone(UTC) - datetime.fromisoformat(time)).total_seconds()


def _unsettled(pool: PoolObject) -> tuple[str, str] | None:
    """Return a pool's name and its lack; None if it matches its spec and serves."""
    name, status = pool.metadata.name, pool.status
    ready = next((one for one in status.conditions if one.type == READY), None)
    if ready is None or ready.observed_generation != pool.metadata.generation:
        return name, f"{pool.kind_name} {name} has a change that was not reconciled yet"
    if ready.status != "True":
        return name, f"{pool.kind_name} {name} is not settled ({ready.reason}: {ready.message})"
    if not status.replicas == status.ready_replicas == pool.spec.replicas:
        counted = f"{status.ready_replicas} of {pool.spec.replicas} instances serve, {status.replicas} exist"
        return name, f"{pool.kind_name} {name} is not settled ({counted})"
    return None


def unfinished(policy: PrfaaSPolicy, pools: Iterable[PoolSeen]) -> dict[str, int]:
    """Return the last plan's replicas for pools that did not get them: the writes were interrupted."""
    plan = policy.status.plan
    if plan is None:
        return {}
    decided = datetime.fromisoformat(plan.last_change_time)
    return {
        name: wanted
        for one in pools
        if (wanted := plan.replicas.get(name := one.pool.metadata.name)) is not None
        and wanted != one.pool.spec.replicas
        and ownership.written_before(one.live, decided)
    }


def condition(decision: LongLoopDecision) -> ConditionState:
    """Return the long loop's decision as a condition; Unknown while a change is under way."""
    passing = decision.reason in {"Converting", "Scaling", "PoolsNotSettled"}
    return ConditionState("Unknown" if passing else decision.status, decision.reason, decision.message)


def plan_fields(found: Installation, decision: LongLoopDecision, now: str) -> dict[str, Any]:
    """Return status.plan after a decision with a change."""
    counts = {**found.counts, **decision.changes}
    return {
        "prefill": found.hub_prefill(counts),
        "decode": counts[found.decode.name],
        "replicas": dict(sorted(decision.changes.items())),
        "lastChangeTime": now,
    }


def capacity_fields(found: Installation, decision: LongLoopDecision) -> dict[str, Any] | None:
    """Return status.capacity; None while it is unknown."""
    now, best = decision.now, decision.best
    if now is None or best is None or now.plan is None:
        return None
    p90 = ttft_p90_seconds(found, now)
    return {
        "arrivalMilliPerSecond": _milli(now.arrivals_per_second),
        "maxMilliPerSecond": _milli(now.lambda_max),
        "offloadMilliPerSecond": _milli(now.plan.theta_prfaas),
        "prefillMilliPerSecond": _milli(now.plan.theta_pd_p),
        "decodeMilliPerSecond": _milli(now.plan.theta_pd_d),
        "prefillLoadPercent": _percent(now.prefill_load),
        "decodeLoadPercent": _percent(now.decode_load),
        **({"ttftP90Millis": round(1000 * p90)} if math.isfinite(p90) else {}),
        "bestPrefill": found.hub_prefill(best.counts),
        "bestDecode": best.counts[found.decode.name],
        "bestMilliPerSecond": _milli(best.lambda_max),
    }


def _milli(rate: float) -> int:
    return min(round(1000 * rate), NEVER) if math.isfinite(rate) else NEVER


def _percent(share: float) -> int:
    return min(round(100 * share), NEVER) if math.isfinite(share) else NEVER
