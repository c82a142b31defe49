"""A real worker as a benchmark drives it: started, asked over HTTP by plain blocking clients, and stopped."""

import http.client
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import children_of

from prfaas.names import WORKER_DATA_PORT
from prfaas.util import Deadline
from prfaas.wire.prefill import new_transfer

MODEL = "m"
PORT = 8000
START_SECONDS = 120
REQUEST_SECONDS = 120
VOCABULARY = 256  # bytes: special tokens would end prompts
# Loopback addresses of this process alone, so that a benchmark disturbs no other one's ports.
_HOSTS = (f"127.{60 + os.getpid() % 40}.{os.getpid() // 40 % 250}.{n}" for n in itertools.count(2))


class Answer(NamedTuple):
    """One completion: seconds from sending it to its last byte, the tokens it has, and the worker's own figures."""

    seconds: float
    tokens: int
    headers: dict[str, str]

    def figure(self, header: str) -> float:
        """A figure that the worker put into a header."""
        return float(self.headers[header])


LAST_CORE = max(os.sched_getaffinity(0))


def beside_the_engine(pid: int) -> None:
    """Leave all cores but one to the engine: a load that takes its cores says nothing about being disturbed."""
    if LAST_CORE:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {LAST_CORE})


class Worker:
    """A running prfaas-worker, with the model that ships along unless flags name another."""

    def __init__(self, *flags: str):
        self.host = next_host()
        command = [sys.executable, "-m", "prfaas_worker", "--model-source", "builtin:kimi-linear-tiny"]
        command += ["--model-name", MODEL, "--host", self.host, "--threads", "1", *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})

    @property
    def url(self) -> str:
        return f"http://{self.host}:{PORT}"

    @property
    def front_pid(self) -> int:
        """The front's process."""
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        """The engine's process, the front's only child."""
        (engine,) = children_of(self._process.pid)
        return engine

    def wait_ready(self) -> None:
        """Wait until it takes requests."""
        deadline = Deadline(START_SECONDS)
        while not deadline.is_over:
            if self._process.poll() is not None:
                raise RuntimeError("the worker ended before it was ready")
            try:
                if self.get("/readyz")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"the worker was not ready within {START_SECONDS} s")

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        connection = http.client.HTTPConnection(self.host, PORT, timeout=REQUEST_SECONDS)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body

    def metric(self, name: str) -> float:
        """A metric without labels."""
        lines = self.get("/metrics")[1].splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def complete(self, prompt: list[int], max_tokens: int, source: str = "") -> Answer:
        """Have a prompt continued, greedily and to its full length, in one answer. The instance at the address `source`
        prefills it at the same time, where there is one."""
        if not source:
            return _post(self.host, prompt, max_tokens, {})
        transfer, place = new_transfer(), {"host": source, "port": WORKER_DATA_PORT}
        with ThreadPoolExecutor(1) as pool:
            filling = pool.submit(_post, source, prompt, 1, {"role": "source", **transfer})
            answer = _post(self.host, prompt, max_tokens, {"role": "destination", **transfer, **place})
            filling.result()
        return answer

    def complete_together(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, int]:
        """Have several prompts continued at once; seconds until all are, and tokens of all."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            began = time.perf_counter()
            answers = list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))
            return time.perf_counter() - began, sum(answer.tokens for answer in answers)

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


def _post(host: str, prompt: list[int], max_tokens: int, leg: dict[str, Any]) -> Answer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | ({"kv_transfer_params": {"prfaas": leg}} if leg else {}))
    connection = http.client.HTTPConnection(host, PORT, timeout=REQUEST_SECONDS)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    seconds = time.perf_counter() - began
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"a completion failed: {found}")
    return Answer(seconds, found["usage"]["completion_tokens"], dict(answer.getheaders()))


@contextmanager
def running(*flags: str) -> Iterator[Worker]:
    """A worker that is ready, for the block."""
    worker = Worker(*flags)
    try:
        worker.wait_ready()
        yield worker
    finally:
        worker.stop()


def next_host() -> str:
    """An address that nobody else here listens on."""
    return next(_HOSTS)


_RANDOM = random.Random(7)


def new_prompt(tokens: int) -> list[int]:
    """A prompt that no prefix cache has seen."""
    return [_RANDOM.randrange(VOCABULARY) for _ in range(tokens)]
