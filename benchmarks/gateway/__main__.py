"""What the gateway costs a request, beside the backend driven directly in the same run.

    prfaas bench gateway

Three processes: an instant backend, the gateway with a routes file, and this one, which drives 16 connections. CPU time
comes from /proc/PID/stat, so that other work on the machine disturbs the figures little. Prompts of 1 KB and 100 KB.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from benchmarks.gateway.load import drive
from benchmarks.report import Figure, cpu_seconds, peak_mib, run

from prfaas.wire.routes import Instance, LinkWatermarks, RoutingTable, Threshold, encode

CONCURRENCY = 16
SIZES = {"1 KB": (1_000, 8_000), "100 KB": (100_000, 3_000)}  # prompt bytes, requests
RSS_REACH_MIB = 100
MEASURED = {
    "cpu_ms": ("gateway CPU a request", "ms", "lower"),
    "per_second": ("throughput", "requests/s", "higher"),
    "p50_ms": (f"median latency at c={CONCURRENCY}", "ms", "lower"),
}


@contextmanager
def started(command: list[str], **options) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


def routing_table(port: int) -> RoutingTable:
    return RoutingTable(
        policy="bench",
        namespace="bench",
        generation=1,
        model="m",
        on_offload_failure="PrefillLocally",
        threshold=Threshold(mode="Fixed", tokens=10_000, min_tokens=1, max_tokens=10_000),
        watermarks=LinkWatermarks(high_percent=80, low_percent=50),
        short_interval_seconds=1,
        instances=(Instance(name="d0", pool="d", cluster="hub", role="decode", url=f"http://127.0.0.1:{port}"),),
    )


def prompt(size_bytes: int) -> bytes:
    text = ("The quick brown fox jumps over the lazy dog. " * (size_bytes // 45 + 1))[:size_bytes]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


def measure(port: int, pid: int, size_bytes: int, requests: int) -> dict[str, float]:
    """Drive one target; return CPU milliseconds a request of process `pid`, requests a second, and median latency."""
    body = prompt(size_bytes)
    uvloop.run(drive(port, body, requests // 10, CONCURRENCY))  # warm up
    cpu, wall = cpu_seconds(pid), time.perf_counter()
    latencies = uvloop.run(drive(port, body, requests, CONCURRENCY))
    cpu, wall = cpu_seconds(pid) - cpu, time.perf_counter() - wall
    return {"cpu_ms": cpu / requests * 1e3, "per_second": requests / wall, "p50_ms": statistics.median(latencies) * 1e3}


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        routes = Path(directory) / "routes.json.gz"
        backend_file = Path(__file__).with_name("backend.py")
        with started([sys.executable, str(backend_file), "0"], stdout=subprocess.PIPE) as backend:
            backend_port = int(backend.stdout.readline())
            routes.write_bytes(encode(routing_table(backend_port)))
            command = [sys.executable, "-m", "prfaas_gateway", "--port", "0", "--routes-file", str(routes)]
            with started([*command, "--drain-seconds", "0"], stderr=subprocess.PIPE) as gateway:
                port = int(re.search(r"listening on \S+:(\d+)", gateway.stderr.readline()).group(1))
                yield from compare(gateway.pid, port, backend.pid, backend_port)


def compare(gateway_pid: int, port: int, backend_pid: int, backend_port: int) -> Iterator[Figure]:
    for label, (size_bytes, requests) in SIZES.items():
        direct = measure(backend_port, backend_pid, size_bytes, requests)
        through = measure(port, gateway_pid, size_bytes, requests)
        for key, (name, unit, better) in MEASURED.items():
            yield Figure(
                name=f"{name}, {label} prompt",
                value=through[key],
                unit=unit,
                better=better,
                rival="the backend driven directly",
                rival_value=direct[key],
            )
    yield Figure(name="gateway peak memory", value=peak_mib(gateway_pid), unit="MiB", reach=RSS_REACH_MIB)


if __name__ == "__main__":
    run("gateway", __doc__, figures)
