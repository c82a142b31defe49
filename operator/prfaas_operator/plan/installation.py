"""Builds a policy's installation for the capacity model from the hub's objects only: specs and statuses.

Load and links come only from the scheduler's summary in the policy's status. So do profiles, but for pools that were
not measured and say themselves what they can do. An offload pool behind a link
that is not alive is left out, because its capacity reaches no request. A pool without instances has its declared link.
"""

from collections.abc import Mapping
from itertools import pairwise

from prfaas.api import DecodePool, Engine, PrefillPool, PrfaaSPolicy
from prfaas.api.policystatus import Observed, ObservedPool
from prfaas.capacity.installation import Installation, MeasuredLoad, Pool
from prfaas.capacity.profile import MeasuredPoint, profile_through
from prfaas.capacity.system import LinkCapacity
from prfaas.capacity.workload import MIN_PROMPTS, workload_of
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Threshold
from prfaas_operator.plan.policy import PolicyFacts
from prfaas_operator.plan.pool_status import PoolObject, role_of
from prfaas_operator.plan.profile import seeds


def installation(facts: PolicyFacts, refusals: Mapping[str, str]) -> Installation:
    """Return the policy's installation; `refusals` say, by pool, why the policy must not write its replicas."""
    policy = facts.policy
    seen = policy.status.observed
    links = _links(facts, seen)
    alive = {link.name for link in links}
    spec = policy.spec.threshold
    profiles = {**_declared(facts), **_measured(seen)}
    return Installation(
        pools=tuple(
            _pool(one, policy.spec.decode_pool, profiles, refusals.get(one.metadata.name, ""))
            for one in facts.routed_pools
            if not one.spec.cluster_name or one.spec.cluster_name in alive
        ),
        links=links,
        threshold=Threshold(mode=spec.mode, tokens=spec.tokens, min_tokens=spec.min, max_tokens=spec.max),
        load=_load(policy, facts.decode_pools[policy.spec.decode_pool], seen),
    )


def arrivals_per_second(policy: PrfaaSPolicy) -> float:
    """Return the arrival rate at all gateways together; each gateway measures its share."""
    seen = policy.status.observed
    return seen.gateway_arrival_milli_per_second / 1000 * max(1, policy.spec.gateway.replicas) if seen else 0.0


def waiting_prefills(policy: PrfaaSPolicy) -> int:
    return sum(pool.waiting_prefills for pool in policy.status.observed.pools) if policy.status.observed else 0


def unknown(found: Installation, facts: PolicyFacts) -> str:
    """Return the missing measurements as a sentence; empty when the plan can be made."""
    policy = facts.policy
    seen, decode = policy.status.observed, facts.decode_pools[policy.spec.decode_pool]
    if seen is None:
        return "the gateway's scheduler has no summary of its measurements yet: send requests for a minute"
    if seen.prompts < MIN_PROMPTS:
        return f"{seen.prompts} prompts in the last minutes are too few; {MIN_PROMPTS} are needed"
    if seen.output_milli_tokens is None:
        return "no answer ended in the last minutes, so the length of answers is not known"
    if _batch(decode, seen) is None or _step_seconds(decode, seen) is None:
        step = _step_seconds(decode, seen)
        what = "the time of a decode step" if step is None else "the number of requests that fit an instance"
        return (
            f"{what} was not measured; set maxBatch and stepMillis of DecodePool "
            f"{decode.metadata.name}, or check that Prometheus scrapes its instances"
        )
    if missing := found.unmeasured():
        return (
            f"no profile of pool {missing[0]} is known: does Prometheus scrape its instances? "
            "Until it was measured, profile in its spec stands in"
        )
    return ""


def _pool(pool: PoolObject, decode_pool: str, profiles: Mapping[str, Profile], refusal: str) -> Pool:
    spec = pool.spec
    shared_with = pool.spec.share_with if isinstance(pool, PrefillPool) else ""
    return Pool(
        name=pool.metadata.name,
        role=role_of(pool),
        replicas=spec.replicas,
        link=spec.cluster_name,
        shares=shared_with == decode_pool,
        least=spec.min_replicas,
        most=spec.max_replicas,
        profile=profiles.get(shared_with or pool.metadata.name),
        refusal=refusal,
    )


def _measured(seen: Observed | None) -> dict[str, Profile]:
    """Return the measured profiles by pool."""
    found = {pool.name: _profile_of(pool) for pool in (seen.pools if seen else ())}
    return {name: profile for name, profile in found.items() if profile is not None}


def _profile_of(pool: ObservedPool) -> Profile | None:
    points = [MeasuredPoint(point.tokens, point.prefill_micros / 1e6, point.cache_bytes) for point in pool.profile]
    return profile_through(points, pool.samples)


def _declared(facts: PolicyFacts) -> dict[str, Profile]:
    """Return what pools say of themselves. A member's pool that says no size of a cache says too little."""
    local = {pool.metadata.name for pool in facts.routed_pools if not pool.spec.cluster_name}
    return {
        name: seed
        for name, seed in seeds(facts.routed_pools).items()
        if seed.samples and (name in local or seed.token_bytes or seed.state_bytes)
    }


def _links(facts: PolicyFacts, seen: Observed | None) -> tuple[LinkCapacity, ...]:
    measured = {link.cluster_name: link.effective_mbps for link in (seen.links if seen else ())}
    return tuple(
        LinkCapacity(name=name, capacity_mbps=float(mbps))
        for name in sorted({pool.spec.cluster_name for pool in facts.routed_pools} - {""})
        if (mbps := measured.get(name, 0) or _declared_mbps(facts, name))
    )


def _declared_mbps(facts: PolicyFacts, cluster: str) -> int:
    """Return a link's declared capacity where no instance can measure it; 0 for a link that is not alive."""
    has_instances = any(pool.spec.replicas for pool in facts.routed_pools if pool.spec.cluster_name == cluster)
    if cluster not in facts.clusters or has_instances:
        return 0
    return facts.clusters[cluster].spec.link.capacity_mbps


def _load(policy: PrfaaSPolicy, decode: DecodePool, seen: Observed | None) -> MeasuredLoad | None:
    if seen is None or not seen.length_tokens or not seen.output_milli_tokens:
        return None
    batch, step_seconds = _batch(decode, seen), _step_seconds(decode, seen)
    if batch is None or step_seconds is None:
        return None
    return MeasuredLoad(
        workload=workload_of(seen.length_tokens),
        arrivals_per_second=arrivals_per_second(policy),
        output_tokens=seen.output_milli_tokens / 1000,
        max_batch=batch,
        step_seconds=step_seconds,
    )


def _batch(decode: DecodePool, seen: Observed) -> int | None:
    """Return how many requests an instance decodes together: `maxBatch`, or what was measured, within its flag."""
    known = [one for one in (seen.decode_batch, _running_limit(decode.spec.engine)) if one]
    return decode.spec.max_batch or min(known, default=None)


def _running_limit(engine: Engine) -> int | None:
    """Return the most requests that the flags of an engine let run, if it does not publish that itself."""
    wanted = engine.record.running_limit_flag
    words = [word for arg in engine.args for word in arg.split("=", 1)]
    for flag, value in pairwise(words):
        if wanted and flag.replace("_", "-") == wanted and value.isdecimal():
            return int(value) or None
    return None


def _step_seconds(decode: DecodePool, seen: Observed) -> float | None:
    if decode.spec.step_millis is not None:
        return decode.spec.step_millis / 1000
    return seen.decode_step_micros / 1e6 if seen.decode_step_micros else None
