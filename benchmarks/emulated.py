"""24 emulated workers under the load of the paper's case study: their memory, and how well they keep their time.

    prfaas bench emulated [--stretch 4] [--load 0.7] [--minutes 4]

Twice the instances of examples/paper.yaml, in the roles of its best plan: 8 prefill long prompts as the other cluster
would, 6 short ones, and 10 decode. Prompts come at a share of the rate that the plan carries, with its lengths. Each is
prefilled at one worker and decoded at another, whose answer streams. All times are stretched, the arrivals' too, and
caches have a part of their bytes. How late steps end is asked of the workers: the bound that 99 % do not exceed. Where
one of them says that its machine was too slow for it, there is no figure at all.
"""

import asyncio
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import aiohttp
import msgspec
import typer
from benchmarks.report import Figure, cpu_seconds, family, run, say
from benchmarks.worker_memory import memory_mib
from tests.unit.worker.conftest import Worker, launched

from prfaas.capacity.builtin import DecodeStep
from prfaas.capacity.optimum import best
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.profile import points_of
from prfaas.cli.plan import load as read_plan
from prfaas.errors import CapacityError, PeerError
from prfaas.measure.answers import samples_of
from prfaas.measure.emulated import late_p99
from prfaas.measure.fit import LengthTimes, Measurement
from prfaas.names import WORKER_DATA_PORT
from prfaas.wire import headers
from prfaas.wire.prefill import new_transfer
from prfaas.wire.profile import Profile

PLAN: Final = Path(__file__).parents[1] / "examples" / "paper.yaml"
COPIES: Final = 2
CACHE_SCALE: Final = 256
CACHE_MIB: Final = 64
LONGEST: Final = 131_072
VOCABULARY: Final = 256
REACH_MIB: Final = 4096
REACH_CPU: Final = 0.75
REACH_LATE: Final = 0.05
END_BYTES: Final = 64

Stretch: Final = Annotated[float, typer.Option(min=0.1, help="Factor of all times.")]
Load: Final = Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the rate that the plan carries.")]
Minutes: Final = Annotated[float, typer.Option(min=0.1, help="How long prompts come.")]


class Fleet(NamedTuple):
    """The workers by what they do."""

    offload: list[Worker]
    local: list[Worker]
    decode: list[Worker]


class Request(NamedTuple):
    """A prompt that comes at this moment, and who serves it."""

    at_seconds: float
    tokens: int
    source: Worker
    destination: Worker


class Seen(NamedTuple):
    """What was measured: requests without a whole answer, and those without a cache; the share of the machine's cores
    that workers and client took; memory and libraries of processes, and metrics of workers."""

    failed: int
    alone: int
    cpu_share: float
    pss_mib: list[float]
    with_torch: int
    metrics: list[str]


def figures(stretch: Stretch = 4.0, load: Load = 0.7, minutes: Minutes = 4.0) -> Iterator[Figure]:
    plan = read_plan(PLAN)
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder)) as launch:
        began = time.monotonic()
        fleet = started(plan, Path(folder), launch, stretch)
        workers = [*fleet.offload, *fleet.local, *fleet.decode]
        asyncio.run(all_ready(workers))
        start_seconds = time.monotonic() - began
        requests = drawn(plan, fleet, load / stretch, 60 * minutes, random.Random(1))
        say(f"{len(requests)} prompts in {minutes:g} minutes, to {len(workers)} workers")
        seen = asyncio.run(measured(workers, requests, round(plan.system.output_tokens)))
    yield from judged(seen, start_seconds)


