"""Copies of an accelerator's cache: the memory of a forgotten transfer is not touched."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from prfaas.errors import PeerError
from prfaas.wire.frames import Address, FrameHeader, Kind
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.mover.messages import CopyPart
from prfaas_transfer.send import Frame
from prfaas_worker.cache.transfer_frames import layer_groups
from prfaas_worker.engine.shared import StagedCopies

from .transfer_bench import ATTENTION, FINGERPRINT

PART = CopyPart(0, 0, 0, 64)
HEADER = FrameHeader(Kind.BLOCK, Address("a" * 32, 1), 6, group=0, layer=0, start_token=0, tokens=64)


class Copying:
    """A frame in two pieces, of which the first comes at once."""

    def __init__(self) -> None:
        self.copies, self.may_end = threading.Event(), threading.Event()

    @contextmanager
    def load(self, _header: FrameHeader) -> Iterator[Sequence[memoryview]]:
        self.copies.set()
        assert self.may_end.wait(10)
        yield memoryview(bytearray(b"abcd")), memoryview(bytearray(b"ef"))


def test_who_forgets_a_transfer_waits_for_the_copy_of_it_that_runs_and_for_no_other():
    staged, frame = StagedCopies(CacheLayout(FINGERPRINT, layer_groups([ATTENTION]), 0)), Copying()
    staged.add_frame("a", PART, Frame(HEADER, frame.load, 6))
    room = memoryview(bytearray(6))
    with ThreadPoolExecutor(2) as pool:
        copy = pool.submit(staged.load, "a", PART, room)
        assert frame.copies.wait(10)
        staged.forget("b")
        forgetting = pool.submit(staged.forget, "a")
        with pytest.raises(TimeoutError):
            forgetting.result(0.2)
        frame.may_end.set()
        forgetting.result(10)
        copy.result(10)
    assert bytes(room) == b"abcdef"
    for key in ("a", "b"):
        with pytest.raises(PeerError, match="the offer is over"):
            staged.load(key, PART, room)
        with pytest.raises(PeerError, match="the fetch is over"):
            staged.land(key, PART, room)
