"""Lists and watches for ever: through timeouts, dropped connections, expired resource versions and dead servers.

A half-dead server keeps the connection and sends nothing, like a collection without changes. So the server shall end
every watch after `window_seconds`, and the client cuts it shortly after. The next watch resumes from the last resource
version with one small request.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from prfaas.errors import ConfigError, PeerError, ProtocolError
from prfaas.kube.session import KubeSession, ObjectRef, OnAnswer, StatusError, with_query
from prfaas.util import Backoff, backoff_seconds, decode_json

log = logging.getLogger(__name__)

L = TypeVar("L")
MAX_EVENT_BYTES = 8 * 1024 * 1024  # etcd holds objects up to 1.5 MiB
WINDOW_SLACK_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.2
BOOKMARK = "BOOKMARK"
DELETED = "DELETED"
GONE = 410
NOT_FOUND = 404


class WatchEvent(NamedTuple):
    """One line of a watch: ADDED, MODIFIED, DELETED or BOOKMARK, and the object at that time."""

    type: str
    object: dict[str, Any]


class ExpiredError(ProtocolError):
    """A resource version is too old for a watch: list again."""

    reason = "Expired"


class _Line(msgspec.Struct):
    type: str
    object: dict[str, Any]


async def list_and_watch(
    read: Callable[[], Awaitable[tuple[L, str]]],
    watch: Callable[[str], AsyncIterator[WatchEvent]],
    failed: Callable[[PeerError | ConfigError, float], float],
    backoff: Backoff,
) -> AsyncIterator[L | WatchEvent]:
    """Yield the result of `read`, then every change; read again after a failure or after lost changes.

    Never ends by itself and never raises for a server's failure. `read` returns the existing objects, and the resource
    version to watch from. `watch` yields the changes after it until the server ends the watch, and raises ExpiredError.
    `failed` takes an error and the pause that is due; it returns how long to wait.
    """
    version = ""
    while True:
        try:
            if not version:
                found, version = await read()
                yield found
            async for event in watch(version):
                version = version_of(event.object)
                backoff.succeeded()
                if event.type != BOOKMARK:
                    yield event
            backoff.succeeded()
        except (PeerError, ConfigError) as error:
            # A version from a server that was restored from a backup since would never be reached again.
            version, pause_seconds = "", backoff.failed()
            # One expiry is usual; a server that never has the version is failing.
            is_usual = isinstance(error, ExpiredError) and backoff.failures == 1
            await asyncio.sleep(pause_seconds if is_usual else failed(error, pause_seconds))
        else:
            await asyncio.sleep(backoff_seconds(1, FIRST_PAUSE_SECONDS, 1.0))  # a server may end every watch at once


async def watch_events(
    session: KubeSession,
    path: str,
    version: str,
    *,
    window_seconds: float,
    query: Mapping[str, str],
    on_answer: OnAnswer | None = None,
) -> AsyncIterator[WatchEvent]:
    """Yield the events of one watch until the server ends it; raises ExpiredError for a `version` too old."""
    # Bookmarks renew the version of a quiet watch. An API server forgets versions after five minutes, and then all is
    # listed again.
    asked = {"watch": "1", "allowWatchBookmarks": "true", **query, "resourceVersion": version}
    path = with_query(path, {**asked, "timeoutSeconds": max(1, round(window_seconds))})
    limit_seconds = window_seconds + WINDOW_SLACK_SECONDS  # for a server that does not end the stream first
    buffer = bytearray()
    try:
        async with session.stream("GET", path, timeout_seconds=limit_seconds, on_answer=on_answer) as response:
            async for chunk in response.content.iter_any():
                buffer += chunk
                while (end := buffer.find(b"\n")) >= 0:
                    yield _event(bytes(buffer[:end]), path)
                    del buffer[: end + 1]
                if len(buffer) > MAX_EVENT_BYTES:  # a broken peer may send no newline
                    raise ProtocolError(f"a watch event exceeds {MAX_EVENT_BYTES} bytes")
    except StatusError as error:
        if error.status == GONE:
            raise ExpiredError(str(error)) from error
        raise


async def watch_object(
    session: KubeSession, ref: ObjectRef, *, window_seconds: float = 30.0, max_backoff_seconds: float = 10.0
) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the object now and after every change; None while it does not exist.

    It continues as `list_and_watch` does. An object may be yielded more than once. Needs get and watch on this name.
    """
    query = {"fieldSelector": f"metadata.name={ref.name}"}

    async def read() -> tuple[dict[str, Any] | None, str]:
        try:
            current = await session.call("GET", ref.path)
        except StatusError as error:
            if error.status != NOT_FOUND:
                raise
            return None, "0"  # from any point: the server then sends an existing object as ADDED
        return current, version_of(current)

    def watch(version: str) -> AsyncIterator[WatchEvent]:
        return watch_events(session, ref.kind.path(ref.namespace), version, window_seconds=window_seconds, query=query)

    def failed(error: PeerError | ConfigError, pause_seconds: float) -> float:
        log.warning("watch of %s failed, next try in %.1f s: %s", ref, pause_seconds, error)
        return pause_seconds

    async for change in list_and_watch(read, watch, failed, Backoff(FIRST_PAUSE_SECONDS, max_backoff_seconds)):
        if isinstance(change, WatchEvent):
            yield None if change.type == DELETED else change.object
        else:
            yield change


def version_of(current: Mapping[str, Any]) -> str:
    """Return metadata.resourceVersion; raise ProtocolError if it is missing."""
    try:
        return str(current["metadata"]["resourceVersion"])
    except (KeyError, TypeError) as error:
        raise ProtocolError("an object has no metadata.resourceVersion") from error


def _event(line: bytes, path: str) -> WatchEvent:
    found = decode_json(line, _Line, f"GET {path} sent a damaged event")
    if found.type == "ERROR":
        if found.object.get("code") == GONE:
            raise ExpiredError(f"GET {path}: {found.object.get('message', 'the resource version is too old')}")
        raise ProtocolError(f"GET {path} ended with an error event: {found.object}")
    return WatchEvent(found.type, found.object)
