"""A data port and destinations by hand: an early one waits, and a machine without threads costs a connection."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from typing import BinaryIO

import msgspec
import pytest

from prfaas.errors import CapacityError, UnreachableError
from prfaas.wire.engine import TransferSubject
from prfaas.wire.frames import HEADER_BYTES, Address, FrameHeader, Kind, parse_header
from prfaas.wire.transfer import (
    AWAIT_SILENT_SECONDS,
    AWAIT_VERSION,
    HEARTBEAT_SECONDS,
    KEEP_ALIVE_SECONDS,
    NO_PROGRESS_SECONDS,
    VERSION,
    Abort,
    Hello,
    Welcome,
    decode_message,
    message_frame,
)
from prfaas_transfer import data_port, leases, pull
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.data_port import (
    LATE_SECONDS,
    POLL_SECONDS,
    DataPort,
    LeaseClock,
    OpenConnections,
    await_announced,
    listen,
)
from prfaas_transfer.leases import Offer, Offers
from prfaas_transfer.limits import unlimited
from prfaas_transfer.pull import Connections, SourceAddress, await_begin

from ...clocks import Clock
from ...waiting import PATIENCE_SECONDS, eventually
from .engines import make_options
from .layout import GROUPS, TOKENS

pytestmark = pytest.mark.system

ADDRESS = Address("a" * 32, 7)
LAYOUT = CacheLayout("f", GROUPS)


@pytest.fixture
def offers() -> Iterator[Offers]:
    offers = Offers(1)
    yield offers
    for offer in [*offers._offers.values()]:  # its end would be logged in another test
        offers.end(offer, "cancelled")


@pytest.fixture
def connect(offers: Offers) -> Iterator[Callable[[float], socket.socket]]:
    """Open a data port with this patience; return a destination's socket, connected to it."""
    opened: list[socket.socket] = []

    def connect(patience_seconds: float) -> socket.socket:
        listener = listen("127.0.0.1", 0)
        DataPort(listener, offers, unlimited(), patience_seconds)
        opened.append(socket.create_connection(listener.getsockname(), PATIENCE_SECONDS))
        return opened[-1]

    yield connect
    for sock in opened:
        sock.close()


def announce(offers: Offers) -> Offer:
    manifest = LAYOUT.manifest(ADDRESS, 0, TOKENS)
    return offers.announce(TransferSubject(3, "request"), manifest, "token")


def test_a_destination_that_comes_early_hears_keep_alives_until_its_cache_is_announced(offers, connect):
    sock = connect(PATIENCE_SECONDS)
    with sock.makefile("rb") as reader:
        sock.sendall(message_frame(Kind.HELLO, ADDRESS, Hello(token="token")))
        for _ in range(3):
            assert parse_header(reader.read(HEADER_BYTES)).kind == Kind.KEEP_ALIVE
        announce(offers)
        found = parse_header(reader.read(HEADER_BYTES))
        while found.kind == Kind.KEEP_ALIVE:
            found = parse_header(reader.read(HEADER_BYTES))
        assert found.kind == Kind.WELCOME


def test_a_destination_whose_cache_is_never_announced_hears_so_when_the_patience_ends(connect):
    sock = connect(1.0)
    with sock.makefile("rb") as reader:
        sock.sendall(message_frame(Kind.HELLO, ADDRESS, Hello(token="token")))
        found = [parse_header(reader.read(HEADER_BYTES))]
        while found[-1].kind == Kind.KEEP_ALIVE:
            found.append(parse_header(reader.read(HEADER_BYTES)))
        message = decode_message(found[-1], reader.read(found[-1].payload_bytes), Abort).message
    assert "no prefill" in message
    assert len(found) > 1, "the port did not wait"


def test_a_destination_that_comes_after_the_end_of_an_offer_hears_so_without_a_wait(offers, connect):
    offers.end(announce(offers), "cancelled")
    sock = connect(PATIENCE_SECONDS)
    with sock.makefile("rb") as reader:
        sock.sendall(message_frame(Kind.HELLO, ADDRESS, Hello(token="token")))
        assert parse_header(reader.read(HEADER_BYTES)).kind == Kind.ABORT


