"""Reconcile a PrfaaSPolicy: its gateway with all that belongs to it, and its routing table."""

import math
import time
from collections.abc import Iterable
from typing import Final

from prfaas import names
from prfaas.api import DecodePool, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.errors import PrfaasError
from prfaas.wire.routes import RoutingTable
from prfaas_operator.clusters import api
from prfaas_operator.clusters.api import Object
from prfaas_operator.errors import CertificateNotReadyError
from prfaas_operator.plan import policy as plan
from prfaas_operator.plan import routes, sharing
from prfaas_operator.plan.conditions import DELETING, READY, Verdict, no
from prfaas_operator.plan.longloop import Look
from prfaas_operator.plan.pool import Counts, counts
from prfaas_operator.reconcile import children, longloop
from prfaas_operator.reconcile.reading import read, read_named
from prfaas_operator.reconcile.runtime import RESYNC_SECONDS, RETRY_SECONDS, Report, Runtime
from prfaas_operator.reconcile.wakers import Ref
from prfaas_operator.render import access, certificates, gateway, protection, service
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
    hub, policy = runtime.hub, read(PrfaaSPolicy, live)
    if policy.metadata.deletion_timestamp:
        remaining = await children.remove(hub, CHILD_KINDS, f"{names.LABEL_POLICY_UID}={policy.metadata.uid}")
        waiting = no(DELETING, "waiting until the gateway has ended")
        return Report({READY: waiting}) if remaining else Report(gone=True)
    facts = await _observe(runtime, policy)
    table, tls = await _table(runtime, facts), runtime.certificates.gateway_uses_tls(facts.clusters)
    gateway_counts, failures = await _apply(runtime, policy, _manifests(policy, table, tls=tls))
    if tls and gateway_counts.ready < policy.spec.gateway.replicas:
        try:
            await runtime.certificates.wait_delivered(names.HUB)
        except CertificateNotReadyError as error:
            failures.append(error)  # pods that mount the Secret wait for it
    look = await longloop.balance(runtime, facts, live)
    readiness = plan.readiness(facts, table, gateway_counts, failures)
    return Report(
        conditions={READY: readiness, **look.conditions},
        fields={
            "readyPrefill": routes.ready_by_role(table, "prefill"),
            "readyDecode": routes.ready_by_role(table, "decode"),
            **look.fields,
        },
        again_seconds=_again_seconds(readiness, look),
    )


def _again_seconds(readiness: Verdict, look: Look) -> float | None:
    """Return when to look again, where the long loop wants to sooner than others; None: as ever."""
    if math.isinf(look.again_at_seconds):
        return None
    left_seconds = max(0.0, look.again_at_seconds - time.monotonic())
    return min(left_seconds, RESYNC_SECONDS if readiness.good else RETRY_SECONDS)


async def _observe(runtime: Runtime, policy: PrfaaSPolicy) -> plan.PolicyFacts:
    """Read the policy's own pools and their clusters, and pools that share instances with one of these.

    One that cannot be read ends the look: without it the routing table would lose instances that serve.
    """
    prefill = await read_named(runtime.hub, api.PREFILL_POOL, PrefillPool, policy.spec.prefill_pools)
    homes = {policy.spec.decode_pool, *(pool.spec.share_with for pool in prefill.values() if pool.spec.share_with)}
    sharing_too = [pool.name for pool in runtime.sharers.items.values() if pool.share_with in homes]
    prefill |= await read_named(runtime.hub, api.PREFILL_POOL, PrefillPool, set(sharing_too) - prefill.keys())
    decode = await read_named(runtime.hub, api.DECODE_POOL, DecodePool, homes)
    used = {pool.spec.cluster_name for pool in (*prefill.values(), *decode.values()) if pool.spec.cluster_name}
    clusters = await read_named(runtime.hub, api.MEMBER_CLUSTER, MemberCluster, used)
    return plan.PolicyFacts(
        policy,
        decode,
        {pool.metadata.name: pool for pool in sharing.resolved(prefill.values(), decode)},
        clusters,
    )


async def _table(runtime: Runtime, facts: plan.PolicyFacts) -> RoutingTable:
    standing = await runtime.hub.get(api.CONFIG_MAP, names.routes_configmap(facts.policy.metadata.name))
    views = {name: runtime.members.view(name) for name in facts.clusters} | {names.HUB: runtime.hub_view()}
    return routes.table(facts, views, render_routes.read_config_map(standing))


def _manifests(policy: PrfaaSPolicy, table: RoutingTable, *, tls: bool) -> list[Manifest]:
    """Return all children in the order in which they need each other; `tls`: workers may be inside TLS."""
    deployment = gateway.deployment(policy)
    budget = protection.disruption_budget(policy)
    return [
        render_routes.config_map(policy, table),
        access.service_account(policy),
        access.role(policy),
        access.role_binding(policy),
        access.lease(policy),
        certificates.gateway_in_tls(deployment) if tls else deployment,
        service.service(policy),
        protection.network_policy(policy, {one.engine for one in table.instances}),
        *([budget] if budget else []),
    ]


async def _apply(
    runtime: Runtime, policy: PrfaaSPolicy, manifests: Iterable[Manifest]
) -> tuple[Counts, list[PrfaasError]]:
    """Apply all children; return the gateway's instances and what could not be applied.

    The routing table goes alone: whatever is wrong with the gateway's own objects, requests follow the instances.
    """
    ref = Ref(api.POLICY, policy.metadata.name)
    table: list[Manifest] = []
    gateway_objects: list[Manifest] = []
    for manifest in manifests:
        (table if manifest["kind"] == api.CONFIG_MAP.name else gateway_objects).append(manifest)
    applied: list[Object] = []
    failures: list[PrfaasError] = []
    for together in (table, gateway_objects):
        try:
            applied += await children.apply_all(runtime, ref, runtime.hub, together)
        except PrfaasError as error:
            failures.append(error)
    if all(manifest["kind"] != api.DISRUPTION_BUDGET.name for manifest in gateway_objects):
        await children.remove(runtime.hub, (api.DISRUPTION_BUDGET,), f"{names.LABEL_POLICY_UID}={policy.metadata.uid}")
    return next((counts(one) for one in applied if one["kind"] == api.DEPLOYMENT.name), Counts()), failures
