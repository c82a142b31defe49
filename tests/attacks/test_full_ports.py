"""A client wants all connections of a port. Those without a whole request make room, whoever has them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from unittest.mock import Mock

import pytest
from aiohttp import web

from prfaas.http_server import PROBED_BOUNDS, ConnectionBounds, PublicRunner
from prfaas.ports import free_ports
from prfaas_operator import http
from prfaas_operator.options import OperatorOptions

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
    bounds = PROBED_BOUNDS._replace(most=6)
    assert await closed_by_another(bounds, *[(host, HALF) for host, _ in ALL_BUSY], host="10.0.0.9") == [0]


PROBE: Final = b"GET /healthz HTTP/1.1\r\nHost: g\r\n\r\n"
STRANGERS: Final = PROBED_BOUNDS.most + 20
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected(port: int, address: str, sent: bytes) -> Line:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(sent)
    return reader, writer


async def is_answered(one: Line, sent: bytes = b"") -> bool:
    """Send something and close the connection; return whether it was answered before."""
    reader, writer = one
    try:
        writer.write(sent)
        return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    except ConnectionError:
        return False
    finally:
        writer.close()


@asynccontextmanager
async def strangers_at_the_operators_port(sent: bytes) -> AsyncIterator[tuple[list[Line], Line]]:
    """Yield connections to its port of probes that sent this, and one with a probe that came later."""
    ports = free_ports(2)
    options = OperatorOptions("ns", "g:1", "w:1", "c:1", metrics_port=ports[0], health_port=ports[1])
    async with http.serving(options, http.Health(lambda: "")):
        held = [await connected(ports[1], f"127.0.0.{2 + one % 4}", sent) for one in range(STRANGERS)]
        yield held, await connected(ports[1], "127.0.0.1", PROBE)


async def strangers_held() -> int:
    """Return how many half heads the operator's port of probes still holds when it has answered a probe."""
    async with strangers_at_the_operators_port(PROBE[:1]) as (held, probe):
        assert await is_answered(probe)
        return sum([await is_answered(one, PROBE[1:]) for one in held])


async def is_probe_answered_beside_bodies_that_do_not_come() -> bool:
    async with strangers_at_the_operators_port(PROBE[:-2] + b"Content-Length: 9\r\n\r\n") as (held, probe):
        answered = await is_answered(probe)
        for _, writer in held:
            writer.close()
        return answered


@pytest.mark.system
async def test_the_operator_holds_few_connections_of_strangers_and_answers_probes():
    assert await strangers_held() == PROBED_BOUNDS.most - 1


@pytest.mark.system
async def test_control_without_a_number_it_holds_all_of_them(monkeypatch):
    monkeypatch.setattr("prfaas.http_server.PROBED_BOUNDS", ConnectionBounds())
    assert await strangers_held() == STRANGERS


@pytest.mark.system
async def test_bodies_that_do_not_come_keep_no_probe_out():
    assert await is_probe_answered_beside_bodies_that_do_not_come()


@pytest.mark.system
async def test_control_where_they_are_awaited_after_the_answer_they_do(monkeypatch):
    monkeypatch.setattr("prfaas.http_server.PROBED_BOUNDS", PROBED_BOUNDS._replace(lingering_seconds=10.0))
    assert not await is_probe_answered_beside_bodies_that_do_not_come()
