"""One simulated instance: the worker's schedule in hand-computed cases, with steps that repeat taken as one, or not."""

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prfaas.simulate.events import EventQueue
from prfaas.simulate.instance import InstanceKind, Notices, SimulatedInstance
from prfaas.simulate.request import Arrival, Request
from prfaas.wire.engine import Role
from prfaas.wire.profile import Profile

from .worlds import linear

MILLI = linear(1e-3)
"""A token takes a millisecond, and a prompt nothing besides."""
STEP = 0.5
"""Of a decode step."""


class OneByOne(SimulatedInstance):
    """Plans each step, as a worker does."""

    def _steps_alike(self, _planned) -> int:
        return 1


class Bench:
    """One instance, with what it told and when."""

    def __init__(self, profile: Profile = MILLI, *, running: int = 8, tokens: int = 1000, role: Role = "mixed", **more):
        self.events = EventQueue()
        kind = InstanceKind.of(profile, running, STEP, tokens, hands_over=more.pop("hands_over", False))
        self.told: list[tuple[str, int, float]] = []
        prefilled, first, last = map(self._note, ("prefilled", "first", "last"))
        notices = Notices(first, last, self._chunk, prefilled)
        self.one = more.pop("made", SimulatedInstance)(self.events, kind, role, notices)
        self.requests: dict[int, Request] = {}
        self.handed: list[tuple[int, int]] = []
        self.left: list[int] = []

    def _note(self, what: str):
        return lambda request: self.told.append((what, request.index, self.events.now))

    def _chunk(self, request: Request, tokens: int) -> None:
        self.handed.append((request.index, tokens))
        self._note("chunk")(request)

    def serve(self, at: float, index: int, prompt: int, answer: int, cached: int = 0) -> None:
        self.requests[index] = Request(index, Arrival(at, prompt + cached, max(1, answer)))
        self.events.at(at, lambda _: self.one.serve(self.requests[index], cached, prompt, answer))

    def answer(self, at: float, index: int, answer: int, arrived: float = 0.0) -> None:
        """The cache of a prompt comes that another instance computed."""
        self.requests[index] = Request(index, Arrival(arrived, 500, answer))
        self.events.at(at, lambda _: self.one.answer(self.requests[index], 499, answer))

    def withdraw(self, at: float, index: int) -> None:
        self.events.at(at, lambda _: self.left.append(self.one.withdraw(self.requests[index])))

    def finish(self) -> "Bench":
        while self.events.step():
            pass
        return self

    def at(self, what: str) -> dict[int, float]:
        return {index: at for kind, index, at in self.told if kind == what}


def test_a_short_prompt_shares_each_step_with_a_long_one_and_is_not_behind_it():
    bench = Bench(role="prefill", tokens=1000)  # steps of 2,000 tokens, 2 s
    bench.serve(0, 1, 20_000, 0)
    bench.serve(0.1, 2, 1500, 0)
    bench.finish()
    # It came in the first step, was admitted in the second, and computes 1,000 of the third and its last full block,
    # 1,472 tokens, less that, in the fourth, then 28 in the fifth.
    assert bench.at("prefilled")[2] == pytest.approx(10.0)
    assert bench.at("prefilled")[1] == pytest.approx(21.5), "no time is lost"
    assert [bench.requests[one].prefill_seconds for one in (1, 2)] == pytest.approx([21.5, 6.0]), "of its steps"


def test_a_short_prompt_without_a_slot_waits_until_the_long_ones_cache_has_left():
    bench = Bench(role="prefill", tokens=1000, running=1)  # two slots, and one prompt is computed
    bench.serve(0, 1, 20_000, 0)
    bench.serve(0, 2, 4000, 0)
    bench.serve(0.1, 3, 1500, 0)
    bench.events.at(10, lambda _: bench.told.append(("waiting", bench.one.waiting_prefills, 10)))
    bench.withdraw(25, 1)
    bench.finish()
    assert (bench.at("prefilled"), bench.at("waiting")) == ({1: 20.0, 2: 24.0, 3: pytest.approx(26.5)}, {2: 10})


def test_a_prefill_for_another_instance_waits_until_the_step_that_begins_it():
    bench = Bench(role="prefill", tokens=1000, running=2)  # four slots, and steps of 2,000 tokens, 2 s
    waiting = dict[float, int]()
    for index, prompt in ((1, 5000), (2, 3000), (3, 20_000), (6, 20_000), (4, 100)):
        bench.serve(0, index, prompt, 0)
    bench.serve(0, 5, 100, 1)  # of its own
    for at in (0.5, 2.5, 4.5, 20.0, 40.0):
        bench.events.at(at, lambda _: waiting.update({bench.events.now: bench.one.waiting_prefills}))
    bench.finish()
    # Half of each step is the first one's, half the shortest one's. The sixth has a slot, then, and waits; the fourth,
    # without one, does so to the end.
    assert waiting == {0.5: 3, 2.5: 3, 4.5: 3, 20.0: 2, 40.0: 1}
    assert bench.at("prefilled").keys() == {1, 2, 3, 6}