AWAITS = message_frame(Kind.HELLO, ADDRESS, Hello(versions=(AWAIT_VERSION,), token="token", awaits=True))


def read_answer(reader: BinaryIO, alive: list[FrameHeader] | None = None) -> tuple[FrameHeader, bytes]:
    """Return what follows the signs of life."""
    while (found := parse_header(reader.read(HEADER_BYTES))).kind == Kind.KEEP_ALIVE:
        if alive is not None:
            alive.append(found)
    return found, reader.read(found.payload_bytes)


def test_a_destination_that_awaits_hears_when_its_prompt_begins_and_comes_again_on_its_connection(offers, connect):
    offer, sock, alive = announce(offers), connect(PATIENCE_SECONDS), list[FrameHeader]()
    with sock.makefile("rb") as reader:
        sock.sendall(AWAITS)
        assert parse_header(reader.read(HEADER_BYTES)).kind == Kind.KEEP_ALIVE
        offer.begin()
        header, payload = read_answer(reader, alive)
        assert decode_message(header, payload, Welcome).version == AWAIT_VERSION
        assert not offer.is_bound
        sock.sendall(message_frame(Kind.HELLO, ADDRESS, Hello(token="token", start_token=8)))
        header, payload = read_answer(reader)
        welcome = decode_message(header, payload, Welcome)
    assert (welcome.version, welcome.manifest.start_token) == (VERSION, 8)


@pytest.mark.parametrize("wrong", ["token", "version", "ended", "full"])
def test_a_destination_that_cannot_wait_hears_why_and_its_cache_is_offered_as_before(
    offers, connect, monkeypatch, wrong
):
    monkeypatch.setattr(leases, "MAX_AWAITED", 0 if wrong == "full" else 1)
    offer, sock = announce(offers), connect(PATIENCE_SECONDS)
    hello = Hello(versions=(AWAIT_VERSION,), token="token", awaits=True)
    changes = {"token": {"token": "other"}, "version": {"versions": (VERSION,)}}.get(wrong, {})
    with sock.makefile("rb") as reader:
        sock.sendall(message_frame(Kind.HELLO, ADDRESS, msgspec.structs.replace(hello, **changes)))
        if wrong == "ended":
            assert parse_header(reader.read(HEADER_BYTES)).kind == Kind.KEEP_ALIVE
            offers.end(offer, "cancelled", "its caller left")
        abort = decode_message(*read_answer(reader), Abort)
    message = abort.message
    assert abort.later == (wrong == "full")
    text = {"token": "no prefill", "version": "upgrade one side", "ended": "is over", "full": "is awaited already"}
    assert text[wrong] in message
    assert not offer.is_bound
    assert offers.is_open(ADDRESS.transfer_id, 0) == (wrong != "ended")


