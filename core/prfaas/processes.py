"""Child processes: each has a log file, and ends with the thread that started it."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from prfaas.errors import PeerError

TAIL_LINES: Final = 15
TAIL_BYTES: Final = 16 * 1024


def ends_with_us(signal: str = "KILL") -> list[str]:
    """Return what to put before a command: the kernel sends the child `signal` when the *thread* that started it ends.

    That holds also when our process is killed. Empty where util-linux is not installed.
    """
    return ["setpriv", "--pdeathsig", signal, "--"] if shutil.which("setpriv") else []


class ChildProcess:
    """A running child process. Messages call it `name`; its output goes to the file `log`.

    Start it from a thread that lives as long as it does: see `ends_with_us`, which gets `death_signal`. Every user of
    the machine can read `command`: give no secret. With `share_output` stdout goes to ours, and only stderr to the log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        *,
        share_output: bool = False,
        death_signal: str = "KILL",
    ):
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*ends_with_us(death_signal), *command],
                stdin=subprocess.DEVNULL,
                stdout=None if share_output else output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is ours to handle: children end in our order
            )

    def check_running(self) -> None:
        """Raise PeerError, with the end of the log, when the process has ended."""
        status = self._process.poll()
        if status is not None:
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise PeerError(f"{self.name} {how}; the end of {self.log}:\n{tail(self.log)}")

    def stop(self, grace_seconds: float) -> None:
        """Ask the process to end, kill it after `grace_seconds` or a second Ctrl-C, and wait until it is gone."""
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        finally:
            self._process.kill()
            self._process.wait()


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(lines) or "(it is empty)"
