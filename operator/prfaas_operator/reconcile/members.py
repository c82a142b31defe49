"""The open connections to member clusters: made from their Secrets, probed, watched, and closed.

One member's failure affects no other: each has its own client, informers and last contact. The observed pods of a
member stay while it does not answer.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, Final

from prfaas import names
from prfaas.api import MemberCluster
from prfaas.conditions import rfc3339
from prfaas.errors import PrfaasError
from prfaas.kube.session import ObjectKind
from prfaas_operator import metrics
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.informer import Informer
from prfaas_operator.clusters.kinds import CONFIG_MAP, DEPLOYMENT, POD, POLICY, PREFILL_POOL, Object
from prfaas_operator.controller.child_cache import ChildCache
from prfaas_operator.controller.queue import ReconcileQueue
from prfaas_operator.errors import ClusterUnreachableError, SecretNotFoundError, TokenExpiredError, UnauthorizedError
from prfaas_operator.plan import credentials
from prfaas_operator.plan.credentials import Access, TokenFacts
from prfaas_operator.plan.member import Contact, check_given
from prfaas_operator.plan.pod_facts import NOT_ENDED, PodFacts, project_pod
from prfaas_operator.plan.policy import ObservedCluster
from prfaas_operator.render.common import LABEL_CLUSTER_UID, selector_text

log = logging.getLogger(__name__)

Connect = Callable[[str, str, Access], Awaitable[ClusterClient]]
FIRST_CONTACT_SECONDS: Final = 8.0  # a little more than one probe may take


OWNED_KINDS: Final = (DEPLOYMENT, CONFIG_MAP)
Owned = list[tuple[ObjectKind, Object]]
"""The children of pools in a member cluster."""


class MemberConnection:
    """A connection to one member cluster with one set of credentials."""

    def __init__(self, member: MemberCluster, access: Access, cluster: ClusterClient, queue: ReconcileQueue):
        self.made_for = connection_key(member, access)
        self.cluster = cluster
        self._token = access.token
        mine = {names.LABEL_MANAGED_BY: names.MANAGED_BY, LABEL_CLUSTER_UID: member.metadata.uid}
        self.selector = selector_text(mine)
        self._queue = queue
        self.pods = Informer(cluster, POD, self.selector, project_pod, self._pod_changed, fields=NOT_ENDED)
        self.children = ChildCache(cluster, self.selector, lambda child: queue.wake_uid(child.pool_uid))
        self._tasks: list[asyncio.Task[None]] = []

    def use(self, access: Access) -> None:
        """Continue with another token; the watches continue too."""
        if access.token != self._token:
            self._token = access.token
            self.cluster.use_token(access.token)

    async def follow(self, *, afresh: bool) -> None:
        """Watch pods and children; `afresh` restarts the watches after a silence: their connections may be dead."""
        if afresh:
            await self._stop()
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(informer.run()) for informer in (self.pods, *self.children.followed.values())
            ]

    async def close(self) -> None:
        await self._stop()
        await self.cluster.close()

    async def _stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _pod_changed(self, pod: PodFacts) -> None:
        self._queue.wake_uid(pod.pool_uid)
        self._queue.wake_kinds(POLICY)


class Members:
    """All member clusters by name; `connect` opens an API server from (name, namespace, access)."""

    def __init__(self, connect: Connect, queue: ReconcileQueue):
        self._connect = connect
        self._queue = queue
        self._connections: dict[str, MemberConnection] = {}
        self._contacts: dict[str, Contact] = {}
        self._contacted = asyncio.Condition()

    async def contact(self, member: MemberCluster, secret: Object | None) -> Contact:
        """Contact a member's API server; return the result."""
        name, token = member.metadata.name, None
        try:
            access = access_from(member, secret)
            token = credentials.read_token(access.token)
            connection = await self._connection(member, access)
            version = await connection.cluster.version()
            # The version is answered without any right; these calls show whether the token may do what pools need.
            for kind in OWNED_KINDS:
                await connection.cluster.try_list(kind, selector=connection.selector)
            before = self._contacts.get(name)
            await connection.follow(afresh=before is not None and before.error is not None)
            contact = Contact(server_version=version, token=token)
            metrics.contacted(name, time.monotonic())
        except UnauthorizedError as error:
            contact = Contact(
                error=_expired(member, token, self._connections[name].cluster.now()) or error, token=token
            )
        except PrfaasError as error:
            contact = Contact(error=error, token=token)
        metrics.token_expires(name, token.expires_at if token else None)
        await self._remember(name, contact)
        return contact

    def owners(self, name: str) -> set[str] | None:
        """Return the uids of the pools that have children in a member; None while they are unknown."""
        connection = self._connections.get(name)
        return connection.children.pool_uids(*OWNED_KINDS) if connection else None

    async def owned(self, name: str) -> Owned:
        """Return the children of pools in a member that was just contacted.

        Raises PrfaasError: it does not answer any more.
        """
        connection = self._connections[name]
        lists = [(kind, await connection.cluster.list_all(kind, selector=connection.selector)) for kind in OWNED_KINDS]
        return [(kind, one) for kind, found in lists for one in found]

    async def cluster(self, name: str) -> ClusterClient:
        """Return the client of a member. Raises PrfaasError: the problem that the last contact found."""
        async with self._contacted:
            try:
                async with asyncio.timeout(FIRST_CONTACT_SECONDS):
                    await self._contacted.wait_for(lambda: name in self._contacts)
            except TimeoutError:
                raise ClusterUnreachableError(f"MemberCluster {name} has not been contacted yet") from None
        error = self._contacts[name].error
        if error is not None:
            raise error
        return self._connections[name].cluster

    def children_of(self, cluster: ClusterClient) -> ChildCache | None:
        """Return the child cache of a member, None right after the member was removed."""
        return next((one.children for one in self._connections.values() if one.cluster is cluster), None)

    def observed(self, name: str) -> ObservedCluster:
        """Return a member's observed pods; the last known ones while it does not answer."""
        connection, contact = self._connections.get(name), self._contacts.get(name)
        known = connection is not None and connection.pods.synced.is_set()
        pods = tuple(connection.pods.items.values()) if connection and known else None
        return ObservedCluster(pods, reachable=contact and contact.error is None)

    async def drop(self, name: str) -> None:
        self._contacts.pop(name, None)
        metrics.forget_member(name)
        connection = self._connections.pop(name, None)
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        await asyncio.gather(*(self.drop(name) for name in list(self._connections)))

    async def _connection(self, member: MemberCluster, access: Access) -> MemberConnection:
        """Return the connection to this very server; a changed server gets a new connection."""
        name = member.metadata.name
        old = self._connections.get(name)
        if old is not None and old.made_for == connection_key(member, access):
            old.use(access)
            return old
        cluster = await self._connect(name, member.spec.namespace, access)
        # Before the old one is closed, which takes a while: nobody may be given it meanwhile.
        self._connections[name] = MemberConnection(member, access, cluster, self._queue)
        if old is not None:
            await old.close()
        return self._connections[name]

    async def _remember(self, name: str, contact: Contact) -> None:
        old = self._contacts.get(name)
        self._contacts[name] = contact
        # By their words, since exceptions are equal only to themselves.
        if old is None or (type(old.error), str(old.error)) != (type(contact.error), str(contact.error)):
            self._queue.wake_kinds(PREFILL_POOL, POLICY)
        async with self._contacted:
            self._contacted.notify_all()


