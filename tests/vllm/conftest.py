"""Real vLLM: installed once, imported once, and an engine forked for each that a test needs.

All of these tests are marked `vllm`. `make test-vllm` runs them, but for those that are marked `release`, and `make
test` does not: the environment has 6 GB.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import ensure_vllm
from prfaas_worker.assets import model_directory

from ..clients.programs import Clients, client_programs
from .engines import Engine, EngineHost
from .servers import StartServer, vllm_servers
from .versions import RUN, Versions, sources_of
from .workers import StartWorker, worker_processes

MODEL = "builtin:qwen3-next-tiny"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("vllm")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the environment with vLLM."""
    with progress() as report:
        return ensure_vllm(report)


@pytest.fixture(scope="session")
def vllm_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def engine_host(vllm_python: Path, vllm_logs: Path) -> Iterator[EngineHost]:
    """Where engines are forked; all of them end with the session."""
    host = EngineHost(vllm_python, vllm_logs, model_directory(MODEL))
    yield host
    host.close()


@pytest.fixture(scope="session")
def vllm_sources(vllm_python: Path) -> dict[str, Path]:
    """Folders with vLLM's sources, of each version that the connector was tested with."""
    return sources_of(vllm_python)


@pytest.fixture(scope="session")
def vllm_versions(
    vllm_python: Path, vllm_sources: dict[str, Path], engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory
) -> Versions:
    folders = {version: vllm_sources[version] for version in RUN}
    return Versions(vllm_python, folders, engine_host, tmp_path_factory.mktemp("metadata"))


@pytest.fixture(scope="session")
def reference_engine(engine_host: EngineHost) -> Engine:
    """An engine without a connector, that all tests share."""
    return engine_host.start("reference").wait_ready()


@pytest.fixture(scope="module")
def clients(vllm_logs: Path) -> Iterator[Clients]:
    """OpenAI clients, which run as long as the module."""
    with client_programs(vllm_logs) as started:
        yield started


@pytest.fixture(scope="module")
def start_server(engine_host: EngineHost) -> Iterator[StartServer]:
    """Starts `vllm serve`; all servers end with the module."""
    with vllm_servers(engine_host) as start:
        yield start


@pytest.fixture(scope="module")
def start_worker(vllm_logs: Path) -> Iterator[StartWorker]:
    """Starts our own worker; all of them end with the module."""
    with worker_processes(MODEL, vllm_logs) as start:
        yield start
