"""One run of a container: a process in its own mount and PID namespaces, and the actions on it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from prfaas.errors import PeerError
from prfaas_sandbox.network import enter
from prfaas_sandbox.processes import wait_process

START_TIMEOUT_SECONDS = 30.0
# The agent's interpreter, without site-packages: the script needs none, and starts in a third of the time.
LAUNCH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py")))


class StartError(PeerError):
    """A container's command could not be started."""


@dataclass(frozen=True)
class Mount:
    """A file or folder at an absolute path of the container."""

    path: str
    source: str
    read_only: bool


@dataclass(frozen=True)
class ProcessSpec:
    """The process to run.

    `argv`'s command is looked up in env's PATH. `scratch` is an empty folder of the host for the container's root.
    `network` is the file of the pod's network namespace; without it the pod shares its cluster's.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    mounts: tuple[Mount, ...]
    scratch: str
    network: str = ""


def program_folders() -> set[str]:
    """Return the folders of containers' programs, which are those of this process."""
    folders = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path}
    return {folder for folder in folders if Path(folder).is_dir()}


def with_programs(mounts: Sequence[Mount], folders: Iterable[str]) -> tuple[Mount, ...]:
    """Return the mounts, then those of `folders` that a volume would hide, such as a checkout below /tmp."""
    targets = [os.path.realpath(each.path) for each in mounts]
    hidden = [folder for folder in sorted(folders) if any(folder.startswith(target + "/") for target in targets)]
    shown = [folder for folder in hidden if not any(folder.startswith(other + "/") for other in hidden)]
    return (*mounts, *(Mount(folder, folder, read_only=True) for folder in shown if folder not in targets))


class ContainerProcess:
    """A container's process tree; get one from `start`.

    `launcher` is our child, which ends as the container does; `pid` is the container's first process.
    """

    def __init__(self, launcher: subprocess.Popen[bytes], pid: int):
        self._launcher = launcher
        self._pid = pid

    @classmethod
    async def start(cls, spec: ProcessSpec, log: Path) -> Self:
        """Start `spec` with its output appended to `log`; raise StartError with the reason if that fails."""
        Path(spec.scratch).mkdir(parents=True, exist_ok=True)
        report, report_end = os.pipe()
        try:
            launcher = _launch(spec, log, report_end)
        finally:
            os.close(report_end)
        answer = await _read_all(report)
        if answer.startswith("started "):
            return cls(launcher, int(answer.split()[1]))
        launcher.kill()
        await wait_process(launcher)
        raise StartError(answer or f"the container's first process ended before its command; see {log}")

    @property
    def running(self) -> bool:
        return self._launcher.poll() is None

    async def wait(self) -> int:
        """Wait for the end and return the exit code, 128 + N for signal N."""
        return await wait_process(self._launcher)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the container's first process; after SIGKILL the kernel ends all others too."""
        # The launcher reaps that process and ends at once: while it runs, the pid means what it meant.
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_seconds`."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.wait()

    def enter_command(self, command: list[str]) -> list[str]:
        """Return a command that runs `command` in the container's namespaces and root folder."""
        return [
            shutil.which("nsenter") or "nsenter",
            f"--target={self._pid}",
            "--net",
            "--mount",
            "--pid",
            "--root",
            *command,
        ]


def _launch(spec: ProcessSpec, log: Path, report_end: int) -> subprocess.Popen[bytes]:
    # The environment may hold secrets: it travels in memory, not in arguments or files.
    descriptor = os.memfd_create("container-spec")
    with os.fdopen(descriptor, "wb") as file, log.open("ab") as output:
        file.write(json.dumps(asdict(spec)).encode())
        file.flush()
        file.seek(0)
        launch = enter(Path(spec.network), [*LAUNCH]) if spec.network else LAUNCH
        command: list[Any] = [*launch, str(descriptor), str(report_end)]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(descriptor, report_end),
            start_new_session=True,
        )


async def _read_all(descriptor: int) -> str:
    """Read a pipe to its end; return nothing if time is up before."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb")
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            return (await reader.read()).decode(errors="replace")
    except TimeoutError:
        return ""
    finally:
        transport.close()
