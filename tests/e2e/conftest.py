"""One installation of prfaas in each environment, which all whole-system tests there share: a start takes long.

The sandbox runs on any machine. kind needs Docker: where that cannot be had, its tests say so in their own section
at the end of the run, and count as skipped.
"""

import json
import sys
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from prfaas.errors import ConfigError, PeerError
from prfaas_sandbox.demo.install import NAMESPACE, POLICY, ExampleInstallation, repository_root
from prfaas_sandbox.environment import Environment
from prfaas_sandbox.kind.clusters import remove_everything
from prfaas_sandbox.kind.docker import ensure_daemon
from prfaas_sandbox.kind.environment import KindEnvironment
from prfaas_sandbox.kind.layout import Layout
from prfaas_sandbox.progress import progress
from prfaas_sandbox.sandbox import Sandbox

from .checks import TIMEOUT

LINK_MBPS = 100
ENVIRONMENTS = (pytest.param("sandbox", marks=TIMEOUT), pytest.param("kind", marks=[TIMEOUT, pytest.mark.kind]))
REMOVAL = "tests/e2e/test_removal.py"
WHY_NOT_KIND = pytest.StashKey[str]()
WHY_NOT_VLLM = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what takes the installation away come after all that needs it."""
    items.sort(key=lambda item: item.nodeid.startswith(REMOVAL))


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=ENVIRONMENTS)
async def installation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ExampleInstallation]:
    """Install prfaas as the README says, into two fresh clusters joined by a link of 100 Mbit/s."""
    state = tmp_path_factory.mktemp(request.param)
    if request.param == "sandbox":
        async with Sandbox.start(state, link_mbps=LINK_MBPS, report=print) as sandbox:
            yield await created(sandbox, report=print)
        return
    layout = Layout(repository_root(), state, "prfaas-e2e")
    await require_docker(layout, request.config)
    with progress() as report:
        async with KindEnvironment.running(layout, link_mbps=LINK_MBPS, report=report) as environment:
            yield await created(environment, report=report)


async def created(environment: Environment, report: Callable[[str], None]) -> ExampleInstallation:
    """Install, and bound the threshold: what many short prompts make of it must not keep at home what a test sends."""
    installation = await ExampleInstallation.create(environment, report=report)
    patch = json.dumps({"spec": {"threshold": {"max": 4096}}})
    await environment.kubectl(environment.hub, "-n", NAMESPACE, "patch", "prfaas", POLICY, "--type=merge", "-p", patch)
    return installation


async def require_docker(layout: Layout, config: pytest.Config) -> None:
    """Skip, and report it at the end, when this machine cannot run kind."""
    layout.logs.mkdir(parents=True)
    try:
        await ensure_daemon(layout, lambda line: print(line, file=sys.stderr))
    except (ConfigError, PeerError) as error:
        config.stash[WHY_NOT_KIND] = str(error)
        pytest.skip(f"kind cannot run here: {error}")
    await remove_everything(layout)  # what a run that was killed left


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell loudly which tests on kind did not run."""
    why = config.stash.get(WHY_NOT_KIND, "")
    if why:
        terminalreporter.section("THE TESTS ON KIND DID NOT RUN", sep="!", red=True, bold=True)
        terminalreporter.line(why)
        terminalreporter.line("Nothing was tested in real containers. `make test-kind` runs only these tests.")
    why = config.stash.get(WHY_NOT_VLLM, "")
    if why:
        terminalreporter.section("THE TESTS OF vLLM ON KIND DID NOT RUN", sep="!", red=True, bold=True)
        terminalreporter.line(why)
