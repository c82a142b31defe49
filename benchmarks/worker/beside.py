"""A decode step alone, beside full HTTP load on the front, and beside a transfer that arrives at 1 Gbit/s.

The step is the engine's own count of it. Alone and beside alternate, round by round, so that other work on the machine
meets both alike; the figures are medians over the rounds. Front, load and senders share one core and leave the others
to the engine: being disturbed is what is measured, not being robbed.
"""

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import cpu_seconds, waited_seconds
from benchmarks.worker.process import Worker, beside_the_engine, new_prompt, next_host

ROUNDS = 6
STEP_TOKENS = 250
LINK_MBPS = 1000
TRANSFER_TOKENS = 2048
IN_FLIGHT = 2
RECEIVED = "prfaas_transfer_received_bytes_total"


class Step(NamedTuple):
    """A decode step of a single stream, the engine's CPU time for it, and how long its thread waited for a core."""

    seconds: float
    cpu_seconds: float
    waited_seconds: float


class Beside(NamedTuple):
    """The step in each round, alone and beside the load, and how much load there was."""

    alone: list[Step]
    beside: list[Step]
    load: float

    @property
    def median_alone(self) -> float:
        return statistics.median(step.seconds for step in self.alone)

    @property
    def median_beside(self) -> float:
        return statistics.median(step.seconds for step in self.beside)

    @property
    def ratio(self) -> float:
        """Median over the rounds: in each of them both met the same machine."""
        return statistics.median(two.seconds / one.seconds for one, two in self._rounds)

    @property
    def cpu_ratio(self) -> float:
        return statistics.median(two.cpu_seconds / one.cpu_seconds for one, two in self._rounds)

    @property
    def net_ratio(self) -> float:
        """The ratio without the time in which the step's thread waited for a core: what others on the machine take."""
        return statistics.median(
            (two.seconds - two.waited_seconds) / (one.seconds - one.waited_seconds) for one, two in self._rounds
        )

    @property
    def _rounds(self) -> list[tuple[Step, Step]]:
        return list(zip(self.alone, self.beside, strict=True))


def measure_step(worker: Worker) -> Step:
    """Have a long answer drawn."""
    before = [read() for read in _counters(worker)]
    tokens = worker.complete(new_prompt(16), STEP_TOKENS).tokens
    cpu, waited, seconds, steps = (read() - one for read, one in zip(_counters(worker), before, strict=True))
    return Step(seconds / steps, cpu / tokens, waited / steps)


def _counters(worker: Worker) -> tuple[Callable[[], float], ...]:
    return (
        lambda: cpu_seconds(worker.engine_pid),
        lambda: waited_seconds(worker.engine_pid),
        lambda: worker.metric("prfaas_decode_seconds_total"),
        lambda: worker.metric("prfaas_decode_steps_total"),
    )


def http_load(worker: Worker) -> Beside:
    """Beside as many HTTP requests as the front can refuse; `load` is requests a second."""
    return _alternate(worker, lambda: _loading(worker))


def transfer(worker: Worker, model: Path) -> Beside:
    """Beside caches of this model that arrive one after the other; `load` is Mbit/s."""
    with _peer(model) as host:
        return _alternate(worker, lambda: _fetching(worker, host))


def _alternate(worker: Worker, load: Callable[[], AbstractContextManager["Load"]]) -> Beside:
    alone, beside, rates = [], [], []
    beside_the_engine(worker.front_pid)
    measure_step(worker)  # warms up
    for _ in range(ROUNDS):
        alone.append(measure_step(worker))
        with load() as measured:
            beside.append(measure_step(worker))
        rates.append(measured.rate)
    return Beside(alone, beside, statistics.median(rates))


class Load:
    """How much load there was; `rate` is set once it has ended."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.rate = 0.0

    def end(self, amount: float) -> None:
        self.rate = amount / (time.perf_counter() - self._began)


@contextmanager
def _loading(worker: Worker) -> Iterator[Load]:
    process, load = _child("load", worker.host), Load()
    try:
        yield load
    finally:
        load.end(float(process.communicate()[0]))


@contextmanager
def _peer(model: Path) -> Iterator[str]:
    host = next_host()
    process = _child("peer", str(model), host, str(TRANSFER_TOKENS), str(LINK_MBPS / IN_FLIGHT))
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the sending instance did not start")
        yield host
    finally:
        process.communicate()


@contextmanager
def _fetching(worker: Worker, source: str) -> Iterator[Load]:
    ended = threading.Event()

    def fetch() -> None:
        prompt = new_prompt(TRANSFER_TOKENS)
        while not ended.is_set():
            prompt[:64] = new_prompt(64)  # nothing of it is in the prefix cache
            worker.complete(prompt, 1, source)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        load, before = Load(), worker.metric(RECEIVED)
        fetches = [pool.submit(fetch) for _ in range(IN_FLIGHT)]
        try:
            yield load
        finally:
            load.end((worker.metric(RECEIVED) - before) * 8e-6)
            ended.set()
        for fetched in fetches:
            fetched.result()


def _child(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"benchmarks.worker.{module}", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    beside_the_engine(process.pid)
    return process