@pytest.mark.parametrize("lives", [True, False])
def test_a_destination_that_awaits_in_silence_is_given_up(offers, connect, monkeypatch, lives):
    assert AWAIT_SILENT_SECONDS > 2 * HEARTBEAT_SECONDS, "one that is alive has time to say so"
    monkeypatch.setattr(data_port, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(data_port, "AWAIT_SILENT_SECONDS", PATIENCE_SECONDS if lives else 0.2)
    offer, sock = announce(offers), connect(PATIENCE_SECONDS)
    with sock.makefile("rb") as reader:
        sock.sendall(AWAITS)
        for _ in range(4):
            if lives:
                assert parse_header(reader.read(HEADER_BYTES)).kind == Kind.KEEP_ALIVE
                sock.sendall(message_frame(Kind.KEEP_ALIVE, ADDRESS))
        if lives:
            offer.begin()
        kind = read_answer(reader)[0].kind
    assert kind == (Kind.WELCOME if lives else Kind.ABORT)
    assert offers.is_open(ADDRESS.transfer_id, 0)


def test_who_finds_no_room_to_wait_asks_again_as_long_as_it_may(offers, connect, monkeypatch):
    """It would take the memory of those before it, if that were as if its source had begun."""
    monkeypatch.setattr(leases, "MAX_AWAITED", 0)
    monkeypatch.setattr(pull, "AWAIT_AGAIN_SECONDS", 0.02)
    refused, awaited, cancelled = list[Address](), offers.awaited, threading.Event()

    def watched(address: Address, hello: Hello, peer: str) -> AbstractContextManager[Offer]:
        refused.append(address)
        return awaited(address, hello, peer)

    monkeypatch.setattr(offers, "awaited", watched)
    offer, port = announce(offers), connect(0.0).getpeername()[1]
    source, connections = SourceAddress("127.0.0.1", port), Connections(unlimited().auth)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(await_begin, connections, source, "token", ADDRESS, cancelled)
        eventually(lambda: len(refused) > 2, "it asks again")
        assert not leaving.done()
        cancelled.set()
        assert isinstance(leaving.exception(PATIENCE_SECONDS), UnreachableError)
        waiting = pool.submit(await_begin, connections, source, "token", ADDRESS, threading.Event())
        seen = len(refused)
        eventually(lambda: len(refused) > seen + 2, "it asks again")
        offer.begin()
        assert waiting.result(PATIENCE_SECONDS) is None


def test_who_has_waited_makes_room_for_the_next(offers, connect, monkeypatch):
    monkeypatch.setattr(leases, "MAX_AWAITED", 1)
    offer, sock = announce(offers), connect(PATIENCE_SECONDS)
    offer.begin()
    with sock.makefile("rb") as reader:
        for _ in range(3):
            sock.sendall(AWAITS)
            assert read_answer(reader)[0].kind == Kind.WELCOME


def count_seconds(
    patience_seconds: float, announced_at: float = float("inf"), caught_up_at: float = 0.0
) -> tuple[float, int]:
    """Return how long an early destination waits, by a clock that only its waits move, and how often it hears of it."""
    clock, alive = Clock(), list[float]()

    def is_announced(seconds: float) -> bool:
        clock.seconds += seconds
        return clock.seconds >= announced_at

    await_announced(
        is_announced,
        lambda: clock.seconds >= caught_up_at,
        patience_seconds,
        lambda: alive.append(clock.seconds),
        clock,
    )
    return clock.seconds, len(alive)


def test_a_request_whose_source_says_nothing_of_it_is_at_home_within_two_seconds():
    """With half a second left for all that is no wait: to connect, to hear the answer, and to begin."""
    patience_seconds = make_options().patience_seconds
    waited_seconds, alive = count_seconds(patience_seconds)
    assert waited_seconds == pytest.approx(patience_seconds)
    assert waited_seconds < 1.5 + 1e-6
    assert waited_seconds / (alive + 1) < NO_PROGRESS_SECONDS / 2, "meanwhile its source is not silent"
    assert count_seconds(patience_seconds, 0.5)[0] < 0.5 + KEEP_ALIVE_SECONDS
    assert count_seconds(0.0)[0] < 1e-6
    assert count_seconds(5.0)[0] > 2.0, "a longer patience would be seen"


def test_a_destination_waits_for_an_engine_in_the_middle_of_a_step_and_its_patience_begins_then():
    patience_seconds = make_options().patience_seconds
    assert count_seconds(patience_seconds, caught_up_at=1.0)[0] == pytest.approx(1.0 + patience_seconds, abs=0.3)
    assert count_seconds(patience_seconds, 0.6, 1.0)[0] < 0.6 + KEEP_ALIVE_SECONDS, "announced is announced"
    assert count_seconds(0.0, caught_up_at=1.0)[0] == pytest.approx(1.0, abs=0.3)


def test_a_machine_without_a_thread_to_spare_costs_a_connection_and_no_lease(offers, connect, monkeypatch, caplog):
    """The thread that accepts ends the leases, too."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "data-send":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with closing(connect(0.0)) as refused:
        assert refused.recv(1) == b""
    assert "127.0.0.1 is refused: can't start new thread" in caplog.text
    announce(offers).lease.renew(0)
    eventually(lambda: not offers.is_open(ADDRESS.transfer_id, 0), "the lease ends")


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    opened = [one for _ in range(4) for one in socket.socketpair()]
    yield opened
    for one in opened:
        one.close()


def test_whoever_has_a_name_has_half_of_the_connections_and_who_has_none_all(sockets: list[socket.socket]):
    connections = OpenConnections(4)
    connections.count(sockets[1], "buyer/a")
    connections.count(sockets[2], "192.0.2.1")
    connections.prove(sockets[2], "buyer/a", "192.0.2.1")
    connections.count(sockets[3], "192.0.2.1")
    with pytest.raises(CapacityError, match=r"2 connections of buyer/a are open"):
        connections.prove(sockets[3], "buyer/a", "192.0.2.1")
    with pytest.raises(CapacityError, match=r"2 connections of 192\.0\.2\.1 are open"):
        connections.count(sockets[4], "192.0.2.1")
    connections.leave(sockets[3])
    connections.leave(sockets[1])
    connections.prove(sockets[2])
    for number in (3, 4, 5):
        connections.count(sockets[number])
    with pytest.raises(CapacityError, match="4 connections are open"):
        connections.count(sockets[6], "192.0.2.1")


def test_a_connection_that_carries_nothing_makes_room_for_another_of_its_name(sockets: list[socket.socket]):
    idle, idle_peer, busy, _, shaking, shaking_peer, new, _ = sockets
    connections = OpenConnections(4)
    connections.count(busy, "buyer/a")
    connections.count(idle, "buyer/a")
    connections.count(shaking, "192.0.2.1", waits=True)
    with pytest.raises(CapacityError):
        connections.count(new, "buyer/a")  # control: none waits
    connections.begin_wait(idle)
    connections.count(new, "buyer/a")
    assert idle_peer.recv(1) == b"", "it was shut down"
    connections.begin_wait(idle)  # its thread does not know yet
    connections.leave(idle)
    shaking_peer.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        shaking_peer.recv(1)


def test_a_connection_that_made_room_takes_no_other_ones_place(sockets: list[socket.socket]):
    """Its handshake may have ended just then."""
    shaking, _, other, other_peer, *_ = sockets
    connections = OpenConnections(2)
    connections.count(shaking, "192.0.2.1", waits=True)
    connections.count(other, "192.0.2.1", waits=True)
    with pytest.raises(CapacityError, match="it made room for another one"):
        connections.prove(shaking, "buyer/a", "192.0.2.1")
    other_peer.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        other_peer.recv(1)
    connections.prove(other, "buyer/a", "192.0.2.1")  # control


def test_what_is_nobodys_makes_no_room_where_all_connections_are_open(sockets: list[socket.socket]):
    hub, _, shaking, shaking_peer, new, _, another, _ = sockets
    connections = OpenConnections(2)
    connections.count(hub)
    connections.begin_wait(hub)
    connections.count(shaking, "192.0.2.1", waits=True)
    connections.count(new)
    assert shaking_peer.recv(1) == b""
    with pytest.raises(CapacityError, match="2 connections are open"):
        connections.count(another)


def test_without_tls_who_knows_a_token_leaves_the_part_of_its_address_to_others(offers, connect, monkeypatch):
    """Many destinations may have the address of one gateway of their network."""
    monkeypatch.setattr(data_port, "MAX_CONNECTIONS", 2)
    announce(offers)
    sock = connect(0.0)
    sock.sendall(message_frame(Kind.HELLO, ADDRESS, Hello(token="token")))
    with sock.makefile("rb") as reader:
        assert parse_header(reader.read(HEADER_BYTES)).kind == Kind.WELCOME
    with (
        closing(socket.create_connection(sock.getpeername(), PATIENCE_SECONDS)) as other,
        other.makefile("rb") as reader,
    ):
        other.sendall(message_frame(Kind.HELLO, Address("b" * 32, 7), Hello(token="token")))
        assert parse_header(reader.read(HEADER_BYTES)).kind == Kind.ABORT


def test_after_a_late_round_no_lease_ends_until_signs_of_life_were_read():
    now = 0.0
    clock = LeaseClock(lambda: now)
    assert clock.begin_round()
    now += POLL_SECONDS
    assert clock.begin_round()
    now += LATE_SECONDS + 0.1  # no CPU
    assert not clock.begin_round()
    assert not clock.begin_round(), "a connection that waited to be accepted makes no second"
    now += LATE_SECONDS
    assert not clock.begin_round()
    now += 0.1
    assert clock.begin_round()
