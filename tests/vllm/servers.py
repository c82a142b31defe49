"""`vllm serve` for tests: each server in a session of its own, with a log, and warmed up."""

import itertools
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prfaas.ports import free_ports
from prfaas.processes import tail
from prfaas_sandbox.vllm import checkout_path

from .engines import VARIABLES, contained

START_SECONDS = 240.0
FLAGS = (
    *("--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager"),
    *("--max-model-len", "32768", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(64 << 20), "--disable-uvicorn-access-log"),
)


class VllmServer:
    """A running `vllm serve`."""

    def __init__(self, python: Path, model: Path, log: Path, flags: Sequence[str], variables: Mapping[str, str]):
        self.log, self.port = log, free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(self.port), *FLAGS, *flags]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*contained(), *command],
                env=os.environ | VARIABLES | {"PYTHONPATH": checkout_path()} | dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_ready(self) -> "VllmServer":
        """Wait until it answers, then have it compute a few tokens.

        A process of vLLM 0.32 dies of SIGILL if its first prompt has four tokens or fewer, on a processor with AMX.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self._process.poll() is None, f"vllm serve has ended:\n{tail(self.log)}"
            assert time.monotonic() < deadline, (
                f"vllm serve is not ready after {START_SECONDS:.0f} s:\n{tail(self.log)}"
            )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        self.post("/v1/completions", prompt=list(range(16)), max_tokens=1)
        return self

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        return post(self.url + path, **body)

    def stop(self) -> None:
        """End it and all that it has started."""
        self._process.kill()
        self._process.wait()


def post(url: str, **body: Any) -> dict[str, Any]:
    """POST a JSON object to an OpenAI API; the model is "tiny" unless the body says otherwise."""
    data = json.dumps({"model": "tiny"} | body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code}: {error.read().decode(errors='replace')}") from error


StartServer = Callable[..., VllmServer]


@contextmanager
def vllm_servers(python: Path, model: Path, folder: Path) -> Iterator[StartServer]:
    """Give the function that starts a server; `wait_ready` before use. All end with the block."""
    started: list[VllmServer] = []
    numbers = itertools.count()

    def start(*flags: str, **variables: str) -> VllmServer:
        log = folder / f"server-{next(numbers)}.log"
        started.append(VllmServer(python, model, log, flags, variables))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            server.stop()
