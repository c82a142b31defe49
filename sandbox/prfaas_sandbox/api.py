"""Connects the sandbox's own processes to its API servers: `prfaas.kube` with a client certificate."""

import logging
from collections.abc import AsyncIterator

from prfaas.errors import ConfigError, PeerError
from prfaas.kube.session import KubeSession, Object, with_query
from prfaas.kube.watch import WatchEvent, list_and_watch, version_of, watch_events
from prfaas.util import Backoff
from prfaas_sandbox.credentials import Kubeconfig

log = logging.getLogger(__name__)

WATCH_TIMEOUT_SECONDS = 240.0
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.5, 2.0
UNLIMITED = 0  # a node's pods ask all at once


def connect(kubeconfig: Kubeconfig) -> KubeSession:
    """Return a session of a kubeconfig's user."""
    user = kubeconfig.user
    return KubeSession(
        kubeconfig.server,
        certificate=user.certificate.decode(),
        key=user.key.decode(),
        ca_cert_data=kubeconfig.authority.decode(),
        connection_pool_maxsize=UNLIMITED,
    )


async def follow(session: KubeSession, path: str, **query: str) -> AsyncIterator[list[Object] | WatchEvent]:
    """Yield a collection, then its changes, for ever; after lost changes, the whole collection again."""

    async def read() -> tuple[list[Object], str]:
        found = await session.call("GET", with_query(path, query))
        return found["items"], version_of(found)

    def watch(version: str) -> AsyncIterator[WatchEvent]:
        return watch_events(session, path, version, window_seconds=WATCH_TIMEOUT_SECONDS, query=query)

    def failed(error: PeerError | ConfigError, pause_seconds: float) -> float:
        log.info("watch of %s broke, starting over: %s", path, error)
        return pause_seconds

    async for change in list_and_watch(read, watch, failed, Backoff(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS)):
        yield change
