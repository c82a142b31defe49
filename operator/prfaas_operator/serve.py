"""The operator's process: connects to the hub, watches it, and reconciles every object until SIGTERM."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from prfaas.errors import ConfigError
from prfaas.memory import OPERATOR, bounds_part, container_limit_bytes
from prfaas.ports import url_host
from prfaas.telemetry.tracing import Tracing, tracing_from_environment
from prfaas_operator import http, metrics
from prfaas_operator.clusters.client import ClusterClient, MayWrite, always
from prfaas_operator.clusters.connect import connect_member, hub_session
from prfaas_operator.clusters.kinds import DECODE_POOL, MEMBER_CLUSTER, POLICY, PREFILL_POOL
from prfaas_operator.controller import handlers
from prfaas_operator.controller.children import Children
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.loop import Controller
from prfaas_operator.controller.queue import ReconcileQueue
from prfaas_operator.election import Election, Shutdown
from prfaas_operator.kopf import kopf
from prfaas_operator.options import OperatorOptions, names_in
from prfaas_operator.plan.pool_status import AllowedNames
from prfaas_operator.reconcile.certificates import Certificates
from prfaas_operator.reconcile.content import ContentCheck
from prfaas_operator.reconcile.longloop import PolicyBalancer
from prfaas_operator.reconcile.member import MemberReconciler, SecretGuard, TokenRenewal
from prfaas_operator.reconcile.members import Connect, Members
from prfaas_operator.reconcile.policy import PolicyReconciler
from prfaas_operator.reconcile.pool import PoolReconciler
from prfaas_operator.reconcile.roles import SharedRoles
from prfaas_operator.render.gateway import GatewayImage
from prfaas_operator.render.launch import StartTerms

log = logging.getLogger(__name__)

SYNC_SECONDS: Final = 60.0
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def login(settings: kopf.OperatorSettings, **_: object) -> kopf.ConnectionInfo | None:
    """Give kopf the hub of our own client; kopf calls this again when the API server refuses the old token."""
    if os.environ.get("KUBECONFIG"):
        return kopf.login_with_kubeconfig(settings=settings)
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return kopf.ConnectionInfo(
        # An address, because a cluster's DNS may be down or missing.
        server=f"https://{url_host(host)}:{port}",
        ca_path=str(SERVICE_ACCOUNT / "ca.crt"),
        token=(SERVICE_ACCOUNT / "token").read_text().strip(),
    )


class _Operator(NamedTuple):
    controller: Controller
    members: Members
    certificates: Certificates


def assemble(
    hub: ClusterClient, connect: Connect, queue: ReconcileQueue, options: OperatorOptions, tracing: Tracing
) -> _Operator:
    """Build the operator; all of its state can be lost and is read again."""
    view = HubView(hub, queue)
    members = Members(connect, queue)
    certificates = Certificates(view, members, options.certificate_terms())
    children = Children(view, lambda cluster: view.children if cluster is hub else members.children_of(cluster))
    secrets = SecretGuard(view)
    contents, roles = ContentCheck(view), SharedRoles(view)
    allowed = AllowedNames(names_in(options.worker_service_accounts), names_in(options.worker_priority_classes))
    terms = StartTerms(connector_image=options.connector_image, worker_image=options.worker_image)
    pools = PoolReconciler(view, members, certificates, children, secrets, contents, roles, terms, allowed)
    image = GatewayImage(options.gateway_image, names_in(options.gateway_pull_secrets))
    policies = PolicyReconciler(view, members, certificates, children, PolicyBalancer(view), image)
    clusters = MemberReconciler(view, members, certificates, secrets, TokenRenewal(options.member_token_days))
    reconciles = {
        MEMBER_CLUSTER: clusters.reconcile,
        PREFILL_POOL: pools.reconcile_prefill,
        DECODE_POOL: pools.reconcile_decode,
        POLICY: policies.reconcile,
    }
    return _Operator(Controller(view, children, reconciles, tracing), members, certificates)


@contextlib.asynccontextmanager
async def running(
    hub: ClusterClient, connect: Connect, queue: ReconcileQueue, options: OperatorOptions
) -> AsyncIterator[_Operator]:
    """Watch the hub's pods and children, and close every connection at the end."""
    tracing = tracing_from_environment("prfaas-operator", {"k8s.pod.name": os.environ.get("POD_NAME", "")})
    operator = assemble(hub, connect, queue, options, tracing)
    view = operator.controller.hub
    tasks = [asyncio.create_task(informer.run()) for informer in view.informers]
    try:
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                for informer in view.informers:
                    await informer.synced.wait()
        except TimeoutError:
            raise ConfigError(f"the hub's objects could not be listed within {SYNC_SECONDS:g} s") from None
        tasks.append(asyncio.create_task(operator.certificates.run()))
        yield operator
    finally:
        tracing.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        queue.clear()


def _members_part() -> float:
    """Return the part of the bounds on members' answers that this container has memory for. Raises ConfigError."""
    return bounds_part(OPERATOR, container_limit_bytes())


async def lead(
    options: OperatorOptions,
    may_write: MayWrite,
    queue: ReconcileQueue,
    health: http.Health,
    shutdown: Shutdown,
    term: asyncio.Event,
) -> None:
    hub = ClusterClient(hub_session(), options.namespace, "hub", may_write=may_write, is_trusted=True)
    connect = partial(connect_member, may_write=may_write, bounds_part=_members_part())
    try:
        is_served = partial(hub.check_served, (MEMBER_CLUSTER, PREFILL_POOL, DECODE_POOL, POLICY))
        await is_served()  # Fails at once and names the kind that is missing or cannot be read.
        again = True
        while again and not term.is_set():
            async with running(hub, connect, queue, options) as operator:
                operate = partial(_operate, operator, options.namespace, health, shutdown)
                again = await handlers.follow(operate, term)
            if again:
                await handlers.until_served(is_served, term)
    finally:
        await hub.close()


async def _operate(
    operator: _Operator, namespace: str, health: http.Health, shutdown: Shutdown, stop: asyncio.Event
) -> None:
    """Let kopf watch our kinds until `stop` is set."""
    registry = handlers.register(operator.controller, operator.members.close)
    kopf.on.login(registry=registry)(login)
    # What runs before kopf is not kopf's to cancel.
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=handlers.settings(),
        standalone=True,
        namespaces=[namespace],
        stop_flag=stop,
        ready_flag=health.ready,
    )
    # kopf has installed its own handlers there, which lose a signal that arrives during their shutdown.
    shutdown.listen()
    await handlers.run_kopf(tasks, others)


async def serve(options: OperatorOptions) -> None:
    """Run until SIGTERM or SIGINT; with an election, work only while this replica leads."""
    options.certificate_terms()  # wrong combinations of flags are refused before any connection
    if (part := _members_part()) < 1:
        message = "by this container's memory limit members' API servers may answer %d %% of what is usual"
        log.warning(message, 100 * part)
    queue, shutdown = ReconcileQueue(), Shutdown()
    health = http.Health(queue.stuck)
    shutdown.listen()
    async with http.serving(options, health):
        if not options.leader_elect:
            metrics.LEADER.set(1)
            await lead(options, always, queue, health, shutdown, shutdown.term)
            return
        # The Lease has its own connections, so that it waits behind no other call.
        async with hub_session() as session:
            election = Election(session, options.namespace, health.ready)
            await election.run(partial(lead, options, election.may_write, queue, health, shutdown), shutdown)
