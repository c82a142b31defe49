"""The memory that a mover shares with its engine, behind an engine that stops for a while."""

import mmap

import pytest

from prfaas.errors import InternalError, PeerError
from prfaas.wire.frames import Address, FrameHeader, Kind
from prfaas.wire.receive_ledger import LayerRows
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.mover import shared
from prfaas_transfer.mover.messages import CopyDone, CopyRequest
from prfaas_transfer.mover.shared import SharedCache, SharedMemory, Slots

from .test_mover import GROUPS, PAGE_TOKENS

SLOT_BYTES = 4096
PAGE_BYTES = GROUPS[1].nbytes
MANIFEST = CacheLayout("f", GROUPS, 0).manifest(Address("a" * 32, 1), 0, PAGE_TOKENS, is_prefix=True)
PAGE = FrameHeader(Kind.BLOCK, MANIFEST.address, PAGE_BYTES, group=1, layer=1, start_token=0, tokens=PAGE_TOKENS)
ROWS = LayerRows(1, 1, 0, PAGE_TOKENS)


def test_a_copy_that_comes_late_meets_no_other_requests_bytes(monkeypatch):
    monkeypatch.setattr(shared, "COPY_SECONDS", 0.1)
    asked: list[CopyRequest] = []
    memory = SharedMemory(Slots(mmap.mmap(-1, SLOT_BYTES), SLOT_BYTES, 1), asked.append)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="copied nothing"), memory.load(MANIFEST.transfer_id, GROUPS[1], PAGE):
        pass
    cache = SharedCache(memory, "other")
    with pytest.raises(InternalError, match="no slot is free"), cache.room_for(MANIFEST, ROWS):
        pass
    for _ in range(2):  # the second answer is nobody's
        memory.copies.finish(CopyDone(asked[0].number))
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
