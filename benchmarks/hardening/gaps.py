"""How long an event loop ran nothing else, and what its process did meanwhile.

A gap is less what the process's threads waited for a core: another process had it. What is left may still be no work of
the loop, and the CPU time beside it tells. Of the loop's own thread it is a handler, or the search for garbage. Of the
process alone it is another thread that holds the interpreter. Without CPU time it is a wait for a file or a lock, or a
virtual machine that its host stopped.
"""

import asyncio
import gc
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

TICK_SECONDS: Final = 0.005


class Moment(NamedTuple):
    """What the clocks of a process say: the machine's monotonic one, and how long its threads waited for a core; CPU of
    the loop's thread, of all threads, and of those that searched for garbage."""

    at: float
    without_core_seconds: float = 0.0
    loop_seconds: float = 0.0
    process_seconds: float = 0.0
    garbage_seconds: float = 0.0


class Gap(msgspec.Struct, frozen=True):
    """A time for which a loop ran nothing else, from a moment on, and the CPU time in it."""

    seconds: float = 0.0
    at: float = 0.0
    loop_seconds: float = 0.0
    process_seconds: float = 0.0
    garbage_seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{1000 * self.seconds:.0f} ms, in which the loop's thread computed for {1000 * self.loop_seconds:.0f} ms, "
            f"all threads for {1000 * self.process_seconds:.0f}, and {1000 * self.garbage_seconds:.0f} of it went "
            "into the search for garbage"
        )


class Gaps:
    """Keeps the longest gap of the event loop that runs `watch`."""

    def __init__(self) -> None:
        self.longest = Gap()
        self._garbage_seconds = 0.0

    async def watch(self) -> None:
        gc.callbacks.append(self.note_garbage)
        try:
            while True:
                before = self.now()
                await asyncio.sleep(TICK_SECONDS)
                ended = time.monotonic()
                # Not later: each file that is read gives the interpreter away, for 5 ms where a thread computes.
                self.note(before, self.now()._replace(at=ended))
        finally:
            gc.callbacks.remove(self.note_garbage)

    def note(self, before: Moment, after: Moment) -> None:
        seconds = after.at - before.at - TICK_SECONDS - (after.without_core_seconds - before.without_core_seconds)
        if seconds > self.longest.seconds:
            spent = (new - old for old, new in zip(before[2:], after[2:], strict=True))
            self.longest = Gap(seconds, before.at, *spent)

    def now(self) -> Moment:
        waited_seconds = waited_by_threads()
        return Moment(time.monotonic(), waited_seconds, time.thread_time(), time.process_time(), self._garbage_seconds)

    def note_garbage(self, phase: str, _: dict[str, Any]) -> None:
        """Called at the begin and the end of each search, in its thread."""
        self._garbage_seconds += time.thread_time() if phase == "stop" else -time.thread_time()


def waited_by_threads() -> float:
    """Return how long all threads of this process were ready and had no core."""
    found = 0.0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            found += int((task / "schedstat").read_text().split()[1]) / 1e9
    return found
