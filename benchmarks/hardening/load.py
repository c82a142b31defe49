"""Requests that are sent when they are due, whatever answers take, and what became of each of them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import aiohttp

PATIENCE_SECONDS = 30.0
Bodies = Callable[[float], bytes]
"""Returns the body of the request that is due then."""


class Reply(NamedTuple):
    """What a client saw: when its request was due, how long after that it was answered, and how.

    `status` is 0 where the connection broke. `retry_after` is the header of that name, empty without it.
    """

    due_seconds: float
    seconds: float
    status: int
    retry_after: str


class Client:
    """A client of an HTTP API, with as many connections as it needs."""

    def __init__(self, url: str, bodies: Bodies):
        self._url = url
        self._bodies = bodies

    async def __aenter__(self) -> "Client":
        limits, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
        self._session = aiohttp.ClientSession(connector=limits, timeout=timeout)
        self._began = time.monotonic()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def now_seconds(self) -> float:
        return time.monotonic() - self._began

    async def ask(self, due_seconds: float) -> Reply:
        """Send one request when it is due, and read its whole answer."""
        await asyncio.sleep(due_seconds - self.now_seconds())
        status, retry_after = 0, ""
        with suppress(aiohttp.ClientError, TimeoutError):
            sent = {"data": self._bodies(due_seconds), "headers": {"Content-Type": "application/json"}}
            async with self._session.post(self._url, **sent) as answer:
                await answer.read()
                status, retry_after = answer.status, answer.headers.get("Retry-After", "")
        return Reply(due_seconds, self.now_seconds() - due_seconds, status, retry_after)


def beats(per_second: float, seconds: float, start_seconds: float = 0.0) -> list[float]:
    """Return when requests of a steady rate are due."""
    return [start_seconds + number / per_second for number in range(int(per_second * seconds))]


async def pace(url: str, bodies: Bodies, dues: Sequence[float]) -> list[Reply]:
    """Send requests when they are due; return their replies in the same order."""
    async with Client(url, bodies) as client:
        return await asyncio.gather(*map(client.ask, dues))


async def hammer(url: str, bodies: Bodies, at_once: int, seconds: float) -> list[Reply]:
    """Send requests over some connections, each when its last one is answered; return all replies."""
    replies: list[Reply] = []

    async def insist(client: Client) -> None:
        while client.now_seconds() < seconds:
            replies.append(await client.ask(client.now_seconds()))

    async with Client(url, bodies) as client:
        await asyncio.gather(*(insist(client) for _ in range(at_once)))
    return replies
