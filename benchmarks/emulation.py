"""An emulated worker beside the engine whose measured profile it takes its time from, under the same requests.

    prfaas bench emulation [worker|vllm] [-o json]

The engine is measured as `prfaas profile measure` does, at more lengths. Then both get the same prompts at the same
moments, one right after the other: Poisson arrivals at shares of the rate that the profile says they can serve, of two
mixes of lengths. The simulator's instance gets them, too, with the same times.

A machine that others share is not always equally quick. So lone prompts say before and after the engine's run by how
much it is off its profile, and the emulated worker's times are stretched by that. A run does not count where that is
much or changes, where the machine kept an engine's processes from running, or an emulated step from ending in time. It
is tried again then. An engine that is far off its profile is measured anew.

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
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import typer
from benchmarks import profile_measure
from benchmarks.report import Figure, children_of, family, percentile, run, say
from benchmarks.worker.process import running

from prfaas.capacity.builtin import step_seconds
from prfaas.cli.measured_server import HttpServer
from prfaas.errors import CapacityError, ConfigError
from prfaas.measure.answers import CacheBytes, ServedCard, StreamedAnswer, samples_of
from prfaas.measure.curve import Point, PrefillTimes
from prfaas.measure.fit import FEW_TOKENS, Measurement
from prfaas.measure.session import Session, reach_of
from prfaas.schedule import role_budgets
from prfaas.simulate.events import EventQueue
from prfaas.simulate.instance import InstanceKind, Notices, SimulatedInstance
from prfaas.simulate.request import Arrival, Request
from prfaas.util import Deadline
from prfaas.wire.engine import Role
from prfaas.wire.profile import Profile

LOADS: Final = (0.5, 0.7, 0.9)
LENGTHS: Final = tuple(round(200 * 2 ** (step / 4)) for step in range(21))
"""Up to 6,400 tokens, as near to each other as a measurement tells lengths apart: an engine's chunks make steps."""
VOCABULARY: Final = 256
CACHE: Final = CacheBytes(62_976, 256, "the tiny model")  # no cache moves here
NO_SECONDS: Final = 1e-6
OWN_REPEATS: Final = 12
MOST_WAITED: Final = 0.05
"""Of a run, in which a thread of an engine was ready and had no core."""
MOST_LATE: Final = 0.05
MOST_OFF: Final = 0.05
"""How far lone prompts may be off the profile, and those before a run off those after it."""
LONE_SECONDS: Final = 1.5
TRIES: Final = 3
TRIED_SECONDS: Final = 540.0
"""Nothing is tried after so long."""
REACH_SIMULATED_PERCENT: Final = 5.0

Seconds = Annotated[float, typer.Option(min=1.0, help="Length of each run.")]


class Mix(NamedTuple):
    """Prompts of `shortest` to `longest` tokens, any of them as often, and answers of one length."""

    name: str
    shortest: int
    longest: int
    answer_tokens: int


MIXES: Final = (Mix("short", 200, 800, 16), Mix("long", 1000, 6000, 16))


class Engine(NamedTuple):
    """A running server, and the process that has started all of its processes."""

    url: str
    process: int


class Kind(NamedTuple):
    """An engine to emulate: how it is started, and the worker that schedules as it does, `batch` sequences at once."""

    start: Callable[[], AbstractContextManager[Engine]]
    role: Role
    step_tokens: int
    reach_percent: float
    batch: int = 8

    @property
    def flags(self) -> tuple[str, ...]:
        return "--role", self.role, "--max-running", str(self.batch), "--step-tokens", str(self.step_tokens)

    @property
    def chunk_tokens(self) -> int:
        """The tokens of prompts that a step computes beside decodes."""
        return role_budgets(self.step_tokens)[self.role].prompt_tokens_beside_decodes


class Outcome(NamedTuple):
    """What a client saw of a run."""

    mean_seconds: float
    p90_seconds: float
    tokens_per_second: float


class Pair(NamedTuple):
    """The same requests, served by the engine and by an emulated one; and the simulator's mean."""

    real: Outcome
    emulated: Outcome
    simulated_seconds: float


