"""Reconciles a PrfaaSPolicy: its gateway with all its children, and its routing table."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from prfaas import names
from prfaas.api import DecodePool, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.errors import PrfaasError
from prfaas.kube.lease import LEASE_KIND
from prfaas.wire.routes import RoutingTable
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.controller.children import Children, remove
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import Ref
from prfaas_operator.controller.status import RESYNC_SECONDS, RETRY_SECONDS, ReconcileResult
from prfaas_operator.errors import CertificateNotReadyError, SecretNotFoundError
from prfaas_operator.plan import policy as plan
from prfaas_operator.plan import roles, transfers
from prfaas_operator.plan.certificates import GATEWAYS
from prfaas_operator.plan.conditions import DELETING, READY, ConditionState, no
from prfaas_operator.plan.longloop import LongLoopResult
from prfaas_operator.plan.member import check_given
from prfaas_operator.plan.pool_status import Counts, counts
from prfaas_operator.plan.reading import read
from prfaas_operator.reconcile.certificates import Certificates
from prfaas_operator.reconcile.longloop import PolicyBalancer
from prfaas_operator.reconcile.members import Members
from prfaas_operator.render import certificates, gateway, protection

CHILD_KINDS: Final = (
    kinds.DEPLOYMENT,
    kinds.SERVICE,
    kinds.DISRUPTION_BUDGET,
    kinds.NETWORK_POLICY,
    kinds.CONFIG_MAP,
    kinds.ROLE_BINDING,
    kinds.ROLE,
    kinds.SERVICE_ACCOUNT,
    LEASE_KIND,
)


@dataclass(frozen=True)
class PolicyReconciler:
    """Reconciles policies."""

    hub: HubView
    members: Members
    certificates: Certificates
    children: Children
    long_loop: PolicyBalancer
    gateway_image: gateway.GatewayImage

    async def reconcile(self, live: Object) -> ReconcileResult:
        policy = read(PrfaaSPolicy, live)
        if policy.metadata.deletion_timestamp:
            selector = f"{names.LABEL_POLICY_UID}={policy.metadata.uid}"
            remaining = await remove(self.hub.client, CHILD_KINDS, selector)
            waiting = no(DELETING, "waiting for the gateway's end")
            return ReconcileResult({READY: waiting}) if remaining else ReconcileResult(gone=True)
        facts = self._observe(policy)
        table, tls = await self._table(facts), self.certificates.gateway_uses_tls(facts.clusters)
        deployment = gateway.deployment(policy, self.gateway_image)
        deployment = certificates.gateway_in_tls(deployment) if tls else deployment
        gateway_counts, failures = await self._apply(policy, _manifests(policy, table, deployment))
        if tls and gateway_counts.ready < policy.spec.gateway.replicas:
            try:
                await self.certificates.wait_delivered(GATEWAYS)
            except CertificateNotReadyError as error:
                failures.append(error)  # pods that mount the Secret wait for it
        balance = await self.long_loop.balance(facts, live)
        ready = plan.readiness(facts, table, gateway_counts, failures)
        return ReconcileResult(
            conditions={
                READY: ready,
                **transfers.conditions(table),
                **self.certificates.separation(policy.metadata.uid),
                **balance.conditions,
            },
            fields={
                "readyPrefill": plan.ready_by_role(table, "prefill"),
                "readyDecode": plan.ready_by_role(table, "decode"),
                **balance.fields,
            },
            again_seconds=_again_seconds(ready, balance),
        )

    def _observe(self, policy: PrfaaSPolicy) -> plan.PolicyFacts:
        """Read the policy's pools and their clusters, and the pools that share instances with these.

        An unreadable pool ends the reconcile: without it the routing table would lose working instances.
        """
        hub = self.hub
        prefill = hub.named(kinds.PREFILL_POOL, PrefillPool, policy.spec.prefill_pools)
        decodes = {policy.spec.decode_pool, *(one.spec.share_with for one in prefill.values() if one.spec.share_with)}
        sharing_too = [pool.name for pool in hub.sharers.values() if pool.share_with in decodes]
        prefill |= hub.named(kinds.PREFILL_POOL, PrefillPool, set(sharing_too) - prefill.keys())
        decode = hub.named(kinds.DECODE_POOL, DecodePool, decodes)
        used = {pool.spec.cluster_name for pool in (*prefill.values(), *decode.values()) if pool.spec.cluster_name}
        clusters = hub.named(kinds.MEMBER_CLUSTER, MemberCluster, used)
        resolved = {pool.metadata.name: pool for pool in roles.resolved(prefill.values(), decode)}
        return plan.PolicyFacts(policy, decode, resolved, clusters, hub.datacenters())

    async def _table(self, facts: plan.PolicyFacts) -> RoutingTable:
        name = names.routes_configmap(facts.policy.metadata.name)
        present = await self.hub.client.get(kinds.CONFIG_MAP, name)
        observed = {name: self.members.observed(name) for name in facts.clusters} | {names.HUB: self.hub.observed()}
        return plan.routing_table(facts, observed, gateway.read_config_map(present))

    async def _apply(self, policy: PrfaaSPolicy, manifests: Iterable[Object]) -> tuple[Counts, list[PrfaasError]]:
        """Apply all children; return the gateway's instances and the errors of children.

        The routing table comes first and alone: a problem with the gateway's other children does not delay it.
        """
        ref = Ref(kinds.POLICY, policy.metadata.name)
        table, *gateway_objects = manifests
        applied: list[Object] = []
        failures: list[PrfaasError] = []
        try:
            await self.children.apply(ref, self.hub.client, table)
        except PrfaasError as error:
            failures.append(error)
        try:
            await self._check_keys(policy)
        except PrfaasError as error:
            failures.append(error)  # a gateway that runs keeps its keys, and all else of it stays current
            gateway_objects = [one for one in gateway_objects if one["kind"] != kinds.DEPLOYMENT.name]
        try:
            applied = await self.children.apply_all(ref, self.hub.client, gateway_objects)
        except PrfaasError as error:
            failures.append(error)
        if all(manifest["kind"] != kinds.DISRUPTION_BUDGET.name for manifest in gateway_objects):
            selector = f"{names.LABEL_POLICY_UID}={policy.metadata.uid}"
            await remove(self.hub.client, (kinds.DISRUPTION_BUDGET,), selector)
        return next((counts(one) for one in applied if one["kind"] == kinds.DEPLOYMENT.name), Counts()), failures

    async def _check_keys(self, policy: PrfaaSPolicy) -> None:
        """Raise an error unless the Secret that the gateway would mount is there, and is given to gateways."""
        keys = policy.spec.gateway.api_keys_secret_ref
        if keys is None:
            return
        secret = await self.hub.client.get(kinds.SECRET, keys.name)
        if secret is None:
            raise SecretNotFoundError(f"Secret {keys.name} does not exist; the gateway does not start without its keys")
        check_given(secret, names.API_KEYS_SECRET)


def _again_seconds(ready: ConditionState, balance: LongLoopResult) -> float | None:
    """Return the delay until the next reconcile if the long loop needs an earlier one; None: the usual delay."""
    if math.isinf(balance.again_at_seconds):
        return None
    left_seconds = max(0.0, balance.again_at_seconds - time.monotonic())
    return min(left_seconds, RESYNC_SECONDS if ready.good else RETRY_SECONDS)


def _manifests(policy: PrfaaSPolicy, table: RoutingTable, deployment: Object) -> list[Object]:
    """Return the routing table, then the other children in the order of their dependencies."""
    budget = protection.disruption_budget(policy)
    return [
        gateway.config_map(policy, table),
        gateway.service_account(policy),
        gateway.role(policy),
        gateway.role_binding(policy),
        gateway.lease(policy),
        deployment,
        gateway.service(policy),
        protection.network_policy(policy, table.instances),
        *([budget] if budget else []),
    ]
