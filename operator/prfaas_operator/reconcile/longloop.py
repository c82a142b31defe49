"""Converts and scales a policy's pools: measures once in a long interval, decides, and makes at most one change.

Replicas are written by server-side apply under the operator's field manager. The apply takes the field over from its
owner, but only if the object is unchanged since the read. A write by an autoscaler in between is kept. Of two writes
the growing one goes first, because one instance too many is harmless. The plan is in the status before both writes, so
that the next leader can finish interrupted ones.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from prfaas.api import DecodePool, PrfaaSPolicy
from prfaas.capacity.longloop import LongLoopDecision, decide
from prfaas.conditions import rfc3339
from prfaas.errors import PrfaasError
from prfaas_operator import metrics
from prfaas_operator.clusters.kinds import DECODE_POOL, POLICY, PREFILL_POOL, Object, manifest
from prfaas_operator.controller import events
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import Ref
from prfaas_operator.controller.status import ReconcileResult, write_status
from prfaas_operator.errors import ConflictError, reason_of
from prfaas_operator.plan import installation, longloop, ownership
from prfaas_operator.plan.conditions import ConditionState, no
from prfaas_operator.plan.longloop import BALANCED, LongLoopResult, PoolSeen
from prfaas_operator.plan.policy import PolicyFacts
from prfaas_operator.plan.pool_status import PoolObject
from prfaas_operator.plan.reading import read_each

log = logging.getLogger(__name__)

WRITE_TRIES: Final = 3


class PolicyBalancer:
    """Balances policies, and remembers the time of each balance; all of that can be lost."""

    def __init__(self, hub: HubView):
        self._hub = hub
        self._balances: dict[str, LongLoopResult] = {}
        self._summaries: dict[str, longloop.Summary] = {}
        """The last summary of each policy's scheduler, by uid."""

    async def balance(self, facts: PolicyFacts, live: Object) -> LongLoopResult:
        """Return the long loop's part of a policy's status; it decides again when that is due."""
        policy, now_seconds = facts.policy, time.monotonic()
        uid, generation = policy.metadata.uid, policy.metadata.generation
        if not longloop.acts(policy) or policy.spec.decode_pool not in {
            one.metadata.name for one in facts.routed_pools
        }:
            self._balances.pop(uid, None)
            self._summaries.pop(uid, None)
            return LongLoopResult(generation, math.inf, {}, {"capacity": None, "plan": None})
        if policy.status.observed is not None:
            observed_at = policy.status.observed.time
            self._summaries[uid] = longloop.refreshed(
                self._summaries.get(uid), observed_at, self._hub.client.now(), now_seconds
            )
        last = self._balances.get(uid)
        if last is not None and now_seconds < last.again_at_seconds and last.generation == generation:
            return last
        fields: dict[str, Any] = {}
        try:
            conditions = {BALANCED: await self._balance(facts, live, fields)}
        except PrfaasError as error:
            conditions = {BALANCED: no(reason_of(error), str(error))}
        balance = LongLoopResult(generation, now_seconds + policy.spec.intervals.long_seconds, conditions, fields)
        self._balances[uid] = balance
        return balance

    async def _balance(self, facts: PolicyFacts, live: Object, fields: dict[str, Any]) -> ConditionState:
        """Return the condition; put into `fields` what the status says of it, also if a later write fails."""
        policy, now = facts.policy, self._hub.client.now()
        pools = [one for one in map(self._read, facts.routed_pools) if one]
        if rest := longloop.unfinished(policy, pools):
            await self._write_all(pools, rest)
            words = ", ".join(f"{name} to {count}" for name, count in rest.items())
            return ConditionState("Unknown", "Converting", f"finishes an interrupted change: {words}")
        policies = read_each(PrfaaSPolicy, self._hub.all(POLICY))
        found = installation.installation(facts, longloop.refusals(policy, pools, policies))
        decision = decide(
            longloop.rules(policy), found, longloop.moment(facts, found, now, self._summary_seconds(policy))
        )
        condition = longloop.condition(decision)
        fields["capacity"] = longloop.capacity_fields(found, decision)
        metrics.balanced(policy.metadata.name, decision)
        if decision.changes:
            plan = {"plan": longloop.plan_fields(found, decision, rfc3339(now))}
            await write_status(self._hub, POLICY, live, ReconcileResult({BALANCED: condition}, fields | plan))
            fields |= plan
            await self._write_all(pools, decision.changes)
            await self._tell(live, pools, decision)
        return condition

    def _summary_seconds(self, policy: PrfaaSPolicy) -> float:
        """Return the age of the scheduler's summary, 0 while there is none."""
        seen = self._summaries.get(policy.metadata.uid)
        return seen.age_seconds + time.monotonic() - seen.seen_at_seconds if seen else 0.0

    def _read(self, pool: PoolObject) -> PoolSeen | None:
        """Return a pool's present state; None if it is gone."""
        kind = DECODE_POOL if isinstance(pool, DecodePool) else PREFILL_POOL
        live = self._hub.get(Ref(kind, pool.metadata.name))
        return PoolSeen(pool, live) if live is not None and live["metadata"]["uid"] == pool.metadata.uid else None

    async def _write_all(self, pools: Sequence[PoolSeen], changes: Mapping[str, int]) -> None:
        """Write the new replicas; a growing pool goes first."""
        changed = [(one, changes[one.pool.metadata.name]) for one in pools if one.pool.metadata.name in changes]
        for one, count in sorted(changed, key=lambda change: change[0].pool.spec.replicas - change[1]):
            await self._write(one, count)

    async def _write(self, one: PoolSeen, count: int) -> None:
        """Write a pool's replicas, unless they were written since the read.

        Raises ConflictError: they were, or the pool is gone.
        """
        kind = DECODE_POOL if isinstance(one.pool, DecodePool) else PREFILL_POOL
        live, owner = one.live, ownership.owner(one.live)
        for tries_left in reversed(range(WRITE_TRIES)):
            metadata = {key: live["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
            try:
                self._hub.learn(await self._hub.client.apply(manifest(kind, metadata, spec={"replicas": count})))
            except ConflictError:
                again = await self._hub.client.get(kind, one.pool.metadata.name)
                # A status write in between changes the version too, and is no reason to give up.
                untouched = again is not None and (again["spec"].get("replicas"), ownership.owner(again)) == (
                    live["spec"].get("replicas"),
                    owner,
                )
                if again is None or not untouched or not tries_left:
                    raise
                live = again
            else:
                return

    async def _tell(self, live: Object, pools: Sequence[PoolSeen], decision: LongLoopDecision) -> None:
        name = live["metadata"]["name"]
        log.info("PrfaaSPolicy %s: %s", name, decision.message)
        metrics.POOL_CHANGES.labels(name, decision.reason).inc()
        await events.post(self._hub.client, live, "Normal", decision.reason, decision.message)
        for one in pools:
            if one.pool.metadata.name in decision.changes:
                message = f"PrfaaSPolicy {name} {decision.message}"
                await events.post(self._hub.client, dict(one.live), "Normal", decision.reason, message)
