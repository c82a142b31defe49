"""Offers that both sides know from elsewhere: what a destination may say of them, and when."""

import socket
import threading
from typing import cast

import pytest

from prfaas.errors import CapacityError, PeerError, ProtocolError
from prfaas.wire.engine import TransferSubject
from prfaas.wire.frames import Address
from prfaas.wire.transfer import Hello
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.leases import Offer, Offers
from prfaas_transfer.limits import unlimited
from prfaas_transfer.net import DataStream

from ..worker.transfer_bench import eventually
from .test_mover import GROUPS, TOKENS

ADDRESS = Address("a" * 32, 7)
LAYOUT = CacheLayout("f", GROUPS, 0)
STREAM = cast(DataStream, None)


def hello(start_token: int = 0, connection: int = 0) -> Hello:
    return Hello(token="token", connection=connection, start_token=start_token)


@pytest.fixture
def offers() -> Offers:
    return Offers(LAYOUT, 1)


def announced(offers: Offers, address: Address = ADDRESS) -> Offer:
    manifest = LAYOUT.manifest(address, 0, TOKENS, is_prefix=True)
    return offers.announce(TransferSubject(3, "request"), manifest, "token")


@pytest.mark.parametrize("start_token", [-1, TOKENS, TOKENS + 1])
def test_a_destination_that_asks_for_nothing_of_a_cache_hears_its_length(offers, start_token):
    announced(offers)
    with pytest.raises(ProtocolError, match=f"asks from token {start_token} of {TOKENS}"):
        offers.connect(ADDRESS, hello(start_token), "hub", STREAM)
    assert offers.connect(ADDRESS, hello(TOKENS - 1), "hub", STREAM).manifest.start_token == TOKENS - 1


def test_an_announced_cache_belongs_to_the_cluster_that_asked_first(offers):
    announced(offers)
    assert offers.connect(ADDRESS, hello(8), "hub", STREAM).subject.peer == "hub"
    with pytest.raises(PeerError, match="no prefill"):
        offers.connect(ADDRESS, hello(8, 1), "other", STREAM)
    assert offers.connect(ADDRESS, hello(0, 1), "hub", STREAM).manifest.start_token == 8, "the first one said it"


def test_a_transfer_is_announced_once_and_not_beyond_what_may_be_open():
    several = Offers(CacheLayout("f", GROUPS, 0), 2)
    announced(several)
    with pytest.raises(ProtocolError, match=f"transfer {ADDRESS.transfer_id} was announced before"):
        announced(several)
    announced(several, Address("b" * 32, 7))
    with pytest.raises(CapacityError, match="2 prefills are queued or undelivered already"):
        announced(several, Address("c" * 32, 7))


def test_a_machine_without_a_thread_to_spare_costs_a_connection_and_no_lease(offers, monkeypatch, caplog):
    """The thread that accepts ends the leases, too."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "data-send":
            raise RuntimeError("can't start new thread")
        start(thread)

    listener = listen("127.0.0.1", 0)
    DataPort(listener, offers, unlimited())
    monkeypatch.setattr(threading.Thread, "start", refused)
    with socket.create_connection(listener.getsockname()) as refused_one:
        refused_one.settimeout(5)
        assert refused_one.recv(1) == b""
    assert "127.0.0.1 is refused: can't start new thread" in caplog.text
    announced(offers).lease.renew(0)
    eventually(lambda: not offers.is_open(ADDRESS.transfer_id, 0), 5)


def test_an_offers_memory_is_given_back_once_when_it_is_over_and_nothing_sends_it_any_more():
    over: list[int] = []
    offers = Offers(LAYOUT, 1, over.append)
    for connections in (0, 1, 2):
        offer = announced(offers, Address(f"{connections:032x}", 7))
        for connection in range(connections):
            offers.connect(offer.manifest.address, hello(connection=connection), "hub", STREAM)
        if connections == 2:
            offers.disconnect(offer, 0)
            offers.disconnect(offer, 1)
            assert over == [], "the destination may come again"
            offers.connect(offer.manifest.address, hello(connection=2), "hub", STREAM)
        for _ in range(2):
            offers.end(offer, "cancelled")
        if connections:
            assert over == [], "a connection still sends"
            offers.disconnect(offer, 2 if connections == 2 else 0)
        assert over == [3]
        over.clear()
