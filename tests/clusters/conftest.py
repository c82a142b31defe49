"""Real control planes for the tests of this folder: `hub`, and `member` for what spans two clusters.

Each is one etcd, API server and controller manager on loopback, started once a session and on first use. There is no
node and no scheduler, so pods stay Pending; a test that wants a status writes it.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas_sandbox.controlplane import ControlPlane
from prfaas_sandbox.tools import Tools, ensure_tools

KUBECTL_TIMEOUT_SECONDS = 90


@dataclass(frozen=True)
class Cluster:
    """One running control plane, as the administrator sees it."""

    name: str
    kubeconfig: Path
    tools: Tools

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


@pytest.fixture(scope="session")
def tools() -> Tools:
    return ensure_tools(print)


@pytest.fixture(scope="session")
def start_cluster(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Cluster]]:
    """Return a function that starts a control plane, which ends with the session."""

    @asynccontextmanager
    async def cluster(name: str) -> AsyncIterator[Cluster]:
        async with ControlPlane.start(name, tools, tmp_path_factory.mktemp(name), scheduler=False) as plane:
            yield Cluster(name, plane.kubeconfig, tools)

    started: list[AbstractAsyncContextManager[Cluster]] = []
    # A loop of its own: the fixture outlives the loops that pytest-asyncio makes for tests.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:

        def start(name: str) -> Cluster:
            context = cluster(name)
            started.append(context)
            return runner.run(context.__aenter__())

        yield start
        for context in started:
            runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def hub(start_cluster: Callable[[str], Cluster]) -> Cluster:
    return start_cluster("hub")


@pytest.fixture(scope="session")
def member(start_cluster: Callable[[str], Cluster]) -> Cluster:
    return start_cluster("member")
