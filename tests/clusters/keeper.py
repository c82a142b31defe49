"""Keeps a control plane up for all test processes that use it: `python keeper.py NAME FOLDER`.

Test processes share it, and any of them may die. So it belongs to none of them: it runs as long as one holds a lock on
FOLDER/use.lock. FOLDER/kubeconfig.path tells where its kubeconfig is, while it can be used.
"""

import asyncio
import fcntl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas.util import replace_file
from prfaas_sandbox.controlplane import ControlPlane
from prfaas_sandbox.tools import ensure_tools

POLL_SECONDS = 0.5


def use_lock(folder: Path) -> Path:
    return folder / "use.lock"


def shown_path(folder: Path) -> Path:
    return folder / "kubeconfig.path"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start_lock(folder: Path) -> Path:
    return folder / "start.lock"


async def keep(name: str, folder: Path) -> None:
    """Run the plane while a process uses it."""
    inside = Path(tempfile.mkdtemp(dir=folder))
    async with ControlPlane.start(name, ensure_tools(print), inside, scheduler=False) as plane:
        replace_file(shown_path(folder), str(plane.kubeconfig).encode())
        while not is_unused(folder):  # noqa: ASYNC110  # the locks are other processes'
            await asyncio.sleep(POLL_SECONDS)


def is_unused(folder: Path) -> bool:
    """Return whether no process uses the plane; from then on none finds it."""
    with locked(start_lock(folder)), use_lock(folder).open("a") as use:
        try:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        shown_path(folder).unlink()
        return True


if __name__ == "__main__":
    asyncio.run(keep(sys.argv[1], Path(sys.argv[2])))
