"""Lists and watches for ever: through timeouts, dropped connections, expired resource versions and dead servers.

A half-dead server keeps the connection and sends nothing, like a collection without changes. So the server shall end
every watch after WINDOW_SECONDS, and the client cuts it shortly after. The next watch resumes from the last resource
version with one small request.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from prfaas.bounds.answers import unpacked
from prfaas.errors import ConfigError, PeerError, ProtocolError
from prfaas.kube.session import MAX_ANSWER_VALUES, KubeSession, Object, ObjectRef, OnAnswer, StatusError
from prfaas.util import Backoff, backoff_seconds, check_values, decode_json

log = logging.getLogger(__name__)

L = TypeVar("L")
MAX_EVENT_BYTES = 4 * 1024 * 1024  # etcd holds objects up to 1.5 MiB
WINDOW_SECONDS = 30.0
WINDOW_SLACK_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 5.0
BOOKMARK = "BOOKMARK"
DELETED = "DELETED"
GONE = 410


class WatchEvent(msgspec.Struct):
    """One line of a watch: ADDED, MODIFIED, DELETED or BOOKMARK, and the object at that time."""

    type: str
    object: Object


class ExpiredError(ProtocolError):
    """A resource version is too old for a watch: list again."""

    reason = "Expired"


def _warn(error: PeerError | ConfigError, pause_seconds: float) -> float:
    log.warning("a watch failed, next try in %.1f s: %s", pause_seconds, error)
    return pause_seconds


async def list_and_watch(
    read: Callable[[], Awaitable[tuple[L, str]]],
    watch: Callable[[str], AsyncIterator[WatchEvent]],
    failed: Callable[[PeerError | ConfigError, float], float] = _warn,
) -> AsyncIterator[L | WatchEvent]:
    """Yield the result of `read`, then every change; read again after a failure or after lost changes.

    Never ends by itself and never raises for a server's failure. `read` returns the existing objects, and the resource
    version to watch from. `watch` yields the changes after it until the server ends the watch, and raises ExpiredError.
    `failed` takes an error and the pause that is due; it returns how long to wait.
    """
    version, backoff = "", Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
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
                del event  # not held until the next one comes: it may be large, and there are many watches
            backoff.succeeded()
        except (PeerError, ConfigError) as error:
            # A version from a server that was restored from a backup since would never be reached again.
            version, pause_seconds = "", backoff.failed()
            # One expiry is usual; a server that never has the version is failing.
            is_usual = isinstance(error, ExpiredError) and backoff.failures == 1
            pause_seconds = pause_seconds if is_usual else failed(error, pause_seconds)
        else:
            pause_seconds = backoff_seconds(1, FIRST_PAUSE_SECONDS, 1.0)  # a server may end every watch at once
        await asyncio.sleep(pause_seconds)  # not above, where the error holds what was read


async def watch_events(
    session: KubeSession, path: str, query: Mapping[str, str], version: str, on_answer: OnAnswer | None = None
) -> AsyncIterator[WatchEvent]:
    """Yield the events of one watch until the server ends it; raises ExpiredError for a `version` too old."""
    # Bookmarks renew the version of a quiet watch. An API server forgets versions after five minutes, and then all is
    # listed again.
    asked = {"watch": "1", "allowWatchBookmarks": "true", **query, "resourceVersion": version}
    asked["timeoutSeconds"] = str(round(WINDOW_SECONDS))
    limit_seconds = WINDOW_SECONDS + WINDOW_SLACK_SECONDS  # for a server that does not end the stream first
    buffer, most_bytes, most_values = bytearray(), session.bound(MAX_EVENT_BYTES), session.bound(MAX_ANSWER_VALUES)
    try:
        timed = session.stream("GET", path, query=asked, timeout_seconds=limit_seconds, on_answer=on_answer)
        async with timed as response:
            async for chunk in unpacked(response):
                buffer += chunk
                while (end := buffer.find(b"\n")) >= 0:
                    yield _event(buffer[:end], path, most_values)
                    del buffer[: end + 1]
                if len(buffer) > most_bytes:  # a broken peer may send no newline
                    raise ProtocolError(f"a watch event exceeds {most_bytes} bytes")
    except StatusError as error:
        if error.status == GONE:
            raise ExpiredError(str(error)) from error
        raise


def follow(session: KubeSession, path: str, query: Mapping[str, str]) -> AsyncIterator[list[Object] | WatchEvent]:
    """Yield a collection, or what a selector in `query` chooses of it, and then every change, as `list_and_watch`."""

    async def read() -> tuple[list[Object], str]:
        found = await session.call("GET", path, query=query)
        items: list[Object] = found.get("items") or []
        if type(items) is not list:
            raise ProtocolError(f"GET {path} did not answer with a list")
        return items, version_of(found)

    return list_and_watch(read, partial(watch_events, session, path, query))


async def watch_object(session: KubeSession, ref: ObjectRef) -> AsyncIterator[Object | None]:
    """Yield the object now and after every change; None while it does not exist.

    It continues as `list_and_watch` does. An object may be yielded more than once. Needs list and watch on this name.
    """
    async for change in follow(session, ref.kind.path(ref.namespace), {"fieldSelector": f"metadata.name={ref.name}"}):
        if not isinstance(change, WatchEvent):
            yield change[0] if change else None
        else:
            yield None if change.type == DELETED else change.object


def version_of(current: Mapping[str, Any]) -> str:
    """Return metadata.resourceVersion; raise ProtocolError if it is missing."""
    try:
        return str(current["metadata"]["resourceVersion"])
    except (KeyError, TypeError) as error:
        raise ProtocolError("an object has no metadata.resourceVersion") from error


def _event(line: bytearray, path: str, most_values: int) -> WatchEvent:
    check_values(line, most_values, f"GET {path} sent an event")
    event = decode_json(line, WatchEvent, f"GET {path} sent a damaged event")
    if event.type == "ERROR":
        if event.object.get("code") == GONE:
            raise ExpiredError(f"GET {path}: {event.object.get('message', 'the resource version is too old')}")
        raise ProtocolError(f"GET {path} ended with an error event: {event.object}")
    return event
