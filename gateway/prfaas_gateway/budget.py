"""How often requests may be sent again, over all of them, so that a collapse does not multiply the load.

A token bucket. Every request that comes brings a fifth of a retry, and time brings a few, so that a gateway with little
to do may try again as well. What is saved up covers the death of an instance with many streams, each of which goes on
elsewhere; what goes on failing after that costs a fifth more work, not a multiple.
"""

from typing import Final

RETRIES_PER_REQUEST: Final = 0.2
RETRIES_PER_SECOND: Final = 10.0
SAVED_RETRIES: Final = 1000.0


class RetryBudget:
    """The retries that are left; begins with all that can be saved."""

    def __init__(self, now_seconds: float):
        self._left = SAVED_RETRIES
        self._at_seconds = now_seconds

    def request_came(self) -> None:
        """Earn what a request brings."""
        self._left = min(SAVED_RETRIES, self._left + RETRIES_PER_REQUEST)

    def take(self, now_seconds: float) -> bool:
        """Take one retry; False where none is left."""
        earned = RETRIES_PER_SECOND * max(0.0, now_seconds - self._at_seconds)
        self._left, self._at_seconds = min(SAVED_RETRIES, self._left + earned), now_seconds
        if self._left < 1:
            return False
        self._left -= 1
        return True
