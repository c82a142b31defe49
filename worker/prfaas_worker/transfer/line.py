"""Threads in a line: first come, first served, and nobody is woken who cannot go.

The bucket and the budget let threads pass one at a time. What is hard is to lose no wake-up when a place is given up in
the middle, by a timeout or a stop: so every departure wakes whoever is first then, and only the first ever looks.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prfaas_worker.transfer.stop import Stop, StoppedError


class Line:
    """A line with a lock. What decides whether the first may go changes under `lock` alone, and then `wake` is due."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._places: deque[threading.Condition] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def wake(self) -> None:
        """Let the first look again; under `lock`."""
        if self._places:
            self._places[0].notify()

    @contextmanager
    def turn(self, delay_seconds: Callable[[], float], stop: Stop, timeout_seconds: float = math.inf) -> Iterator[None]:
        """Wait in the line until first and let go, then run the block under `lock`.

        `delay_seconds` is asked under `lock` by the first: 0 lets it go, more is when it will ask again, infinity until
        it is woken.

        Raises:
            StoppedError: `stop` was set.
            TimeoutError: `timeout_seconds` have passed.

        """
        place = threading.Condition(self.lock)
        with stop.waking(lambda: self._wake_place(place)), self.lock:
            self._places.append(place)
            try:
                self._await(place, delay_seconds, stop, time.monotonic() + timeout_seconds)
                yield
            finally:
                self._places.remove(place)
                self.wake()

    def _await(
        self, place: threading.Condition, delay_seconds: Callable[[], float], stop: Stop, deadline: float
    ) -> None:
        while True:
            if stop.is_set:
                raise StoppedError("the transfer was ended here")
            pause_seconds = delay_seconds() if self._places[0] is place else math.inf
            if pause_seconds <= 0:
                return
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise TimeoutError(f"still in line behind {self._places.index(place)} others")
            pause_seconds = min(pause_seconds, left_seconds)
            place.wait(None if math.isinf(pause_seconds) else pause_seconds)

    def _wake_place(self, place: threading.Condition) -> None:
        with self.lock:
            place.notify()
