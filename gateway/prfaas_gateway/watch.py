"""A timer for what goes on piece by piece: it looks up now and then whether anything has moved.

Moving a timer with every piece would cost about as much as the piece, and leave a cancelled one behind each time.
"""

import asyncio
from types import TracebackType
from typing import Self


class Watch:
    """A block that ends in TimeoutError once nothing has moved in it for too long. Use as an async context manager.

    Args:
        limit_seconds: how long that is; may be changed within the block.

    """

    def __init__(self, limit_seconds: float):
        self.limit_seconds = limit_seconds
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._moved_seconds = self._now()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    def moved(self, limit_seconds: float) -> None:
        """Count anew from now on, up to this limit."""
        self._moved_seconds = self._now()
        self.limit_seconds = limit_seconds

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._timer is not None:
            self._timer.cancel()
        return await self._timeout.__aexit__(kind, error, trace)

    def _look(self) -> None:
        due_seconds = self._moved_seconds + self.limit_seconds
        if self._now() >= due_seconds:
            self._timeout.reschedule(self._now())
        else:
            # A limit that becomes shorter meanwhile is noticed late, by as much at most.
            self._timer = self._loop.call_at(due_seconds, self._look)
