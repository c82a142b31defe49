"""An emulated worker beside the engine whose measured profile it takes its time from, under the same requests.

    prfaas bench emulation [worker|vllm] [-o json]

The engine is measured as `prfaas profile measure` does. Then both get the same prompts at the same moments, one after
the other: Poisson arrivals at shares of the rate that the profile says they can serve, of two mixes of lengths. A run
does not count where the machine kept an engine's processes from running, or an emulated step from ending in time, or
where the engine alone no longer has the times of its profile.

What a client measures holds HTTP and the front, some milliseconds. The emulated worker has its own, which would count
twice. So the client measures that too, of an emulated worker whose prefills take no time, and takes it off the profile.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import typer
from benchmarks.report import Figure, children_of, percentile, run, say
from benchmarks.worker.process import running
from tests.vllm.engines import EngineHost
from tests.vllm.servers import vllm_servers

from prfaas.capacity.builtin import step_seconds
from prfaas.capacity.profile import Sample, prefill_seconds
from prfaas.cli.measured_server import HttpServer
from prfaas.errors import ConfigError
from prfaas.measure.answers import CacheBytes, StreamedAnswer, samples_of
from prfaas.measure.fit import Measurement, fitted
from prfaas.measure.session import Session, reach_of
from prfaas.wire.profile import Profile
from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import ensure_vllm
from prfaas_worker.assets import model_directory

LOADS: Final = (0.5, 0.7, 0.9)
LONGEST: Final = 6144
VOCABULARY: Final = 256
CACHE: Final = CacheBytes(62_976, 256, "the tiny model")  # no cache moves here
NO_SECONDS: Final = 1e-6
OWN_REPEATS: Final = 12
MOST_WAITED: Final = 0.05
"""Of a run, in which a thread of an engine was ready and had no core."""
MOST_LATE: Final = 0.05
MOST_OFF: Final = 0.05
LONE_REPEATS: Final = 7

Seconds = Annotated[float, typer.Option(min=1.0, help="Length of each run.")]


class Mix(NamedTuple):
    """Prompts of `shortest` to `longest` tokens, any of them as often, and answers of one length."""

    name: str
    shortest: int
    longest: int
    answer_tokens: int


MIXES: Final = (Mix("short", 200, 800, 16), Mix("long", 1000, 6000, 16))


class Arrival(NamedTuple):
    """A request that is sent at this moment."""

    at_seconds: float
    prompt_tokens: int


class Engine(NamedTuple):
    """A running server, and the process that has started all of its processes."""

    url: str
    process: int


class Kind(NamedTuple):
    """An engine to emulate: how it is started, and the flags of a worker that schedules as it does. It runs `batch`
    sequences at once, and a step computes `chunk_tokens` of prompts beside decodes."""

    start: Callable[[], AbstractContextManager[Engine]]
    flags: tuple[str, ...]
    batch: int
    chunk_tokens: int
    reach_percent: float


class Outcome(NamedTuple):
    """What a client saw of a run."""

    mean_seconds: float
    p90_seconds: float
    tokens_per_second: float


def capacity(found: Measurement, mix: Mix, batch: int, chunk_tokens: int) -> float:
    """Return the requests a second that keep an instance busy all the time. Every step has a chunk of a prompt then,
    and decodes a token of as many answers as are under way."""
    tokens, steps = (mix.shortest + mix.longest) / 2, mix.answer_tokens - 1
    chunks = max(1.0, tokens / chunk_tokens)
    streams = min(float(batch), max(1.0, steps / chunks))
    lengths = range(mix.shortest, mix.longest + 1, 50)
    prefill = statistics.mean(prefill_seconds(found.profile, length) for length in lengths)
    step = step_seconds(found.decode_steps, round(streams))
    if step is None:
        raise ConfigError(f"no decode step of {streams:.0f} streams was measured: measure on a quiet machine")
    return 1 / (prefill + steps / streams * step)


def drawn(mix: Mix, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return the requests of a run."""
    rng, at, made = random.Random(seed), 0.0, list[Arrival]()
    while (at := at + rng.expovariate(rate)) < seconds:
        made.append(Arrival(at, rng.randint(mix.shortest, mix.longest)))
    return made


