"""Open API servers: the hub from where the process runs, a member from a validated kubeconfig, either from a terminal.

A member's credentials never pass through the client library's kubeconfig loader, which would run `exec` commands and
read any file they name: `plan.kubeconfig` has reduced them to an address, a CA and a token or certificate.
"""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.config_exception import ConfigException

from prfaas.errors import ConfigError
from prfaas_operator.clusters.client import OPEN, Gate, KubernetesCluster
from prfaas_operator.clusters.lease import LeaseCalls
from prfaas_operator.errors import KubeconfigRefusedError
from prfaas_operator.plan.kubeconfig import Access

FIELD_MANAGER_CLI: Final = "prfaas-cli"
CONNECTIONS: Final = 32  # watches hold two each; reconciles of different objects run side by side


async def connect_hub(namespace: str, gate: Gate = OPEN) -> KubernetesCluster:
    """Connect to the cluster that this process runs in, or to the one of $KUBECONFIG where that is set."""
    return _cluster(await _hub_configuration(), namespace, "hub", gate)


async def connect_lease() -> LeaseCalls:
    """Connect to the hub as `connect_hub` does, with connections of its own: a Lease waits behind no other call."""
    return LeaseCalls(ApiClient(await _hub_configuration()))


async def _hub_configuration() -> Configuration:
    configuration = Configuration()
    try:
        if os.environ.get("KUBECONFIG"):
            await config.load_kube_config(client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise ConfigError(
            f"no access to the hub: {error}; run in a pod with a service account, or set KUBECONFIG"
        ) from error
    return configuration


class Terminal(NamedTuple):
    """A cluster as a person at a terminal reaches it, with the address and CA of their kubeconfig."""

    cluster: KubernetesCluster
    server: str
    ca_pem: str


async def connect_context(kubeconfig: Path | None, context: str | None, namespace: str) -> Terminal:
    """Connect as a person at a terminal does: their kubeconfig, their context, exec plugins and all."""
    configuration = Configuration()
    try:
        await config.load_kube_config(
            config_file=str(kubeconfig) if kubeconfig else None, context=context, client_configuration=configuration
        )
    except (ConfigException, OSError) as error:
        raise ConfigError(f"kubeconfig {kubeconfig or 'of $KUBECONFIG or ~/.kube/config'}: {error}") from error
    where = f"context {context or 'current'} of {kubeconfig or 'the kubeconfig'}"
    cluster = KubernetesCluster(ApiClient(configuration), namespace, where, FIELD_MANAGER_CLI)
    ca_file = configuration.ssl_ca_cert
    return Terminal(cluster, str(configuration.host), Path(ca_file).read_text() if ca_file else "")


async def connect_member(name: str, namespace: str, access: Access, gate: Gate = OPEN) -> KubernetesCluster:
    """Connect to a member cluster with what its kubeconfig was reduced to.

    Raises:
        KubeconfigRefusedError: CA, certificate or key are not what a TLS library can load.

    """
    configuration = Configuration()
    configuration.host = access.server
    configuration.ca_cert_data = access.ca_pem
    configuration.tls_server_name = access.tls_server_name or None
    if access.token:
        configuration.api_key["BearerToken"] = f"Bearer {access.token}"
    try:
        # Building a TLS context reads files and parses certificates.
        return await asyncio.to_thread(_member, configuration, namespace, f"cluster {name}", access, gate)
    except (OSError, ValueError) as error:
        raise KubeconfigRefusedError(
            f"kubeconfig of {name}: CA, client certificate or key cannot be loaded: {error}"
        ) from error


def _member(configuration: Configuration, namespace: str, label: str, access: Access, gate: Gate) -> KubernetesCluster:
    if not access.client_certificate_pem:
        return _cluster(configuration, namespace, label, gate)
    # The ssl module loads certificates from files only; they are gone again before the first call.
    with tempfile.TemporaryDirectory(prefix="prfaas-") as directory:
        certificate, key = Path(directory, "tls.crt"), Path(directory, "tls.key")
        for path, content in ((certificate, access.client_certificate_pem), (key, access.client_key_pem)):
            path.touch(mode=0o600)
            path.write_text(content)
        configuration.cert_file, configuration.key_file = str(certificate), str(key)
        return _cluster(configuration, namespace, label, gate)


def _cluster(configuration: Configuration, namespace: str, label: str, gate: Gate) -> KubernetesCluster:
    configuration.connection_pool_maxsize = CONNECTIONS
    return KubernetesCluster(ApiClient(configuration), namespace, label, gate=gate)
