"""ZMTP 3.0 over TCP: the part that a reader of foreign PUB and ROUTER sockets needs (rfc.zeromq.org/spec/23).

    greeting   64 bytes each way: signature, version 3, mechanism NULL
    READY      a command each way, with the kind of socket
    messages   of frames: a byte of flags, the size in 1 or 8 bytes, the body

libzmq bounds a frame and the number of messages, but not the frames of one message. So an instance could fill this
process's memory with one endless message. Here a whole message and every wait have a bound.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

from prfaas.errors import ProtocolError, UnreachableError
from prfaas_gateway.upstream import worker_socket

CONNECT_SECONDS: Final = 5.0
"""Timeout of the connection and its greetings."""
MESSAGE_SECONDS: Final = 20.0
"""Timeout from the first byte of a message to its last."""
MAX_MESSAGE_BYTES: Final = 8 << 20
"""Bound of one step's events; those of a prompt of a million tokens fit."""
MAX_PARTS: Final = 8
MAX_COMMANDS: Final = 16
"""Between two messages; heartbeats are commands."""
_MORE, _LONG, _COMMAND = 1, 2, 4
_SIZE: Final = struct.Struct("!Q")
_MECHANISM: Final = b"NULL"
# RFC 23: signature 10, version 2, mechanism 20, as-server 1 and filler 31 bytes.
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + _MECHANISM.ljust(20, b"\0") + bytes(32)

SocketType = Literal["SUB", "DEALER"]


class ZmtpConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    async def send(self, *parts: bytes) -> None:
        """Send one message of short parts."""
        for number, part in enumerate(parts, 1):
            self._writer.write(bytes([_MORE if number < len(parts) else 0, len(part)]) + part)
        async with asyncio.timeout(MESSAGE_SECONDS):
            await self._writer.drain()

    async def receive(self, idle_seconds: float) -> list[bytes] | None:
        """Return the parts of the next message; None after `idle_seconds` without one.

        Raises ProtocolError for an invalid or too large message.
        """
        parts: list[bytes] = []
        left_bytes = MAX_MESSAGE_BYTES
        for _ in range(MAX_PARTS + MAX_COMMANDS):
            try:
                async with asyncio.timeout(MESSAGE_SECONDS if parts else idle_seconds):
                    (flags,) = await self._reader.readexactly(1)
            except TimeoutError:
                if parts:
                    raise
                return None
            body = await self._body(flags, left_bytes)
            if flags & _COMMAND:
                continue
            parts.append(body)
            left_bytes -= len(body)
            if len(parts) > MAX_PARTS:
                break
            if not flags & _MORE:
                return parts
        raise ProtocolError(f"a message of more than {MAX_PARTS} parts, or {MAX_COMMANDS} commands beside it")

    async def _body(self, flags: int, most_bytes: int) -> bytes:
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ProtocolError(f"a frame has the flags {flags:#x}, which ZMTP 3.0 does not know")
        async with asyncio.timeout(MESSAGE_SECONDS):
            if flags & _LONG:
                (size,) = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))
            else:
                (size,) = await self._reader.readexactly(1)
            if size > most_bytes:
                raise ProtocolError(f"a message of over {MAX_MESSAGE_BYTES} bytes")
            return await self._reader.readexactly(size)

    async def greet(self, kind: SocketType) -> None:
        """Exchange greetings. Raises ProtocolError if the peer does not speak ZMTP 3, or wants credentials."""
        self._writer.write(_GREETING)
        theirs = await self._reader.readexactly(len(_GREETING))
        if theirs[0] != 0xFF or theirs[9] != 0x7F or theirs[10] < 3:
            raise ProtocolError("the peer does not speak ZMTP 3: is that its port for cache events?")
        if theirs[12:32].rstrip(b"\0") != _MECHANISM:
            raise ProtocolError(f"the peer requires the mechanism {theirs[12:32]!r}; only NULL is supported")
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind.encode()
        self._writer.write(bytes([_COMMAND, len(ready)]) + ready)
        (flags,) = await self._reader.readexactly(1)
        answer = await self._body(flags, 4096)
        if not flags & _COMMAND or not answer.startswith(b"\x05READY"):
            raise ProtocolError(f"the peer refused a {kind} socket: {answer[:80]!r}")


@asynccontextmanager
async def connected(host: str, port: int, kind: SocketType) -> AsyncIterator[ZmtpConnection]:
    """Hold a connection while the block runs.

    Raises UnreachableError for a failed or lost connection, also in the block, and ProtocolError for another protocol.
    """
    loop = asyncio.get_running_loop()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            address, *_ = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            plain = worker_socket(address)
            plain.setblocking(False)
            try:
                await loop.sock_connect(plain, address[4])
                reader, writer = await asyncio.open_connection(sock=plain)
            except BaseException:
                plain.close()
                raise
            connection = ZmtpConnection(reader, writer)
            await connection.greet(kind)
        yield connection
    except (OSError, EOFError) as error:
        raise UnreachableError(f"cache events at {host}:{port}: {type(error).__name__}: {error}") from error
    finally:
        if writer is not None:
            # `close` would first try to send the rest to a peer that may read nothing.
            writer.transport.abort()
