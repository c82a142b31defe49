"""Real control planes for the tests of this folder: `hub`, and `member` for what spans two clusters.

Each is one etcd, API server and controller manager on loopback, started on first use, once for all processes of a run,
and kept by a separate process (keeper.py). So files may meet in it: each has its own namespaces, and one that
changes what a whole cluster shares, such as a CRD, starts its own cluster. There is no node and no scheduler; a
test that wants a pod's status writes it.
"""

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from prfaas_sandbox.controlplane import ControlPlane
from prfaas_sandbox.tools import Tools, ensure_tools

from ..waiting import eventually
from .keeper import locked, shown_path, start_lock, use_lock
from .reader import Reader

CRDS = Path(__file__).parents[2] / "crds"
KEEPER = Path(__file__).with_name("keeper.py")
KUBECTL_TIMEOUT_SECONDS = 90


@dataclass(frozen=True)
class Cluster:
    """One running control plane, as the administrator sees it."""

    name: str
    kubeconfig: Path
    tools: Tools
    reader: Reader

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Return what kubectl prints; a failure raises CalledProcessError with its message as a note."""
        command = [self.tools["kubectl"], "--kubeconfig", self.kubeconfig, *arguments]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=KUBECTL_TIMEOUT_SECONDS, check=True
            )
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise
        return done.stdout

    def install_crds(self) -> None:
        """Have our custom resources served; many files ask for that, some at once."""
        installed = self.kubeconfig.with_name("crds.installed")
        with locked(self.kubeconfig.with_name("crds.lock")):
            if not installed.exists():
                self.kubectl("apply", "--server-side", "-f", str(CRDS))
                self.kubectl("wait", "--for=condition=Established", "-f", str(CRDS), "--timeout=60s")
                installed.touch()


@pytest.fixture(scope="session")
def tools() -> Tools:
    return ensure_tools(print)


class Planes:
    """Starts control planes of this process, and finds or starts those that all processes of a run share.

    A process that uses a shared one holds a lock on it. Its keeper (keeper.py) ends it when no process does.
    """

    def __init__(self, tools: Tools):
        self._tools = tools
        # Its own loop: planes outlive the loops that pytest-asyncio makes for tests.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._started: list[AbstractAsyncContextManager[ControlPlane]] = []
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._used: list[TextIO] = []
        self._readers: list[Reader] = []

    def start(self, name: str, folder: Path) -> Cluster:
        """Start a plane of this process's own."""
        context = ControlPlane.start(name, self._tools, folder, scheduler=False)
        self._started.append(context)
        plane = self._runner.run(context.__aenter__())
        return self._seen(name, plane.kubeconfig)

    def share(self, name: str, folder: Path) -> Cluster:
        """Return the plane that is kept in a folder, started when it is not there."""
        folder.mkdir(exist_ok=True)
        with locked(start_lock(folder)):
            use = use_lock(folder).open("a")
            fcntl.flock(use, fcntl.LOCK_SH)
            self._used.append(use)
            if not shown_path(folder).exists():
                self._keepers.append(start_keeper(name, folder))
            return self._seen(name, Path(shown_path(folder).read_text()))

    def _seen(self, name: str, kubeconfig: Path) -> Cluster:
        self._readers.append(Reader(kubeconfig))
        return Cluster(name, kubeconfig, self._tools, self._readers[-1])

    def end(self) -> None:
        """End what was started here, and let go of what is shared; wait for the end of what this process began."""
        for reader in self._readers:
            reader.close()
        for use in self._used:
            use.close()
        for context in self._started:
            self._runner.run(context.__aexit__(None, None, None))
        self._runner.close()
        for keeper in self._keepers:
            keeper.wait()


def start_keeper(name: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the keeper of a plane, and wait until the plane is ready."""
    log = folder / "keeper.log"
    command = [sys.executable, KEEPER, name, folder]
    with log.open("wb") as output:
        # Whoever ends this process and its group does not end the plane of all others.
        keeper = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def is_shown() -> bool:
        assert keeper.poll() is None, f"the keeper of {name} ended: {log.read_text()}"
        return shown_path(folder).exists()

    eventually(is_shown, f"the control plane {name} is ready")
    return keeper


@pytest.fixture(scope="session")
def planes(tools: Tools, request: pytest.FixtureRequest) -> Planes:
    found = Planes(tools)
    # After all fixtures, and beyond any test's time limit: other processes may still use a plane of this one.
    request.config.add_cleanup(found.end)
    return found


@pytest.fixture(scope="session")
def start_cluster(planes: Planes, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Cluster]:
    """Return a function that starts a control plane of a test file's own, which ends with the session."""
    return lambda name: planes.start(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="session")
def share_cluster(planes: Planes, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Cluster]:
    """Return a function that gives the control plane of a name, one for all processes of the run."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    return lambda name: planes.share(name, root / f"plane-{name}")


@pytest.fixture(scope="session")
def hub(share_cluster: Callable[[str], Cluster]) -> Cluster:
    return share_cluster("hub")


@pytest.fixture(scope="session")
def member(share_cluster: Callable[[str], Cluster]) -> Cluster:
    return share_cluster("member")
