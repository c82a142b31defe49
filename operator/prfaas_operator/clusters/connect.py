"""Opens API servers: the hub from where the process runs, a member from a validated kubeconfig, either from a terminal.

A member's credentials never pass through `prfaas.kube.kubeconfig`, which runs `exec` commands and reads files that the
kubeconfig names. `plan.credentials` has reduced them to an address, a CA and a token or certificate.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from prfaas.errors import ConfigError
from prfaas.kube import kubeconfig
from prfaas.kube.session import KubeSession, bearer, client_tls
from prfaas_operator.clusters.client import ClusterClient, MayWrite, always
from prfaas_operator.errors import KubeconfigRefusedError
from prfaas_operator.plan.credentials import Access

FIELD_MANAGER_CLI: Final = "prfaas-cli"
CONNECTIONS: Final = 32  # each watch holds one; reconciles of different objects run side by side


class KubeContext(NamedTuple):
    """The cluster and namespace of a command."""

    kubeconfig: Path | None
    context: str | None
    namespace: str


class Terminal(NamedTuple):
    """A cluster as a person's kubeconfig reaches it, with its address and CA."""

    cluster: ClusterClient
    server: str
    ca_pem: str


def hub_session() -> KubeSession:
    """Return an unopened session with the cluster of this process, or with the one of $KUBECONFIG if set."""
    try:
        if os.environ.get("KUBECONFIG"):
            return kubeconfig.load(None, None, CONNECTIONS).session
        return KubeSession.in_cluster(connections=CONNECTIONS)
    except ConfigError as error:
        raise ConfigError(
            f"no access to the hub: {error}; run in a pod with a service account, or set KUBECONFIG"
        ) from error


@asynccontextmanager
async def open_context(kube_context: KubeContext) -> AsyncIterator[Terminal]:
    """Connect for the length of a command with a person's kubeconfig, their context and exec plugins."""
    access = await asyncio.to_thread(kubeconfig.load, kube_context.kubeconfig, kube_context.context, CONNECTIONS)
    where = f"context {kube_context.context or 'current'} of {kube_context.kubeconfig or 'the kubeconfig'}"
    cluster = ClusterClient(access.session, kube_context.namespace, where, FIELD_MANAGER_CLI)
    try:
        yield Terminal(cluster, access.server, access.ca_pem)
    finally:
        await cluster.close()


async def connect_member(name: str, namespace: str, access: Access, may_write: MayWrite = always) -> ClusterClient:
    """Connect to a member cluster with the access that its kubeconfig was reduced to.

    Raises KubeconfigRefusedError: a TLS library cannot load the CA, certificate or key.
    """
    try:
        # Building a TLS context reads files and parses certificates.
        tls = await asyncio.to_thread(client_tls, access.ca_pem, access.client_certificate_pem, access.client_key_pem)
    except (OSError, ValueError) as error:
        raise KubeconfigRefusedError(
            f"kubeconfig of {name}: CA, client certificate or key cannot be loaded: {error}"
        ) from error
    session = KubeSession(
        access.server,
        authorization=bearer(access.token) if access.token else None,
        tls=tls,
        tls_server_name=access.tls_server_name,
        connections=CONNECTIONS,
    )
    return ClusterClient(session, namespace, f"cluster {name}", may_write=may_write)
