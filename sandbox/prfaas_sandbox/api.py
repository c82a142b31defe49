"""Connects the sandbox's own processes to its API servers: `prfaas.kube` with a client certificate."""

from prfaas.kube.session import KubeSession
from prfaas_sandbox.credentials import Kubeconfig


def connect(kubeconfig: Kubeconfig) -> KubeSession:
    """Return a session of a kubeconfig's user."""
    user = kubeconfig.user
    return KubeSession(
        kubeconfig.server,
        certificate=user.certificate.decode(),
        key=user.key.decode(),
        ca_cert_data=kubeconfig.authority.decode(),
        connection_pool_maxsize=0,  # unlimited: a node's pods ask all at once
    )