def outcome(arrivals: Sequence[Arrival], began: float, answers: Sequence[StreamedAnswer]) -> Outcome:
    """Return what a client saw, whose first request was due at the first arrival behind `began`."""
    waits = [answer.marks[0].seconds - began - one.at_seconds for one, answer in zip(arrivals, answers, strict=True)]
    last = max(answer.marks[-1].seconds for answer in answers)
    tokens = sum(answer.marks[-1].tokens for answer in answers)
    return Outcome(statistics.mean(waits), percentile(waits, 0.9), tokens / (last - began - arrivals[0].at_seconds))


def ask_all(url: str, arrivals: Sequence[Arrival], answer_tokens: int, seed: int) -> Outcome:
    """Send the requests when they are due, whatever was answered by then."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(one.prompt_tokens)] for one in arrivals]
    with HttpServer(url) as server, ThreadPoolExecutor(len(arrivals)) as pool:
        server.card()
        began, sent = time.perf_counter(), []
        for one, prompt in zip(arrivals, prompts, strict=True):
            time.sleep(max(0.0, began + one.at_seconds - time.perf_counter()))
            sent.append(pool.submit(server.ask, [prompt], answer_tokens))
        answers = [future.result()[0] for future in sent]
    return outcome(arrivals, began, answers)


def is_as_measured(engine: Engine, found: Measurement, mix: Mix) -> bool:
    """Return whether a lone prompt takes as long as its profile says: a busy machine may be slower by now."""
    rng, tokens = random.Random(), (mix.shortest + mix.longest) // 2
    with HttpServer(engine.url) as server:
        server.card()
        prompts = [[rng.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(LONE_REPEATS)]
        seconds = statistics.median(server.ask([prompt], 1)[0].first_seconds for prompt in prompts)
    off = seconds / prefill_seconds(found.profile, tokens) - 1
    say(f"{engine.url}: alone, {tokens:,} tokens take {1000 * seconds:.1f} ms, {off:+.1%} of the profile's time")
    return abs(off) <= MOST_OFF


def met(engine: Engine, arrivals: Sequence[Arrival], mix: Mix, seed: int) -> Outcome | None:
    """Return what a client saw of a run; None if it does not count."""
    before, began = waited_seconds(engine.process), time.monotonic()
    seen = ask_all(engine.url, arrivals, mix.answer_tokens, seed)
    seconds, after = time.monotonic() - began, waited_seconds(engine.process)
    waited = max(after[task] - before.get(task, 0.0) for task in after) / seconds
    with HttpServer(engine.url) as server:
        late = mean_late(server.get("/metrics").decode(errors="replace"))
    say(f"{engine.url}: a thread had no core for {waited:.1%} of the time; steps ended {late:.1%} of theirs late")
    return seen if waited <= MOST_WAITED and late <= MOST_LATE else None


def mean_late(metrics: str) -> float:
    """Return how late emulated steps ended, as a share of their time; 0 where they are computed. It is the mean: steps
    of a tiny model take two milliseconds, of which no machine's timer keeps 99 % to 5 %."""
    found = dict[str, float]()
    for name, _, value in samples_of(metrics):
        found[name] = found.get(name, 0.0) + value
    late = "prfaas_emulation_late_ratio"
    return found.get(f"{late}_sum", 0.0) / max(1.0, found.get(f"{late}_count", 0.0))


def waited_seconds(process: int) -> dict[str, float]:
    """Return how long each thread of a process, and of those that it has started, was ready and had no core."""
    tasks = [task for one in family(process) for task in Path(f"/proc/{one}/task").iterdir()]
    return {task.name: int((task / "schedstat").read_text().split()[1]) / 1e9 for task in tasks}


def family(process: int) -> list[int]:
    return [process, *(one for child in children_of(process) for one in family(child))]


@contextmanager
def worker(*flags: str) -> Iterator[Engine]:
    with running("--max-context", "8192", *(flags or WORKER_FLAGS)) as one:
        yield Engine(f"http://{one.host}:8000", one.front_pid)


@contextmanager
def vllm() -> Iterator[Engine]:
    with progress() as report:
        python = ensure_vllm(report)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        host = EngineHost(python, Path(folder), model_directory("builtin:qwen3-next-tiny"))
        stack.callback(host.close)
        server = stack.enter_context(vllm_servers(host))().wait_ready()
        yield Engine(server.url, children_of(os.getpid())[-1])  # which has forked all of vLLM's


WORKER_FLAGS: Final = ("--max-running", "8", "--step-tokens", "1024")
KINDS: Final = {
    "worker": Kind(worker, WORKER_FLAGS, 8, 512, 5.0),
    # Its steps have 512 tokens whether something decodes or not, as those of our role prefill.
    "vllm": Kind(vllm, ("--role", "prefill", "--max-running", "8", "--step-tokens", "256"), 8, 512, 10.0),
}
Chosen = Annotated[str, typer.Argument(help=f"What is emulated: {' or '.join(KINDS)}.")]


