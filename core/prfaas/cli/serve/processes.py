"""The processes of `prfaas serve`: started with a log each, watched, and ended in order.

They have sessions of their own, so that Ctrl-C reaches us alone and requests can be finished; where util-linux is
there, the kernel ends them even when we are killed. It does so when the *thread* that started them ends: start them
from the main one.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from prfaas.errors import PeerError

TAIL_LINES: Final = 12
TAIL_BYTES: Final = 16 * 1024


class Child:
    """A running process.

    Args:
        name: what messages call it.
        command: program and arguments.
        log: file that gets all that it writes.

    """

    def __init__(self, name: str, command: Sequence[str], log: Path):
        self.name = name
        self.log = log
        tether = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*tether, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
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
    """Return the last lines of a log, indented."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (it is empty)"
