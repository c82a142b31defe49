"""Pairs of our workers with a model that depends on its context; either may have a planted fault."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from prfaas.cli.contract.calls import CheckedEngine
from prfaas.cli.contract.checks import EnginePair
from prfaas.cli.measured_server import HttpServer
from prfaas.errors import PeerError
from prfaas.ports import LOOPBACK, free_ports
from prfaas.processes import ends_with_us

from ..waiting import eventually
from . import faulty_worker

START_SECONDS: Final = 300.0
"""`import torch` on a busy machine."""


class StartedWorker:
    """A worker on loopback, which may not be ready yet. With a fault it is that of faulty_worker.py. It ends with the
    thread that started it."""

    def __init__(self, log: Path, model: Path, fault: str = "", after: int = 1):
        api_port, self.data_port = free_ports(2)
        self.url, self.log = f"http://{LOOPBACK}:{api_port}", log
        program = [faulty_worker.__file__] if fault else ["-m", "prfaas_worker"]
        command = [*ends_with_us(), sys.executable, *program, "--model-source", str(model), "--model-name", "attentive"]
        command += ["--api-port", str(api_port), "--data-port", str(self.data_port), "--admin-port", "0"]
        command += ["--instance", log.stem]
        # Nothing is measured: equal steps give equal answers.
        command += ["--threads", "1", "--step-tokens", "2048", "--profile-seconds", "0", "--max-context", "32768"]
        planted = {faulty_worker.FAULT: fault, faulty_worker.AFTER: str(after)}
        with log.open("wb") as output:
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | planted
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def wait_ready(self) -> "StartedWorker":
        eventually(self._is_ready, lambda: f"a worker is ready:\n{self.log.read_text()}", START_SECONDS, 0.05)
        return self

    def stop(self) -> None:
        """Kill the front; the kernel ends its engine, and that one's mover, with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(HttpServer(self.url).get("/readyz"))
        except PeerError:
            return False


class WorkerPair(NamedTuple):
    """A source and a destination, both ready."""

    source: StartedWorker
    destination: StartedWorker

    @property
    def engines(self) -> EnginePair:
        source, destination = (CheckedEngine(one.url) for one in self)
        return EnginePair(source, destination, self.source.data_port)


@contextmanager
def starting(folder: Path, model: Path) -> Iterator[Callable[..., StartedWorker]]:
    """Give a function that starts a worker, by a name, and perhaps with a fault: `start(name, fault, after)`. All end
    with the block."""
    started: list[StartedWorker] = []

    def start(name: str, fault: str = "", after: int = 1) -> StartedWorker:
        started.append(StartedWorker(folder / f"{name}.log", model, fault, after))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.stop()


@contextmanager
def worker_pair(
    folder: Path, model: Path, *, source_fault: str = "", destination_fault: str = "", after: int = 1
) -> Iterator[WorkerPair]:
    """Run a source and a destination; give them once both are ready."""
    with starting(folder, model) as start:
        pair = WorkerPair(start("source", source_fault, after), start("destination", destination_fault, after))
        for one in pair:
            one.wait_ready()
        yield pair
