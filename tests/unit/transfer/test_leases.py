"""Offers that both sides know from elsewhere: what a destination may say of them, and when."""

import json
from contextlib import nullcontext
from typing import cast

import pytest
from tests.clocks import Clock

from prfaas.errors import CapacityError, PeerError, ProtocolError
from prfaas.wire.engine import TransferSubject
from prfaas.wire.frames import Address, FrameHeader, Kind
from prfaas.wire.transfer import MAX_TOKEN_CHARS, Hello, decode_message
from prfaas_transfer import leases
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.leases import Offer, Offers
from prfaas_transfer.net import DataStream

from .layout import GROUPS, TOKENS

ADDRESS = Address("a" * 32, 7)
LAYOUT = CacheLayout("f", GROUPS)
STREAM = cast(DataStream, None)
AWAITS = Hello(token="token", awaits=True)


class OffersOnAClock(Offers):
    """Offers that expire on a test's clock, and the handles of those that ended."""

    def __init__(self) -> None:
        self.clock, self.ended = Clock(), list[int]()
        super().__init__(1, self.ended.append, clock=self.clock)

    def pass_seconds(self, seconds: float) -> None:
        self.clock.seconds += seconds
        self.expire()

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: count for _, outcome, count in self.counters.snapshot()[0]}


def make_hello(start_token: int = 0, connection: int = 0) -> Hello:
    return Hello(token="token", connection=connection, start_token=start_token)


@pytest.fixture
def offers() -> OffersOnAClock:
    return OffersOnAClock()


def announce(offers: Offers, address: Address = ADDRESS) -> Offer:
    manifest = LAYOUT.manifest(address, 0, TOKENS)
    return offers.announce(TransferSubject(3, "request"), manifest, "token")


def test_an_offer_expires_when_no_destination_connects_during_its_first_lease(offers):
    announce(offers)
    offers.pass_seconds(leases.ANNOUNCED_SECONDS)
    assert offers.ended == []
    offers.pass_seconds(0.1)
    assert (offers.ended, offers.outcomes) == ([3], {"expired": 1})


def test_an_offer_lives_as_long_as_a_destination_awaits_its_begin(offers):
    offer = announce(offers)
    with offers.awaited(ADDRESS, AWAITS, "hub") as found:
        for _ in range(3):
            offers.pass_seconds(leases.ANNOUNCED_SECONDS - 0.1)
            found.note_awaited()
    assert not offer.is_bound
    offer.begin()
    for _ in range(3):
        offer.note_awaited()
        offers.pass_seconds(leases.ANNOUNCED_SECONDS / 2)
    assert offers.outcomes == {"expired": 1}, "who could come is awaited for no longer than before"


def test_who_awaits_binds_nothing_and_is_no_stranger(offers):
    offer = announce(offers)
    with offers.awaited(ADDRESS, AWAITS, "hub"):
        offers.connect(ADDRESS, make_hello(start_token=8), "member", STREAM)
    assert offer.manifest.start_token == 8
    for wrong, peer in ((AWAITS, "hub"), (Hello(token="other", awaits=True), "member")):
        with pytest.raises(PeerError, match="no prefill"), offers.awaited(ADDRESS, wrong, peer):
            pass


def test_an_offer_is_awaited_once_and_so_many_are(offers, monkeypatch):
    announce(offers)
    for _ in range(2):  # a wait that has ended leaves its place
        second = offers.awaited(ADDRESS, AWAITS, "hub")
        with offers.awaited(ADDRESS, AWAITS, "hub"), pytest.raises(PeerError, match="awaited already"), second:
            pass
    monkeypatch.setattr(leases, "MAX_AWAITED", 0)
    with pytest.raises(PeerError, match="0 others are"), offers.awaited(ADDRESS, AWAITS, "hub"):
        pass


@pytest.mark.parametrize("what", ["begin", "compute", "fail", "end"])
def test_whatever_begins_or_ends_a_prompt_ends_the_wait_for_it(offers, what):
    offer = announce(offers)
    assert not offer.await_begin(0)
    match what:
        case "begin":
            offer.begin()
        case "compute":
            offer.finish_computing(0.5)
        case "fail":
            offer.fail("the machine burns")
        case _:
            offers.end(offer, "cancelled")
    assert offer.await_begin(0)


def test_a_destination_that_shows_no_life_is_dropped_although_its_connection_stands(offers):
    offer = announce(offers)
    offers.connect(ADDRESS, make_hello(), "hub", STREAM)
    for _ in range(3):
        offers.pass_seconds(leases.LEASE_SECONDS - 0.1)
        offer.note_life()
    offers.pass_seconds(leases.LEASE_SECONDS)
    assert offers.outcomes == {}
    offers.pass_seconds(0.1)
    assert offers.outcomes == {"failed": 1}
    assert offers.ended == [], "a connection may still send its memory"
    offers.disconnect(offer, 0)
    assert offers.ended == [3]


def test_a_destination_may_return_during_the_resume_time_and_not_later(offers):
    offer = announce(offers)
    for connection in range(3):
        offers.connect(ADDRESS, make_hello(connection=connection), "hub", STREAM)
        offers.disconnect(offer, connection)
        offers.pass_seconds(leases.RESUME_SECONDS)
    assert offers.outcomes == {}
    offers.pass_seconds(0.1)
    assert (offers.ended, offers.outcomes) == ([3], {"failed": 1})
    with pytest.raises(PeerError, match="no prefill"):
        offers.connect(ADDRESS, make_hello(connection=3), "hub", STREAM)


