"""Shows the progress of long work: on a terminal as one line that changes, elsewhere as a line at intervals."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console

OnProgress = Callable[[str], None]

QUIET_SECONDS = 15.0
TICK_SECONDS = 1.0

console = Console(stderr=True, highlight=False)


@contextmanager
def progress() -> Iterator[OnProgress]:
    """Yield the function that shows a line; a log keeps few of the many `building` lines."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    shown = float("-inf")

    def report(line: str) -> None:
        nonlocal shown
        if not line.startswith("building") or time.monotonic() - shown >= QUIET_SECONDS:
            shown = time.monotonic()
            console.print(line, soft_wrap=True)

    yield report


@asynccontextmanager
async def ticking(report: OnProgress, what: Callable[[], str]) -> AsyncIterator[None]:
    """Report `building WHAT` with its duration, once a second, while the block runs."""
    started = time.monotonic()

    async def tick() -> None:
        while True:
            minutes, seconds = divmod(int(time.monotonic() - started), 60)
            report(f"building {what()}: {minutes}:{seconds:02d}")
            await asyncio.sleep(TICK_SECONDS)

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
