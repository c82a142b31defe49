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
from prfaas.kube import KubeSession, kubeconfig
from prfaas.kube.session import bearer
from prfaas_operator.clusters.client import ClusterClient, MayWrite, always
from prfaas_operator.errors import KubeconfigRefusedError
from prfaas_operator.plan.credentials import Access

FIELD_MANAGER_CLI: Final = "prfaas-cli"


class KubeContext(NamedTuple):
    """The cluster and namespace of a command."""

    kubeconfig: Path | None
    context: str | None
    namespace: str


def hub_session() -> KubeSession:
    """Return a session with the cluster of this process, or with the one of $KUBECONFIG if set."""
    try:
        return kubeconfig.load(None, None) if os.environ.get("KUBECONFIG") else KubeSession.in_cluster()
    except ConfigError as error:
        raise ConfigError(
            f"no access to the hub: {error}; run in a pod with a service account, or set KUBECONFIG"
        ) from error


@asynccontextmanager
async def open_context(kube_context: KubeContext) -> AsyncIterator[ClusterClient]:
    """Connect for the length of a command with a person's kubeconfig, their context and exec plugins."""
    session = await asyncio.to_thread(kubeconfig.load, kube_context.kubeconfig, kube_context.context)
    where = f"context {kube_context.context or 'current'} of {kube_context.kubeconfig or 'the kubeconfig'}"
    async with session:
        yield ClusterClient(session, kube_context.namespace, where, FIELD_MANAGER_CLI)


async def connect_member(
    name: str, namespace: str, access: Access, may_write: MayWrite = always, bounds_part: float = 1.0
) -> ClusterClient:
    """Connect to a member cluster with the access that its kubeconfig was reduced to; KubeSession has `bounds_part`.

    Raises KubeconfigRefusedError: a TLS library cannot load the CA, certificate or key.
    """
    try:
        session = await asyncio.to_thread(  # building a TLS context reads files and parses certificates
            KubeSession,
            access.server,
            authorization=bearer(access.token) if access.token else None,
            certificate=access.client_certificate_pem,
            key=access.client_key_pem,
            bounds_part=bounds_part,
            ca_cert_data=access.ca_pem,
            tls_server_name=access.tls_server_name,
        )
    except (OSError, ValueError) as error:
        raise KubeconfigRefusedError(
            f"kubeconfig of {name}: CA, client certificate or key cannot be loaded: {error}"
        ) from error
    return ClusterClient(session, namespace, f"cluster {name}", may_write=may_write)
