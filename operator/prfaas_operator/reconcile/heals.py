"""How often edited children are put back: at once, unless somebody goes on editing.

Two controllers that each correct the other would write as fast as watches tell them, for ever. A person who edits by
hand is corrected within a second a few times in a row; after that a child waits until a minute has passed.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

AT_ONCE: Final = 5
WINDOW_SECONDS: Final = 60.0


class Heals:
    """The last corrections of each child, by its uid."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._at: dict[str, deque[float]] = {}
        self._held_back_at = float("-inf")

    def may_heal(self, uid: str) -> bool:
        """Tell whether a child may be put back now."""
        times, now = self._at.get(uid), self._clock()
        may = times is None or len(times) < AT_ONCE or now - times[0] > WINDOW_SECONDS
        if not may:
            self._held_back_at = now
        return may

    def holds_back(self) -> bool:
        """Tell whether any child waits to be put back, which no watch will tell of."""
        return self._clock() - self._held_back_at <= 2 * WINDOW_SECONDS

    def healed(self, uid: str) -> None:
        """Note that a child was put back, and forget those that have been left in peace since."""
        now = self._clock()
        for other in [one for one, times in self._at.items() if now - times[-1] > WINDOW_SECONDS]:
            del self._at[other]
        self._at.setdefault(uid, deque(maxlen=AT_ONCE)).append(now)