def capacity(found: Measurement, mix: Mix, batch: int, chunk_tokens: int) -> float:
    """Return the requests a second that keep an instance busy all the time. Every step has a chunk of a prompt then,
    and decodes a token of as many answers as are under way."""
    tokens, steps = (mix.shortest + mix.longest) / 2, mix.answer_tokens - 1
    chunks = max(1.0, tokens / chunk_tokens)
    streams = min(float(batch), max(1.0, steps / chunks))
    lengths, times = range(mix.shortest, mix.longest + 1, 50), found.times.prefill
    prefill = statistics.mean(times.prompt_seconds(length) for length in lengths)
    step = step_seconds(found.decode_steps, round(streams))
    if step is None:
        raise ConfigError(f"no decode step of {streams:.0f} streams was measured: measure on a quiet machine")
    return 1 / (prefill + steps / streams * step)


def drawn(mix: Mix, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return the requests of a run."""
    rng, at, made = random.Random(seed), 0.0, list[Arrival]()
    while (at := at + rng.expovariate(rate)) < seconds:
        made.append(Arrival(at, rng.randint(mix.shortest, mix.longest), mix.answer_tokens))
    return made


def outcome(arrivals: Sequence[Arrival], began: float, answers: Sequence[StreamedAnswer]) -> Outcome:
    """Return what a client saw, whose first request was due at the first arrival behind `began`."""
    waits = [answer.marks[0].seconds - began - one.at_seconds for one, answer in zip(arrivals, answers, strict=True)]
    last = max(answer.marks[-1].seconds for answer in answers)
    tokens = sum(answer.marks[-1].tokens for answer in answers)
    return Outcome(statistics.mean(waits), percentile(waits, 0.9), tokens / (last - began - arrivals[0].at_seconds))


def ask_all(url: str, arrivals: Sequence[Arrival], seed: int) -> Outcome:
    """Send the requests when they are due, whatever was answered by then."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(one.input_tokens)] for one in arrivals]
    with HttpServer(url) as server, ThreadPoolExecutor(len(arrivals)) as pool:
        server.card()
        began, sent = time.perf_counter(), []
        for one, prompt in zip(arrivals, prompts, strict=True):
            time.sleep(max(0.0, began + one.at_seconds - time.perf_counter()))
            sent.append(pool.submit(server.ask, [prompt], one.output_tokens))
        answers = [future.result()[0] for future in sent]
    return outcome(arrivals, began, answers)


def pace(engine: Engine, found: Measurement, mix: Mix) -> float:
    """Return how many times as long as its profile says lone prompts of a mix take, as the median of some."""
    rng, until, paces = random.Random(), Deadline(LONE_SECONDS), list[float]()
    with HttpServer(engine.url) as server:
        server.card()
        while not until.is_over:
            tokens = rng.randint(mix.shortest, mix.longest)
            (answer,) = server.ask([[rng.randrange(VOCABULARY) for _ in range(tokens)]], 1)
            paces.append(answer.first_seconds / found.times.prefill.prompt_seconds(tokens))
    return statistics.median(paces)


def met(engine: Engine, arrivals: Sequence[Arrival], seed: int) -> Outcome | None:
    """Return what a client saw of a run; None if it does not count."""
    before, began = waited_seconds(engine.process), time.monotonic()
    seen = ask_all(engine.url, arrivals, seed)
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


@contextmanager
def worker(*flags: str) -> Iterator[Engine]:
    with running("--max-context", "8192", *flags) as one:
        yield Engine(one.url, one.front_pid)


@contextmanager
def our_worker() -> Iterator[Engine]:
    with worker(*KINDS["worker"].flags) as engine:
        yield engine


@contextmanager
def vllm() -> Iterator[Engine]:
    with profile_measure.vllm() as url:
        yield Engine(url, children_of(os.getpid())[-1])  # which has forked all of vLLM's


KINDS: Final = {
    "worker": Kind(our_worker, "mixed", 1024, 5.0),
    # Its steps have 512 tokens whether something decodes or not, as those of our role prefill.
    "vllm": Kind(vllm, "prefill", 256, 10.0),
}
Chosen = Annotated[str, typer.Argument(help=f"What is emulated: {' or '.join(KINDS)}.")]


def figures(engine: Chosen = "worker", seconds: Seconds = 10.0) -> Iterator[Figure]:
    if engine not in KINDS:
        raise ConfigError(f"no engine is called {engine!r}: give {' or '.join(KINDS)}")
    kind, left_out, until = KINDS[engine], 0, Deadline(TRIED_SECONDS)
    with kind.start() as real, tempfile.TemporaryDirectory() as folder:
        bench = Bench(real, kind, Path(folder) / "profile.json")
        for number, (mix, load) in enumerate((mix, load) for mix in MIXES for load in LOADS):
            name = f"{mix.name} at {load:.0%}"
            pair, tries = None, 0
            while pair is None and tries < TRIES and not until.is_over:
                seed = TRIES * number + tries  # prompts that were met before are cached
                pair, tries = bench.met_by_both(mix, load, seconds, seed), tries + 1
                say(f"{name}: try {tries} of {TRIES} {'does not count' if pair is None else 'counts'}")
            if pair is None:
                left_out += 1
            else:
                yield from compared(name, pair, kind.reach_percent)
    yield Figure(name="pairs of runs that do not count", value=left_out, unit="", reach=0)


class Bench:
    """An engine that runs, and what was measured of it last. The profile to emulate it by is written to `path`."""

    def __init__(self, real: Engine, kind: Kind, path: Path) -> None:
        self._real, self._kind, self._path = real, kind, path
        self._found = measured(real, kind.batch)
        self._own = own_times(path, self._found, kind.flags)
        say(f"the worker's own front takes {', '.join(f'{1000 * one.seconds:.1f}' for one in self._own.points)} ms")

    def met_by_both(self, mix: Mix, load: float, seconds: float, seed: int) -> Pair | None:
        """Send the same requests to the engine, and to an emulated one at the engine's pace; None if that does not
        count."""
        real, kind, before = self._real, self._kind, pace(self._real, self._found, mix)
        if abs(before - 1) > MOST_OFF:
            say(f"{real.url}: alone, it takes {before:.3f} of the profile's time, which is measured anew")
            self._measure_anew()
            return None
        arrivals = drawn(mix, load * capacity(self._found, mix, kind.batch, kind.chunk_tokens), seconds, seed)
        say(f"{mix.name} prompts at {load:.0%}: {len(arrivals)} in {seconds:g} s, to either")
        theirs, after = met(real, arrivals, seed), pace(real, self._found, mix)
        say(f"{real.url}: alone, it takes {before:.3f} of the profile's time before and {after:.3f} after")
        if theirs is None or abs(after / before - 1) > MOST_OFF:
            return None
        bare, stretch = without(self._found, self._own), (before + after) / 2
        self._path.write_bytes(msgspec.json.encode(bare))
        with worker("--emulate", str(self._path), "--stretch", f"{stretch:.4f}", *kind.flags) as emulated:
            ours = met(emulated, arrivals, seed)
        if ours is None:
            return None
        return Pair(theirs, ours, simulated_seconds(bare, self._own, stretch, kind, arrivals))

    def _measure_anew(self) -> None:
        try:
            self._found = measured(self._real, self._kind.batch)
        except CapacityError as error:
            say(f"what was measured before stays: {error}")


def measured(engine: Engine, batch: int) -> Measurement:
    """Return the profile of an engine that has no other requests, with steps of up to `batch` streams. Raises
    CapacityError on a machine that is busy again and again."""
    with HttpServer(engine.url) as server:
        card = server.card()
        for _ in range(TRIES - 1):
            try:
                return measured_once(server, card, batch)
            except CapacityError as error:
                say(str(error))
        return measured_once(server, card, batch)


def measured_once(server: HttpServer, card: ServedCard, batch: int) -> Measurement:
    session = Session(server, reach_of(card, LENGTHS[-1]), random.Random(), say, LENGTHS)
    found = session.measure(card, server.url, CACHE)
    if not any(step.batch >= batch for step in found.decode_steps):
        raise CapacityError(f"no decode step of {batch} streams was measured: other work disturbs this machine")
    return found


def own_times(path: Path, found: Measurement, flags: Sequence[str]) -> PrefillTimes:
    """Return the times to the first token of an emulated worker whose engine takes none. `path` is overwritten."""
    quick = msgspec.structs.replace(found.profile, fixed_seconds=NO_SECONDS, token_seconds=0.0, squared_seconds=0.0)
    lengths = [msgspec.structs.replace(one, seconds=NO_SECONDS) for one in found.lengths]
    idle = msgspec.structs.replace(found, profile=quick, lengths=tuple(lengths), least_prompt_seconds=0.0)
    path.write_bytes(msgspec.json.encode(idle))
    points, rng = list[Point](), random.Random()
    with worker("--emulate", str(path), *flags) as emulated, HttpServer(emulated.url) as server:
        server.card()
        for tokens in (FEW_TOKENS, *(one.tokens for one in found.lengths)):
            prompts = [[rng.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(OWN_REPEATS)]
            points.append(Point(tokens, statistics.median(server.ask([one], 1)[0].first_seconds for one in prompts)))
    return PrefillTimes.through(points, Profile(state_bytes=1, token_bytes=1))


def without(found: Measurement, own: PrefillTimes) -> Measurement:
    """Return a measurement without the time that the worker's own front takes."""

    def rest(tokens: int, seconds: float) -> float:
        return max(NO_SECONDS, seconds - own.prompt_seconds(tokens))

    lengths = [msgspec.structs.replace(one, seconds=rest(one.tokens, one.seconds)) for one in found.lengths]
    least = rest(FEW_TOKENS, found.least_prompt_seconds)
    return msgspec.structs.replace(found, lengths=tuple(lengths), least_prompt_seconds=least)


def simulated_seconds(
    found: Measurement, own: PrefillTimes, stretch: float, kind: Kind, arrivals: Sequence[Arrival]
) -> float:
    """Return the mean time to the first token by the simulator's instance, whose times are `stretch` times as long, and
    by the front, whose are not."""
    events, waits = EventQueue(), list[float]()

    def first(request: Request) -> None:
        engine_seconds = stretch * events.now - request.arrival.at_seconds
        waits.append(engine_seconds + own.prompt_seconds(request.arrival.input_tokens))

    notices = Notices(lambda *_: None, lambda _: None, first, lambda _: None)
    simulated = InstanceKind.of(found.profile, kind.batch, 0.0, kind.step_tokens)._replace(measured=found.times)
    one = SimulatedInstance(events, simulated, kind.role, notices)
    for index, arrival in enumerate(arrivals):
        request, sizes = Request(index, arrival), (arrival.input_tokens, arrival.output_tokens)
        events.at(arrival.at_seconds / stretch, lambda request, sizes=sizes: one.serve(request, 0, *sizes), request)
    while events.step():
        pass
    return statistics.mean(waits)


def compared(name: str, pair: Pair, reach_percent: float) -> Iterator[Figure]:
    """Yield each figure of both, and by how much the emulated one is off; and the simulator beside the latter."""
    real, emulated, simulated = pair
    for what, unit, better, factor, theirs, ours in (
        ("mean TTFT", "ms", "lower", 1000, real.mean_seconds, emulated.mean_seconds),
        ("P90 of TTFT", "ms", "lower", 1000, real.p90_seconds, emulated.p90_seconds),
        ("throughput", "tokens/s", "higher", 1, real.tokens_per_second, emulated.tokens_per_second),
    ):
        rival = {"rival": "the real engine", "rival_value": factor * theirs}
        yield Figure(name=f"{name}: {what}", value=factor * ours, unit=unit, better=better, **rival)
        yield Figure(name=f"{name}: {what} off by", value=100 * abs(ours / theirs - 1), unit="%", reach=reach_percent)
    off = 100 * abs(simulated / emulated.mean_seconds - 1)
    yield Figure(
        name=f"{name}: simulated mean TTFT off the emulated by", value=off, unit="%", reach=REACH_SIMULATED_PERCENT
    )


if __name__ == "__main__":
    run("emulation", __doc__, figures)
