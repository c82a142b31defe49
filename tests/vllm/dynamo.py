"""A Dynamo for tests: frontends and a mocker, which answers as an engine of vLLM would, without a model.

Its packages are those of dynamo.lock.txt, in their own environment in the cache.
"""

import asyncio
import hashlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas.ports import free_ports
from prfaas.processes import ChildProcess
from prfaas_sandbox.cache.entries import ensure_folder
from prfaas_sandbox.cache.install import make_environment
from prfaas_sandbox.progress import OnProgress

from ..waiting import eventually

LOCK = Path(__file__).with_name("dynamo.lock.txt")
START_SECONDS = 120.0
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


def ensure_dynamo(report: OnProgress) -> Path:
    """Return the interpreter of an environment with Dynamo, which is installed if needed (450 MB)."""
    stamp = hashlib.sha256(sys.version.encode() + LOCK.read_bytes()).hexdigest()[:12]

    def make(folder: Path) -> None:
        report("Dynamo is installed for tests: 450 MB on disk")
        asyncio.run(make_environment(folder, LOCK, "the environment of Dynamo", report))

    return ensure_folder(f"dynamo-{stamp}", make, report) / "bin" / "python"


class Frontend:
    """A running frontend: one instance to our gateway."""

    def __init__(self, python: Path, folder: Path, number: int):
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        flags = ("--http-host", "127.0.0.1", "--http-port", str(self.port))
        self._process = _start(python, folder, f"frontend-{number}", "dynamo.frontend", *flags)

    def wait_ready(self) -> None:
        """Wait until it serves a model."""
        eventually(self._serves, f"it serves a model; see {self._process.log}", START_SECONDS, poll=0.2)

    def _serves(self) -> bool:
        self._process.check_running()
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                return bool(json.load(answer)["data"])
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def kill(self) -> None:
        self._process.stop(grace_seconds=0)


@contextmanager
def frontends(python: Path, model: Path, folder: Path, count: int) -> Iterator[list[Frontend]]:
    """Run one mocker and `count` frontends, ready; the model's name is its folder, so that nothing is downloaded."""
    (folder / "discovery").mkdir()
    flags = ("--model-path", str(model), "--engine-type", "vllm")
    mocker = _start(python, folder, "mocker", "dynamo.mocker", *flags)
    started: list[Frontend] = []
    try:
        for number in range(count):
            started.append(Frontend(python, folder, number))
        for one in started:
            one.wait_ready()
        yield started
    finally:
        for one in started:
            one.kill()
        mocker.stop(grace_seconds=0)


def _start(python: Path, folder: Path, name: str, module: str, *flags: str) -> ChildProcess:
    variables = [f"DYN_FILE_KV={folder / 'discovery'}", "HF_HUB_OFFLINE=1"]
    return ChildProcess(name, ["env", *variables, python, "-m", module, *flags, *PLANES], folder / f"{name}.log")