def started(plan: PlanFile, folder: Path, launch: Any, stretch: float) -> Fleet:
    """Start the workers of a plan, each with the profile of its pool."""
    (offload,), (hub,) = plan.system.offload, plan.system.hub
    prefilling = round(sum(best(plan.system, plan.workload).split.values()))
    common = ("--stretch", f"{stretch:g}", "--cache-scale", str(CACHE_SCALE), "--cache-mib", str(CACHE_MIB))
    common += ("--max-running", str(hub.max_batch), "--max-context", str(LONGEST + round(plan.system.output_tokens)))

    def group(name: str, role: str, profile: Profile, count: int) -> list[Worker]:
        path = folder / f"{name}.json"
        path.write_bytes(msgspec.json.encode(as_measured(profile, hub.step_seconds, hub.max_batch)))
        flags = ("--emulate", str(path), "--role", role, *common)
        return [launch(f"{name}-{number}", *flags) for number in range(COPIES * count)]

    return Fleet(
        group("offload", "prefill", offload.profile, offload.instances),
        group("local", "prefill", hub.profile, prefilling),
        group("decode", "decode", hub.profile, hub.instances - prefilling),
    )


def as_measured(profile: Profile, step_seconds: float, batch: int) -> Measurement:
    """Return a plan's figures in the form of `prfaas profile measure`. Its step takes as long for any batch."""
    points = [(point.tokens, point.seconds) for point in points_of(profile)]
    return Measurement(
        model="paper",
        source=str(PLAN),
        profile=msgspec.structs.replace(profile, max_tokens=LONGEST),
        cache_source="the plan",
        lengths=tuple(
            LengthTimes(
                tokens=tokens,
                repeats=1,
                seconds=seconds,
                near=1,
                quickest_seconds=seconds,
                slowest_seconds=seconds,
                fitted_seconds=seconds,
            )
            for tokens, seconds in points
        ),
        decode_context_tokens=0,
        decode_steps=tuple(DecodeStep(batch=one, seconds=step_seconds) for one in (1, batch)),
    )


def drawn(plan: PlanFile, fleet: Fleet, load: float, seconds: float, rng: random.Random) -> list[Request]:
    """Return the requests of a run: each goes where the plan's threshold says, to the next worker there."""
    found, at, made = best(plan.system, plan.workload), 0.0, list[Request]()
    rate = COPIES * load * found.lambda_max
    offload, local, decode = (itertools.cycle(workers) for workers in fleet)
    while (at := at + rng.expovariate(rate)) < seconds:
        (tokens,) = plan.workload.sample(rng, 1)
        source = next(offload if tokens > found.threshold_tokens else local)
        made.append(Request(at, min(tokens, LONGEST), source, next(decode)))
    return made


async def all_ready(workers: Sequence[Worker]) -> None:
    await asyncio.gather(*(worker.ready() for worker in workers))


async def measured(workers: list[Worker], requests: Sequence[Request], answer_tokens: int) -> Seen:
    processes = [process for worker in workers for process in family(worker.process.pid)]  # front, engine and mover
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(total=None)) as session:
        cpu_before, began = cpu_of(processes), time.monotonic()
        ended = await asyncio.gather(*(answered(session, request, answer_tokens) for request in requests))
        cores_seconds = (time.monotonic() - began) * (os.cpu_count() or 1)
        cpu_share = (cpu_of(processes) - cpu_before) / cores_seconds
        metrics = [await text_of(session, worker) for worker in workers]
    with_torch = sum("torch" in Path(f"/proc/{process}/maps").read_text() for process in processes)
    pss_mib = [memory_mib(process)[1] for process in processes]
    return Seen(ended.count(None), ended.count(0), cpu_share, pss_mib, with_torch, metrics)


def cpu_of(processes: Sequence[int]) -> float:
    """Return the CPU time of workers and of this client until now."""
    return time.process_time() + sum(cpu_seconds(process) for process in processes)


async def answered(session: aiohttp.ClientSession, request: Request, answer_tokens: int) -> int | None:
    """Send both legs of a request when it is due; return the bytes of its cache, and None without a whole answer."""
    await asyncio.sleep(request.at_seconds)
    transfer, rng = new_transfer(), random.Random(request.at_seconds)
    prompt = msgspec.Raw(msgspec.json.encode([rng.randrange(VOCABULARY) for _ in range(request.tokens)]))
    body = {"model": "tiny", "prompt": prompt, "ignore_eos": True}
    giving = body | {"max_tokens": 1, "kv_transfer_params": {"prfaas": {"role": "source", **transfer}}}
    leg = {"role": "destination", **transfer, "host": request.source.host, "port": WORKER_DATA_PORT}
    taking = body | {"max_tokens": answer_tokens, "stream": True, "kv_transfer_params": {"prfaas": leg}}
    filling = asyncio.ensure_future(sent(session, request.source, giving))
    answer, end = await sent(session, request.destination, taking)
    await filling
    return int(answer.get(headers.KV_BYTES, 0)) if end.rstrip().endswith(b"[DONE]") else None


