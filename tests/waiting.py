"""How tests wait, in one place.

`eventually` waits for what must come at some time. Its bound is generous: waiting costs nothing where all is well.
`within` holds a promise of promptness. A busy machine breaks such a promise without a bug, so only tests marked
`quiet`, which run one after the other, may use it. Both raise NotInTime. It is the one failure that a second try may
forgive (tools/ci/verdict.py); a wrong value never gets one.
"""

import asyncio
import inspect
import queue
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from .stages import refuse_beside_others, refuse_in_gate

T = TypeVar("T")
Text = str | Callable[[], object]
PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.02


class NotInTime(AssertionError):  # noqa: N818  # a verdict on a test, not an error of the product
    """What a test waited for did not come in time."""


def eventually(check: Callable[[], T], what: Text, seconds: float = PATIENCE_SECONDS, poll: float = POLL_SECONDS) -> T:
    """Return what `check` returns once that is true. Raise NotInTime with `what` when it never is."""
    refuse_in_gate("waits")
    deadline = time.monotonic() + seconds
    while not (result := check()):
        if time.monotonic() > deadline:
            raise NotInTime(_sentence(what, seconds))
        time.sleep(poll)
    return result


def assert_freed(check: Callable[[], T], what: Text, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait in the same way until nothing is held. What stays is a leak, which no second try forgives."""
    try:
        eventually(check, what, seconds)
    except NotInTime as error:
        raise AssertionError(str(error)) from None


def take_next(source: "queue.SimpleQueue[T]", what: Text, seconds: float = PATIENCE_SECONDS) -> T:
    """Return the next thing of a queue. Raise NotInTime with `what` when none comes."""
    try:
        return source.get(timeout=seconds)
    except queue.Empty:
        raise NotInTime(_sentence(what, seconds)) from None


async def eventually_async(
    check: Callable[[], T | Awaitable[T]], what: Text, seconds: float = PATIENCE_SECONDS, poll: float = POLL_SECONDS
) -> T:
    """Do the same in an event loop. `check` may be a coroutine function; one call of it counts as no wait."""
    refuse_in_gate("waits")
    deadline = time.monotonic() + seconds
    while not (result := await _value(check)):
        if time.monotonic() > deadline:
            raise NotInTime(_sentence(what, seconds))
        await asyncio.sleep(poll)
    return result


def within(seconds: float, check: Callable[[], T], what: Text) -> T:
    """Return what `check` returns once that is true, which prfaas promises to happen within `seconds`."""
    refuse_beside_others("promises promptness")
    return eventually(check, what, seconds, poll=0.005)


def assert_prompt(seconds: float, limit_seconds: float, what: Text) -> None:
    """Raise NotInTime if something that took `seconds` was promised within `limit_seconds`."""
    refuse_beside_others("promises promptness")
    if seconds > limit_seconds:
        raise NotInTime(f"{_sentence(what, limit_seconds)} (it took {seconds:.2f} s)")


async def _value(check: Callable[[], Any]) -> Any:
    result = check()
    return await result if inspect.isawaitable(result) else result


def _sentence(what: Text, seconds: float) -> str:
    return f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
