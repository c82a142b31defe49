"""`prfaas serve` beside a real service inside TLS: long prompts are prefilled there, short ones here, and all of them
here once the service is dead. A child process that dies ends it, with the reason.
"""

import asyncio
import datetime
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from prfaas import identity
from prfaas.processes import ends_with_us
from prfaas.rights import BUYER

from ...waiting import eventually_async
from ..tls.mounts import Mount
from .conftest import START_SECONDS, Client, Worker
from .prompts import text_of

pytestmark = pytest.mark.system

NOW = datetime.datetime.now(datetime.UTC)
WAIT_SECONDS = 60
COMMAND = [sys.executable, "-m", "prfaas.cli.main", "serve"]


class Hybrid(NamedTuple):
    """The command as it runs, and the service it buys from."""

    process: subprocess.Popen[bytes]
    service: Worker
    output: Path

    @property
    def url(self) -> str:
        """What it says that it serves at; empty before it does."""
        found = re.search(r"serving tiny at (http://\S+)/v1", self.output.read_text())
        return found[1] if found else ""

    async def ready(self) -> "Hybrid":
        """Wait for the address."""

        def is_there() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return bool(self.url)

        await eventually_async(is_there, self.output.read_text, START_SECONDS)
        return self


def start(output: Path, *flags: str) -> subprocess.Popen[bytes]:
    command, environment = [*ends_with_us(), *COMMAND, *flags], os.environ | {"OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


@pytest.fixture
async def hybrid(tmp_path: Path, launch) -> Iterator[Hybrid]:
    """A service of cluster eu, and the command on a buyer's machine."""
    authority, until = identity.make_authority("test", identity.valid_for(NOW, 30)), identity.valid_for(NOW, 2)
    acme, eu = (
        Mount(tmp_path / name).put(identity.issue(authority, name, until), authority).path
        for name in (f"{BUYER}acme", "eu")
    )
    service = launch("service", "--role", "prefill", "--cluster", "eu", "--tls-dir", str(eu))
    flags = ["--model", "builtin:kimi-linear-tiny", "--model-name", "tiny", "--prefill-service", service.url]
    flags += ["--service-cluster", "eu", "--threshold-tokens", "500", "--tls-dir", str(acme), "--port", "0"]
    output = tmp_path / "serve.log"
    process = start(output, *flags, "--", "--threads", "1")
    try:
        await service.ready()
        yield await Hybrid(process, service, output).ready()
    finally:
        process.terminate()
        try:
            process.wait(WAIT_SECONDS)
        finally:
            process.kill()


async def ask(client: Client, hybrid: Hybrid, length: int, seed: int) -> aiohttp.ClientResponse:
    body = {"model": "tiny", "prompt": text_of(length, seed=seed), "max_tokens": 4, "temperature": 0}
    async with client.session.post(f"{hybrid.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        return answer


async def ask_until(client: Client, hybrid: Hybrid, decision: str) -> aiohttp.ClientResponse:
    """Ask with long prompts, each a new one, until it is decided so: the gateway hears of the service each second."""
    seeds = itertools.count(1)

    async def answered() -> aiohttp.ClientResponse | None:
        answer = await ask(client, hybrid, 6000, seed=next(seeds))
        is_so = (answer.headers["x-prfaas-decision"], answer.headers["x-prfaas-outcome"]) == (decision, "ok")
        return answer if is_so else None

    answer = await eventually_async(answered, hybrid.output.read_text, poll=0.1)
    assert answer is not None
    return answer


async def test_long_prompts_are_bought_while_the_service_lives_and_all_are_served(client, hybrid):
    bought = await ask_until(client, hybrid, "offload")
    assert int(bought.headers["x-prfaas-kv-bytes"]) > 6000
    assert bought.headers["x-prfaas-prefill-cluster"] == "eu"
    short = await ask(client, hybrid, 40, seed=0)
    assert (short.headers["x-prfaas-decision"], short.headers["x-prfaas-kv-bytes"]) == ("local", "0")

    hybrid.service.stop()
    next_one = await ask(client, hybrid, 6000, seed=-1)  # whatever the gateway knows of it by now
    assert (next_one.headers["x-prfaas-prefill-cluster"], next_one.headers["x-prfaas-kv-bytes"]) == ("hub", "0")
    await ask_until(client, hybrid, "local")
    # The gateway decides by the update before the command has shown it.
    shown = lambda: f"{hybrid.service.url} is not used" in hybrid.output.read_text()  # noqa: E731
    await eventually_async(shown, "the service that ended is reported as unused")

    children = Path(f"/proc/{hybrid.process.pid}/task/{hybrid.process.pid}/children").read_text().split()
    assert len(children) == 2
    os.killpg(hybrid.process.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
    assert await asyncio.to_thread(hybrid.process.wait, WAIT_SECONDS) == 0, hybrid.output.read_text()
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_a_worker_that_cannot_start_ends_it_with_the_reason(tmp_path: Path):
    flags = ["--model", str(tmp_path / "nothing"), "--prefill-service", "http://127.0.0.1:9", "--port", "0"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # its logs stay for a reader
    ended = subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=START_SECONDS, check=False, env=environment
    )
    assert ended.returncode == 1, ended.stderr
    assert "prfaas: the worker ended with status" in ended.stderr
    assert list(tmp_path.glob("prfaas-serve-*/worker.log"))
    assert str(tmp_path / "nothing") in ended.stderr.split("the end of")[1]
    assert "Traceback" not in ended.stderr.split("prfaas: the worker")[0]
