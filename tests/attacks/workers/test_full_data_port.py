"""A buyer, or a stranger at one address, takes the connections of a data port: it has half, and the hub is served."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import pytest

from prfaas.errors import CapacityError, PeerError
from prfaas_transfer import data_port, tls
from prfaas_transfer.credentials import PeerCredentials
from prfaas_transfer.data_port import DataPort, OpenConnections, listen
from prfaas_transfer.leases import Offers
from prfaas_transfer.limits import unlimited
from prfaas_transfer.net import DataStream
from prfaas_transfer.tls import TlsAuth, connect_tls

from ...waiting import eventually
from .conftest import CALLERS, SECONDS, Installation, fetches_at

pytestmark = pytest.mark.system

MOST: Final = 8
ATTACKER: Final = "127.0.0.2"
FOREVER: Final = 600.0
Port = tuple[str, int]
attackers = pytest.mark.parametrize("who", ["a buyer", "nobody"])
"""The latter begins no handshake."""


def shown_by(installation: Installation, who: str) -> PeerCredentials:
    shown = installation.credentials(CALLERS[who])
    assert shown is not None
    return shown


@pytest.fixture
def port(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> Port:
    """The data port of a member, which waits for who says nothing."""
    monkeypatch.setattr(data_port, "MAX_CONNECTIONS", MOST)
    monkeypatch.setattr(data_port, "HELLO_SECONDS", FOREVER)
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", FOREVER)
    listener = listen("127.0.0.1", 0)
    DataPort(listener, Offers(1), unlimited()._replace(auth=TlsAuth(shown_by(installation, "the own member"))))
    return listener.getsockname()


def make_no_room(connections: OpenConnections, connection: socket.socket, most: int, name: str = "") -> None:
    """Refuse where the port would shut down a connection that waits."""
    counted = [names for one, names in connections._names.items() if one is not connection]
    if len([names for names in counted if not name or name in names]) >= most:
        raise CapacityError("all are open")


@contextmanager
def flood(port: Port, shown: PeerCredentials | None, host: str = ATTACKER) -> Iterator[Sequence[DataStream]]:
    """Open as many connections as the port has, which then say nothing; yield those that got so far."""
    opened: list[DataStream] = []
    try:
        for _ in range(MOST):
            sock = socket.create_connection(port, SECONDS, source_address=(host, 0))
            with suppress(PeerError):
                opened.append(DataStream(sock) if shown is None else connect_tls(sock, shown, SECONDS, ""))
        yield opened
    finally:
        for one in opened:
            one.close()


def still_open(opened: Sequence[DataStream]) -> int:
    return sum(not one.readable() for one in opened)


@attackers
def test_the_hub_is_served_beside_who_takes_all_it_can_get(port: Port, installation: Installation, who: str):
    with flood(port, installation.credentials(CALLERS[who])) as opened:
        eventually(lambda: still_open(opened) == MOST // 2, lambda: f"half is held, not {still_open(opened)}")
        hub = shown_by(installation, "a worker of the hub")
        eventually(lambda: fetches_at(port, hub), "the hub is served")


def test_the_hub_is_served_beside_a_buyer_that_also_begins_handshakes(port: Port, installation: Installation):
    with flood(port, installation.credentials(CALLERS["a buyer"])), flood(port, None):
        assert fetches_at(port, shown_by(installation, "a worker of the hub"))


def test_the_hub_is_served_beside_a_stranger_at_its_own_address(port: Port, installation: Installation):
    with flood(port, None, "127.0.0.1"):
        assert fetches_at(port, shown_by(installation, "a worker of the hub"))


def test_control_silent_handshakes_that_make_no_room_keep_out_the_hub_at_their_address(
    port: Port, installation: Installation, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(OpenConnections, "_make_room", make_no_room)
    with flood(port, None, "127.0.0.1"):
        assert not fetches_at(port, shown_by(installation, "a worker of the hub"))


@attackers
def test_control_who_may_have_all_connections_keeps_the_hub_out(
    port: Port, installation: Installation, monkeypatch: pytest.MonkeyPatch, who: str
):
    monkeypatch.setattr(data_port, "COUNTED_PART", 1)
    monkeypatch.setattr(OpenConnections, "_make_room", make_no_room)
    with flood(port, installation.credentials(CALLERS[who])) as opened:
        assert not fetches_at(port, shown_by(installation, "a worker of the hub"))
        assert still_open(opened) == MOST
