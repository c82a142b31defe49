"""Emulated workers, many at once on this machine: their memory, and how well they keep the time of their profile.

    prfaas bench emulated [--instances 24] [--stretch 20] [--rounds 3]

All start at the same moment. In each round every one gets a prompt, one shortly after the other, and answers it. How
late their steps end is asked of themselves, by the bound of the histogram that 99 % do not exceed.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import aiohttp
import typer
from benchmarks.report import Figure, children_of, run
from benchmarks.worker_memory import memory_mib
from tests.unit.worker.conftest import Worker, launched

from prfaas.measure.answers import samples_of

PROFILE: Final = "qwen3.5-397b-fp8-8xh200"
FLAGS: Final = ("--emulate", PROFILE, "--cache-scale", "64", "--max-context", "32768")
REACH_MIB: Final = 4096
REACH_LATE: Final = 0.05
PROMPT: Final = 4000
ANSWER: Final = 20
PAUSE_SECONDS: Final = 0.2  # between two prompts: the load is light

Instances: Final = Annotated[int, typer.Option(min=1, help="Emulated workers.")]
Stretch: Final = Annotated[float, typer.Option(min=0.1, help="Factor of their times.")]
Rounds: Final = Annotated[int, typer.Option(min=1, help="Prompts of each.")]


class Seen(NamedTuple):
    """What was measured: the start, each process's memory and libraries, and the metrics of each worker."""

    start_seconds: float
    pss_mib: list[float]
    with_torch: int
    metrics: list[str]


def figures(instances: Instances = 24, stretch: Stretch = 20.0, rounds: Rounds = 3) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder)) as launch:
        began = time.monotonic()
        workers = [launch(f"emulated-{number}", *FLAGS, "--stretch", f"{stretch:g}") for number in range(instances)]
        seen = asyncio.run(measured(workers, rounds, began))
    name = f"{instances} emulated workers"
    yield Figure(name=f"{name}: until all are ready", value=seen.start_seconds, unit="s")
    yield Figure(name=f"{name}: proportional memory", value=sum(seen.pss_mib), unit="MiB", reach=REACH_MIB)
    yield Figure(name=f"{name}: processes with torch", value=seen.with_torch, unit="", reach=0)
    for step in ("prefill", "decode"):
        late = late_share(seen.metrics, step)
        yield Figure(name=f"P99 of how late a {step} step ends", value=late, unit="of its time", reach=REACH_LATE)
    busy, idle = (total(seen.metrics, f"prfaas_emulation_{state}_seconds_total") for state in ("busy", "idle"))
    yield Figure(name="busy share of the machine's cores", value=busy / (busy + idle), unit="")
    too_slow = total(seen.metrics, "prfaas_emulation_too_slow")
    yield Figure(name="workers that say that they were too slow", value=too_slow, unit="", reach=0)


async def measured(workers: list[Worker], rounds: int, began: float) -> Seen:
    await asyncio.gather(*(worker.ready() for worker in workers))
    start_seconds = time.monotonic() - began
    async with aiohttp.ClientSession() as session:
        for number in range(rounds):
            answers = [answered(session, worker, number, PAUSE_SECONDS * place) for place, worker in enumerate(workers)]
            await asyncio.gather(*answers)
        metrics = [await text_of(session, worker) for worker in workers]
    processes = [process for worker in workers for process in family(worker.process.pid)]
    with_torch = sum("torch" in Path(f"/proc/{process}/maps").read_text() for process in processes)
    return Seen(start_seconds, [memory_mib(process)[1] for process in processes], with_torch, metrics)


async def answered(session: aiohttp.ClientSession, worker: Worker, number: int, pause_seconds: float) -> None:
    """Have a worker answer a new prompt."""
    await asyncio.sleep(pause_seconds)
    body = {"model": "tiny", "prompt": f"{number} {'word ' * (PROMPT // 5)}", "max_tokens": ANSWER}
    async with session.post(f"{worker.url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.read()


async def text_of(session: aiohttp.ClientSession, worker: Worker) -> str:
    async with session.get(f"{worker.url}/metrics") as answer:
        return await answer.text()


def family(process: int) -> list[int]:
    """Return a process and all that it has started: front, engine and mover."""
    return [process, *(one for child in children_of(process) for one in family(child))]


def total(metrics: list[str], name: str) -> float:
    """Return the sum of a metric's samples in all texts."""
    return sum(value for text in metrics for found, _, value in samples_of(text) if found == name)


def late_share(metrics: list[str], step: str) -> float:
    """Return the smallest bound that 99 % of the steps of this kind do not exceed."""
    name, counts = "prfaas_emulation_late_ratio", dict[float, float]()
    for text in metrics:
        for found, labels, value in samples_of(text):
            if found == f"{name}_bucket" and f'step="{step}"' in labels:
                bound = float(labels.partition('le="')[2].partition('"')[0])
                counts[bound] = counts.get(bound, 0.0) + value
    return min(bound for bound, count in counts.items() if count >= 0.99 * max(counts.values()))


if __name__ == "__main__":
    run("emulated", __doc__, figures)
