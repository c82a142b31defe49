"""Virtual time: what happens next, in the order in which it is due, and what is due together in the order it was said.

The order is total, so that a run depends on its inputs alone. Nothing is ever taken back: whoever scheduled something
that no longer holds finds that out when it comes, by a count or an epoch of its own.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Events:
    """The one clock of a run. `now` is in seconds of virtual time since its start."""

    __slots__ = ("_heap", "_said", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._said = 0

    def at(self, seconds: float, action: Callable[[Any], None], subject: Any = None) -> None:
        """Have `action(subject)` called at this time; a time that has passed means now."""
        self._said += 1
        heappush(self._heap, (seconds if seconds > self.now else self.now, self._said, action, subject))

    def after(self, seconds: float, action: Callable[[Any], None], subject: Any = None) -> None:
        """Have `action(subject)` called so many seconds from now."""
        self.at(self.now + seconds, action, subject)

    def step(self) -> bool:
        """Do the next thing; False when there is none."""
        if not self._heap:
            return False
        self.now, _, action, subject = heappop(self._heap)
        action(subject)
        return True