async def sent(session: aiohttp.ClientSession, worker: Worker, body: dict[str, Any]) -> tuple[Mapping[str, str], bytes]:
    """Send a leg and read all of its answer; return the answer's headers and end, or nothing of what breaks off."""
    form, last = {"content-type": "application/json"}, b""
    with suppress(aiohttp.ClientError):
        async with session.post(f"{worker.url}/v1/completions", data=msgspec.json.encode(body), headers=form) as answer:
            async for piece in answer.content.iter_any():
                last = (last + piece)[-END_BYTES:]
            return answer.headers, last
    return {}, b""


async def text_of(session: aiohttp.ClientSession, worker: Worker) -> str:
    async with session.get(f"{worker.url}/metrics") as answer:
        return await answer.text()


def judged(seen: Seen, start_seconds: float) -> Iterator[Figure]:
    """Yield all figures of a run. Raises CapacityError before the first where a worker was too slow."""
    if slow := sum(map(says_too_slow, seen.metrics)):
        raise CapacityError(
            f"no figure counts: the machine was too slow for {slow} of {len(seen.metrics)} workers "
            "(prfaas_emulation_too_slow). End what else runs on it, or give a larger --stretch"
        )
    name = f"{len(seen.metrics)} emulated workers"
    yield Figure(name=f"{name}: until all are ready", value=start_seconds, unit="s")
    yield Figure(name="requests without a whole answer", value=seen.failed, unit="", reach=0)
    yield Figure(name="prompts whose cache did not come", value=seen.alone, unit="", reach=0)
    yield Figure(name=f"{name}: proportional memory", value=sum(seen.pss_mib), unit="MiB", reach=REACH_MIB)
    yield Figure(name=f"{name}: processes with torch", value=seen.with_torch, unit="", reach=0)
    for step in ("prefill", "decode"):
        late = late_share(seen.metrics, step)
        yield Figure(name=f"P99 of how late a {step} step ends", value=late, unit="of its time", reach=REACH_LATE)
    busy, idle = (total(seen.metrics, f"prfaas_emulation_{state}_seconds_total") for state in ("busy", "idle"))
    yield Figure(
        name="cores of the machine that workers and client take", value=seen.cpu_share, unit="", reach=REACH_CPU
    )
    yield Figure(name="cores that anything takes, other programs too", value=busy / (busy + idle), unit="")


def says_too_slow(metrics: str) -> bool:
    """Return whether an engine is emulated and says that its machine was too slow for it."""
    return any(value > 0 for name, _, value in samples_of(metrics) if name == "prfaas_emulation_too_slow")


def total(metrics: list[str], name: str) -> float:
    """Return the sum of a metric's samples in all texts."""
    return sum(value for text in metrics for found, _, value in samples_of(text) if found == name)


def late_share(metrics: list[str], step: str) -> float:
    """Return the least lateness that 99 % of the steps of this kind do not exceed. Raises PeerError without a step."""
    name, counts = "prfaas_emulation_late_ratio", dict[float, float]()
    for text in metrics:
        for found, labels, value in samples_of(text):
            if found == f"{name}_bucket" and f'step="{step}"' in labels:
                bound = float(labels.partition('le="')[2].partition('"')[0])
                counts[bound] = counts.get(bound, 0.0) + value
    if (late := late_p99(counts)) is None:
        raise PeerError(f"no worker counts a {step} step")
    return late


if __name__ == "__main__":
    run("emulated", __doc__, figures)
