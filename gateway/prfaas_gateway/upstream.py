"""HTTP to the workers, plain or with TLS: one pool of connections with hard timeouts.

A worker on a vanished node sends neither data nor a reset. TCP keep-alive and TCP_USER_TIMEOUT end its connections
within seconds, so that the timeout for a living worker may be long. LivenessProbes detect a hung worker.
GatewayCredentials verify the worker's cluster.
"""

import asyncio
import errno
import io
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import aiohttp

from prfaas import identity
from prfaas.bounds.answers import read_at_most
from prfaas.credentials import CredentialFiles, Files, load, tls13, utc_now
from prfaas.errors import IdentityError, LostError, UnreachableError
from prfaas.names import HUB
from prfaas.rights import home_of
from prfaas.wire.routes import Instance
from prfaas_gateway.limits import Limits

DEAD_PEER_SECONDS: Final = 5
LARGE_BODY_BYTES: Final = 1024 * 1024  # aiohttp wants larger ones as a file, and writes those in pieces
SMALL_ANSWER_BYTES: Final = 64 * 1024
"""Of an answer whose status alone counts. What is longer is cut off."""
ALLOWED_MISSES: Final = 1
LOOK_SECONDS: Final = 0.1
"""Interval of looks at the credentials: each costs four stats of files, and a request needs several."""
_VANISHED: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
"""How the connections to a node end that vanished. Those of an engine that dies are closed, by its own kernel."""


class Answer:
    """A worker's answer: complete in `body`; if `body` is None, `read` its pieces."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes | None, first: bytes = b""):
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.body = body
        self.first = first
        """The first piece of a stream, if the caller awaited it."""
        self._response = response

    async def read(self) -> bytes:
        """Return the next piece, empty at the end."""
        if self.first:
            piece, self.first = self.first, b""
            return piece
        return await self._response.content.readany()

    def close(self) -> None:
        """Release the connection if the answer was read to its end; else cut it, and the worker aborts."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """Connections to all workers. Make it inside the event loop, and use it as an async context manager.

    Without `credentials`, workers with TLS are not reachable.
    """

    def __init__(self, limits: Limits, credentials: "GatewayCredentials | None" = None):
        self._limits = limits
        self._credentials = credentials
        self._liveness = LivenessProbes(self._lives, limits)
        # Shorter than any worker's own keep-alive: a request must not meet a connection that is being closed.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15, socket_factory=worker_socket)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._liveness.close()
        await self._session.close()

    async def post(
        self, worker: Instance, path: str, headers: Mapping[str, str], body: bytes, *, await_piece: bool = False
    ) -> Answer:
        """Send a request and return the answer: its headers, and its body if it is not a stream.

        With `await_piece` a stream's first piece has arrived: other engines send headers long before the first token.
        Raises UnreachableError for a refused connection, a silent worker or node, or another cluster; LostError for a
        connection that was closed after that; TimeoutError for a late answer.
        """
        url, tls = worker.url + path, self._tls(worker)
        data: Any = body if len(body) <= LARGE_BODY_BYTES else io.BytesIO(body)
        timer = asyncio.timeout(self._limits.first_byte_seconds)
        wait = self._liveness.begin(worker, timer)
        try:
            async with timer:
                response = await self._session.post(url, data=data, headers=headers, allow_redirects=False, ssl=tls)
                try:
                    whole = await self._whole_body(response)
                    awaits_piece = await_piece and whole is None
                    return Answer(response, whole, await response.content.readany() if awaits_piece else b"")
                except BaseException:
                    response.close()
                    raise
        except (aiohttp.ClientError, OSError) as error:
            if wait.given_up:
                raise UnreachableError(f"{url}: it accepts connections, but does not answer") from error
            # The class itself is our timer. aiohttp's own are subclasses: nobody answered the connection.
            if type(error) is TimeoutError:
                raise TimeoutError(f"{url} did not answer within {self._limits.first_byte_seconds:g} s") from error
            raise (LostError if is_lost(error) else UnreachableError)(
                f"{url}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._liveness.end(worker, wait)

    async def _lives(self, worker: Instance) -> bool:
        """Ask a worker for its role, which needs both of its processes; other engines lack that path."""
        if self._session.closed:
            return False
        try:
            async with (
                asyncio.timeout(self._limits.liveness_timeout_seconds),
                self._session.get(f"{worker.url}/v1/role", allow_redirects=False, ssl=self._tls(worker)) as answer,
            ):
                await read_at_most(answer.content.iter_any(), SMALL_ANSWER_BYTES)
                return True
        except (aiohttp.ClientError, OSError, UnreachableError):
            return False

    async def put(self, worker: Instance, path: str, body: bytes, wait_seconds: float) -> int:
        """Send a small JSON document and return the answer's status.

        Raises UnreachableError as `post` does, TimeoutError without an answer within `wait_seconds`.
        """
        url, tls = worker.url + path, self._tls(worker)
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(wait_seconds),
                self._session.put(url, data=body, headers=headers, allow_redirects=False, ssl=tls) as answer,
            ):
                await read_at_most(answer.content.iter_any(), SMALL_ANSWER_BYTES)
                return answer.status
        except (aiohttp.ClientError, OSError) as error:
            if type(error) is TimeoutError:
                raise TimeoutError(f"{url} did not answer within {wait_seconds:g} s") from error
            raise UnreachableError(f"{url}: {type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def reading(self, worker: Instance, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """GET an answer, possibly endless, for the block; cut its connection afterwards.

        Raises UnreachableError as `post` does, also while the block reads.
        """
        url, tls = worker.url + path, self._tls(worker)
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                response = await self._session.get(url, allow_redirects=False, ssl=tls)
            try:
                yield response
            finally:
                _cut(response)
        except (aiohttp.ClientError, OSError, EOFError) as error:
            if type(error) is TimeoutError:
                raise
            raise UnreachableError(f"{url}: {type(error).__name__}: {error}") from error

    def _tls(self, worker: Instance) -> ssl.SSLContext | bool:
        """Return aiohttp's `ssl` argument, which plain addresses ignore."""
        if not worker.url.startswith("https:"):
            return True
        if self._credentials is None:
            raise UnreachableError(f"{worker.url} uses TLS, and this gateway has no --tls-dir")
        return self._credentials.context(worker.cluster)

    async def _whole_body(self, response: aiohttp.ClientResponse) -> bytes | None:
        if 300 <= response.status < 400:
            raise UnreachableError(f"{response.url} answers with a redirect, which is not followed")
        length = response.content_length
        if length is None or length > self._limits.buffered_answer_bytes:
            return None
        return await response.read()


