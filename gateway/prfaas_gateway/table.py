"""Follows the routing table, and sends convertible instances their roles.

The table comes from the operator's ConfigMap, which is watched, or from a file, which is polled. A damaged or missing
document never replaces the table in use.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from prfaas.errors import ConfigError, PrfaasError, ProtocolError
from prfaas.kube import KubeSession, ObjectRef, watch_object
from prfaas.kube.session import CONFIG_MAP
from prfaas.names import ROUTES_KEY, routes_configmap
from prfaas.util import LogOnce, WatchedFiles
from prfaas.wire.routes import Instance, RoutingTable, decode
from prfaas_gateway.state import GatewayState
from prfaas_gateway.upstream import Upstream

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.25
ROLE_RESEND_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 2.0
AT_ONCE: Final = 16

OnTable = Callable[[RoutingTable], None]


async def follow_configmap(session: KubeSession, namespace: str, policy: str, on_table: OnTable) -> None:
    """Call `on_table` with every new version of the policy's table, for ever."""
    ref = ObjectRef(CONFIG_MAP, namespace, routes_configmap(policy))
    last: RoutingTable | None = None
    async for current in watch_object(session, ref):
        if current is None:
            log.warning("%s does not exist; %s", ref, "keeping the last table" if last else "waiting for the operator")
            continue
        try:
            table = read_configmap(current)
        except ProtocolError as error:
            log.error("%s: %s; keeping the last table", ref, error)
            continue
        if table != last:
            last = table
            on_table(table)


def read_configmap(current: dict[str, Any]) -> RoutingTable:
    """Return the table in a ConfigMap. Raises ProtocolError if it is missing or unreadable."""
    try:
        document = base64.b64decode(current["binaryData"][ROUTES_KEY], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ProtocolError(f"binaryData[{ROUTES_KEY!r}] is missing or not base64") from error
    return decode(document)


def read_file(path: Path) -> RoutingTable:
    """Return the table in a file, JSON or gzip JSON. Raises ConfigError if it is missing or unreadable."""
    try:
        return decode(path.read_bytes())
    except (OSError, ProtocolError) as error:
        raise ConfigError(f"--routes-file {path}: {error}") from error


async def follow_file(path: Path, on_table: OnTable, interval_seconds: float = 0.5) -> None:
    """Call `on_table` with the file's table, and again whenever the file changes, for ever."""
    file = WatchedFiles([path])
    while True:
        if file.changed():
            try:
                on_table(read_file(path))
            except ConfigError as error:
                log.error("%s; keeping the last table", error)
        await asyncio.sleep(interval_seconds)


class _SentRole(NamedTuple):
    role: str
    url: str
    until_seconds: float


class RolePublisher:
    """Sends convertible instances their role in the routing table: PUT /v1/role at each.

    Routing does not wait for the calls, because any worker serves any leg. A role only changes how an engine divides
    its steps. A failed call is retried. Every gateway sends roles to all instances, and repeats them, because a
    restarted worker forgot its role. Running sequences continue when a role changes.
    """

    def __init__(self, state: GatewayState, upstream: Upstream):
        self._state = state
        self._upstream = upstream
        self._sent: dict[str, _SentRole] = {}
        self._failures = LogOnce(log)

    async def run(self) -> None:
        while True:
            await self.send_due()
            await asyncio.sleep(POLL_SECONDS)

    async def send_due(self) -> None:
        """Send the role to every instance without it, or to which it was sent long ago."""
        table = self._state.table
        own = [one for one in table.instances if one.convertible and one.record.roles == "Assigned"] if table else []
        instances = [one for one in own if one.state == "Ready"]
        self._sent = {one.name: self._sent[one.name] for one in instances if one.name in self._sent}
        self._failures.keep_only(one.name for one in instances)
        turn = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._tell(one, turn) for one in instances if self._is_due(one)))

    def _is_due(self, one: Instance) -> bool:
        sent = self._sent.get(one.name)
        return sent is None or (sent.role, sent.url) != (one.role, one.url) or sent.until_seconds <= self._state.clock()

    async def _tell(self, one: Instance, turn: asyncio.Semaphore) -> None:
        known, body = self._sent.get(one.name), msgspec.json.encode({"role": one.role})
        async with turn:
            try:
                status = await self._upstream.put(one, "/v1/role", body, WAIT_SECONDS)
                failure = "" if status < 400 else f"HTTP {status}"
            except (PrfaasError, TimeoutError) as error:
                failure = str(error)
        if failure:
            message = f"instance {one.name} did not take its role {one.role}: {failure}; will retry"
            self._failures.failed(one.name, message)
        else:
            self._failures.worked(one.name, f"instance {one.name} takes roles again")
            if known is None or known.role != one.role:
                log.info("instance %s took its role: %s", one.name, one.role)
        pause_seconds = RETRY_SECONDS if failure else ROLE_RESEND_SECONDS
        self._sent[one.name] = _SentRole(one.role, one.url, self._state.clock() + pause_seconds)
