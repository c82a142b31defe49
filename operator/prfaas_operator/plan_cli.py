"""Reads the input of `prfaas plan --from-cluster` from a running installation, from the hub's objects only.

The entry point group `prfaas.plan_sources` registers this module, because core, which has the command, knows no
cluster. The figures are those of the operator's long loop. As with a file, the plan may divide shared instances anew.
"""

import asyncio
from pathlib import Path
from typing import Final

from prfaas.api import DecodePool, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.capacity.installation import system_of
from prfaas.capacity.planfile import PlanFile, PlanSlo
from prfaas.capacity.system import check
from prfaas.errors import ConfigError
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.connect import KubeContext, open_context
from prfaas_operator.plan import reading
from prfaas_operator.plan.installation import installation, unknown
from prfaas_operator.plan.policy import PolicyFacts
from prfaas_operator.plan.roles import resolved

MAX_NAMED: Final = 10


def read(kubeconfig: Path | None, context: str | None, namespace: str, policy: str | None) -> PlanFile:
    """Return the system of a policy's pools, and its load; by default of the only policy there is.

    Raises ConfigError: there is no such policy, or measurements are missing; the message names them.
    Raises PeerError: the API server is not reached, or refuses.
    """
    return asyncio.run(_read(KubeContext(kubeconfig, context, namespace), policy))


async def _read(target: KubeContext, policy: str | None) -> PlanFile:
    async with open_context(target) as there:
        return plan_file(await _facts(there, policy))


async def _facts(hub: ClusterClient, name: str | None) -> PolicyFacts:
    kinds_read = (kinds.POLICY, kinds.DECODE_POOL, kinds.PREFILL_POOL, kinds.MEMBER_CLUSTER)
    policies, decode, prefill, members = await asyncio.gather(*(hub.list_all(kind) for kind in kinds_read))
    policy = _chosen([reading.read(PrfaaSPolicy, one) for one in policies], name, hub.namespace)
    decode_pools = {one.metadata.name: one for one in (reading.read(DecodePool, one) for one in decode)}
    prefill_pools = resolved([reading.read(PrefillPool, one) for one in prefill], decode_pools)
    return PolicyFacts(
        policy,
        decode_pools,
        {one.metadata.name: one for one in prefill_pools},
        {one.metadata.name: one for one in (reading.read(MemberCluster, one) for one in members)},
    )


def _chosen(policies: list[PrfaaSPolicy], name: str | None, namespace: str) -> PrfaaSPolicy:
    names = sorted(one.metadata.name for one in policies)
    named = f"namespace {namespace} has {', '.join(names[:MAX_NAMED]) or 'none'}"
    if name is None and len(policies) != 1:
        raise ConfigError(f"--policy must name the PrfaaSPolicy to plan; {named}")
    for policy in policies:
        if name in (None, policy.metadata.name):
            return policy
    raise ConfigError(f"--policy is {name!r}, but no such PrfaaSPolicy exists; {named}")


def plan_file(facts: PolicyFacts) -> PlanFile:
    """Return the plan file of a policy for `prfaas plan`; raises ConfigError where measurements are missing."""
    policy = facts.policy
    if policy.spec.decode_pool not in {pool.metadata.name for pool in facts.routed_pools}:
        raise ConfigError(f"DecodePool {policy.spec.decode_pool} does not exist, or does not have the policy's model")
    found = installation(facts, {})
    missing = unknown(found, facts)
    if found.load is None or missing:
        raise ConfigError(f"PrfaaSPolicy {policy.metadata.name} cannot be planned yet: {missing}")
    return PlanFile(
        system=check(system_of(found, found.load, found.counts, divided=False)),
        workload=found.load.workload,
        slo=PlanSlo(ttft_millis=policy.spec.slo.ttft_millis),
        published={},
        simulation={},
        notes=("Memory was not checked: an installation does not say what its weights take.",),
    )
