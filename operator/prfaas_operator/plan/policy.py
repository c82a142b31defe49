"""PrfaaSPolicy: an ordered list of checks whose first failure gives the condition Ready its reason."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prfaas.api import DecodePool, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.errors import PrfaasError
from prfaas.wire.routes import RoutingTable
from prfaas_operator.errors import reason_of
from prfaas_operator.plan.conditions import Verdict, no, yes
from prfaas_operator.plan.pool import Counts, Pool, engine_name
from prfaas_operator.plan.sharing import refusal, sharer_of


class PolicyFacts(NamedTuple):
    """What a policy is judged by: itself and every object of the hub by name."""

    policy: PrfaaSPolicy
    decode_pools: Mapping[str, DecodePool]
    prefill_pools: Mapping[str, PrefillPool]
    clusters: Mapping[str, MemberCluster]

    @property
    def named_pools(self) -> tuple[Pool, ...]:
        """The policy's pools that exist, decode pool first."""
        spec = self.policy.spec
        decode = (self.decode_pools[spec.decode_pool],) if spec.decode_pool in self.decode_pools else ()
        return decode + tuple(self.prefill_pools[name] for name in spec.prefill_pools if name in self.prefill_pools)

    @property
    def routed_pools(self) -> tuple[Pool, ...]:
        """The pools that serve the policy's model; no request ever goes to another model."""
        return tuple(pool for pool in self.named_pools if pool.spec.model.name == self.policy.spec.model)

    def home_uid(self, pool: Pool) -> str:
        """Return the uid that the labels of a routed pool's pods name: its own, or its DecodePool's where it shares."""
        if isinstance(pool, PrefillPool) and pool.spec.share_with:
            return self.decode_pools[pool.spec.share_with].metadata.uid
        return pool.metadata.uid


def readiness(
    facts: PolicyFacts, table: RoutingTable, gateway: Counts, child_errors: Sequence[PrfaasError] = ()
) -> Verdict:
    """Return the condition Ready of a policy; `child_errors` are those of its children that could not be applied."""
    failures = (
        _missing_pool(facts),
        _unshared_pool(facts),
        _model_mismatch(facts),
        _engine_mismatch(facts),
        no(reason_of(child_errors[0]), str(child_errors[0])) if child_errors else None,
        _idle_pool(facts, table),
        _gateway(facts, gateway),
    )
    good = yes("AllReady", f"the gateway serves {facts.policy.spec.model}; every pool has a ready instance")
    return next((failure for failure in failures if failure), good)


def _missing_pool(facts: PolicyFacts) -> Verdict | None:
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


def _unshared_pool(facts: PolicyFacts) -> Verdict | None:
    sharers = [sharer_of(pool) for pool in facts.prefill_pools.values()]
    for pool in facts.named_pools:
        if isinstance(pool, PrefillPool) and pool.spec.share_with:
            refused = refusal(sharer_of(pool), facts.decode_pools.get(pool.spec.share_with), sharers)
            if refused is not None:
                return refused._replace(message=f"PrefillPool {pool.metadata.name}: {refused.message}")
    return None


def _model_mismatch(facts: PolicyFacts) -> Verdict | None:
    wanted = facts.policy.spec.model
    for pool in facts.named_pools:
        if pool.spec.model.name != wanted:
            what = f"{pool.kind_name} {pool.metadata.name}"
            return no(
                "ModelMismatch",
                f"{what} serves {pool.spec.model.name}, the policy {wanted}; {what} gets no request until both agree",
            )
    return None


def _engine_mismatch(facts: PolicyFacts) -> Verdict | None:
    """Caches of one kind of engine are nothing to another."""
    for pool in facts.routed_pools[1:]:
        first, name = facts.routed_pools[0], engine_name(pool)
        if name != engine_name(first):
            return no(
                "EngineMismatch",
                f"{pool.kind_name} {pool.metadata.name} runs {name} and {first.kind_name} {first.metadata.name} "
                f"{engine_name(first)}; they serve nothing together until both have one engine",
            )
    return None


def _idle_pool(facts: PolicyFacts, table: RoutingTable) -> Verdict | None:
    served = {(instance.role, instance.pool) for instance in table.instances if instance.state == "Ready"}
    for pool in facts.routed_pools:
        role = "decode" if isinstance(pool, DecodePool) else "prefill"
        if (role, pool.metadata.name) not in served:
            effect = "no request can be served" if role == "decode" else "its share is prefilled elsewhere"
            return no("NoReadyInstances", f"{pool.kind_name} {pool.metadata.name} has no ready instance: {effect}")
    return None


def _gateway(facts: PolicyFacts, gateway: Counts) -> Verdict | None:
    wanted = facts.policy.spec.gateway.replicas
    if gateway.ready >= wanted:
        return None
    return no("GatewayNotReady", gateway.failure or f"{gateway.ready} of {wanted} gateway pods ready")
