"""What tests start themselves: an HTTP server with one handler for all requests, and a client that sends any bytes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web


@asynccontextmanager
async def serving(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Serve at a free port of loopback while the block runs; give the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def send_bytes(port: int, *pieces: bytes, host: str = "127.0.0.1") -> bytes:
    """Send pieces one after the other; return all that comes until the other end closes the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    received = b""
    with suppress(ConnectionError):  # it may close while more is under way
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)  # so that they arrive one by one
        while found := await asyncio.wait_for(reader.read(1 << 16), 30):
            received += found
    writer.close()
    return received
