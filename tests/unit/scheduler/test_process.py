"""The process: a start before its gateway, a clean end, metrics, and how little memory it takes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest
from tests.waiting import PATIENCE_SECONDS, eventually_async

from prfaas.memory import SCHEDULER
from prfaas.ports import free_ports

pytestmark = pytest.mark.system


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "prfaas_scheduler", *flags]


def run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*flags), capture_output=True, text=True, timeout=60, check=False)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_SERVICE")}


def flags_for(gateway, port: int) -> list[str]:
    flags = {"control-socket": gateway.path, "policy": "kimi", "namespace": "prfaas", "identity": "pod-a"}
    named = [f"--{name}={value}" for name, value in flags.items()]
    return [*named, "--host=127.0.0.1", f"--metrics-port={port}"]


def test_a_port_that_is_taken_is_one_sentence(gateway):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        shown = run(*flags_for(gateway, taken.getsockname()[1]))
    assert shown.returncode == 1
    assert "metrics cannot listen on 127.0.0.1" in shown.stderr
    assert "Traceback" not in shown.stderr


def resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status") as lines:  # noqa: PTH123
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


async def test_it_waits_for_its_gateway_pushes_and_ends(gateway):
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *command(*flags_for(gateway, port)), stderr=asyncio.subprocess.PIPE, env=environment()
    )
    try:
        await until_metrics(port)
        async with gateway.listening():
            for _ in range(2):  # by the second push the first step's metrics are out
                gateway.pushed.clear()
                await eventually_async(gateway.pushed.is_set, "the scheduler pushes a threshold")
            exposed = await until_metrics(port)
            resident = resident_mib(process.pid)
            process.send_signal(signal.SIGTERM)
            _, logged = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, logged.decode()
    assert gateway.updates[0].tokens == 1024
    assert "prfaas_scheduler_threshold_tokens 1024.0" in exposed
    assert 'prfaas_scheduler_link_alive{member_cluster="eu"} 1.0' in exposed
    assert resident <= SCHEDULER.rest_mib, f"{resident:.0f} MiB resident"
    text = logged.decode()
    assert text.count("control socket failed") == 1, text
    assert "control socket works again" in text
    assert "Traceback" not in text


async def until_metrics(port: int) -> str:
    async with aiohttp.ClientSession() as session:

        async def metrics() -> str:
            try:
                async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
                    return await response.text()
            except aiohttp.ClientError:
                return ""

        return await eventually_async(metrics, "the scheduler shows its metrics", poll=0.1)
