"""Forwards TCP from the host to addresses inside: a listener on 127.0.0.1, a unix socket, a connection inside.

A unix socket in the file system is reachable from any network namespace. The host sends one line, `ADDRESS PORT`. The
inside connects and answers `ok` or the reason of its failure. Then bytes flow both ways.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from prfaas.errors import PeerError, UnreachableError
from prfaas.kube.session import Object

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_SECONDS = 5.0
CHUNK_BYTES = 256 * 1024
HostPort = tuple[str, int]
Resolve = Callable[[], Awaitable[Sequence[HostPort]]]
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


class _Connections:
    """The open connections of servers, each in a task of ours: asyncio reports its own tasks when cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, handle: Handle) -> Handle:
        async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(handle(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.wait({task})

        return run

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def serve_connections(socket: Path) -> AsyncIterator[None]:
    """Inside: connect each connection of `socket` to the address in its first line."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            address, port = (await reader.readline()).decode().split()
            inside = await asyncio.wait_for(asyncio.open_connection(address, int(port)), CONNECT_TIMEOUT_SECONDS)
        except (OSError, TimeoutError, ValueError) as error:
            writer.write(f"{error or 'timed out'}\n".encode())
            await _close(writer)
            return
        writer.write(b"ok\n")
        await _join((reader, writer), inside)

    connections = _Connections()
    server = await asyncio.start_unix_server(connections.accept(handle), socket)
    socket.chmod(0o600)
    async with server:
        try:
            yield
        finally:
            await connections.end()


async def connect_inside(socket: Path, address: HostPort) -> _Stream:
    """On the host: return a connection to an address inside; raise UnreachableError with the reason if it fails."""
    host, port = address
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(f"{host} {port}\n".encode())
        answer = (await asyncio.wait_for(reader.readline(), 2 * CONNECT_TIMEOUT_SECONDS)).decode().strip()
    except (OSError, TimeoutError) as error:
        raise UnreachableError(f"the sandbox does not answer at {socket}: {error}") from error
    if answer != "ok":
        await _close(writer)
        raise UnreachableError(f"cannot connect to {host}:{port} inside: {answer or 'the sandbox has ended'}")
    return reader, writer


class Forwards:
    """Listeners on the host's loopback; use it as an async context manager.

    Each connection is resolved anew, so that a forward outlives the pods behind it.
    """

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._connections = _Connections()

    async def add(self, socket: Path, resolve: Resolve) -> int:
        """Forward a new port of 127.0.0.1 and return it; `resolve` returns addresses in the order of attempts."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                inside = await _first(socket, await resolve())
            except PeerError as error:
                log.info("a forwarded connection was refused: %s", error)
                writer.transport.abort()
                return
            await _join((reader, writer), inside)

        server = await asyncio.start_server(self._connections.accept(handle), "127.0.0.1", 0)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> "Forwards":
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        await self._connections.end()


async def _first(socket: Path, addresses: Sequence[HostPort]) -> _Stream:
    reason = UnreachableError("this forward has no ready pod")
    for address in addresses:
        try:
            return await connect_inside(socket, address)
        except UnreachableError as error:
            reason = error
    raise reason


async def _join(one: _Stream, other: _Stream) -> None:
    """Pass bytes both ways until both sides have ended, or one is broken."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(one[0], other[1]))
            group.create_task(_pump(other[0], one[1]))
    except* OSError as broken:
        log.debug("a relayed connection broke: %s", broken.exceptions[0])
    finally:
        one[1].close()  # both before waiting for either: the wait may be cancelled
        other[1].close()
        await asyncio.gather(_close(one[1]), _close(other[1]))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def endpoints(service: Object, slices: list[Object], port: int | str) -> list[HostPort]:
    """Return the ready (address, port) pairs behind a port, by number or name, of a Service.

    Raises UnreachableError if the Service has no such port.
    """
    ports = service["spec"].get("ports", [])
    wanted = next((each for each in ports if port in (each["port"], each.get("name"))), None)
    if wanted is None:
        offered = ", ".join(str(each["port"]) for each in ports)
        raise UnreachableError(f"Service {service['metadata']['name']} has no port {port}; it has: {offered or 'none'}")
    name = wanted.get("name", "")
    return [
        (address, target["port"])
        for each in slices
        for target in each.get("ports") or []
        if (target.get("name") or "") == name
        for endpoint in each.get("endpoints") or []
        if endpoint.get("conditions", {}).get("ready")
        for address in endpoint["addresses"]
    ]
