"""What is measured: our gateway with one leg and with two, and vllm-router where it is installed."""

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from prfaas.ports import free_ports
from prfaas.util import Deadline
from prfaas.wire.routes import Instance, LinkWatermarks, RoutingTable, Threshold, encode

READY_SECONDS = 60.0
RIVAL = "vllm-router"


class Router(NamedTuple):
    """A running router: its process, and where it listens."""

    pid: int
    port: int
    other_port: int = 0
    """Of a worker: the same one by another address."""


@contextmanager
def started(command: list[str], **options) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def backend(*tls_dir: Path) -> Iterator[Router]:
    """An instant worker, inside TLS where there is a directory of credentials."""
    file = Path(__file__).with_name("backend.py")
    with started([sys.executable, str(file), *map(str, tls_dir)], stdout=subprocess.PIPE) as process:
        yield Router(process.pid, *map(int, process.stdout.readline().split()))


@contextmanager
def gateway(folder: Path, worker: Router, *, two_legs: bool) -> Iterator[Router]:
    """Our gateway before one worker: by our own protocol, or by vLLM's two legs, which that worker both serves."""
    engine, name = ("vllm-nixl", "two") if two_legs else ("prfaas", "one")
    with serving(folder, name, routing_table(worker.port, engine, two_legs=two_legs)) as router:
        yield router


@contextmanager
def serving(
    folder: Path, name: str, table: RoutingTable, *flags: str, module: str = "prfaas_gateway"
) -> Iterator[Router]:
    """Our gateway before the instances of a table; its files in the folder are called by the name."""
    routes, log = folder / f"{name}.json.gz", folder / f"{name}.log"
    routes.write_bytes(encode(table))
    command = [sys.executable, "-m", module, "--port", "0", "--admin-port", "0", "--routes-file", str(routes)]
    # To a file: it logs a line a request, and nobody would empty a pipe.
    with log.open("w") as output, started([*command, "--drain-seconds", "0", *flags], stderr=output) as process:
        while (found := re.search(r"listening on \S+:(\d+)", log.read_text())) is None:
            time.sleep(0.02)
        yield Router(process.pid, int(found.group(1)))


@contextmanager
def rival(folder: Path, worker: Router, *, two_legs: bool) -> Iterator[Router | None]:
    """vllm-router before the same worker; None where it is not installed (`pip install vllm-router==0.1.17`)."""
    program = shutil.which(RIVAL)
    if program is None:
        yield None
        return
    decode, prefill = (f"http://127.0.0.1:{port}" for port in (worker.port, worker.other_port))
    port, metrics_port = free_ports(2)
    command = [program, "--port", str(port), "--prometheus-port", str(metrics_port), "--log-level", "error"]
    if two_legs:
        command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", prefill, "--decode", decode]
    else:
        command += ["--worker-urls", decode, "--policy", "round_robin"]
    with (folder / "rival.log").open("w") as output, started(command, stdout=output, stderr=output) as process:
        deadline = Deadline(READY_SECONDS)
        while not listens(port):
            if process.poll() is not None or deadline.is_over:
                raise SystemExit(f"{RIVAL} did not start: {(folder / 'rival.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield Router(process.pid, port)


def routing_table(port: int, engine: str, *, two_legs: bool, scheme: str = "http") -> RoutingTable:
    roles = ("decode", "prefill") if two_legs else ("decode",)
    url = f"{scheme}://127.0.0.1:{port}"
    return RoutingTable(
        policy="bench",
        namespace="bench",
        generation=1,
        model="m",
        on_offload_failure="PrefillLocally",
        threshold=Threshold(mode="Fixed", tokens=100_000, min_tokens=1, max_tokens=100_000),
        watermarks=LinkWatermarks(high_percent=80, low_percent=50),
        short_interval_seconds=1,
        instances=tuple(Instance(name=r, pool=r, cluster="hub", role=r, url=url, engine=engine) for r in roles),
    )


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
