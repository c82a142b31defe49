"""The requests of a run, and what a client sees of them: Poisson arrivals of a mix of lengths at a share of capacity.

A reference is one small request again and again, alone: as long as it takes, so quick is the machine at that moment.
"""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.emulated import says_too_slow
from benchmarks.emulation.engines import BATCH, ROLE, Engine, Kind
from benchmarks.report import family, percentile, say

from prfaas.capacity.builtin import step_seconds
from prfaas.cli.measured_server import HttpServer
from prfaas.errors import ConfigError
from prfaas.measure.answers import StreamedAnswer
from prfaas.measure.fit import Measurement
from prfaas.simulate.request import Arrival
from prfaas.util import Deadline

VOCABULARY: Final = 256
MOST_WAITED: Final = 0.05
"""Of a run, in which the thread that computes was ready and had no core."""
REFERENCE_TOKENS: Final = 128
REFERENCE_ANSWER: Final = 8
REFERENCE_SECONDS: Final = 2.0


class Mix(NamedTuple):
    """Prompts of `shortest` to `longest` tokens, any of them as often, and answers of one length."""

    name: str
    shortest: int
    longest: int
    answer_tokens: int


MIXES: Final = (Mix("short", 50, 250, 16), Mix("long", 300, 1200, 16))


class Outcome(NamedTuple):
    """What a client saw of a run."""

    mean_seconds: float
    p90_seconds: float
    tokens_per_second: float


class Waits(NamedTuple):
    """Times to the first token by the simulator."""

    mean_seconds: float
    p90_seconds: float


class Task(NamedTuple):
    """How long a thread had a core, and how long it was ready and had none."""

    run_seconds: float
    waited_seconds: float


def capacity(found: Measurement, mix: Mix, kind: Kind) -> float:
    """Return the requests a second that keep an instance busy all the time. Every step has a chunk of a prompt then,
    and decodes a token of as many answers as are under way."""
    tokens, steps = (mix.shortest + mix.longest) / 2, mix.answer_tokens - 1
    chunks = max(1.0, tokens / kind.budgets[ROLE].prompt_tokens_beside_decodes)
    streams = min(float(BATCH), max(1.0, steps / chunks))
    times = found.times.beside_decodes or found.times.prefill
    lengths = range(mix.shortest, mix.longest + 1, 10)
    prompt = statistics.mean(times.prompt_seconds(length) for length in lengths)
    step = step_seconds(found.decode_steps, round(streams))
    if step is None:
        raise ConfigError(f"no decode step of {streams:.0f} streams was measured: measure on a quiet machine")
    return 1 / (prompt + steps / streams * step)


def drawn(mix: Mix, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return the requests of a run, one at least."""
    rng, at, made = random.Random(seed), 0.0, list[Arrival]()
    while (at := at + rng.expovariate(rate)) < seconds or not made:
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
    prompts = [new_prompt(rng, one.input_tokens) for one in arrivals]
    with HttpServer(url) as server, ThreadPoolExecutor(len(arrivals)) as pool:
        server.card()
        began, sent = time.perf_counter(), []
        for one, prompt in zip(arrivals, prompts, strict=True):
            time.sleep(max(0.0, began + one.at_seconds - time.perf_counter()))
            sent.append(pool.submit(server.ask, [prompt], one.output_tokens))
        answers = [future.result()[0] for future in sent]
    return outcome(arrivals, began, answers)


def new_prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


def reference_seconds(url: str) -> float:
    """Return how long the reference takes, as the median of some seconds."""
    rng, until, found = random.Random(), Deadline(REFERENCE_SECONDS), list[float]()
    with HttpServer(url) as server:
        server.card()
        while not until.is_over:
            (answer,) = server.ask([new_prompt(rng, REFERENCE_TOKENS)], REFERENCE_ANSWER)
            found.append(answer.marks[-1].seconds - answer.began_seconds)
    return statistics.median(found)


def met(engine: Engine, arrivals: Sequence[Arrival], seed: int) -> Outcome | None:
    """Return what a client saw of a run; None if the machine kept the engine from its work."""
    before, began = tasks(engine.process), time.monotonic()
    seen = ask_all(engine.url, arrivals, seed)
    seconds, after = time.monotonic() - began, tasks(engine.process)
    waited = waited_of_busiest(before, after) / seconds
    with HttpServer(engine.url) as server:
        too_slow = says_too_slow(server.get("/metrics").decode(errors="replace"))
    late = "; its emulated time was not kept" if too_slow else ""
    say(f"{engine.url}: its busiest thread had no core for {waited:.1%} of the time{late}")
    return seen if waited <= MOST_WAITED and not too_slow else None


def tasks(process: int) -> dict[str, Task]:
    """Return the threads of a process, and of those that it has started."""
    found = dict[str, Task]()
    for task in [task for one in family(process) for task in Path(f"/proc/{one}/task").iterdir()]:
        with suppress(OSError):  # it has ended
            run, waited, _ = (int(word) / 1e9 for word in (task / "schedstat").read_text().split())
            found[task.name] = Task(run, waited)
    return found


def waited_of_busiest(before: Mapping[str, Task], after: Mapping[str, Task]) -> float:
    """Return how long that thread had no core which had one for longest. Others do not compute: in a server with many
    short answers, one of them waits for the core of the others again and again, which changes little."""
    none = Task(0.0, 0.0)
    busiest = max(after, key=lambda name: after[name].run_seconds - before.get(name, none).run_seconds)
    return after[busiest].waited_seconds - before.get(busiest, none).waited_seconds
