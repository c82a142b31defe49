"""Memory is populated without a byte of it changing, as far as there is enough, and whatever the kernel refuses."""

import ctypes
import mmap
from collections.abc import Iterator

import pytest

from prfaas_worker.cache import populate as populating
from prfaas_worker.cache.populate import populate, populate_in_background

pytestmark = pytest.mark.system

PAGE = mmap.PAGESIZE
SIZE = 24 << 20


class Region:
    """Memory that nobody has touched."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._view)

    def resident(self) -> list[bool]:
        """Whether each page is there."""
        vector = (ctypes.c_ubyte * (SIZE // PAGE))()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(self.address), ctypes.c_size_t(SIZE), vector) == 0
        return [bool(entry & 1) for entry in vector]

    def close(self) -> None:
        del self._view
        self.memory.close()


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region()
    assert not any(region.resident())
    yield region
    region.close()


def enough() -> int:
    return 1 << 40


def test_every_page_is_there_and_none_has_changed(region: Region):
    region.memory[5 * PAGE : 5 * PAGE + 7] = b"written"
    assert populate(region.address, SIZE, enough) == SIZE
    assert all(region.resident())
    assert region.memory[: 5 * PAGE] == bytes(5 * PAGE)
    assert region.memory[5 * PAGE : 5 * PAGE + 7] == b"written"


def test_parts_of_pages_at_the_ends_are_left_alone(region: Region):
    assert populate(region.address + 100, SIZE - 200, enough) == SIZE - 2 * PAGE
    steps: list[tuple[int, int]] = []

    def advise(address: int, nbytes: int, _advice: int) -> bool:
        steps.append((address, nbytes))
        return True

    assert populate(region.address + 100, 50, enough, advise) == 0
    assert all(nbytes == 0 for _, nbytes in steps)


def test_what_is_written_meanwhile_stays(region: Region):
    thread = populate_in_background(region.address, SIZE)
    for at in range(0, SIZE, PAGE):
        region.memory[at] = at // PAGE % 256
    thread.join(20)
    assert not thread.is_alive()
    assert all(region.memory[at] == at // PAGE % 256 for at in range(0, SIZE, PAGE))


def test_it_ends_where_memory_becomes_short(region: Region):
    left = [20 << 20]

    def advise(_address: int, nbytes: int, advice: int) -> bool:
        if advice == populating._MADV_POPULATE_WRITE:
            left[0] -= nbytes
        return True

    done = populate(region.address, SIZE, lambda: left[0], advise)
    assert 0 < done < SIZE
    assert left[0] >= 2 << 20, "a tenth of what was available is left"


def test_a_kernel_that_refuses_everything_is_no_error(region: Region):
    assert populate(region.address, SIZE, enough, lambda *_: False) == 0
    assert populate(0, 0, enough) == 0


def test_no_step_is_so_long_that_others_wait_for_it(region: Region):
    steps: list[int] = []

    def advise(_address: int, nbytes: int, advice: int) -> bool:
        if advice == populating._MADV_POPULATE_WRITE:
            steps.append(nbytes)
        return True

    populate(region.address, SIZE, enough, advise)
    assert sum(steps) == SIZE
    assert 0 < min(steps) <= max(steps) <= populating.STEP_BYTES
