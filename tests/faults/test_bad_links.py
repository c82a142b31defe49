"""A link that damages, repeats and loses, between a real destination and a real source.

What can be mended ends with every bit in its place; what cannot ends as an error, and then nothing counts as received.
"""

import struct

import pytest

from prfaas.errors import PeerError, ProtocolError
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, Kind
from prfaas_transfer import leases as leases_module

from ..unit.worker.transfer_bench import SMALL, Port, Taking, assert_same_bits, compute
from ..unit.worker.transfer_proxy import (
    HEADER_FIELDS,
    Change,
    CutError,
    Proxy,
    Seen,
    as_it_is,
    flip_at_random,
    flip_once,
    flipped,
    resealed,
)
from ..waiting import NotInTime

CACHE = SMALL.filled()


def start(port: Port, proxy: Proxy) -> Taking:
    offer, leg = port.announce()
    compute(SMALL, offer, CACHE)
    return port.take(leg, at=proxy.address)


def assert_mended(port: Port, down: Change = as_it_is, up: Change = as_it_is) -> int:
    """Every bit arrives over such a link, and the source frees its copy once. Returns how many connections it took."""
    with Proxy(port.address, down, up) as proxy:
        taking = start(port, proxy)
        taking.whole()
        assert_same_bits(SMALL, taking.place, CACHE)
        assert port.ends()
        port.settle()
    port.assert_ended_once(delivered=1)
    return proxy.connections


def assert_refused(port: Port, down: Change) -> PeerError:
    """Over such a link the transfer fails, nothing of it is used, and the source frees its copy once."""
    with Proxy(port.address, down) as proxy:
        taking = start(port, proxy)
        error = taking.failure()
        assert not taking.ledger.whole
        assert isinstance(error, PeerError)
        assert port.ends()
    port.assert_ended_once(failed=1)
    return error


@pytest.mark.parametrize("kind", [Kind.WELCOME, Kind.BLOCK, Kind.STATE, Kind.DONE])
@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_flipped_bit_in_any_field_of_any_kind_of_frame_costs_only_its_connection(port: Port, field: str, kind: Kind):
    assert assert_mended(port, flip_once(kind, HEADER_FIELDS[field])) == 2


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.ACK])
@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_flipped_bit_of_the_destination_costs_only_its_connection(
    port: Port, field: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
):
    up = flip_once(kind, HEADER_FIELDS[field])
    if kind == Kind.HELLO:
        assert assert_mended(port, up=up) == 2
        return
    monkeypatch.setattr(leases_module, "RESUME_SECONDS", 0.0)
    with Proxy(port.address, up=up) as proxy:  # the destination has everything: it does not come back to say so again
        taking = start(port, proxy)
        taking.whole()
        assert_same_bits(SMALL, taking.place, CACHE)
        assert port.ends()


@pytest.mark.parametrize("seed", range(5))
def test_bits_flipped_at_random_are_mended_as_long_as_some_connection_gets_through(port: Port, seed: int):
    assert assert_mended(port, flip_at_random(seed, times=10, chance=0.4)) > 1


def test_a_message_that_comes_twice_changes_nothing(port: Port):
    def down(seen: Seen) -> list[bytes]:
        return [seen.raw] * (1 + (seen.header.kind in (Kind.DONE, Kind.KEEP_ALIVE)))

    assert assert_mended(port, down) == 1


@pytest.mark.usefixtures("wary")
@pytest.mark.parametrize("missing", [1, 8, HEADER_BYTES, HEADER_BYTES + 8])
@pytest.mark.parametrize("at", [0, 1, 6, 10, 12])
def test_bytes_lost_from_the_stream_cost_only_its_connection(port: Port, at: int, missing: int):
    """What follows moves into the gap: lengths and places would be read from the wrong bytes."""

    def down(seen: Seen) -> list[bytes]:
        if (seen.connection, seen.frame) == (0, at):
            return [seen.raw[:-missing]]
        return [seen.raw]

    # Behind a short frame nothing may follow: then it is silence that ends the connection.
    assert assert_mended(port, down) >= 2


@pytest.mark.parametrize("at", [1, 4, 9, 11])
def test_a_frame_lost_as_a_whole_is_noticed_at_the_end(port: Port, at: int):
    def down(seen: Seen) -> list[bytes]:
        return [] if (seen.connection, seen.frame) == (0, at) else [seen.raw]

    with Proxy(port.address, down) as proxy:
        taking = start(port, proxy)
        with pytest.raises(NotInTime, match="hangs"):
            taking.whole(seconds=0.3)  # TCP does not lose frames, and a forger must not make us use what is there
        assert not taking.ledger.whole
        proxy.cut()  # the next HELLO says what is missing
        taking.whole()
        assert_same_bits(SMALL, taking.place, CACHE)
        assert port.ends()
        port.settle()
    port.assert_ended_once(delivered=1)


def test_a_frame_with_this_transfers_id_and_another_epoch_is_never_placed(port: Port):
    def down(seen: Seen) -> list[bytes]:
        if seen.header.kind not in DATA_KINDS:
            return [seen.raw]
        address = seen.header.address
        return [resealed(seen, address=address._replace(epoch=address.epoch - 1))]

    with Proxy(port.address, down) as proxy:
        taking = start(port, proxy)
        assert isinstance(taking.failure(), ProtocolError)
        assert not taking.place.memory.pages.any()
        assert port.ends()


def test_the_digest_over_all_finds_a_payload_that_was_changed_and_sealed_again(port: Port):
    def down(seen: Seen) -> list[bytes]:
        if (seen.connection, seen.frame) != (0, 3):
            return [seen.raw]
        changed = seen._replace(raw=flipped(seen.raw, len(seen.raw) - 1))
        return [resealed(changed)]

    assert "digest over all" in str(assert_refused(port, down))


@pytest.mark.usefixtures("wary")
@pytest.mark.parametrize("after", range(1, 13, 3))
def test_a_half_open_connection_costs_seconds_and_no_bit(port: Port, after: int):
    """The peer's machine vanishes without a word: nothing comes, and nothing says so."""

    def down(seen: Seen) -> list[bytes]:
        return [] if seen.connection == 0 and seen.frame >= after else [seen.raw]

    def up(seen: Seen) -> list[bytes]:
        return [] if seen.connection == 0 and seen.frame >= 1 else [seen.raw]

    if after == 1:
        assert assert_mended(port, down, up) >= 2
        return

    def resets(seen: Seen) -> list[bytes]:
        if seen.connection == 0 and seen.frame >= after:
            raise CutError
        return [seen.raw]

    assert assert_mended(port, resets, up) >= 2


def test_the_offsets_of_the_header_are_those_of_the_format():
    """Otherwise a test above would flip another field than it names."""
    assert struct.calcsize("!4sBBHHHI16sQIII") == HEADER_FIELDS["check"]
    assert HEADER_FIELDS["digest"] + 8 == HEADER_BYTES
