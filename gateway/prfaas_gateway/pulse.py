"""Tells a worker that takes its time from one that hangs, while a first byte is awaited.

A prompt may wait for minutes in a queue, so waiting long proves nothing; and a process that is frozen keeps its
connections, which its kernel goes on acknowledging. So once an answer is late its worker is asked something that costs
nothing and needs both of its processes. One that twice does not answer is given up by all who wait for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from prfaas.wire.routes import Instance
from prfaas_gateway.limits import Limits

ALLOWED_MISSES: Final = 1

Ask = Callable[[Instance], Awaitable[bool]]
"""Asks a worker whether it lives; false where it does not answer in time. Any answer is one."""


class Wait:
    """One wait for a first byte, which `timer` ends when the worker is given up."""

    __slots__ = ("given_up", "late", "timer")

    def __init__(self, timer: asyncio.Timeout):
        self.timer = timer
        self.given_up = False
        self.late: asyncio.TimerHandle | None = None


class Pulses:
    """Everybody who waits, by worker; asks for as long as somebody does."""

    def __init__(self, ask: Ask, limits: Limits):
        self._ask = ask
        self._limits = limits
        self._late: dict[str, set[Wait]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def begin(self, worker: Instance, timer: asyncio.Timeout) -> Wait:
        """Note that somebody waits for a worker from now on; `end` must follow."""
        wait = Wait(timer)
        loop = asyncio.get_running_loop()
        wait.late = loop.call_later(self._limits.doubt_seconds, self._doubt, worker, wait)
        return wait

    def end(self, worker: Instance, wait: Wait) -> None:
        """Forget a wait."""
        if wait.late is not None:
            wait.late.cancel()
        waits = self._late.get(worker.url)
        if waits is not None and wait in waits:
            waits.remove(wait)

    def close(self) -> None:
        """Ask nobody any more."""
        for task in self._asking.values():
            task.cancel()

    def _doubt(self, worker: Instance, wait: Wait) -> None:
        self._late.setdefault(worker.url, set()).add(wait)
        if worker.url not in self._asking:
            self._asking[worker.url] = asyncio.ensure_future(self._look_after(worker))

    async def _look_after(self, worker: Instance) -> None:
        """Ask until nobody waits; have all give up after too many answers that did not come."""
        waits, misses = self._late[worker.url], 0
        try:
            while waits:
                misses = 0 if await self._ask(worker) else misses + 1
                if misses > ALLOWED_MISSES:
                    for wait in waits:
                        if not wait.timer.expired():
                            wait.given_up = True
                            wait.timer.reschedule(0)
                    return
                await asyncio.sleep(self._limits.doubt_seconds)
        finally:
            del self._asking[worker.url], self._late[worker.url]
