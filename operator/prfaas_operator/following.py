"""See to it that our kinds stay followed: kopf ends the watch of a kind for good when the API server refuses it.

A CRD that is not served for a moment is enough, or a minute of missing rights or of a store that fails. kopf says so in
one line of its log and goes on with the other kinds. So its watches are looked after here, and where one has failed,
all of them begin anew as soon as the API server serves every kind again. Until then the other kinds are kept.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from prfaas.errors import PrfaasError

log = logging.getLogger(__name__)

WATCH_TASKS: Final = "watcher for "
"""How kopf calls the task that follows a kind."""
LOOK_SECONDS: Final = 1.0


async def follow(
    operate: Callable[[asyncio.Event], Awaitable[None]], is_served: Callable[[], Awaitable[None]], term: asyncio.Event
) -> bool:
    """Run kopf until it ends; tell whether it was ended in order to begin anew.

    Args:
        operate: runs kopf until the event is set, or the process is asked to end.
        is_served: raises PrfaasError while a kind is not served.
        term: ends kopf as well.

    """
    stop = asyncio.Event()
    looking = asyncio.create_task(_look_after(is_served, term, stop))
    try:
        await operate(stop)
        return looking.done() and looking.result()
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _look_after(is_served: Callable[[], Awaitable[None]], term: asyncio.Event, stop: asyncio.Event) -> bool:
    """Set `stop` with `term`, or when a watch has failed and could go on again; tell whether that was it."""
    watches: set[asyncio.Task[object]] = set()
    told = False
    while not term.is_set():
        watches |= {task for task in asyncio.all_tasks() if task.get_name().startswith(WATCH_TASKS)}
        failed = [task for task in watches if task.done() and not task.cancelled()]
        if failed and not told:
            names = ", ".join(task.get_name().removeprefix(WATCH_TASKS) for task in failed)
            log.error("%s: not followed any more; begins anew once the API server serves every kind", names)
            told = True
        if failed and await _holds(is_served):
            log.warning("the API server serves every kind again: beginning anew")
            stop.set()
            return True
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await term.wait()
        except TimeoutError:
            continue
    stop.set()
    return False


async def _holds(is_served: Callable[[], Awaitable[None]]) -> bool:
    try:
        await is_served()
    except PrfaasError:
        return False
    return True