def test_decodes_go_on_beside_the_chunks_of_a_prompt_as_the_role_allows():
    allowed: dict[Role, int] = {"mixed": 500, "decode": 125, "prefill": 1999}
    for role, tokens in allowed.items():
        bench = Bench(role=role, tokens=1000, hands_over=True)
        bench.serve(0, 1, 1, 50, cached=100)
        bench.serve(0.1, 2, 4 * tokens, 0)
        bench.finish()
        # A step of 0.5 s admits it. Each later one lasts 0.5 s, and a millisecond for each of its tokens.
        first = next(at for what, index, at in bench.told if (what, index) == ("chunk", 2))
        assert bench.handed[0] == (2, tokens)
        assert first == pytest.approx(STEP + STEP + STEP + tokens / 1000)
        chunks = len(bench.handed)
        assert bench.at("last")[1] == pytest.approx(50 * STEP + 4 * tokens / 1000), "every token of both, once"
        assert bench.at("prefilled")[2] == pytest.approx((2 + chunks) * STEP + 4 * tokens / 1000)


def test_a_full_batch_has_others_wait_for_a_slot_and_their_first_token():
    bench = Bench(running=2)
    for index, answer in ((1, 10), (2, 4), (3, 3)):
        bench.serve(0, index, 1, answer, cached=500)
    bench.finish()
    assert bench.at("first") == pytest.approx({1: STEP, 2: STEP, 3: 6 * STEP})
    assert bench.at("last") == pytest.approx({1: 10 * STEP, 2: 4 * STEP, 3: 8 * STEP}), "admitted in the fifth step"


def test_caches_that_have_come_wait_for_their_turn_by_arrival_and_interrupt_no_answer():
    bench = Bench(running=2)
    bench.answer(1.1, 3, 3, arrived=0.3)
    bench.answer(1.1, 2, 4, arrived=0.2)
    bench.answer(1.2, 5, 1, arrived=0.5)
    bench.answer(1.3, 4, 1, arrived=0.4)
    bench.answer(1.6, 1, 10, arrived=0.1)
    bench.finish()
    assert bench.at("first") == pytest.approx({2: 1.6, 3: 1.6, 1: 3.1, 4: 3.6, 5: 4.1})


def test_caches_that_have_come_wait_for_slots_of_those_that_leave():
    bench = Bench(running=1)  # two slots
    for index in (1, 2):
        bench.serve(0, index, 1000, 0)
    bench.answer(5, 3, 2)
    bench.withdraw(30, 1)
    bench.finish()
    assert bench.at("prefilled").keys() == {1, 2}
    assert bench.at("first") == {3: pytest.approx(30 + STEP)}


def test_prompts_that_are_computed_here_leave_slots_to_caches_that_have_come():
    bench = Bench(running=2)  # four slots
    for index in (1, 2, 3):
        bench.serve(0, index, 3000, 1)
    bench.answer(0.1, 4, 2)
    bench.finish()
    assert bench.at("first")[4] < bench.at("last")[1] < bench.at("first")[3]


def test_one_prompt_and_its_answer_need_one_slot_and_no_hand_over():
    bench = Bench(Profile(state_bytes=0, token_bytes=1, fixed_seconds=0.25, token_seconds=1e-3))
    bench.serve(0, 1, 900, 3)
    bench.finish()
    # The fixed part once, however many chunks; the prompt's end draws the first token.
    assert bench.told == [("first", 1, pytest.approx(1.15)), ("last", 1, pytest.approx(1.15 + 2 * STEP))]


def test_the_end_of_a_prompt_waits_for_the_step_it_is_in_and_the_state_is_kept_at_the_last_full_block():
    bench = Bench(role="prefill", tokens=1000, hands_over=True)
    bench.serve(0, 1, 3000, 0)
    bench.serve(0, 2, 3000, 0)
    bench.finish()
    assert bench.handed == [(1, 2000), (1, 944), (2, 1056), (1, 56), (2, 1888), (2, 56)]
    assert bench.at("prefilled") == pytest.approx({1: 5.944, 2: 6.0})


def test_what_is_withdrawn_leaves_its_slot_at_the_end_of_the_step_and_keeps_its_tokens():
    bench = Bench(running=1)
    bench.serve(0, 1, 1, 100, cached=500)
    bench.serve(1, 2, 1, 2, cached=500)
    bench.withdraw(10.2, 1)
    bench.withdraw(10.2, 1)
    bench.finish()
    assert bench.left == [20, 0]
    assert bench.at("first") == pytest.approx({1: STEP, 2: 11.0})
    assert 1 not in bench.at("last")
    assert bench.one.generated_tokens == 22


def test_a_prompt_withdrawn_in_the_middle_of_its_chunk_delays_the_others_by_that_chunk_alone():
    bench = Bench(role="prefill", tokens=1000)
    bench.serve(0, 1, 50_000, 0)
    bench.serve(0, 2, 60_000, 0)
    bench.withdraw(3.0, 1)
    bench.finish()
    assert bench.told == [("prefilled", 2, pytest.approx(64.0))]


