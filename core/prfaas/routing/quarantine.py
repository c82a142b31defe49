"""Keeps a request that may kill engines from the others: it is sent to no third one.

An engine that dies takes the connections of all its requests with it, and a router that sends them again would kill one
engine after the other, if one of them was the cause. One loss says nothing. A request that lost two connections before
it got anything is refused, and for a minute so is each request with the same digest: clients repeat what failed.

A request that was beside the cause twice is refused, too. It is told so, and may come back after that minute.
"""

from collections import OrderedDict
from typing import Final

LOSSES: Final = 2
"""Connections that one request may lose."""
QUARANTINE_SECONDS: Final = 60.0
MAX_DIGESTS: Final = 1024


class Quarantine:
    """The digests of requests that lost too many connections. The clock is the caller's, a monotonic one."""

    def __init__(self) -> None:
        self._until_seconds: OrderedDict[bytes, float] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._until_seconds)

    def add(self, digest: bytes, now_seconds: float) -> None:
        """Refuse a request from now on; beyond MAX_DIGESTS the oldest one is free again."""
        self._until_seconds[digest] = now_seconds + QUARANTINE_SECONDS
        self._until_seconds.move_to_end(digest)
        if len(self._until_seconds) > MAX_DIGESTS:
            self._until_seconds.popitem(last=False)

    def left_seconds(self, digest: bytes, now_seconds: float) -> float:
        """Return for how long a request is refused; 0: it is not."""
        while self._until_seconds and next(iter(self._until_seconds.values())) <= now_seconds:
            self._until_seconds.popitem(last=False)
        return max(0.0, self._until_seconds.get(digest, now_seconds) - now_seconds)
