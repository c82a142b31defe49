"""Connects the sandbox's own processes to its API servers: `prfaas.kube` with a client certificate."""

from collections.abc import AsyncIterator
from functools import partial

from prfaas.kube.session import KubeSession, Object
from prfaas.kube.watch import WatchEvent, list_and_watch, version_of, watch_events
from prfaas_sandbox.credentials import Kubeconfig


def connect(kubeconfig: Kubeconfig) -> KubeSession:
    """Return a session of a kubeconfig's user."""
    user = kubeconfig.user
    return KubeSession(
        kubeconfig.server,
        certificate=user.certificate.decode(),
        key=user.key.decode(),
        ca_cert_data=kubeconfig.authority.decode(),
    )


def follow(session: KubeSession, path: str, **query: str) -> AsyncIterator[list[Object] | WatchEvent]:
    """Yield a collection, then its changes, for ever; after lost changes, the whole collection again."""

    async def read() -> tuple[list[Object], str]:
        found = await session.call("GET", path, query=query)
        return found["items"], version_of(found)

    return list_and_watch(read, partial(watch_events, session, path, query))