def figures(engine: Chosen = "worker", seconds: Seconds = 15.0) -> Iterator[Figure]:
    if engine not in KINDS:
        raise ConfigError(f"no engine is called {engine!r}: give {' or '.join(KINDS)}")
    kind = KINDS[engine]
    with kind.start() as real, tempfile.TemporaryDirectory() as folder:
        found, path = measured(real, engine), Path(folder) / "profile.json"
        own = own_curve(path, found, kind.flags)
        say(f"of {found.profile} the worker's own front has {own}")
        path.write_bytes(msgspec.json.encode(without(found, own)))
        invalid = 0
        for number, (mix, load) in enumerate((mix, load) for mix in MIXES for load in LOADS):
            arrivals = drawn(mix, load * capacity(found, mix, kind.batch, kind.chunk_tokens), seconds, number)
            say(f"{mix.name} prompts at {load:.0%}: {len(arrivals)} in {seconds:g} s, to either")
            theirs = met(real, arrivals, mix, number) if is_as_measured(real, found, mix) else None
            ours = None
            if theirs is not None:
                with worker("--emulate", str(path), *kind.flags) as emulated:
                    ours = met(emulated, arrivals, mix, number)
            if theirs is None or ours is None:
                say("this pair does not count")
                invalid += 1
                continue
            yield from compared(f"{mix.name} at {load:.0%}", theirs, ours, kind.reach_percent)
    yield Figure(name="pairs of runs that do not count", value=invalid, unit="", reach=0)


def measured(engine: Engine, name: str) -> Measurement:
    """Return the profile of an engine that has no other requests."""
    with HttpServer(engine.url) as server:
        card = server.card()
        return Session(server, reach_of(card, LONGEST), random.Random(), say).measure(card.id, name, CACHE)


def own_curve(path: Path, found: Measurement, flags: tuple[str, ...]) -> Profile:
    """Return the time to the first token of an emulated worker whose engine takes none. `path` is overwritten."""
    quick = msgspec.structs.replace(found.profile, fixed_seconds=NO_SECONDS, token_seconds=0.0, squared_seconds=0.0)
    idle = msgspec.structs.replace(found, profile=quick, least_prompt_seconds=0.0)
    path.write_bytes(msgspec.json.encode(idle))
    samples, rng = list[Sample](), random.Random()
    with worker("--emulate", str(path), *flags) as emulated, HttpServer(emulated.url) as server:
        server.card()
        for tokens in [one.tokens for one in found.lengths] * OWN_REPEATS:
            (answer,) = server.ask([[rng.randrange(VOCABULARY) for _ in range(tokens)]], 1)
            samples.append(Sample(tokens, answer.first_seconds))
    return fitted(samples, CACHE)


def without(found: Measurement, own: Profile) -> Measurement:
    """Return a measurement without the time that the worker's own front takes."""
    names = ("fixed_seconds", "token_seconds", "squared_seconds")
    rest = {name: max(0.0, getattr(found.profile, name) - getattr(own, name)) for name in names}
    profile = msgspec.structs.replace(found.profile, **rest)
    least = max(0.0, found.least_prompt_seconds - own.fixed_seconds)
    return msgspec.structs.replace(found, profile=profile, least_prompt_seconds=least)


def compared(name: str, real: Outcome, emulated: Outcome, reach_percent: float) -> Iterator[Figure]:
    """Yield each figure of both, and by how much the emulated one is off."""
    for what, unit, better, factor, theirs, ours in (
        ("mean TTFT", "ms", "lower", 1000, real.mean_seconds, emulated.mean_seconds),
        ("P90 of TTFT", "ms", "lower", 1000, real.p90_seconds, emulated.p90_seconds),
        ("throughput", "tokens/s", "higher", 1, real.tokens_per_second, emulated.tokens_per_second),
    ):
        rival = {"rival": "the real engine", "rival_value": factor * theirs}
        yield Figure(name=f"{name}: {what}", value=factor * ours, unit=unit, better=better, **rival)
        yield Figure(name=f"{name}: {what} off by", value=100 * abs(ours / theirs - 1), unit="%", reach=reach_percent)


if __name__ == "__main__":
    run("emulation", __doc__, figures)
