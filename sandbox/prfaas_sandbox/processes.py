"""Runs commands with a time limit. An error carries the end of their output. All functions work on any event loop."""

import asyncio
import os
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.errors import ConfigError, PeerError, UnreachableError
from prfaas.processes import TAIL_LINES

LONGEST_LINE_BYTES = 1 << 20


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
    source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    async with _running(command, stdin=source, stderr=subprocess.PIPE) as process:
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
async def at_once() -> AsyncIterator[asyncio.TaskGroup]:
    """Give a group of tasks that run at the same time. Where one fails the others end, and its error is raised as it
    is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


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
