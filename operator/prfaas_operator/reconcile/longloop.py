"""Convert and scale a policy's pools: look once in a long interval, decide, and make the one change that comes of it.

Replicas are written by server-side apply under the operator's field manager, which takes the field over from whoever
had it, and only if the object is still as it was read: an autoscaler that came in between is not overruled. Of two
writes the one that grows goes first, since an instance too many is harmless, and the plan is in the status before
either, so that whoever leads next finishes what was cut off.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from prfaas.api import DecodePool, PrfaaSPolicy
from prfaas.capacity.longloop import Decision, decide
from prfaas.errors import PrfaasError
from prfaas_operator import metrics
from prfaas_operator.clusters.api import DECODE_POOL, POLICY, PREFILL_POOL, Object
from prfaas_operator.errors import ConflictError, reason_of
from prfaas_operator.plan import installation, longloop, replicas
from prfaas_operator.plan.conditions import Verdict, no, rfc3339
from prfaas_operator.plan.longloop import BALANCED, Look, PoolSeen
from prfaas_operator.plan.policy import PolicyFacts
from prfaas_operator.plan.pool import Pool
from prfaas_operator.reconcile import events, status
from prfaas_operator.reconcile.reading import read_all
from prfaas_operator.reconcile.runtime import Report, Runtime

log = logging.getLogger(__name__)

WRITE_TRIES: Final = 3


async def balance(runtime: Runtime, facts: PolicyFacts, live: Object) -> Look:
    """Return the long loop's part of a policy's status, after a new look when one is due."""
    policy, now_seconds = facts.policy, time.monotonic()
    uid, generation = policy.metadata.uid, policy.metadata.generation
    if not longloop.acts(policy) or policy.spec.decode_pool not in {one.metadata.name for one in facts.routed_pools}:
        runtime.long_looks.pop(uid, None)
        runtime.summaries.pop(uid, None)
        return Look(generation, math.inf, {}, {"capacity": None, "plan": None})
    if policy.status.observed is not None:
        time_said = policy.status.observed.time
        runtime.summaries[uid] = longloop.sighted(runtime.summaries.get(uid), time_said, runtime.hub.now(), now_seconds)
    last = runtime.long_looks.get(uid)
    if last is not None and now_seconds < last.again_at_seconds and last.generation == generation:
        return last
    try:
        conditions, fields = await _look(runtime, facts, live)
    except PrfaasError as error:
        conditions, fields = {BALANCED: no(reason_of(error), str(error))}, {}
    look = Look(generation, now_seconds + policy.spec.intervals.long_seconds, conditions, fields)
    runtime.long_looks[uid] = look
    return look


async def _look(runtime: Runtime, facts: PolicyFacts, live: Object) -> tuple[dict[str, Verdict], dict[str, Any]]:
    policy, now = facts.policy, runtime.hub.now()
    pools = [one for one in await asyncio.gather(*(_read(runtime, pool) for pool in facts.routed_pools)) if one]
    if rest := longloop.unfinished(policy, pools):
        await _write_all(runtime, pools, rest)
        words = ", ".join(f"{name} to {count}" for name, count in rest.items())
        return {BALANCED: Verdict("Unknown", "Converting", f"finishes what was cut off: {words}")}, {}
    policies = await read_all(runtime.hub, POLICY, PrfaaSPolicy)
    found = installation.installation(facts, longloop.refusals(policy, pools, policies))
    decision = decide(
        longloop.rules(policy), found, longloop.moment(facts, found, now, _summary_seconds(runtime, policy))
    )
    conditions = {BALANCED: longloop.verdict(decision)}
    fields = {"capacity": longloop.capacity_fields(found, decision)}
    metrics.balanced(policy.metadata.name, decision)
    if decision.changes:
        fields["plan"] = longloop.plan_fields(found, decision, rfc3339(now))
        await status.write(runtime.hub, POLICY, live, Report(conditions, fields))
        await _write_all(runtime, pools, decision.changes)
        await _tell(runtime, live, pools, decision)
    return conditions, fields


def _summary_seconds(runtime: Runtime, policy: PrfaaSPolicy) -> float:
    """Return how old the scheduler's summary is, 0 while there is none."""
    seen = runtime.summaries.get(policy.metadata.uid)
    return seen.age_seconds + time.monotonic() - seen.seen_at_seconds if seen else 0.0


async def _read(runtime: Runtime, pool: Pool) -> PoolSeen | None:
    """Return a pool as it is now; None when it has gone."""
    kind = DECODE_POOL if isinstance(pool, DecodePool) else PREFILL_POOL
    live = await runtime.hub.get(kind, pool.metadata.name)
    return PoolSeen(pool, live) if live is not None and live["metadata"]["uid"] == pool.metadata.uid else None


async def _write_all(runtime: Runtime, pools: Sequence[PoolSeen], changes: Mapping[str, int]) -> None:
    """Write the new replicas; a pool that grows goes first."""
    changed = [(one, changes[one.pool.metadata.name]) for one in pools if one.pool.metadata.name in changes]
    for one, count in sorted(changed, key=lambda change: change[0].pool.spec.replicas - change[1]):
        await _write(runtime, one, count)


async def _write(runtime: Runtime, one: PoolSeen, count: int) -> None:
    """Write a pool's replicas, unless somebody else did since it was read.

    Raises:
        ConflictError: somebody did, or the pool has gone.

    """
    kind = DECODE_POOL if isinstance(one.pool, DecodePool) else PREFILL_POOL
    live, owner = one.live, replicas.owner(one.live)
    for tries_left in reversed(range(WRITE_TRIES)):
        metadata = {key: live["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": metadata,
            "spec": {"replicas": count},
        }
        try:
            await runtime.hub.apply(body)
        except ConflictError:
            again = await runtime.hub.get(kind, one.pool.metadata.name)
            # A status that was written in between changes the version as well, and is no reason to give up.
            untouched = again is not None and (again["spec"].get("replicas"), replicas.owner(again)) == (
                live["spec"].get("replicas"),
                owner,
            )
            if again is None or not untouched or not tries_left:
                raise
            live = again
        else:
            return


async def _tell(runtime: Runtime, live: Object, pools: Sequence[PoolSeen], decision: Decision) -> None:
    """Say on the policy, and on each pool, what was changed and why."""
    name = live["metadata"]["name"]
    log.info("PrfaaSPolicy %s: %s", name, decision.message)
    metrics.POOL_CHANGES.labels(name, decision.reason).inc()
    await events.post(runtime.hub, live, "Normal", decision.reason, decision.message)
    for one in pools:
        if one.pool.metadata.name in decision.changes:
            message = f"PrfaaSPolicy {name} {decision.message}"
            await events.post(runtime.hub, dict(one.live), "Normal", decision.reason, message)
