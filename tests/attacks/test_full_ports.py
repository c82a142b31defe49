"""A client wants all connections of a port. Those without a whole request make room, whoever has them."""

import asyncio
from typing import Final
from unittest.mock import Mock

import pytest
from aiohttp import web

from prfaas.http_server import ConnectionBounds, PublicRunner
from prfaas_gateway.limits import Limits

WHOLE: Final = b"GET /waits HTTP/1.1\r\nHost: g\r\n\r\n"
HALF: Final = b"G"
BOUNDS: Final = ConnectionBounds(most=6, spared_seconds=0.0)


class Port:
    """A port without sockets, whose requests are never answered."""

    def __init__(self, bounds: ConnectionBounds):
        self._app = web.Application()
        self._app.router.add_get("/waits", self._wait)
        self._bounds = bounds
        self._server: web.Server | None = None
        self._made: list[web.RequestHandler] = []

    async def connect(self, host: str, sent: bytes = b"") -> Mock:
        """Open a connection, which sends some bytes; return its transport."""
        if self._server is None:
            self._server = await PublicRunner(self._app, shutdown_timeout=0.1, bounds=self._bounds)._make_server()
        transport = Mock(get_extra_info=lambda name, _=None: (host, 1) if name == "peername" else None)
        made = self._server()
        self._made.append(made)
        made.connection_made(transport)
        await asyncio.sleep(0)  # until it waits for a request
        if sent and not transport.close.called:
            made.data_received(sent)
            await asyncio.sleep(0)
        return transport

    async def close(self) -> None:
        for one in self._made:
            one.connection_lost(None)
        await asyncio.sleep(0)

    async def _wait(self, _request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError


async def closed_by_another(bounds: ConnectionBounds, *held: tuple[str, bytes], host: str) -> list[int]:
    """Open connections, then another one from `host`; return the numbers of those that are closed: it has the
    last one."""
    port = Port(bounds)
    opened = [await port.connect(*one) for one in (*held, (host, WHOLE))]
    closed = [number for number, one in enumerate(opened) if one.close.called]
    await port.close()
    return closed


ALL_BUSY: Final = [(host, WHOLE) for host in ("10.0.0.1", "10.0.0.2") for _ in range(3)]


@pytest.mark.parametrize("sent", [HALF, b""], ids=["half a head", "silent"])
async def test_one_without_a_whole_request_makes_room_whoever_has_it(sent):
    for number in range(len(ALL_BUSY)):
        held = [*ALL_BUSY[:number], (ALL_BUSY[number][0], sent), *ALL_BUSY[number + 1 :]]
        assert await closed_by_another(BOUNDS, *held, host="10.0.0.9") == [number]


async def test_the_one_that_has_waited_for_longest_makes_room():
    held = [*ALL_BUSY[:2], ("10.0.0.1", HALF), ("10.0.0.2", b""), *ALL_BUSY[4:]]
    assert await closed_by_another(BOUNDS, *held, host="10.0.0.9") == [2]


async def test_a_client_with_its_whole_share_makes_room_for_itself_alone():
    held = [("10.0.0.2", b""), *ALL_BUSY[:2], ("10.0.0.1", HALF)]
    assert await closed_by_another(BOUNDS, *held, host="10.0.0.1") == [3]


async def test_control_where_all_have_a_request_the_other_one_is_turned_away():
    assert await closed_by_another(BOUNDS, *ALL_BUSY, host="10.0.0.9") == [len(ALL_BUSY)]


async def test_control_one_that_has_just_come_is_spared():
    held = [*ALL_BUSY[:2], ("10.0.0.1", HALF), *ALL_BUSY[3:]]
    assert await closed_by_another(ConnectionBounds(most=6), *held, host="10.0.0.9") == [len(held)]


async def test_half_heads_keep_no_probe_out_of_the_port_of_operators():
    bounds = Limits().admin_connections._replace(most=6)
    assert await closed_by_another(bounds, *[(host, HALF) for host, _ in ALL_BUSY], host="10.0.0.9") == [0]
