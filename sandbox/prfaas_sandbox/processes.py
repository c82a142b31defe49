"""Runs other programs: children that end with this process, and commands with a time limit.

An error carries the end of the program's output. All functions work on any event loop.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.errors import ConfigError, PeerError, UnreachableError

LOG_TAIL_BYTES = 2000
TAIL_LINES = 15
LONGEST_LINE_BYTES = 1 << 20


class ChildProcess:
    """A running child process with its log file.

    The kernel kills the child when the *thread* that started it ends, also after SIGKILL (prctl PR_SET_PDEATHSIG). So
    start children from a thread that lives as long as they do. Every user of the machine can read `command`: give no
    secret. With `share_output` stdout goes to ours, and only stderr to the log.
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
        return self._process.pid

    def check_running(self) -> None:
        """Raise PeerError with the end of the log if the process has ended."""
        if (status := self._process.poll()) is not None:
            raise PeerError(f"{self.name} ended with status {status}; the end of {self._log}:\n{tail(self._log)}")

    async def wait(self) -> int:
        """Wait for the end of the process and return its status, negative for a signal."""
        return await wait_process(self._process)

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, SIGKILL after `grace_seconds`, and wait for the end."""
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


@dataclass(frozen=True)
class Command:
    """A program and its arguments, environment, folder and time limit.

    Args:
        words: program and arguments.
        shown: what messages call it; the words themselves if empty.
        environment: variables beside our own.
        folder: where it runs; ours if None.
        timeout_seconds: after which it is killed.
    """

    words: Sequence[str | Path]
    shown: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    timeout_seconds: float = 300.0

    def __str__(self) -> str:
        return self.shown or " ".join(str(word) for word in self.words)


async def run(command: Command, stdin: bytes | None = None) -> str:
    """Run a command and return its standard output.

    Raises:
        ConfigError: the program cannot be started.
        PeerError: it failed; the message carries what it wrote to stderr.
        UnreachableError: it did not end in time.
    """
    given = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    async with _running(command, stdin=given, stderr=subprocess.PIPE) as process:
        output, errors = await process.communicate(stdin)
    if process.returncode:
        raise PeerError(f"{command}: {errors.decode(errors='replace').strip()}")
    return output.decode()


async def run_logged(command: Command, log: Path, on_line: Callable[[str], None]) -> None:
    """Run a command whose whole output goes to a file, appended; `on_line` sees every line of it.

    Raises:
        ConfigError, UnreachableError: as `run`.
        PeerError: it failed; the message carries the last lines and names the file.
    """
    last: deque[str] = deque(maxlen=TAIL_LINES)
    async with _running(command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        with log.open("ab") as file:
            while process.stdout and (line := await process.stdout.readline()):
                file.write(line)
                last.append(line.decode(errors="replace"))
                on_line(last[-1].rstrip())
        await process.wait()
    if process.returncode:
        raise PeerError(f"{command} failed; the end of {log}:\n{''.join(last)}")


@asynccontextmanager
async def _running(command: Command, *, stdin: int, stderr: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a command, limit the block to its time, and leave no process behind."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command.words,
            env={**os.environ, **command.environment},
            cwd=command.folder,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            limit=LONGEST_LINE_BYTES,
        )
    except OSError as error:
        raise ConfigError(f"{command} cannot be started: {error}") from error
    try:
        async with asyncio.timeout(command.timeout_seconds):
            yield process
    except TimeoutError as error:
        raise UnreachableError(f"{command} did not end within {command.timeout_seconds:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
