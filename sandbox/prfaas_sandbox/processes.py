"""Child processes that end with us, whatever ends us, and that can be awaited on any event loop."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from prfaas.errors import PeerError

LOG_TAIL_BYTES = 2000


class Child:
    """A running child process with its log file.

    The kernel kills the child when the *thread* that started it ends, also after SIGKILL (prctl PR_SET_PDEATHSIG):
    start children from a thread that lives as long as they should.

    Args:
        name: what messages call it.
        command: program and arguments; nothing secret belongs here, every user of the machine can read it.
        log: file that gets stdout and stderr.
        share_output: write stdout to ours, and stderr alone to the log.

    """

    def __init__(self, name: str, command: Sequence[str | Path], log: Path, *, share_output: bool = False):
        self.name = name
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=None if share_output else output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is ours to handle: children end in our order
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def check_running(self) -> None:
        """Raise PeerError with the end of the log when the process has ended."""
        if (status := self._process.poll()) is not None:
            raise PeerError(f"{self.name} ended with status {status}; the end of {self._log}:\n{tail(self._log)}")

    async def wait(self) -> int:
        """Wait until the process has ended and return its status, negative for a signal."""
        return await wait_process(self._process)

    async def stop(self, grace_seconds: float) -> None:
        """Ask the process to end, kill it after `grace_seconds`, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self.wait()
        except TimeoutError:
            self._process.kill()
            await self.wait()


async def wait_process(process: subprocess.Popen[bytes]) -> int:
    """Wait for a child without a thread, a signal handler or polling, so that it works on any loop."""
    if (status := process.poll()) is not None:
        return status
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
