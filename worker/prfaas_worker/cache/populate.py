"""Populates the cache's memory before it is used (MADV_POPULATE_WRITE).

A transfer into pages that were never written costs five times the CPU. The kernel finds, clears and maps each on the
way. A thread asks for pages in small steps, in the pool's order, and rests as long as it worked. The kernel changes no
byte, so anything may use the memory meanwhile. Pages that the kernel does not grant are populated by their first use.
"""

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable
from typing import Final

from prfaas.util import MIB
from prfaas_worker.memory import available_bytes

log = logging.getLogger(__name__)

STEP_BYTES: Final = 4 << 20  # All threads that map memory wait for the end of a step: about a millisecond.
LEFT_SHARE: Final = 0.1  # Share of the memory available at the start that stays free for others.
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_HUGE_PAGE_BYTES: Final = 2 << 20

Advise = Callable[[int, int, int], bool]


def populate_in_background(address: int, nbytes: int) -> threading.Thread:
    """Start to populate memory that lives as long as the process; stop where memory is short."""
    thread = threading.Thread(target=populate, args=(address, nbytes), name="populate", daemon=True)
    thread.start()
    return thread


def populate(
    address: int, nbytes: int, available_bytes: Callable[[], int] = available_bytes, advise: Advise | None = None
) -> int:
    """Populate memory from its beginning, whole pages only; return the number of populated bytes."""
    advise = advise or _madvise()
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    left_bytes = int(available_bytes() * LEFT_SHARE)
    advise(first, max(0, end - first), _MADV_HUGEPAGE)
    at = first
    while at < end:
        # Steps end between huge pages, or each would be broken up.
        step = min((at + STEP_BYTES) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES, end) - at
        if available_bytes() - step < left_bytes:
            log.info("%d of %d MiB of the cache are populated: memory is short", (at - first) // MIB, nbytes // MIB)
            break
        began = time.monotonic()
        if not advise(at, step, _MADV_POPULATE_WRITE):
            break
        at += step
        time.sleep(time.monotonic() - began)
    return at - first


def _madvise() -> Advise:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def advise(address: int, nbytes: int, advice: int) -> bool:
        if libc.madvise(address, nbytes, advice) == 0:
            return True
        log.debug("madvise(%d): errno %d", advice, ctypes.get_errno())
        return False

    return advise
