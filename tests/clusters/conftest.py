"""Real control planes for the tests of this folder: `hub`, and `member` for what spans two clusters.

Each is one etcd, API server and controller manager on loopback, started on first use, and once for all processes of a
run. So files may meet in it: each has namespaces of its own, and one that changes what a whole cluster shares, such as
a CRD, starts a cluster of its own. There is no node and no scheduler; a test that wants a pod's status writes it.
"""

import asyncio
import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from prfaas_sandbox.controlplane import ControlPlane
from prfaas_sandbox.tools import Tools, ensure_tools

from .reader import Reader

CRDS = Path(__file__).parents[2] / "crds"
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
        """Have our custom resources served; several files may ask for that at once."""
        with locked(self.kubeconfig.with_name("crds.lock")):
            self.kubectl("apply", "--server-side", "-f", str(CRDS))
            self.kubectl("wait", "--for=condition=Established", "-f", str(CRDS), "--timeout=60s")


@pytest.fixture(scope="session")
def tools() -> Tools:
    return ensure_tools(print)


class Planes:
    """Starts control planes in this process, and ends them.

    A plane that processes of pytest-xdist share belongs to the one that needed it first. Each that uses it holds a lock
    on it, and the owner ends it when it holds the lock alone.
    """

    def __init__(self, tools: Tools):
        self._tools = tools
        # A loop of its own: planes outlive the loops that pytest-asyncio makes for tests.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._started: list[AbstractAsyncContextManager[ControlPlane]] = []
        self._owned: list[Path] = []
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
        shown = folder / "kubeconfig.path"
        with locked(folder / "start.lock"):
            use = (folder / "use.lock").open("a")
            fcntl.flock(use, fcntl.LOCK_SH)
            self._used.append(use)
            if shown.exists():
                kubeconfig = Path(shown.read_text())
                return self._seen(name, kubeconfig)
            found = self.start(name, Path(tempfile.mkdtemp(dir=folder)))
            shown.write_text(str(found.kubeconfig))
            self._owned.append(folder)
            return found

    def _seen(self, name: str, kubeconfig: Path) -> Cluster:
        self._readers.append(Reader(kubeconfig))
        return Cluster(name, kubeconfig, self._tools, self._readers[-1])

    def end(self) -> None:
        """Let go of what is shared; end what was started here once nobody else uses it."""
        for reader in self._readers:
            reader.close()
        for use in self._used:
            use.close()
        for folder in self._owned:
            while not self._is_given_up(folder):
                time.sleep(0.2)
        for context in self._started:
            self._runner.run(context.__aexit__(None, None, None))
        self._runner.close()

    def _is_given_up(self, folder: Path) -> bool:
        """Return whether nobody uses a plane of ours; from then on nobody finds it."""
        with locked(folder / "start.lock"), (folder / "use.lock").open("a") as use:
            try:
                fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            (folder / "kubeconfig.path").unlink()
            return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
