"""What an API server's clock shows, heard from its answers: what a server has dated is compared with no other clock.

Tokens, deletions and fields that were written carry the time of the server that dated them. The clock of the machine
that the operator runs on may be hours away from that, and the next leader's is a third one.

An answer tells whole seconds, and arrives a little later, so what is told here is behind by a second or two: whatever
it says is over is over.
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


class ServerClock:
    """The clock of one API server; ours until it has answered once.

    Args:
        monotonic: seconds that nobody puts back.

    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic):
        self._monotonic = monotonic
        self._ahead_seconds: float | None = None

    def heard(self, headers: Mapping[str, str] | None) -> None:
        """Take in the headers of an answer; one without a date, as of some proxies, tells nothing."""
        text = next((value for name, value in (headers or {}).items() if name.lower() == "date"), "")
        try:
            self._ahead_seconds = parsedate_to_datetime(text).timestamp() - self._monotonic()
        except (ValueError, OverflowError):
            return

    def now(self) -> datetime:
        """Return what the clock shows."""
        if self._ahead_seconds is None:
            return datetime.now(UTC)
        return datetime.fromtimestamp(self._ahead_seconds + self._monotonic(), UTC)
