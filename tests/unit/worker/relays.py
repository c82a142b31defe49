"""A relay before both ports of a worker, which does to bytes what a test wants."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

API_PORT, DATA_PORT = 8000, 8001
_hosts = itertools.count(220)


@asynccontextmanager
async def relayed(
    worker: Any, *, api: tuple[bytes, bytes] = (b"", b""), cut_after: int = 0, stall_after: int = 0, damage: int = 0
) -> AsyncIterator[str]:
    """Replace bytes on the way to the worker's API.

    After so many bytes that its data port sent, cut a connection once, or fall silent on all of them; or xor the first
    byte of every piece with `damage`.
    """
    host = f"{worker.host.rsplit('.', 1)[0]}.{next(_hosts)}"  # workers keep connections, by address
    sent, ended = 0, asyncio.Event()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, port: int, up: bool) -> None:
        nonlocal sent
        try:
            while piece := await reader.read(1 << 14):
                is_last = False
                if up and port == API_PORT and api[0]:
                    piece = piece.replace(*api)
                if not up and port == DATA_PORT:
                    piece = bytes([piece[0] ^ damage]) + piece[1:]
                    is_last = sent < cut_after <= sent + len(piece)
                    sent += len(piece)
                    if 0 < stall_after < sent:
                        await ended.wait()
                writer.write(piece)
                await writer.drain()
                if is_last:
                    return
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("sockname")[1]
        theirs = await asyncio.open_connection(worker.host, port)
        up = asyncio.create_task(pipe(reader, theirs[1], port=port, up=True))
        await pipe(theirs[0], writer, port=port, up=False)
        theirs[1].close()
        await up

    servers = [await asyncio.start_server(relay, host, port) for port in (API_PORT, DATA_PORT)]
    try:
        yield f"http://{host}:{API_PORT}"
    finally:
        ended.set()
        for server in servers:
            server.close()
