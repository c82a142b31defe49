"""One mover and its client, message by message."""

import mmap
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.wire.engine import TransferEnded, read_body
from prfaas_transfer.events.log import EventLog
from prfaas_transfer.leases import Offer
from prfaas_transfer.mover.__main__ import FULL, Mover
from prfaas_transfer.mover.messages import (
    AnnounceCache,
    AskAnnounce,
    ComputedParts,
    CopyDone,
    CopyPart,
    DeclineCache,
    EndedFetch,
    EndedOffer,
    FetchCache,
    decode_from_mover,
)
from prfaas_transfer.mover.shared import SharedCache, SharedMemory

from .engines import Engine, locate, make_announcement, make_options
from .layout import TOKENS
from .patience import be_patient

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("_patience")]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        yield ours, theirs


@pytest.fixture
def mover(ends: tuple[socket.socket, socket.socket]) -> Mover:
    """A mover in this process."""
    options = make_options()
    return Mover(options, ends[1], mmap.mmap(-1, options.slots * options.slot_bytes), EventLog())


def read_messages(ends: tuple[socket.socket, socket.socket], count: int) -> list[object]:
    with ends[0].makefile("rb") as reader:
        return [decode_from_mover(read_body(reader)) for _ in range(count)]


def test_a_cache_waits_from_its_latest_part_on_for_a_destination_that_has_not_come_yet(mover):
    message = make_announcement()
    mover.handle(message)
    offer = mover._open._open[message.transfer_id]
    offer.lease.renew(5)
    mover.handle(ComputedParts(message.transfer_id, []))
    assert offer.lease.left_seconds > 5
    offer.start_at("", 0)
    offer.lease.renew(5)  # its last connection broke
    mover.handle(ComputedParts(message.transfer_id, []))
    assert offer.lease.left_seconds <= 5


def test_an_offer_that_ends_while_it_is_announced_is_forgotten(mover, ends, monkeypatch):
    """A destination may have waited for it, and go at once."""
    announce = mover._offers.announce

    def announce_and_end(*arguments: Any) -> Offer:
        offer = announce(*arguments)
        ending = threading.Thread(target=mover._offers.end, args=(offer, "cancelled"))
        ending.start()
        ending.join(0.2)
        return offer

    monkeypatch.setattr(mover._offers, "announce", announce_and_end)
    message = make_announcement()
    mover.handle(message)
    ended, end_of_offer = read_messages(ends, 2)
    assert isinstance(ended, TransferEnded)
    assert end_of_offer == EndedOffer(message.transfer_id)
    assert (mover._open._open, mover._open._key_of) == ({}, {})


def test_a_mover_without_a_thread_to_spare_ends_a_fetch_and_still_serves(mover, ends, monkeypatch):
    message = make_announcement()
    at_source = (message.request_id, message.transfer_id, message.epoch, message.token, "127.0.0.1", 1, "")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in ("fetch", "decline"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    mover.handle(FetchCache(*at_source, 0, TOKENS))
    mover.handle(DeclineCache(*at_source))
    assert read_messages(ends, 1) == [EndedFetch(message.key, FULL.format("can't start new thread"))]
    assert mover._pulls._running == {}


def starve(*_: object) -> None:
    raise MemoryError


def test_a_source_whose_mover_has_no_memory_says_so_to_its_destination(mover, start_engine, monkeypatch):
    be_patient(monkeypatch.setattr)
    monkeypatch.setattr(SharedMemory, "load", starve)
    destination, message = start_engine(), make_announcement()
    for command in (message, ComputedParts(message.key, [CopyPart(0, 0)])):
        mover.handle(command)
    destination.fetch(SimpleNamespace(mover=mover), message)
    assert "this process has no memory left: raise the container" in destination.take_ended_fetch().reason


def test_a_destination_whose_mover_has_no_memory_says_so_and_its_source_keeps_nothing(
    mover, ends, start_engine, monkeypatch
):
    be_patient(monkeypatch.setattr)
    monkeypatch.setattr(SharedCache, "room_for", starve)
    source: Engine = start_engine()
    message = source.offer()
    mover.handle(FetchCache(**locate(source, message), start_token=0, end_token=TOKENS))
    _, ended = read_messages(ends, 2)
    assert isinstance(ended, EndedFetch)
    assert ended.reason.startswith("this process has no memory left: raise the container")
    assert source.take_ended_offer() == message.transfer_id


def test_an_answer_that_comes_before_the_call_returns_counts_once(start_engine, monkeypatch):
    engine: Engine = start_engine()
    sent: list[object] = []

    def answer(message: object) -> None:
        for _ in range(2):
            if isinstance(message, AnnounceCache):
                engine.mover._handle(EndedOffer(message.key))
            if isinstance(message, FetchCache):
                engine.mover._handle(EndedFetch(message.key, "refused"))

    def answer_at_once(message: object) -> bool:
        sent.append(message)
        readers.append(threading.Thread(target=answer, args=(message,)))
        readers[-1].start()  # it reads before this call returns
        return True

    readers: list[threading.Thread] = []
    monkeypatch.setattr(engine.mover, "_say", answer_at_once)
    message = engine.announce()
    engine.fetch(engine, message)
    for reader in readers:
        reader.join(5)
    assert engine.ended_offers.get_nowait() == message.transfer_id
    assert engine.ended_fetches.get_nowait().reason == "refused"
    assert engine.ended_offers.empty()
    assert engine.ended_fetches.empty()
    sent.clear()
    engine.mover._handle(AskAnnounce(7))
    assert sent == [CopyDone(7)], "what was sent before is on its way"


def test_a_destination_that_comes_during_a_step_hears_nothing_before_its_end(start_engine, monkeypatch):
    """An engine hears of requests between its steps: one that came meanwhile is announced after that."""
    engine: Engine = start_engine()
    sent: list[object] = []
    monkeypatch.setattr(engine.mover, "_say", sent.append)
    engine.mover.begin_step()
    for number in (7, 8):
        engine.mover._handle(AskAnnounce(number))
    assert sent == []
    engine.mover.end_step()
    assert sent == [CopyDone(7), CopyDone(8)]
    engine.mover._handle(AskAnnounce(9))
    assert sent[2:] == [CopyDone(9)]
    engine.mover.end_step()
    assert sent[3:] == [], "once"


def test_a_port_that_is_taken_is_named_with_its_number(start_engine):
    port = start_engine().mover.data_port
    with pytest.raises(ConfigError, match=f"data port 127.0.0.1:{port} cannot be opened"):
        start_engine(data_port=port)
