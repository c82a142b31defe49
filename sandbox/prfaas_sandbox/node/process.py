"""One run of a container: a process in mount and PID namespaces of its own, and what may be done to it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from prfaas.errors import PeerError
from prfaas_sandbox.processes import wait_process

START_TIMEOUT_SECONDS = 30.0
SCRIPT = Path(__file__).with_name("mounts.py")
# The agent's interpreter, without site-packages: the script needs none, and starts in a third of the time.
LAUNCH = ("unshare", "--mount", "--pid", "--fork", "--kill-child", sys.executable, "-I", "-S", str(SCRIPT))
REPORT_BYTES = 4096


class StartError(PeerError):
    """A container's command could not be started."""


@dataclass(frozen=True)
class Mount:
    """A file or folder that the container sees at an absolute path."""

    path: str
    source: str
    read_only: bool


@dataclass(frozen=True)
class ProcessSpec:
    """What to run.

    Args:
        argv: command and arguments; the command is looked up in env's PATH.
        env: the whole environment.
        cwd: working directory inside the container.
        mounts: volumes.
        scratch: an empty folder of the host, for the container's root.

    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    mounts: tuple[Mount, ...]
    scratch: str


class ContainerProcess:
    """A container's process tree; get one from `start`."""

    def __init__(self, launcher: subprocess.Popen[bytes], descriptor: int):
        self._launcher = launcher
        self._descriptor = descriptor  # of the container's pid 1: unlike a number it cannot come to mean another

    @classmethod
    async def start(cls, spec: ProcessSpec, log: Path) -> Self:
        """Start `spec` with its output appended to `log`; raise StartError with the reason when that fails."""
        Path(spec.scratch).mkdir(parents=True, exist_ok=True)
        report, report_end = os.pipe()
        try:
            launcher = _launch(spec, log, report_end)
        finally:
            os.close(report_end)
        line = await _first_line(report)
        if line == "started":
            with suppress(OSError, ValueError):  # the command may have ended already
                return cls(launcher, os.pidfd_open(_only_child(launcher.pid)))
            return cls(launcher, os.pidfd_open(launcher.pid))
        launcher.kill()
        await wait_process(launcher)
        raise StartError(line or f"the container's first process ended before its command; see {log}")

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._launcher.poll() is None

    async def wait(self) -> int:
        """Wait for the end and return the exit code, 128 + N for signal N."""
        status = await wait_process(self._launcher)
        return status if status >= 0 else 128 - status

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the container's first process; with SIGKILL the kernel ends all the others too."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    async def stop(self, grace_seconds: float) -> None:
        """Ask the container to end and kill it after `grace_seconds`."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.wait()

    def close(self) -> None:
        """Forget the process, which has ended."""
        os.close(self._descriptor)

    def enter_command(self, command: list[str]) -> list[str]:
        """Return a command that runs `command` in the container's namespaces and root folder."""
        pid = _only_child(self._launcher.pid)
        return ["nsenter", f"--target={pid}", "--mount", "--pid", "--root", *command]


def _launch(spec: ProcessSpec, log: Path, report_end: int) -> subprocess.Popen[bytes]:
    # The environment may hold secrets: it travels in memory, not in arguments or files.
    descriptor = os.memfd_create("container-spec")
    with os.fdopen(descriptor, "wb") as file, log.open("ab") as output:
        file.write(json.dumps(asdict(spec)).encode())
        file.flush()
        file.seek(0)
        command: list[Any] = [*LAUNCH, str(descriptor), str(report_end)]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(descriptor, report_end),
            start_new_session=True,
        )


async def _first_line(descriptor: int) -> str:
    """Read one line from a pipe; empty when nothing was written before it was closed or time was up."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=REPORT_BYTES)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            return (await reader.readline()).decode(errors="replace").strip()
    except TimeoutError:
        return ""
    finally:
        transport.close()


def _only_child(pid: int) -> int:
    """Return the child of a process that has exactly one; raise ValueError when it has none any more."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
