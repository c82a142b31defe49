"""Our own workers as processes, beside the servers of vLLM."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas.ports import free_ports
from prfaas.processes import ChildProcess

from ..waiting import eventually
from .servers import answers

START_SECONDS = 300.0


class WorkerProcess:
    """A running prfaas-worker."""

    def __init__(self, model_source: str, log: Path):
        api, self.data_port = free_ports(2)
        flags = ["--model-source", model_source, "--model-name", "tiny", "--host", "127.0.0.1", "--threads", "1"]
        flags += ["--api-port", str(api), "--data-port", str(self.data_port), "--admin-port", "0"]
        self.url = f"http://127.0.0.1:{api}"
        self._child = ChildProcess("our worker", [sys.executable, "-m", "prfaas_worker", *flags], log)

    def wait_ready(self) -> "WorkerProcess":
        def is_ready() -> bool:
            self._child.check_running()
            return answers(f"{self.url}/readyz")

        eventually(is_ready, f"the worker at {self.url} is ready", START_SECONDS, poll=0.1)
        return self

    def stop(self) -> None:
        self._child.stop(grace_seconds=1)


StartWorker = Callable[[], WorkerProcess]


@contextmanager
def worker_processes(model_source: str, folder: Path) -> Iterator[StartWorker]:
    """Give the function that starts a worker; `wait_ready` before use. All end with the block."""
    started: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        started.append(WorkerProcess(model_source, folder / f"worker-{len(started)}.log"))
        return started[-1]

    try:
        yield start
    finally:
        for worker in started:
            worker.stop()