def access_from(member: MemberCluster, secret: Mapping[str, Any] | None) -> Access:
    """Read a member's credentials from its Secret.

    Raises SecretNotFoundError: the Secret or the key does not exist. The message names no other key of it.
    Raises ForbiddenSecretError: the Secret is not labelled as a kubeconfig.
    Raises KubeconfigRefusedError: see `plan.credentials`.
    """
    reference = member.spec.kubeconfig_secret_ref
    if secret is None:
        raise SecretNotFoundError(
            f"Secret {reference.name} does not exist in {member.metadata.namespace}; "
            f"create it, or run `prfaas cluster join {member.metadata.name}`"
        )
    check_given(secret, names.KUBECONFIG_SECRET)
    data = secret.get("data") or {}
    if reference.key not in data:
        raise SecretNotFoundError(f"Secret {reference.name} has no key {reference.key}: correct one of the two")
    return credentials.parse_kubeconfig(base64.b64decode(data[reference.key]))


def connection_key(member: MemberCluster, access: Access) -> tuple[str, str, Access]:
    """Return what a connection depends on: all of the access but the token, which may change during it."""
    return member.metadata.uid, member.spec.namespace, access._replace(token="set" if access.token else "")


def _expired(member: MemberCluster, token: TokenFacts | None, now: datetime) -> TokenExpiredError | None:
    """Return the error for an expired token, if that is why the server refuses it; `now` by that server's clock."""
    if token is None or not credentials.has_expired(token, now):
        return None
    return TokenExpiredError(
        f"the token in Secret {member.spec.kubeconfig_secret_ref.name} ended at {rfc3339(token.expires_at)}; "
        f"run `prfaas cluster join {member.metadata.name}` again"
    )
