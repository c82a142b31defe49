"""The data port between real sockets: a cache arrives bit for bit while it is still being filled, strangers learn
nothing, and every way a transfer can end frees the source's side, once.
"""

import itertools
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from prfaas.wire.frames import Address, Kind
from prfaas.wire.transfer import VERSION, Abort, message_frame
from prfaas_transfer import data_port as data_port_module
from prfaas_transfer import pull as pull_module
from prfaas_transfer.pull import Connections
from prfaas_transfer.tls import PeerAuth

from ...waiting import eventually
from .transfer_bench import (
    LARGE,
    SMALL,
    Port,
    address_of,
    assert_same_bits,
    compute,
    connect,
    frames,
    hello,
    kinds,
    put_chunk,
    through_staging,
    transfer_threads,
)

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def only_port() -> Port:
    """One port for all tests here: its threads live as long as the process."""
    return Port()


@pytest.fixture
def port(only_port: Port) -> Iterator[Port]:
    only_port.renew()
    yield only_port
    only_port.settle()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("connect_first", [True, False])
def test_a_cache_arrives_bit_for_bit_whether_the_destination_comes_early_or_late(
    port: Port, connect_first: bool, staged: bool
):
    offer, leg = port.announce()
    cache = through_staging(SMALL.filled()) if staged else SMALL.filled()
    if not connect_first:
        compute(SMALL, offer, cache)
    taking = port.take(leg, staged=staged)
    if connect_first:
        eventually(lambda: offer.streams, "the destination is connected")
        compute(SMALL, offer, cache)
    done = taking.whole()
    assert_same_bits(SMALL, taking.place, cache)
    assert done.prefill_seconds == 0.25
    assert done.computed_seconds is not None
    assert connect_first or done.computed_seconds < done.first_byte_seconds, "it was computed while nobody had come"
    assert taking.ledger.received_bytes == done.payload_bytes == SMALL.nbytes
    assert port.ends()
    assert not port.offers.is_open(leg.transfer_id, 0)
    assert taking.close() == 1
    port.assert_ended_once(delivered=1)


def test_a_large_cache_is_striped_over_four_connections_and_freed_once():
    port = Port(LARGE)
    offer, leg = port.announce()
    cache = LARGE.filled()
    taking = port.take(leg)
    eventually(lambda: len(offer.streams) == 4, "four connections")
    compute(LARGE, offer, cache, step=64)
    assert taking.whole().frames == 10 * 2 + 1
    assert_same_bits(LARGE, taking.place, cache)
    assert port.ends()
    assert taking.close() == 4, "all four wait for the next transfer"
    port.assert_ended_once(delivered=1)


def test_a_source_without_room_for_more_connections_gives_all_over_those_it_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_port_module, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(pull_module, "REFUSED_SECONDS", 0.001)
    port = Port(LARGE)
    offer, leg = port.announce()
    cache = LARGE.filled()
    taking = port.take(leg)
    eventually(lambda: taking.pull._numbers > 2 + pull_module.MAX_BREAKS, "more are refused than it survives breaks")
    compute(LARGE, offer, cache, step=64)
    taking.whole()
    assert_same_bits(LARGE, taking.place, cache)
    assert port.ends()
    port.settle()
    port.assert_ended_once(delivered=1)


def test_silence_is_filled_with_keep_alives(port: Port):
    offer, leg = port.announce()
    with closing(connect(port, hello(leg))) as sock:
        sock.settimeout(0.9)  # a destination gives up after 1.0 s
        found = [header.kind for header, _ in itertools.islice(frames(sock), 4)]
        assert found == [Kind.WELCOME, *[Kind.KEEP_ALIVE] * 3]
    port.cancel(offer)
    assert port.ends()


