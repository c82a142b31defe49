"""HTTP to the workers, plain or inside TLS: one pool of connections, hard waits, a death noticed by the kernel.

A worker whose node vanished sends neither data nor a reset. TCP keep-alive and TCP_USER_TIMEOUT end its connections
within seconds, so that the wait for a slow but living worker may be long.
"""

import asyncio
import io
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from types import TracebackType
from typing import Any, Self

import aiohttp

from prfaas.errors import InternalError, UnreachableError
from prfaas.wire.routes import Instance
from prfaas_gateway.credentials import Credentials
from prfaas_gateway.limits import Limits
from prfaas_gateway.pulse import Pulses

DEAD_PEER_SECONDS = 5
LARGE_BODY_BYTES = 1024 * 1024  # aiohttp wants larger ones as a file, and writes those in pieces


class Answer:
    """A worker's answer: complete in `body`, or, where `body` is None, still to be read from `content`."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes | None):
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.body = body
        self._response = response

    @property
    def content(self) -> aiohttp.StreamReader:
        """The rest of a streamed answer."""
        return self._response.content

    def close(self) -> None:
        """Give the connection back if the answer was read to its end; otherwise cut it, and the worker aborts."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """Connections to all workers. Use as an async context manager.

    Args:
        limits: how long to wait.
        credentials: what workers inside TLS are asked with; without any they are not reached.

    """

    def __init__(self, limits: Limits, credentials: Credentials | None = None):
        self._limits = limits
        self._credentials = credentials
        self._client: aiohttp.ClientSession | None = None
        self._pulses = Pulses(self._lives, limits)

    async def __aenter__(self) -> Self:
        # Shorter than any worker's own keep-alive: a request must not meet a connection that is just being closed.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15, socket_factory=worker_socket)
        self._client = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_seconds),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pulses.close()
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def post(self, worker: Instance, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send a request and wait for the answer: its headers, and all of it where it is not a stream.

        Raises:
            UnreachableError: connection refused, timed out or lost before the answer stood, or not of its cluster.
            TimeoutError: the worker lives but did not answer in time.

        """
        if self._client is None:
            raise InternalError("Upstream is used outside its `async with` block")
        url, tls = worker.url + path, self._tls(worker)
        data: Any = body if len(body) <= LARGE_BODY_BYTES else io.BytesIO(body)
        timer = asyncio.timeout(self._limits.first_byte_seconds)
        wait = self._pulses.begin(worker, timer)
        try:
            async with timer:
                response = await self._client.post(url, data=data, headers=headers, allow_redirects=False, ssl=tls)
                try:
                    return Answer(response, await self._whole_body(response))
                except BaseException:
                    response.close()
                    raise
        except (aiohttp.ClientError, OSError) as error:
            if wait.given_up:
                raise UnreachableError(f"{url}: it takes connections, and answers nothing") from error
            if type(error) is TimeoutError:
                raise TimeoutError(f"{url} did not answer within {self._limits.first_byte_seconds:g} s") from error
            raise UnreachableError(f"{url}: {type(error).__name__}: {error}") from error
        finally:
            self._pulses.end(worker, wait)

    async def _lives(self, worker: Instance) -> bool:
        """Ask a worker for its role, which both of its processes answer together; other engines know no such path."""
        if self._client is None:
            return False
        try:
            async with (
                asyncio.timeout(self._limits.alive_seconds),
                self._client.get(f"{worker.url}/v1/role", allow_redirects=False, ssl=self._tls(worker)) as answer,
            ):
                await answer.read()
                return True
        except (aiohttp.ClientError, OSError, UnreachableError):
            return False

    async def put(self, worker: Instance, path: str, body: bytes, wait_seconds: float) -> int:
        """Send a small JSON document and return the answer's status.

        Raises:
            UnreachableError: as `post` does.
            TimeoutError: no answer within `wait_seconds`.

        """
        if self._client is None:
            raise InternalError("Upstream is used outside its `async with` block")
        url, tls = worker.url + path, self._tls(worker)
        told = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(wait_seconds),
                self._client.put(url, data=body, headers=told, allow_redirects=False, ssl=tls) as answer,
            ):
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, OSError) as error:
            if type(error) is TimeoutError:
                raise TimeoutError(f"{url} did not answer within {wait_seconds:g} s") from error
            raise UnreachableError(f"{url}: {type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def reading(self, worker: Instance, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """GET an answer that the block reads, be it endless; afterwards its connection is cut.

        Raises:
            UnreachableError: as `post` does, also while the block reads.

        """
        if self._client is None:
            raise InternalError("Upstream is used outside its `async with` block")
        url, tls = worker.url + path, self._tls(worker)
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                response = await self._client.get(url, allow_redirects=False, ssl=tls)
            with closing(response):
                yield response
        except (aiohttp.ClientError, OSError, EOFError) as error:
            if type(error) is TimeoutError:
                raise
            raise UnreachableError(f"{url}: {type(error).__name__}: {error}") from error

    def _tls(self, worker: Instance) -> ssl.SSLContext | bool:
        """Return what aiohttp calls `ssl`, which is not looked at where the address is plain."""
        if not worker.url.startswith("https:"):
            return True
        if self._credentials is None:
            raise UnreachableError(f"{worker.url} is inside TLS, and this gateway has no --tls-dir")
        return self._credentials.context(worker.cluster)

    async def _whole_body(self, response: aiohttp.ClientResponse) -> bytes | None:
        length = response.content_length
        if length is None or length > self._limits.buffered_answer_bytes:
            return None
        return await response.read()


def worker_socket(address: Any) -> socket.socket:
    """Return a socket whose connection ends when the peer's host falls silent."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_PEER_SECONDS - 2)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_SECONDS * 1000)
    return made
