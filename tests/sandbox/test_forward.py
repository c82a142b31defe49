"""The relay passes bytes both ways, resolves again for each connection, and ends what cannot be joined."""

import asyncio

import pytest

from prfaas.errors import UnreachableError
from prfaas_sandbox.forward import Forwards, connect_inside, serve_connections


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read())
    await writer.drain()
    writer.close()


async def exchange(port: int, data: bytes) -> bytes:
    """Send, end the sending side, and return everything that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_megabytes_go_both_ways_and_each_connection_is_resolved_again(tmp_path):
    data = bytes(range(256)) * 20_000
    targets: list[tuple[str, int]] = []

    async def resolve() -> list[tuple[str, int]]:
        return targets

    async with (
        serve_connections(tmp_path / "s"),
        Forwards() as forwards,
        await asyncio.start_server(echo, "127.0.0.1", 0) as server,
    ):
        port = await forwards.add(tmp_path / "s", resolve)
        with pytest.raises(ConnectionResetError):
            await exchange(port, b"nobody is there yet")
        # The first target refuses (port 1 of loopback), the second accepts.
        targets += [("127.0.0.1", 1), server.sockets[0].getsockname()[:2]]
        assert await exchange(port, data) == data


async def test_the_reason_of_a_failure_comes_back(tmp_path):
    async with serve_connections(tmp_path / "s"):
        with pytest.raises(UnreachableError, match=r"127.0.0.1:1 inside"):
            await connect_inside(tmp_path / "s", ("127.0.0.1", 1))
    with pytest.raises(UnreachableError, match="does not answer"):
        await connect_inside(tmp_path / "gone", ("127.0.0.1", 1))


async def test_open_connections_end_with_the_forwards(tmp_path):
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await reader.read()
        writer.close()

    async with serve_connections(tmp_path / "s"), await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        target = server.sockets[0].getsockname()[:2]

        async def resolve() -> list[tuple[str, int]]:
            return [target]

        async with Forwards() as forwards:
            reader, writer = await asyncio.open_connection("127.0.0.1", await forwards.add(tmp_path / "s", resolve))
            assert await reader.readexactly(5) == b"hello"
        assert await reader.read() == b""
        writer.close()
