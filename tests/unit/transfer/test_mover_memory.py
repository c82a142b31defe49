"""The memory that a mover shares with its engine, behind an engine that stops for a while."""

import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from prfaas.errors import InternalError, PeerError, UnreachableError
from prfaas.wire.frames import Address, FrameHeader, Kind
from prfaas.wire.receive_ledger import LayerRows
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.mover import shared
from prfaas_transfer.mover.messages import AskAnnounce, CopyDone, CopyPart, CopyRequest
from prfaas_transfer.mover.shared import Copies, SharedCache, SharedMemory, Slots

from ...waiting import PATIENCE_SECONDS, eventually
from .layout import GROUPS, PAGE_TOKENS

pytestmark = pytest.mark.system

SLOT_BYTES = 4096
PAGE_BYTES = GROUPS[1].nbytes
MANIFEST = CacheLayout("f", GROUPS).manifest(Address("a" * 32, 1), 0, PAGE_TOKENS)
PAGE = FrameHeader(Kind.BLOCK, MANIFEST.address, PAGE_BYTES, group=1, layer=1, start_token=0, tokens=PAGE_TOKENS)
ROWS = LayerRows(1, 1, 0, PAGE_TOKENS)


def test_a_copy_that_comes_late_meets_no_other_requests_bytes(monkeypatch):
    monkeypatch.setattr(shared, "COPY_SECONDS", 0.1)
    requests: list[CopyRequest] = []
    memory = SharedMemory(Slots(mmap.mmap(-1, SLOT_BYTES), SLOT_BYTES, 1), requests.append)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="copied nothing"), memory.load(MANIFEST.transfer_id, GROUPS[1], PAGE):
        pass
    cache = SharedCache(memory, "other")
    with pytest.raises(InternalError, match="no slot is free"), cache.room_for(MANIFEST, ROWS):
        pass
    for _ in range(2):  # the second answer is of no request
        memory.copies.finish(CopyDone(requests[0].number))
    with cache.room_for(MANIFEST, ROWS) as room:
        assert sum(map(len, room)) == PAGE_BYTES
        with pytest.raises(InternalError, match="no slot is free"), cache.room_for(MANIFEST, ROWS):
            pass


def test_a_late_copy_that_is_made_while_its_slot_is_held_frees_it_once():
    slots = Slots(mmap.mmap(-1, SLOT_BYTES), SLOT_BYTES, 1)
    with slots.take(1) as (offset, _):
        slots.keep(offset)
        slots.release(offset)
    with slots.take(1), pytest.raises(InternalError, match="no slot is free"), slots.take(1):
        pass


def make_slots(count: int = 1) -> Slots:
    return Slots(mmap.mmap(-1, count * SLOT_BYTES), SLOT_BYTES, count)


def make_request(offset: int = 0) -> CopyRequest:
    return CopyRequest(0, "load", "key", CopyPart(1, 1, 0, PAGE_TOKENS), offset, PAGE_BYTES)


def test_a_part_may_be_as_large_as_a_slot_and_no_larger():
    found = make_slots()
    with found.take(SLOT_BYTES) as (_, view):
        assert len(view) == SLOT_BYTES
    with (
        pytest.raises(InternalError, match=f"{SLOT_BYTES + 1} bytes in slots of {SLOT_BYTES}"),
        found.take(SLOT_BYTES + 1),
    ):
        pass


def test_slots_lie_apart_and_each_comes_back_also_after_a_late_copy():
    found = make_slots(2)
    for _ in range(2):
        with found.take(SLOT_BYTES) as (first, one), found.take(SLOT_BYTES) as (second, other):
            assert {first, second} == {0, SLOT_BYTES}
            one[:], other[:] = b"a" * SLOT_BYTES, b"b" * SLOT_BYTES
            assert bytes(one) == b"a" * SLOT_BYTES
            for offset in (first, second):
                found.keep(offset)
        with (
            pytest.raises(InternalError, match="no slot is free: the engine has yet to make 2 late copies"),
            found.take(1),
        ):
            pass
        for offset in (first, second):
            found.release(offset)


def test_a_copy_that_is_made_before_the_question_is_on_its_way_is_waited_for_no_longer(monkeypatch):
    monkeypatch.setattr(shared, "COPY_SECONDS", PATIENCE_SECONDS)
    copies: Copies = Copies(make_slots(), lambda request: copies.finish(CopyDone(request.number)))  # type: ignore[union-attr]
    began = time.monotonic()
    copies.make(make_request())
    assert time.monotonic() - began < PATIENCE_SECONDS / 2


def test_each_answer_reaches_the_caller_that_waits_for_it():
    requests: list[CopyRequest] = []
    copies = Copies(make_slots(2), requests.append)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        waiting = []
        for offset in (0, SLOT_BYTES):
            waiting.append(pool.submit(copies.make, make_request(offset)))
            eventually(lambda: len(requests) == len(waiting), "the engine gets the request")
        copies.finish(CopyDone(requests[1].number))
        waiting[1].result(PATIENCE_SECONDS)
        assert not waiting[0].done()
        copies.finish(CopyDone(requests[0].number, "the request has lost its blocks"))
        with pytest.raises(PeerError, match="the engine refused a copy: the request has lost its blocks"):
            waiting[0].result(PATIENCE_SECONDS)


def test_catching_up_ends_with_the_engines_answer_or_without_one(monkeypatch):
    monkeypatch.setattr(shared, "CATCH_UP_SECONDS", 0.2)
    requests: list[AskAnnounce] = []
    copies = Copies(make_slots(), requests.append)  # type: ignore[arg-type]
    with copies.catch_up() as is_caught_up:
        eventually(is_caught_up, "the time for an answer is over")
    monkeypatch.setattr(shared, "CATCH_UP_SECONDS", PATIENCE_SECONDS)
    with copies.catch_up() as is_caught_up:
        assert not is_caught_up()
        copies.finish(CopyDone(requests[0].number))
        assert not is_caught_up(), "that was the answer to the first question"
        copies.finish(CopyDone(requests[1].number))
        assert is_caught_up()
        assert is_caught_up()
    assert copies._done == copies._late == {}


def test_a_connection_that_breaks_during_a_copy_keeps_its_slot_until_the_copy_is_made(monkeypatch):
    monkeypatch.setattr(shared, "KEEP_ALIVE_SECONDS", 0.01)
    requests: list[CopyRequest] = []
    memory = SharedMemory(make_slots(), requests.append)  # type: ignore[arg-type]
    broken = threading.Event()

    def show_life() -> None:
        broken.set()
        raise UnreachableError("the destination left")

    def load(show: Callable[[], None]) -> int:
        with memory.load(MANIFEST.transfer_id, GROUPS[1], PAGE, show_life=show) as payload:
            return sum(map(len, payload))

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(load, show_life)
        assert broken.wait(PATIENCE_SECONDS)
        assert not first.done(), "its slot is not free, so neither is its share of the memory budget"
        memory.copies.finish(CopyDone(requests[0].number))
        with pytest.raises(UnreachableError, match="the destination left"):
            first.result(PATIENCE_SECONDS)
        second = pool.submit(load, lambda: None)
        eventually(lambda: len(requests) == 2, "the next copy is requested")
        memory.copies.finish(CopyDone(requests[1].number))
        assert second.result(PATIENCE_SECONDS) == PAGE_BYTES
