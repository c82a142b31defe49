"""Where the routing table comes from: the operator's ConfigMap, watched, or the same document in a file, polled.

A damaged or missing document never takes away the table in use: what was true a moment ago serves better than nothing.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError, ProtocolError
from prfaas.kube import KubeSession, ObjectRef, watch_object
from prfaas.kube.session import CONFIG_MAP
from prfaas.names import ROUTES_KEY, routes_configmap
from prfaas.wire.routes import RoutingTable, decode

log = logging.getLogger(__name__)

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
    """Return the table in a ConfigMap. Raises ProtocolError when there is none that can be read."""
    try:
        document = base64.b64decode(current["binaryData"][ROUTES_KEY], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ProtocolError(f"binaryData[{ROUTES_KEY!r}] is missing or not base64") from error
    return decode(document)


def read_file(path: Path) -> RoutingTable:
    """Return the table in a file, JSON or gzip JSON. Raises ConfigError when there is none that can be read."""
    try:
        return decode(path.read_bytes())
    except (OSError, ProtocolError) as error:
        raise ConfigError(f"--routes-file {path}: {error}") from error


async def follow_file(path: Path, on_table: OnTable, interval_seconds: float = 0.5) -> None:
    """Call `on_table` with the file's table, and again whenever the file changes, for ever."""
    seen = None
    while True:
        stamp = _stamp(path)
        if stamp != seen:
            seen = stamp
            try:
                on_table(read_file(path))
            except ConfigError as error:
                log.error("%s; keeping the last table", error)
        await asyncio.sleep(interval_seconds)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