def test_a_destination_that_lives_and_takes_only_a_byte_now_and_then_is_dropped_after_the_computation(offers):
    offer = announce(offers)
    offers.connect(ADDRESS, make_hello(), "hub", STREAM)
    offers.pass_seconds(leases.LEASE_SECONDS)
    offer.finish_computing(0.0)
    left_seconds = leases.DELIVERY_GRACE_SECONDS + offer.manifest.nbytes / leases.DELIVERY_FLOOR_BYTES_PER_SECOND
    while left_seconds > 0:
        assert offers.outcomes == {}
        offer.note_life()
        offers.pass_seconds(1.0)
        left_seconds -= 1.0
    assert offers.outcomes == {"failed": 1}


@pytest.mark.parametrize("start_token", [-1, TOKENS, TOKENS + 1])
def test_a_destination_that_wants_nothing_of_a_cache_hears_its_length(offers, start_token):
    announce(offers)
    with pytest.raises(ProtocolError, match=f"asks from token {start_token} of {TOKENS}"):
        offers.connect(ADDRESS, make_hello(start_token), "hub", STREAM)
    assert offers.connect(ADDRESS, make_hello(TOKENS - 1), "hub", STREAM).manifest.start_token == TOKENS - 1


def test_an_announced_cache_belongs_to_the_cluster_that_connected_first(offers):
    announce(offers)
    assert offers.connect(ADDRESS, make_hello(8), "hub", STREAM).subject.peer == "hub"
    with pytest.raises(PeerError, match="no prefill"):
        offers.connect(ADDRESS, make_hello(8, 1), "other", STREAM)
    assert offers.connect(ADDRESS, make_hello(0, 1), "hub", STREAM).manifest.start_token == 8, "the first one set it"


def test_a_transfer_is_announced_once_and_not_beyond_what_may_be_open():
    several = Offers(2)
    announce(several)
    with pytest.raises(ProtocolError, match=f"transfer {ADDRESS.transfer_id} was announced before"):
        announce(several)
    announce(several, Address("b" * 32, 7))
    with pytest.raises(CapacityError, match="2 prefills are queued or undelivered already"):
        announce(several, Address("c" * 32, 7))


def test_an_offers_memory_is_freed_once_when_it_ended_and_nothing_sends_it(offers):
    for connections in (0, 1, 2):
        offer = announce(offers, Address(f"{connections:032x}", 7))
        for connection in range(connections):
            offers.connect(offer.manifest.address, make_hello(connection=connection), "hub", STREAM)
        if connections == 2:
            offers.disconnect(offer, 0)
            offers.disconnect(offer, 1)
            assert offers.ended == [], "the destination may come again"
            offers.connect(offer.manifest.address, make_hello(connection=2), "hub", STREAM)
        for _ in range(2):
            offers.end(offer, "cancelled")
        if connections:
            assert offers.ended == [], "a connection still sends"
            offers.disconnect(offer, 2 if connections == 2 else 0)
        assert offers.ended == [3]
        offers.ended.clear()


def test_a_cache_that_was_declined_before_it_is_announced_is_not_offered_and_a_strangers_word_does_not_count(offers):
    """Its source may be late, and would keep the memory for its whole lease."""
    other = Address("b" * 32, 7)
    for address, changes in ((ADDRESS, {}), (other, {"token": "wrong"}), (other._replace(epoch=8), {})):
        with pytest.raises(PeerError, match="no prefill"):
            offers.connect(address, Hello(**{"token": "token", "declines": True} | changes), "hub", STREAM)
    with pytest.raises(PeerError, match=f"{ADDRESS.transfer_id} is over: the destination does not want it any more"):
        announce(offers)
    assert offers.await_announced(ADDRESS.transfer_id, 0, 0.0), "who comes for it hears so without a wait"
    assert announce(offers, other).manifest.transfer_id == other.transfer_id


def test_so_many_early_declines_are_remembered_and_no_more(offers):
    for number in range(leases.REMEMBERED_ENDS + 1):
        with pytest.raises(PeerError):
            offers.connect(Address(f"{number:032x}", 7), Hello(token="token", declines=True), "hub", STREAM)
    announce(offers, Address(f"{0:032x}", 7))
    with pytest.raises(PeerError, match="is over"):
        announce(offers, Address(f"{1:032x}", 7))


def test_a_token_that_nobody_could_keep_is_no_hello():
    """A thousand of them are remembered, of whoever comes."""
    for chars in (MAX_TOKEN_CHARS, MAX_TOKEN_CHARS + 1):
        payload = json.dumps({"token": "x" * chars}).encode()
        header = FrameHeader(Kind.HELLO, ADDRESS, len(payload))
        with nullcontext() if chars == MAX_TOKEN_CHARS else pytest.raises(ProtocolError, match="token"):
            assert decode_message(header, payload, Hello).token == "x" * chars


def test_a_destination_of_a_cache_that_is_one_too_many_hears_so_without_a_wait(offers):
    announce(offers)
    other = Address("b" * 32, 7)
    assert not offers.await_announced(other.transfer_id, 0, 0.0)
    with pytest.raises(CapacityError):
        announce(offers, other)
    assert offers.await_announced(other.transfer_id, 0, 0.0)
