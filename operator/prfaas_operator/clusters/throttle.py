"""Rate limit for one API server: calls pause while the server asks for a pause.

An overloaded API server answers 429, or 503, with the seconds to wait. An immediate retry would make the overload worse
for all. All calls to one server share a throttle, so a pause holds for all of them.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from prfaas.util import RateBucket, retry_after_seconds
from prfaas_operator.errors import ClusterUnreachableError

CALLS_PER_SECOND: Final = 200.0
"""More than a thousand pools need within a minute of a start, and a fraction of one API server's capacity."""
BURST_CALLS: Final = 400
CALLS_AT_ONCE: Final = 20
"""Calls under way; more would wait for a connection, and their timeouts would run meanwhile."""
PATIENCE_SECONDS: Final = 30.0
"""A call that would wait longer fails instead; its object's status says so, and it retries later."""
LONGEST_REST_SECONDS: Final = 60.0
"""Longest pause: a server or proxy that asks for an hour is called again after this."""


class Throttle:
    """The turns of all calls to one API server, which errors name by `label`."""

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic):
        self._label = label
        self._clock = clock
        self._calls = RateBucket(CALLS_PER_SECOND, BURST_CALLS, clock())
        self._rest_until = float("-inf")
        self._slots = asyncio.Semaphore(CALLS_AT_ONCE)

    @contextlib.asynccontextmanager
    async def under_way(self, *, at_once: bool = False) -> AsyncIterator[None]:
        """Wait in the queue and for a turn, and count as under way while the block runs; raises as `turn`.

        A probe goes `at_once`, past the queue: a dead server has to be found while other calls wait for it.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    if not at_once:
                        await stack.enter_async_context(self._slots)
            except TimeoutError:
                raise self._overdue() from None
            await self.turn()
            yield

    async def turn(self) -> None:
        """Wait until a call may be made; raise ClusterUnreachableError at once where the wait exceeds the patience."""
        now = self._clock()
        due = now + self._calls.delay_seconds(1, now)
        if max(due, self._rest_until) > now + PATIENCE_SECONDS:
            raise self._overdue()
        self._calls.take(1, now)
        # The pause may grow while a call waits.
        while (left := max(due, self._rest_until) - self._clock()) > 0:  # noqa: ASYNC110  # for time to pass
            await asyncio.sleep(left)

    def rest(self, seconds: float) -> None:
        self._rest_until = max(self._rest_until, self._clock() + min(seconds, LONGEST_REST_SECONDS))

    def _overdue(self) -> ClusterUnreachableError:
        left = self._rest_until - self._clock()
        why = f"asks for a pause of {left:.0f} s" if left > 0 else "does not keep up with the calls of this operator"
        return ClusterUnreachableError(f"{self._label} {why}")


def requested_pause_seconds(status: int, headers: Mapping[str, str]) -> float | None:
    """Return the pause that an answer asks for, None without one: 429, or 503 with a time."""
    named = headers.get("Retry-After")
    return retry_after_seconds(named) if status == 429 or (status == 503 and named is not None) else None
