"""Watch one named object for ever: through timeouts, dropped connections, expired resource versions and dead servers.

The hard part is to notice silence. A server that is half dead keeps the connection and sends nothing, which looks
exactly like an object that does not change. So every watch is asked to end after `window_seconds` and cut by the client
shortly after; the next one resumes from the last resource version and costs one small request.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import aiohttp
import msgspec

from prfaas.errors import ConfigError, PeerError, ProtocolError
from prfaas.kube.session import UNREADABLE, KubeSession, ObjectRef, StatusError

log = logging.getLogger(__name__)

MAX_EVENT_BYTES = 8 * 1024 * 1024  # etcd holds objects up to 1.5 MiB
GONE = 410
NOT_FOUND = 404


class _Event(msgspec.Struct):
    type: str
    object: dict[str, Any]


class _ExpiredError(Exception):
    """The resource version is too old to resume from: read the object again."""


async def watch_object(
    session: KubeSession,
    ref: ObjectRef,
    *,
    window_seconds: float = 30.0,
    max_backoff_seconds: float = 10.0,
) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the object as it is now, and again after every change; None while it does not exist.

    Never ends by itself and never raises for what a server does: it logs, waits (doubling, with jitter, up to
    `max_backoff_seconds`) and goes on. The same object may be yielded more than once. Needs the verbs get and watch on
    this name alone.
    """
    version = ""  # empty: read the object first
    failures = 0
    while True:
        try:
            if not version:
                current, version = await _read(session, ref)
                yield current
            async for kind, current in _events(session, ref, version, window_seconds):
                version = _version_of(current, ref)
                failures = 0
                if kind != "BOOKMARK":
                    yield None if kind == "DELETED" else current
            failures = 0
            await asyncio.sleep(backoff_seconds(1, max_backoff_seconds))  # a server may end every watch at once
        except _ExpiredError:
            version = ""
            await asyncio.sleep(backoff_seconds(1, max_backoff_seconds))
        except (PeerError, ConfigError) as error:
            failures += 1
            delay = backoff_seconds(failures, max_backoff_seconds)
            log.warning("watch of %s failed, next try in %.1f s: %s", ref, delay, error)
            await asyncio.sleep(delay)
            # A version given by a server that has since been restored from a backup would never be reached again.
            version = ""


def backoff_seconds(failures: int, max_seconds: float, jitter: float | None = None) -> float:
    """Return the pause after the given number of failures in a row: 0.2 s doubling, times a jitter in [0.5, 1)."""
    spread = random.random() if jitter is None else jitter  # noqa: S311  # spreads retries, guards nothing
    return min(max_seconds, 0.2 * 2 ** min(failures - 1, 16)) * (0.5 + spread / 2)


async def _read(session: KubeSession, ref: ObjectRef) -> tuple[dict[str, Any] | None, str]:
    """Return the object, or None, and a resource version to watch from."""
    try:
        current = await session.call("GET", ref.path)
    except StatusError as error:
        if error.status != NOT_FOUND:
            raise
        return None, "0"  # from any point the server has: it then sends the object as ADDED if it exists by then
    return current, _version_of(current, ref)


async def _events(
    session: KubeSession, ref: ObjectRef, version: str, window_seconds: float
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield (type, object) of one watch until the server ends it."""
    path = (
        f"{ref.collection_path}?watch=1&allowWatchBookmarks=true&fieldSelector=metadata.name%3D{ref.name}"
        f"&resourceVersion={version}&timeoutSeconds={max(1, round(window_seconds))}"
    )
    try:
        async with session.stream("GET", path, timeout_seconds=window_seconds + 5.0) as response:
            async for line in _lines(response.content):
                event = _decode_event(line, ref)
                if event.type == "ERROR":
                    _raise_error_event(ref, event.object)
                yield event.type, event.object
    except StatusError as error:
        if error.status == GONE:
            raise _ExpiredError from error
        raise


def _decode_event(line: bytes, ref: ObjectRef) -> _Event:
    try:
        return msgspec.json.decode(line, type=_Event)
    except UNREADABLE as error:
        raise ProtocolError(f"watch of {ref} sent a damaged event: {error}") from error


def _version_of(current: dict[str, Any], ref: ObjectRef) -> str:
    """Return metadata.resourceVersion; raises ProtocolError where there is none."""
    try:
        return str(current["metadata"]["resourceVersion"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"{ref} came without metadata.resourceVersion") from error


def _raise_error_event(ref: ObjectRef, status: dict[str, Any]) -> NoReturn:
    if status.get("code") == GONE:
        raise _ExpiredError
    raise ProtocolError(f"watch of {ref} ended with an error event: {status}")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Split a stream into lines; bounded, unlike what a broken peer may send without a newline."""
    buffer = bytearray()
    async for chunk in content.iter_any():
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0:
            yield bytes(buffer[:end])
            del buffer[: end + 1]
        if len(buffer) > MAX_EVENT_BYTES:
            raise ProtocolError(f"a watch event exceeds {MAX_EVENT_BYTES} bytes")