def worker_socket(address: Any) -> socket.socket:
    """Return a socket whose connection ends soon after the peer's host falls silent."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # 2 s of silence, then probes a second apart. Sent data stops keep-alive; TCP_USER_TIMEOUT bounds its
    # acknowledgement.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_PEER_SECONDS - 2)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_SECONDS * 1000)
    return made


def is_lost(error: Exception) -> bool:
    """Return whether a worker got the request and then closed its connection: it may have died of the request."""
    if isinstance(error, (aiohttp.ClientConnectorError, TimeoutError)):
        return False
    return not (isinstance(error, OSError) and error.errno in _VANISHED)


def _cut(response: aiohttp.ClientResponse) -> None:
    """Close an answer's connection at once. TLS would first wait half a minute for a goodbye of a peer that only
    writes."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()


Ask = Callable[[Instance], Awaitable[bool]]
"""Probes a worker; returns False without an answer in time. Any answer counts."""


class _Wait:
    """One wait for a first byte; `timer` ends the wait if the worker hangs."""

    __slots__ = ("given_up", "late", "timer")

    def __init__(self, timer: asyncio.Timeout):
        self.timer = timer
        self.given_up = False
        self.late: asyncio.TimerHandle | None = None


class LivenessProbes:
    """Detects a hung worker while the gateway waits for its first byte.

    A prompt may wait for minutes in a queue, so a long wait proves nothing. The kernel of a frozen process goes on
    acknowledging. So a late worker gets a cheap request that needs both of its processes. After two missing answers all
    requests give the worker up.
    """

    def __init__(self, ask: Ask, limits: Limits):
        self._ask = ask
        self._limits = limits
        self._late: dict[str, set[_Wait]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def begin(self, worker: Instance, timer: asyncio.Timeout) -> _Wait:
        """Record a wait for a worker; `end` must follow."""
        wait = _Wait(timer)
        loop = asyncio.get_running_loop()
        wait.late = loop.call_later(self._limits.liveness_interval_seconds, self._doubt, worker, wait)
        return wait

    def end(self, worker: Instance, wait: _Wait) -> None:
        if wait.late is not None:
            wait.late.cancel()
        waits = self._late.get(worker.url)
        if waits is not None and wait in waits:
            waits.remove(wait)

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()

    def _doubt(self, worker: Instance, wait: _Wait) -> None:
        self._late.setdefault(worker.url, set()).add(wait)
        if worker.url not in self._asking:
            self._asking[worker.url] = asyncio.ensure_future(self._look_after(worker))

    async def _look_after(self, worker: Instance) -> None:
        """Probe a worker until its last wait ends; end all waits after too many missing answers."""
        waits, misses = self._late[worker.url], 0
        try:
            while waits:
                misses = 0 if await self._ask(worker) else misses + 1
                if misses > ALLOWED_MISSES:
                    for wait in waits:
                        if not wait.timer.expired():
                            wait.given_up = True
                            # A moment that is past: the timer ends the wait now.
                            wait.timer.reschedule(0)
                    return
                await asyncio.sleep(self._limits.liveness_interval_seconds)
        finally:
            del self._asking[worker.url], self._late[worker.url]


class _Proof(ssl.SSLObject):
    """A connection whose handshake succeeds only with the intended cluster."""

    def do_handshake(self) -> None:
        # It raises SSLWantReadError until it is whole, so what follows comes once, before the first byte of a request.
        super().do_handshake()
        context = self.context
        if isinstance(context, _Context):
            certificate = self.getpeercert(binary_form=True) or b""
            try:
                found = identity.check_peer(certificate, None, utc_now(), context.peers).cluster
            except IdentityError as error:
                raise ssl.CertificateError(str(error)) from error
            if found != context.cluster:
                raise ssl.CertificateError(f"the worker is of cluster {found!r} and {context.cluster!r} was expected")


class _Context(ssl.SSLContext):
    cluster = ""
    peers = identity.PeerRules()
    sslobject_class = _Proof


class _Known(NamedTuple):
    files: Files
    contexts: dict[str, _Context]


class GatewayCredentials:
    """The gateway's own certificate, and contexts that check a worker's cluster.

    Certificates name clusters; addresses and host names prove nothing. A changed directory gives new contexts, within
    LOOK_SECONDS. aiohttp's pool keeps connections apart by context, so no connection of an older context is reused.
    Raises ConfigError for unusable files at the start.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic):
        self._files = CredentialFiles(directory, lambda files: _Known(files, {"": _context("", files)}))
        self._clock = clock
        self._known, self._looked_at = self._files.now(), clock()

    def _now(self) -> _Known:
        now = self._clock()
        if now - self._looked_at >= LOOK_SECONDS:
            self._known, self._looked_at = self._files.now(), now
        return self._known

    @property
    def ran_out(self) -> bool:
        """Our certificate has run out: no other cluster takes it."""
        return self._now().files.ran_out

    def context(self, cluster: str) -> ssl.SSLContext:
        """Return the context for workers of a cluster; it is the same until the files change."""
        files, contexts = self._now()
        cluster = home_of(files.cluster) if cluster == HUB else cluster
        if cluster not in contexts:
            contexts[cluster] = _context(cluster, files)
        return contexts[cluster]


def _context(cluster: str, files: Files) -> _Context:
    context = tls13(_Context, ssl.PROTOCOL_TLS_CLIENT)
    context.cluster, context.peers = cluster, files.peers
    load(context, files)
    return context
