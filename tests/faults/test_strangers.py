"""Who talks to a data port without being the destination that it waits for: strangers, copies of what a destination
sent, and fuzzed frames. Each learns nothing and costs others nothing.
"""

import random
import socket
from collections import Counter
from contextlib import closing

import msgspec
import pytest

from prfaas.errors import PeerError, ProtocolError
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, FrameHeader, Kind, parse_header, seal
from prfaas.wire.transfer import message_frame
from prfaas_transfer.leases import Offer

from ..unit.worker.transfer_bench import (
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
    transfer_threads,
)
from ..unit.worker.transfer_proxy import Proxy, Seen, forged
from ..waiting import PATIENCE_SECONDS, NotInTime, eventually

FUZZED_FRAMES = 3000
FUZZED_TRANSFERS = 150


CACHE = SMALL.filled()


def test_a_hello_copied_from_another_connection_gets_no_byte_and_the_transfer_continues(port: Port):
    offer, leg = port.announce()
    taking = port.take(leg)
    eventually(lambda: offer.streams, "the destination is connected")
    put_chunk(SMALL, offer, CACHE, 0, 300)
    for _ in range(3):
        with closing(connect(port, hello(leg))) as copy:
            assert kinds(copy) == [Kind.ABORT]
    assert offer.streams
    compute_rest(offer)
    taking.whole()
    assert_same_bits(SMALL, taking.place, CACHE)
    assert port.ends()
    port.assert_ended_once(delivered=1)


def compute_rest(offer: Offer) -> None:
    for start in range(300, SMALL.tokens, 300):
        put_chunk(SMALL, offer, CACHE, start, min(SMALL.tokens, start + 300))
    offer.finish_computing(0.0)


@pytest.mark.parametrize("ended", ["delivered", "cancelled", "failed"])
def test_a_token_is_worth_nothing_after_the_end(port: Port, ended: str):
    offer, leg = port.announce()
    compute(SMALL, offer, CACHE)
    if ended == "delivered":
        port.take(leg).whole()
    else:
        port.offers.end(offer, ended)  # type: ignore[arg-type]
    assert port.ends()
    for number in (0, 1, 7):
        with closing(connect(port, hello(leg, connection=number))) as sock:
            assert kinds(sock) == [Kind.ABORT]


def fuzzed(rng: random.Random, honest: bytes) -> bytes:
    """A HELLO that is wrong somewhere, or right by chance."""
    header, payload = parse_header(honest[:HEADER_BYTES]), bytearray(honest[HEADER_BYTES:])
    match rng.randrange(6):
        case 0:
            raw = bytearray(honest)
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            return bytes(raw)
        case 1:
            return honest[: rng.randrange(len(honest))]
        case 2:
            payload[rng.randrange(len(payload))] = rng.randrange(256)
            return seal(header, [payload]).header + payload
        case 3:
            kind = rng.choice([kind for kind in Kind if kind != Kind.HELLO])
            return seal(header._replace(kind=kind), [payload]).header + payload
        case 4:
            return rng.randbytes(rng.randrange(200))
        case _:
            size = rng.choice([0, 1, 1 << 16, 1 << 20, 1 << 26])
            return seal(FrameHeader(rng.choice(tuple(Kind)), header.address, size)).header


def test_thousands_of_fuzzed_frames_on_the_port_cost_the_destination_that_it_waits_for_nothing(
    port: Port, monkeypatch: pytest.MonkeyPatch
):
    rng, answers = random.Random(7), Counter[str]()
    offer, leg = port.announce()
    # A stranger may know everything but the token.
    unknown = msgspec.structs.replace(leg, token="x" * len(leg.token))
    first = [hello(unknown, connection=number) for number in range(3)]
    for _ in range(FUZZED_FRAMES):
        with socket.create_connection(port.address, PATIENCE_SECONDS) as sock:
            try:
                sock.sendall(fuzzed(rng, rng.choice(first)))
                sock.shutdown(socket.SHUT_WR)
                found = [header.kind for header, _ in frames(sock)]
            except OSError:  # unread bytes make its close a reset
                found = []
        assert found in ([], [Kind.ABORT])
        answers["refused with a word" if found else "closed"] += 1
    print(answers)
    assert len(answers) == 2
    assert port.outcomes() == {}
    assert not offer.streams
    compute(SMALL, offer, CACHE)
    taking = port.take(leg)
    taking.whole()
    assert_same_bits(SMALL, taking.place, CACHE)
    assert port.ends()
    port.settle()
    eventually(lambda: not transfer_threads(), "the threads of all transfers ended")
    port.assert_ended_once(delivered=1)


@pytest.mark.usefixtures("wary")
def test_a_source_that_forges_frames_never_makes_a_destination_use_anything_else(port: Port):
    rng, ends, left_out = random.Random(11), Counter[str](), [False]

    def down(seen: Seen) -> list[bytes]:
        if rng.random() > 0.08:
            return [seen.raw]
        strange = forged(rng, seen)
        chosen = rng.choice([[strange], [strange, seen.raw], [seen.raw, strange]])
        left_out[0] |= len(chosen) == 1
        return chosen

    with Proxy(port.address, down) as proxy:
        for handle in range(FUZZED_TRANSFERS):
            left_out[0] = False
            offer, leg = port.announce(handle)
            compute(SMALL, offer, CACHE)
            taking = port.take(leg, at=proxy.address)
            if rng.random() < 0.3:  # frames that are left out end in a wait
                proxy.cut()
            try:
                taking.whole(seconds=0.5 if left_out[0] else PATIENCE_SECONDS)
            except NotInTime:
                assert left_out[0], "it waits for nothing"
                taking.pull.cancel()
                taking.failure()
                ends["waited for what was left out"] += 1
            except PeerError as error:
                ends["refused" if isinstance(error, ProtocolError) else "given up"] += 1
            else:
                ends["whole"] += 1
                assert_same_bits(SMALL, taking.place, CACHE)
            assert taking.ledger.whole == (taking.error is None)
            port.cancel(offer)
            assert port.ends(handle)
    print(ends)
    assert ends["whole"]
    assert ends["refused"]
    eventually(lambda: not [name for name in transfer_threads() if name == "fetch-data"], "no destination receives")


def test_a_message_that_a_destination_may_not_send_ends_only_its_transfer(port: Port):
    for kind in sorted(set(Kind) - {Kind.KEEP_ALIVE, Kind.ACK}):
        offer, leg = port.announce(int(kind))
        with closing(connect(port, hello(leg))) as sock:
            assert kinds(sock, 1) == [Kind.WELCOME]
            if kind in DATA_KINDS:
                sock.sendall(seal(FrameHeader(kind, address_of(leg), 4), [b"1234"]).header + b"1234")
            else:
                sock.sendall(message_frame(kind, address_of(leg)))
            assert port.ends(int(kind))
        assert offer.ended