def test_an_instance_that_restarts_forgets_its_step_and_serves_what_comes():
    bench = Bench(role="prefill", tokens=1000)
    bench.serve(0, 1, 50_000, 0)
    bench.events.at(3.0, lambda _: bench.one.restart())
    bench.serve(3.5, 2, 640, 0)
    bench.finish()
    assert bench.told == [("prefilled", 2, pytest.approx(4.14))]


def test_a_new_role_divides_the_next_step_and_not_this_one():
    bench = Bench(role="decode", tokens=800, hands_over=True)
    bench.serve(0, 1, 1, 40, cached=100)
    bench.serve(0, 2, 10_000, 0)
    bench.events.at(1.3, lambda _: bench.one.set_role("prefill"))
    bench.finish()
    assert [tokens for _, tokens in bench.handed][:4] == [100, 100, 100, 1599]


ROLES = st.sampled_from(["prefill", "decode", "mixed"])
GAPS = st.floats(0.0, 30.0).map(lambda gap: gap * 1.000123457)
PROMPTS = st.lists(
    st.tuples(GAPS, st.integers(1, 9_000), st.sampled_from([0, 0, 1, 2, 40, 300]), st.sampled_from([0, 64, 5000])),
    min_size=1,
    max_size=12,
)
LEAVING = st.lists(st.tuples(st.floats(0.0, 200.0).map(lambda at: at * 1.0001718), st.integers(0, 11)), max_size=4)
ODD = Profile(state_bytes=9000, token_bytes=7, fixed_seconds=0.0517, token_seconds=1.0313e-3, squared_seconds=1.7e-8)


# The first of two gets a token more of each step, until it is the shorter one and gets all of it.
@example([(0.0, 9_000, 1, 0), (0.0, 8_990, 1, 0)], [], "mixed", 333, 3, False)
@given(PROMPTS, LEAVING, ROLES, st.sampled_from([64, 333, 1024]), st.sampled_from([1, 3, 12]), st.booleans())
@settings(max_examples=150)
def test_steps_taken_as_one_end_when_the_single_steps_do(prompts, leaving, role, tokens, running, hands_over):
    runs: list[Bench] = []
    for made in (SimulatedInstance, OneByOne):
        bench = Bench(ODD, running=running, tokens=tokens, role=role, hands_over=hands_over, made=made)
        at = 0.0
        for index, (gap, prompt, answer, cached) in enumerate(prompts):
            at += gap
            if cached == 64 and answer:  # another instance computes its prompt
                bench.answer(at + prompt / 77.7, index, answer, at)
            else:
                bench.serve(at, index, prompt, answer, cached)
            bench.withdraw(at + 700.0123, index)  # what was prefilled leaves
        for when, index in leaving:
            if index < len(prompts):
                bench.withdraw(when, index)
        runs.append(bench.finish())
    quick, plain = runs
    assert [one[:2] for one in sorted(quick.told)] == [one[:2] for one in sorted(plain.told)]
    assert [one[2] for one in sorted(quick.told)] == pytest.approx([one[2] for one in sorted(plain.told)], abs=1e-6)
    assert quick.one.generated_tokens == plain.one.generated_tokens
    took, took_plain = ([one.prefill_seconds for one in bench.requests.values()] for bench in runs)
    assert took == pytest.approx(took_plain, abs=1e-6)
    assert quick.handed == plain.handed


def test_a_long_answer_and_a_long_prompt_take_few_events():
    counts: list[int] = []
    for made in (SimulatedInstance, OneByOne):
        bench = Bench(ODD, role="decode", tokens=256, made=made)
        bench.serve(0, 1, 9_000, 3_000)
        bench.serve(0.1, 2, 1, 3_000)
        counts.append(sum(1 for _ in _steps(bench.events)))
    assert (counts[0] < 20, counts[1] > 3_000) == (True, True)


@given(PROMPTS, ROLES, st.sampled_from([64, 1024]), st.sampled_from([1, 4]))
def test_every_request_ends_once_and_gets_its_tokens(prompts, role, tokens, running):
    bench = Bench(ODD, running=running, tokens=tokens, role=role)
    for index, (gap, prompt, answer, cached) in enumerate(prompts):
        bench.serve(gap, index, prompt, answer, cached)
    told = _leaving_when_prefilled(bench)
    assert sorted(index for what, index in told if what in ("prefilled", "last")) == list(range(len(prompts)))
    answers = [answer for _, _, answer, _ in prompts if answer]
    assert sum(what == "first" for what, _ in told) == len(answers)
    assert bench.one.generated_tokens == sum(answers)


def _steps(events: EventQueue) -> Iterator[None]:
    while events.step():
        yield


def _leaving_when_prefilled(bench: Bench) -> list[tuple[str, int]]:
    seen = 0
    for _ in _steps(bench.events):
        for what, index, _ in bench.told[seen:]:
            if what == "prefilled":
                bench.withdraw(0, index)
        seen = len(bench.told)
    return [one[:2] for one in bench.told]
