"""`vllm serve` for tests: forked as engines are, each with a log, and warmed up."""

import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prfaas.ports import free_ports
from prfaas.processes import tail

from ..waiting import eventually
from .engines import EngineHost

START_SECONDS = 600.0
FLAGS = (
    *("--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager"),
    *("--max-model-len", "32768", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(64 << 20), "--disable-uvicorn-access-log"),
)
# The last line of a server's log: `engine_host.py` writes it.
ENDED = "vllm serve has ended"
NAMES = (f"server-{number}" for number in itertools.count())


class VllmServer:
    """A running `vllm serve`: the API's process, and the engine's that it has forked."""

    def __init__(self, host: EngineHost, *flags: str, **variables: str):
        self.name, self.port = next(NAMES), free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._host = host
        self.log = host.serve(self.name, ["--port", str(self.port), *FLAGS, *flags], variables)

    def wait_ready(self) -> "VllmServer":
        """Wait until it answers, then have it compute a few tokens, which takes longer the first time."""

        def is_ready() -> bool:
            assert ENDED not in tail(self.log), tail(self.log)
            return answers(f"{self.url}/health")

        eventually(is_ready, lambda: f"{self.name} is ready; {self.log}:\n{tail(self.log)}", START_SECONDS, poll=0.1)
        self.post("/v1/completions", prompt=list(range(16)), max_tokens=1)
        return self

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        return post(self.url + path, **body)

    def stop(self) -> None:
        """End it and all that it has started, now."""
        self._host.kill(self)


def answers(url: str) -> bool:
    """Whether a GET has status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def transferred_tokens(server: VllmServer) -> float:
    """The tokens of which a server has got the cache from another one."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(r"^vllm:external_prefix_cache_hits_total\{[^}]*\} (\S+)", text, re.MULTILINE)
    assert found
    return float(found[1])


def post(url: str, **body: Any) -> dict[str, Any]:
    """POST a JSON object to an OpenAI API; the model is "tiny" unless the body says otherwise."""
    data = json.dumps({"model": "tiny"} | body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code}: {error.read().decode(errors='replace')}") from error


StartServer = Callable[..., VllmServer]


@contextmanager
def vllm_servers(host: EngineHost) -> Iterator[StartServer]:
    """Give the function that starts a server by flags and variables; `wait_ready` before use. They end as the block."""
    started: list[VllmServer] = []

    def start(*flags: str, **variables: str) -> VllmServer:
        started.append(VllmServer(host, *flags, **variables))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            server.stop()