def test_a_connection_serves_one_transfer_after_another(port: Port):
    connections, names = Connections(PeerAuth()), set()
    for handle in range(3):
        offer, leg = port.announce(handle)
        compute(SMALL, offer, SMALL.filled())
        taking = port.take(leg, connections=connections)
        taking.whole()
        assert port.ends(handle)
        eventually(lambda: "fetch-data" not in transfer_threads(), "no destination receives")
        kept = connections.take(taking.source)
        assert kept is not None
        assert connections.take(taking.source) is None
        names.add(kept.socket.getsockname())
        connections.keep(taking.source, kept)
    assert len(names) == 1, "the very same connection"
    assert taking.close() == 1
    port.assert_ended_once(delivered=3)


@pytest.mark.parametrize("wrong", ["token", "epoch", "transfer"])
def test_a_stranger_gets_one_answer_whatever_is_wrong_and_harms_nothing(port: Port, wrong: str):
    offer, leg = port.announce()
    changes: dict[str, object] = {
        "token": {"token": leg.token[:-1]},
        "epoch": {"epoch": leg.epoch + 1},
        "transfer": {"transfer_id": "0" * 32},
    }[wrong]
    with closing(connect(port, hello(msgspec.structs.replace(leg, **changes)))) as sock:
        ((header, payload),) = frames(sock)
    assert header.kind == Kind.ABORT
    message = payload.decode()
    assert "with this token and epoch: ended, expired or foreign" in message
    assert leg.token not in message
    assert port.offers.is_open(leg.transfer_id, 0)
    assert not offer.streams
    port.cancel(offer)
    assert port.ends()


@pytest.mark.parametrize("source_version", [VERSION, VERSION - 1])
def test_instances_of_different_versions_refuse_each_other_in_one_sentence(
    port: Port, source_version: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(data_port_module, "VERSION", source_version)
    offer, leg = port.announce()
    if source_version == VERSION:
        with closing(connect(port, hello(leg, versions=(VERSION - 1,)))) as sock:
            ((_, payload),) = frames(sock)
        found, theirs = msgspec.json.decode(payload, type=Abort).message, VERSION - 1
    else:
        found, theirs = str(port.take(leg).failure()), VERSION
    assert found == f"HELLO speaks versions ({theirs},), this instance {source_version}: upgrade one side"
    port.cancel(offer)
    assert port.ends()


def test_a_destination_that_gives_up_ends_the_offer_at_once(port: Port):
    offer, leg = port.announce(5)
    with closing(connect(port, hello(leg))) as sock:
        assert kinds(sock, 1) == [Kind.WELCOME]
        sock.sendall(message_frame(Kind.ABORT, address_of(leg), Abort("no room here")))
        assert port.ends(5)
    put_chunk(SMALL, offer, SMALL.filled(), 0, SMALL.tokens)  # the engine has not heard yet: nothing is kept
    assert offer.send_state.queue.queued_bytes == 0
    port.assert_ended_once(failed=1)


def test_an_acknowledgement_of_another_epoch_is_none(port: Port):
    offer, leg = port.announce()
    offer.finish_computing(0.0)
    with closing(connect(port, hello(leg))) as sock:
        assert kinds(sock, 2) == [Kind.WELCOME, Kind.DONE]
        sock.sendall(message_frame(Kind.ACK, Address(leg.transfer_id, leg.epoch + 1)))
        assert port.ends()
    port.assert_ended_once(failed=1)


def test_an_acknowledgement_frees_the_source_even_if_the_destination_then_leaves(port: Port):
    offer, leg = port.announce()
    offer.finish_computing(0.0)
    with closing(connect(port, hello(leg))) as sock:
        assert kinds(sock, 2) == [Kind.WELCOME, Kind.DONE]
        sock.sendall(message_frame(Kind.ACK, address_of(leg)))
    assert port.ends()
    port.assert_ended_once(delivered=1)


def test_nothing_is_acknowledged_before_it_was_sent(port: Port):
    offer, leg = port.announce()
    with closing(connect(port, hello(leg))) as sock:
        assert kinds(sock, 1) == [Kind.WELCOME]
        sock.sendall(message_frame(Kind.ACK, address_of(leg)))
        assert Kind.FREED not in kinds(sock)
    assert port.ends()
    assert offer.ended
    port.assert_ended_once(failed=1)
