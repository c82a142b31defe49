"""Reconcile a PrfaaSPolicy: its gateway with all that belongs to it, and its routing table."""

from collections.abc import Iterable
from typing import Final

from prfaas import names
from prfaas.api import DecodePool, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.errors import PrfaasError
from prfaas.wire.routes import RoutingTable
from prfaas_operator.clusters import api
from prfaas_operator.clusters.api import Object
from prfaas_operator.plan import policy as plan
from prfaas_operator.plan import routes
from prfaas_operator.plan.conditions import DELETING, READY, no
from prfaas_operator.plan.pool import Counts, counts
from prfaas_operator.reconcile import children
from prfaas_operator.reconcile.member import read_all
from prfaas_operator.reconcile.runtime import Report, Runtime
from prfaas_operator.reconcile.wakers import Ref
from prfaas_operator.render import access, gateway, protection, service
from prfaas_operator.render import routes as render_routes
from prfaas_operator.render.common import Manifest

CHILD_KINDS: Final = (
    api.DEPLOYMENT,
    api.SERVICE,
    api.DISRUPTION_BUDGET,
    api.NETWORK_POLICY,
    api.CONFIG_MAP,
    api.ROLE_BINDING,
    api.ROLE,
    api.SERVICE_ACCOUNT,
    api.LEASE,
)


async def judge(runtime: Runtime, live: Object) -> Report:
    """Reconcile a PrfaaSPolicy."""
    hub, policy = runtime.hub, PrfaaSPolicy.model_validate(live)
    if policy.metadata.deletion_timestamp:
        remaining = await children.remove(hub, CHILD_KINDS, f"{names.LABEL_POLICY_UID}={policy.metadata.uid}")
        waiting = no(DELETING, "waiting until the gateway has ended")
        return Report({READY: waiting}) if remaining else Report(gone=True)
    facts = await _observe(runtime, policy)
    table = await _table(runtime, facts)
    gateway_counts, failures = await _apply(runtime, policy, _manifests(policy, table))
    return Report(
        conditions={READY: plan.readiness(facts, table, gateway_counts, failures)},
        fields={
            "readyPrefill": routes.ready_by_role(table, "prefill"),
            "readyDecode": routes.ready_by_role(table, "decode"),
        },
    )


async def _observe(runtime: Runtime, policy: PrfaaSPolicy) -> plan.PolicyFacts:
    decode = await read_all(runtime.hub, api.DECODE_POOL, DecodePool)
    prefill = await read_all(runtime.hub, api.PREFILL_POOL, PrefillPool)
    clusters = await read_all(runtime.hub, api.MEMBER_CLUSTER, MemberCluster)
    return plan.PolicyFacts(
        policy,
        {pool.metadata.name: pool for pool in decode},
        {pool.metadata.name: pool for pool in prefill},
        {cluster.metadata.name: cluster for cluster in clusters},
    )


async def _table(runtime: Runtime, facts: plan.PolicyFacts) -> RoutingTable:
    standing = await runtime.hub.get(api.CONFIG_MAP, names.routes_configmap(facts.policy.metadata.name))
    views = {name: runtime.members.view(name) for name in facts.clusters} | {names.HUB: runtime.hub_view()}
    return routes.table(facts, views, render_routes.read_config_map(standing))


def _manifests(policy: PrfaaSPolicy, table: RoutingTable) -> list[Manifest]:
    """Return all children in the order in which they need each other."""
    budget = protection.disruption_budget(policy)
    return [
        render_routes.config_map(policy, table),
        access.service_account(policy),
        access.role(policy),
        access.role_binding(policy),
        access.lease(policy),
        gateway.deployment(policy),
        service.service(policy),
        protection.network_policy(policy),
        *([budget] if budget else []),
    ]


async def _apply(
    runtime: Runtime, policy: PrfaaSPolicy, manifests: Iterable[Manifest]
) -> tuple[Counts, list[PrfaasError]]:
    """Apply every child that can be applied; return the gateway's instances and what failed."""
    ref, failures, gateway_counts = Ref(api.POLICY, policy.metadata.name), [], Counts()
    wanted = set()
    for manifest in manifests:
        wanted.add(manifest["kind"])
        try:
            live = await children.apply(runtime, ref, runtime.hub, manifest)
        except PrfaasError as error:
            failures.append(error)
            continue
        if manifest["kind"] == api.DEPLOYMENT.name:
            gateway_counts = counts(live)
    if api.DISRUPTION_BUDGET.name not in wanted:
        await children.remove(runtime.hub, (api.DISRUPTION_BUDGET,), f"{names.LABEL_POLICY_UID}={policy.metadata.uid}")
    return gateway_counts, failures
