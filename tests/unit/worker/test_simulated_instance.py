"""The simulated instance is the worker: the same requests end when the worker's own step loop ends them, whose runner
takes the emulated time of each step."""

import random
from typing import NamedTuple

import pytest

from prfaas.capacity.profile import prefill_seconds
from prfaas.measure.curve import Point, PrefillTimes
from prfaas.measure.steps import StepTimes
from prfaas.schedule import role_budgets
from prfaas.simulate.events import EventQueue
from prfaas.simulate.instance import InstanceKind, Notices, SimulatedInstance
from prfaas.simulate.request import Arrival, Request
from prfaas.wire.engine import ALL_CHOICES, Cancel, Generate, Role, Started, Tokens
from prfaas_worker.emulated.profile import EmulatedProfile

from .emulated_bench import GREEDY, PROFILE, Emulated, SlowClock, prompt_of

SLOTS = 6
CURVE = PROFILE.times.prefill.profile
ROLES: list[Role] = ["prefill", "mixed", "decode"]


class Job(NamedTuple):
    at: float
    prompt: int
    answer: int
    leaves_at: float = float("inf")


Ends = dict[int, tuple[float, float]]
"""When each request had its first token and its last."""


def jobs(seed: int, count: int = 30, *, leaving: bool = False) -> list[Job]:
    rng, at, made = random.Random(seed), 0.0, list[Job]()
    for _ in range(count):
        at += rng.expovariate(4)
        prompt, answer = int(2 + rng.lognormvariate(7.5, 1.2)), rng.randrange(1, 200)
        leaves_at = at + rng.expovariate(2) if leaving and rng.random() < 0.4 else float("inf")
        made.append(Job(at, min(prompt, 30_000), answer, leaves_at))
    return made


def in_worker(role: Role, tokens: int, sent: list[Job], profile: EmulatedProfile = PROFILE) -> Ends:
    """Serve with the engine's step loop on a virtual clock. A step begins with what came before it."""
    clock = SlowClock()
    engine = Emulated(clock, tokens, SLOTS, role=role, pages=6_000, max_waiting=1000, profile=profile)
    began, found = clock(), Ends()
    news = [
        (job.at, Generate(handle, "r", prompt_of(job.prompt, handle), 1, job.answer, GREEDY, -1))
        for handle, job in enumerate(sent, 1)
    ]
    left = [(job.leaves_at, Cancel(handle, ALL_CHOICES)) for handle, job in enumerate(sent, 1)]
    coming = sorted([*news, *(one for one in left if one[0] < float("inf"))], key=lambda one: one[0])
    while True:
        while coming and began + coming[0][0] <= clock():
            engine.engine.inbox.put(coming.pop(0)[1])
        if not engine.engine.step(wait=False):
            if not coming:
                break
            clock.seconds = began + coming[0][0]
    for at, message in engine.sent:
        if isinstance(message, Started):
            found[message.handle] = (at - began, float("inf"))
        if isinstance(message, Tokens) and message.finish_reason:
            found[message.handle] = (found[message.handle][0], at - began)
    return found


def simulated(
    role: Role, tokens: int, sent: list[Job], measured: StepTimes | None = None, *, in_order: bool = False
) -> Ends:
    events, found = EventQueue(), Ends()

    def first(request: Request) -> None:
        found[request.index] = (events.now, float("inf"))

    def last(request: Request) -> None:
        found[request.index] = (found[request.index][0], events.now)

    def decode_seconds(batch: int) -> float:
        return PROFILE.times.decode_seconds(batch, 0)

    budgets = role_budgets(tokens, in_order=in_order)
    kind = InstanceKind(CURVE, SLOTS, decode_seconds, budgets, measured=measured)
    one = SimulatedInstance(events, kind, role, Notices(first, last))
    for handle, job in enumerate(sent, 1):
        request = Request(handle, Arrival(job.at, job.prompt, job.answer))
        events.at(job.at, lambda _, job=job, request=request: one.serve(request, 0, job.prompt, job.answer))
        if job.leaves_at < float("inf"):
            events.at(job.leaves_at, one.withdraw, request)
    while events.step():
        pass
    return found


def flat(ends: Ends) -> list[float]:
    return [at for _, both in sorted(ends.items()) for at in both]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("tokens", [256, 1024, 4096])
def test_requests_have_their_tokens_when_the_worker_gives_them(role: Role, tokens: int):
    sent = jobs(tokens)
    ours, theirs = simulated(role, tokens, sent), in_worker(role, tokens, sent)
    assert ours.keys() == theirs.keys() == set(range(1, len(sent) + 1))
    assert flat(ours) == pytest.approx(flat(theirs), abs=1e-6)


@pytest.mark.parametrize("role", ROLES)
def test_requests_that_leave_change_both_alike(role: Role):
    sent = jobs(7, leaving=True)
    ours, theirs = simulated(role, 1024, sent), in_worker(role, 1024, sent)
    assert sum(last == float("inf") for _, last in theirs.values()) > 2
    assert ours.keys() == theirs.keys()
    assert flat(ours) == pytest.approx(flat(theirs), abs=1e-6)


# A server that was measured: what a step costs is shared, and what comes before a token costs.
MEASURED = StepTimes(
    PrefillTimes.through([Point(8, 0.05), Point(1000, 0.2), Point(30_000, 5.0)], CURVE),
    PROFILE.times.decode_steps,
    common_seconds=0.004,
    cut_seconds=0.046,
    context_tokens=1056,
    decode_token_seconds=1e-7,
)


@pytest.mark.parametrize("role", ROLES)
def test_a_measured_server_is_simulated_as_it_is_emulated(role: Role):
    sent = jobs(11, leaving=True)
    theirs = in_worker(role, 1024, sent, PROFILE._replace(times=MEASURED))
    ours = simulated(role, 1024, sent, MEASURED)
    assert ours.keys() == theirs.keys()
    assert flat(ours) == pytest.approx(flat(theirs), abs=1e-6)
    assert flat(simulated(role, 1024, sent)) != pytest.approx(flat(theirs), rel=0.01), "the fit alone would be off"


@pytest.mark.parametrize("measured", [None, MEASURED])
def test_an_engine_that_computes_in_order_is_simulated_as_it_is_emulated(measured: StepTimes | None):
    sent = jobs(7, leaving=True)
    profile = PROFILE._replace(in_order=True, times=measured or PROFILE.times)
    ours, theirs = simulated("mixed", 512, sent, measured, in_order=True), in_worker("mixed", 512, sent, profile)
    assert ours.keys() == theirs.keys()
    assert flat(ours) == pytest.approx(flat(theirs), abs=1e-6)
    assert flat(simulated("mixed", 512, sent, measured)) != pytest.approx(flat(theirs), rel=0.01), "ours is another"


def test_another_rule_would_not_end_them_at_those_times():
    """The negative control: other budgets, and prompts one after the other as they came."""
    sent = jobs(1)
    theirs = in_worker("mixed", 1024, sent)
    assert flat(simulated("decode", 1024, sent)) != pytest.approx(flat(theirs), rel=0.01)
    alone = [job._replace(answer=1) for job in sent]
    free, one_by_one = 0.0, list[float]()
    for job in alone:
        free = max(free, job.at) + prefill_seconds(CURVE, job.prompt)
        one_by_one.append(free)
    theirs = in_worker("prefill", 1024, alone)
    assert one_by_one != pytest.approx([first for first, _ in theirs.values()], rel=0.01)
