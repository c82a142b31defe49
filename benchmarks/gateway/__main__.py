"""What the gateway costs a request, beside the backend driven directly and vllm-router in the same run.

    prfaas bench gateway

Processes of their own: an instant backend, the gateway with a routes file, vllm-router where it is on PATH, and this
one, which drives them. CPU time comes from /proc/PID/stat, so that other work on the machine disturbs the figures
little; latencies it does disturb. Prompts of 1 KB and 108 KB, by one leg and by two; streams of 105 events a second.
`--soak N` sends N more requests and says whether memory grew.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from benchmarks.gateway.load import drive, pace, stream
from benchmarks.gateway.routers import RIVAL, Router, backend, gateway, rival
from benchmarks.report import Figure, cpu_seconds, peak_mib, percentile, run

CONCURRENCY = 16
SIZES = {"1 KB": (1_000, 6_000), "108 KB": (108_000, 2_000)}  # prompt bytes, requests
CPU_REACH = {("1 KB", False): 0.6, ("108 KB", False): 0.8, ("1 KB", True): 1.0, ("108 KB", True): 1.2}
RSS_REACH_MIB = 100
STREAMS = 200
DIRECT = "the backend driven directly"


def prompt(size_bytes: int, **more) -> bytes:
    text = ("The quick brown fox jumps over the lazy dog. " * (size_bytes // 45 + 1))[:size_bytes]
    return json.dumps({"model": "m", **more, "messages": [{"role": "user", "content": text}]}).encode()


def measure(router: Router, body: bytes, requests: int, key: str = "") -> tuple[float, float]:
    """Drive one target; return CPU milliseconds a request of its process, and requests a second."""
    uvloop.run(drive(router.port, body, requests // 10, CONCURRENCY, key))  # warm up
    cpu, wall = cpu_seconds(router.pid), time.perf_counter()
    uvloop.run(drive(router.port, body, requests, CONCURRENCY, key))
    cpu, wall = cpu_seconds(router.pid) - cpu, time.perf_counter() - wall
    return cpu / requests * 1e3, requests / wall


def cost(folder: Path, worker: Router, *, two_legs: bool) -> Iterator[Figure]:
    """CPU and throughput at 16 connections, beside vllm-router."""
    legs = "two legs" if two_legs else "one leg"
    with gateway(folder, worker, two_legs=two_legs) as ours, rival(folder, worker, two_legs=two_legs) as theirs:
        for label, (size_bytes, requests) in SIZES.items():
            body = prompt(size_bytes)
            cpu_ms, per_second = measure(ours, body, requests)
            against = measure(theirs, body, requests) if theirs else (None, None)
            beside = RIVAL if theirs else None
            yield Figure(
                name=f"CPU a request, {legs}, {label} prompt",
                value=cpu_ms,
                unit="ms",
                reach=CPU_REACH[label, two_legs],
                rival=beside,
                rival_value=against[0],
            )
            yield Figure(
                name=f"throughput, {legs}, {label} prompt",
                value=per_second,
                unit="requests/s",
                better="higher",
                rival=beside,
                rival_value=against[1],
            )


def added_latency(ours: Router, worker: Router) -> Iterator[Figure]:
    """What the gateway adds: the median with one client, and the tail at half of what it can do."""
    body = prompt(1_000)
    through, direct = (uvloop.run(drive(one.port, body, 2_000, 1)) for one in (ours, worker))
    added_ms = (statistics.median(through) - statistics.median(direct)) * 1e3
    yield Figure(name="added latency, median, one client", value=added_ms, unit="ms", reach=1.0)
    _, per_second = measure(ours, body, 3_000)
    through, direct = (uvloop.run(pace(one.port, body, per_second / 2, 6_000)) for one in (ours, worker))
    added_ms = (percentile(through, 0.99) - percentile(direct, 0.99)) * 1e3
    yield Figure(name="added latency, 99th percentile, half load", value=added_ms, unit="ms", reach=5.0)


def added_delay(ours: Router, worker: Router) -> Iterator[Figure]:
    """What the gateway adds to the events of 200 streams, a little over 20,000 a second together."""
    body = prompt(1_000, stream=True)
    cpu = cpu_seconds(ours.pid)
    through, rate = uvloop.run(stream(ours.port, body, STREAMS))
    cpu = cpu_seconds(ours.pid) - cpu
    direct, most = uvloop.run(stream(worker.port, body, STREAMS))
    for name, share, reach in (("median", 0.5, 3.0), ("99th percentile", 0.99, 15.0)):
        added_ms = (percentile(through, share) - percentile(direct, share)) * 1e3
        what = f"added delay of an event, {name}, {STREAMS} streams"
        yield Figure(name=what, value=added_ms, unit="ms", reach=reach)
    name = "events relayed, while all streams flow"
    yield Figure(name=name, value=rate, unit="events/s", better="higher", reach=20_000, rival=DIRECT, rival_value=most)
    yield Figure(name="CPU an event", value=cpu / len(through) * 1e6, unit="us")


def soak(ours: Router, requests: int) -> Iterator[Figure]:
    """Whether memory grows with what was served."""
    body = prompt(1_000)
    uvloop.run(drive(ours.port, body, max(CONCURRENCY, requests // 10), CONCURRENCY))
    before = peak_mib(ours.pid)
    uvloop.run(drive(ours.port, body, requests, CONCURRENCY))
    name = f"peak memory after {requests:,} requests over that after a tenth"
    yield Figure(name=name, value=peak_mib(ours.pid) / before, unit="x", reach=1.02)


def figures(
    soak_requests: Annotated[int, typer.Option("--soak", help="Requests of an endurance run.")] = 0,
) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as directory, backend() as worker:
        folder = Path(directory)
        for two_legs in (False, True):
            yield from cost(folder, worker, two_legs=two_legs)
        with gateway(folder, worker, two_legs=False) as ours:
            yield from added_latency(ours, worker)
            yield from added_delay(ours, worker)
            if soak_requests:
                yield from soak(ours, soak_requests)
            yield Figure(name="gateway peak memory", value=peak_mib(ours.pid), unit="MiB", reach=RSS_REACH_MIB)


if __name__ == "__main__":
    run("gateway", __doc__, figures)
