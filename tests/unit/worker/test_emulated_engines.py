"""An engine that is none of ours is emulated by what was measured of it: requests have their tokens when it gives them.

It is written here as such engines are: prompts in order of arrival, computed from the step on that admits them, in
steps of at most so many tokens, and slower beside decodes than alone.
"""

import random
import statistics
from collections.abc import Sequence
from functools import cache

import pytest

from prfaas.measure.answers import CacheBytes, ServedCard, StreamedAnswer, TokenMark
from prfaas.measure.fit import Measurement
from prfaas.measure.session import Reach, Session
from prfaas.measure.steps import StepTimes
from prfaas.wire.engine import Generate, Started
from prfaas_worker.emulated.profile import EmulatedProfile

from .emulated_bench import GREEDY, Emulated, SlowClock, prompt_of

SLOTS, STEP_TOKENS = 8, 512
BEGUN_SECONDS = 0.4
"""By then four streams have a dozen tokens each."""
REQUEST_SECONDS = 0.24
"""That a request takes of an engine that is busy all the time."""
CACHE = CacheBytes(1 << 27, 1024, "a test")
"""A state of more pages than any prompt has: it is not kept, so no prompt is cut for it."""


class Job:
    """A request: how many of its tokens are left, and when those of its answer came."""

    def __init__(self, at: float, prompt: int, answer: int):
        self.at, self.prompt, self.left, self.answer = at, prompt, prompt, answer
        self.came = list[float]()


def step_seconds(decodes: int, chunks: Sequence[int]) -> float:
    """A step reads the weights once. Each chunk has a cost of its own, which beside decodes is more, as for a token."""
    tokens, seconds = sum(chunks), 0.01
    seconds += 0.012 + 0.001 * decodes if decodes else 0.0
    dearer = 1.4 if decodes else 1.0
    return seconds + dearer * (0.002 * len(chunks) + 2e-4 * tokens)


def serve(jobs: Sequence[Job]) -> None:
    """Serve jobs, which are in order of arrival."""
    now, held, coming = 0.0, list[Job](), list(jobs)
    while coming or held:
        if not held:
            now = max(now, coming[0].at)
        while coming and coming[0].at <= now and len(held) < SLOTS:
            held.append(coming.pop(0))
        decodes = [one for one in held if not one.left]
        left, chunks = STEP_TOKENS - len(decodes), dict[Job, int]()
        for one in held:
            if one.left and left:
                chunks[one] = min(one.left, left)
                left -= chunks[one]
        now += step_seconds(len(decodes), list(chunks.values()))
        for one, tokens in chunks.items():
            one.left -= tokens
        for one in held:
            if one in decodes or (one in chunks and not one.left):
                one.came.append(now)
        held = [one for one in held if len(one.came) < one.answer]


class Server:
    """The engine as a client measures it."""

    def __init__(self):
        self.now = 0.0

    def answers(self, jobs: list[Job]) -> list[StreamedAnswer]:
        serve(sorted(jobs, key=lambda job: job.at))
        made = [
            StreamedAnswer(
                self.now + job.at,
                tuple(TokenMark(self.now + at, count) for count, at in enumerate(job.came, 1)),
                job.prompt,
                0,
            )
            for job in jobs
        ]
        self.now = max(one.marks[-1].seconds for one in made) + 1
        return made

    def ask(self, prompts: Sequence[list[int]], answer_tokens: int) -> list[StreamedAnswer]:
        return self.answers([Job(0.0, len(prompt), answer_tokens) for prompt in prompts])

    def ask_beside(
        self, streams: Sequence[list[int]], answer_tokens: int, prompt: list[int]
    ) -> tuple[list[StreamedAnswer], StreamedAnswer]:
        jobs = [Job(0.0, len(one), answer_tokens) for one in streams]
        *beside, lone = self.answers([*jobs, Job(BEGUN_SECONDS, len(prompt), 1)])
        return beside, lone

    def others(self) -> int:
        return 0


LENGTHS = tuple(round(50 * 2 ** (step / 3)) for step in range(15))


@cache
def measured() -> Measurement:
    session = Session(Server(), Reach(2048, LENGTHS[-1]), random.Random(1), lambda _: None, LENGTHS)
    return session.measure(ServedCard(id="m", owned_by="another"), "here", CACHE)


def drawn(load: float, seed: int, count: int = 40) -> list[Job]:
    rng, at, made = random.Random(seed), 0.0, list[Job]()
    for _ in range(count):
        at += rng.expovariate(load / REQUEST_SECONDS)
        made.append(Job(at, rng.randint(50, 1200), 16))
    return made


def firsts_of(jobs: Sequence[Job], times: StepTimes, *, in_order: bool = True) -> list[float]:
    """Return the times to the first token by an emulated engine. Its every wake-up is a third of a millisecond late."""
    profile = EmulatedProfile("p", "m", times, (1, 1), in_order)
    clock = SlowClock(late_seconds=0.0003)
    engine = Emulated(clock, STEP_TOKENS, SLOTS, pages=3000, max_waiting=1000, profile=profile)
    began, coming = clock(), list(enumerate(jobs))
    while True:
        while coming and began + coming[0][1].at <= clock():
            handle, job = coming.pop(0)
            engine.engine.inbox.put(Generate(handle, "r", prompt_of(job.prompt, handle), 1, job.answer, GREEDY, -1))
        if not engine.engine.step(wait=False):
            if not coming:
                break
            clock.seconds = began + coming[0][1].at
    firsts = {one.handle: at - began - jobs[one.handle].at for at, one in engine.sent if isinstance(one, Started)}
    return [firsts[handle] for handle in range(len(jobs))]


def off(load: float, times: StepTimes, *, in_order: bool = True) -> tuple[float, float]:
    """Return by how much the emulated mean and P90 are off the engine's."""
    found = list[tuple[float, float]]()
    for seed in range(3):
        jobs = drawn(load, seed)
        serve(jobs)
        theirs = [job.came[0] - job.at for job in jobs]
        for waits in (firsts_of(jobs, times, in_order=in_order), theirs):
            found.append((statistics.mean(waits), sorted(waits)[int(0.9 * len(waits))]))
    ours, real = found[::2], found[1::2]
    mean, p90 = (sum(one[part] for one in ours) / sum(one[part] for one in real) - 1 for part in (0, 1))
    return abs(mean), abs(p90)


@pytest.mark.parametrize("load", [0.5, 0.7, 0.9])
def test_first_tokens_come_when_the_engine_gives_them(load: float):
    assert measured().in_order
    mean, p90 = off(load, measured().times)
    assert mean < 0.05
    assert p90 < 0.05


@pytest.mark.parametrize("load", [0.7, 0.9])
def test_neither_our_order_nor_the_parts_of_a_step_apart_would_do(load: float):
    """The negative controls."""
    assert max(off(load, measured().times, in_order=False)) > 0.05
    assert max(off(load, measured().times._replace(beside_decodes=None))) > 0.05
