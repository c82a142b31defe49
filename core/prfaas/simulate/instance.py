"""One instance: the worker's step loop in virtual time, by the schedule that the worker itself asks.

A step lasts as long as an emulated engine's: its chunks of prompts one after the other, and the step of its decodes.
What comes during a step is admitted in the next one and computed in the one after; engines that compute in order of
arrival compute it in the next one. A prefill for another instance hands over each chunk as it ends, and keeps its slot
until its cache has left. A cache that comes from another instance takes a slot with its first token. As many prompts
are computed here as decode at once, and the other slots are for caches that leave or have come. Memory beyond the slots
is never short.

Most steps repeat the one before: the same sequences decode, and the same prompts get as many tokens. Such steps are one
event. Who gets which tokens depends on the order of the prompts' lengths. Those shrink by equal amounts, so that two of
them change places once at most: if the last step is scheduled as the first is, so are those between. What comes while
steps repeat ends the repetition with the step in which it came.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from prfaas.capacity.profile import best_step_tokens, chunk_seconds
from prfaas.kvindex.blocks import BLOCK_TOKENS
from prfaas.measure.steps import StepChunk, StepTimes
from prfaas.schedule import (
    Budgets,
    RunningSequence,
    Schedule,
    ScheduledChunk,
    ScheduleFacts,
    WaitingSequence,
    role_budgets,
    schedule,
    slots_for,
)
from prfaas.simulate.events import EventQueue
from prfaas.simulate.request import Request
from prfaas.wire.engine import Role
from prfaas.wire.profile import Profile

_PLENTY: Final = 1 << 60
"""Of pages, which are not simulated."""


class InstanceKind(NamedTuple):
    """What instances of one pool have in common."""

    profile: Profile
    running: int
    """Sequences that decode at once."""
    decode_seconds: Callable[[int], float]
    """Of a step of so many sequences, perhaps none."""
    budgets: Mapping[Role, Budgets]
    hands_over: bool = False
    """Whether prefills for other instances leave chunk by chunk; else nobody is told of a chunk."""
    measured: StepTimes | None = None
    """What was measured of the steps: counts in place of `profile` and `decode_seconds`. Each has a time of its own."""

    @classmethod
    def of(
        cls, profile: Profile, running: int, decode_seconds: float, tokens: int = 0, *, hands_over: bool = False
    ) -> "InstanceKind":
        """Return a kind whose decode step takes as long for any batch, with steps of so many `tokens`; 0: as many as a
        worker finds best by such a profile."""
        budgets = role_budgets(tokens or best_step_tokens(profile))
        return cls(profile, running, partial(_same_for_any, decode_seconds), budgets, hands_over)

    @property
    def slots(self) -> int:
        return slots_for(self.running)

    @property
    def state_pages(self) -> int:
        return -(-self.profile.state_bytes // max(1, BLOCK_TOKENS * self.profile.token_bytes))


def _same_for_any(seconds: float, batch: int) -> float:
    return seconds if batch else 0.0


def _ignore(*_: object) -> None:
    pass


class Notices(NamedTuple):
    """Whom an instance tells of a request: its first token is drawn; its last one is; a chunk of a prompt for another
    instance is computed, of so many tokens; all of them are."""

    first: Callable[[Request], None]
    last: Callable[[Request], None]
    chunk: Callable[[Request, int], None] = _ignore
    prefilled: Callable[[Request], None] = _ignore


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on an instance. `answer_tokens` 0: it is prefilled for another one."""

    request: Request
    computed_tokens: int
    remaining_tokens: int
    answer_tokens: int
    cut_tokens: int = 0
    """A chunk ends here, to keep the state; 0: nowhere."""
    is_fetched: bool = False
    """True if another instance computed its prompt."""
    has_slot: bool = False
    drawn_tokens: int = 0
    is_first: bool = True
    gone: bool = False

    @property
    def computes(self) -> bool:
        """True if its slot is for a prompt that is computed here, or for the answer to one."""
        return not self.is_fetched and (self.answer_tokens > 0 or self.remaining_tokens > 0)

    def facts(self, ahead_tokens: int = 0) -> "RunningSequence[_Sequence]":
        """Return what the schedule asks, as it will be when so many more tokens are computed."""
        computed, remaining = self.computed_tokens + ahead_tokens, self.remaining_tokens - ahead_tokens
        until_cut_tokens = self.cut_tokens - computed if self.cut_tokens > computed else remaining
        answers = self.answer_tokens > 0
        return RunningSequence(
            self,
            remaining,
            until_cut_tokens,
            held_pages=0,
            short=False,
            decodes=remaining == 1 and answers,
            pinned=not answers,
            continues=self.drawn_tokens > 0,
            lacks_slot=not self.has_slot,
        )


def _arrived(entry: tuple[Request, _Sequence]) -> float:
    return entry[0].arrival.at_seconds


_Planned = Schedule[_Sequence]


@dataclass(slots=True)
class _Span:
    """Steps in a row that compute the same: for each prompt so many tokens, and a token for each that decodes."""

    began: float
    chunks: tuple[ScheduledChunk[_Sequence], ...]
    decodes: tuple[_Sequence, ...]
    steps: int


class SimulatedInstance:
    """Owns the sequences of one instance, which serves at the budgets of its `role`."""

    def __init__(self, events: EventQueue, kind: InstanceKind, role: Role, notices: Notices):
        self._events, self._kind, self._notices = events, kind, notices
        self._role: Role = role
        self._waiting: dict[Request, _Sequence] = {}
        self._held: dict[Request, _Sequence] = {}  # with memory, in order of arrival
        self._span: _Span | None = None
        self._awake = False  # it begins a step at this moment
        self._planned = 0
        self._generated = 0

    @property
    def waiting_prefills(self) -> int:
        """Prefills for other instances of which no chunk is computed, nor in the step under way."""
        begun = {one for one, _ in self._span.chunks} if self._span else ()
        held = (one for one in self._held.values() if one.is_first and one not in begun)
        return sum(not one.answer_tokens for one in (*self._waiting.values(), *held))

    @property
    def generated_tokens(self) -> int:
        self._catch_up()
        return self._generated

    def serve(self, request: Request, cached_tokens: int, prompt_tokens: int, answer_tokens: int) -> None:
        """Compute `prompt_tokens` >= 1 behind `cached_tokens`, and generate an answer; of 0: for another instance."""
        total = cached_tokens + prompt_tokens
        cut = (total - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        keeps = cut - cached_tokens >= max(1, self._kind.state_pages)
        self._waiting[request] = _Sequence(request, cached_tokens, prompt_tokens, answer_tokens, cut if keeps else 0)
        if self._span is None:
            self._wake()
        elif self._free_slots and self._places:
            self._cut_short()

    def answer(self, request: Request, cached_tokens: int, answer_tokens: int) -> None:
        """Answer a request whose cache another instance has sent, all but the prompt's last token."""
        self._held[request] = _Sequence(request, cached_tokens, 1, answer_tokens, is_fetched=True)
        self._held = dict(sorted(self._held.items(), key=_arrived))
        if self._span is None:
            self._wake()
        else:
            self._cut_short()

    def withdraw(self, request: Request) -> int:
        """Forget a request, if it is here, and return the number of its tokens. A step under way ends as it would."""
        self._catch_up()
        if self._waiting.pop(request, None):
            return 0
        sequence = self._held.pop(request, None)
        if sequence is None:
            return 0
        sequence.gone = True
        if self._span is None:
            self._wake()
        else:
            self._cut_short()
        return sequence.drawn_tokens

    def restart(self) -> None:
        """Forget everything, the step under way, too."""
        self._waiting.clear()
        self._held.clear()
        self._span = None
        self._planned += 1

    def set_role(self, role: Role) -> None:
        self._role = role
        self._cut_short()

    def _wake(self) -> None:
        """Begin a step when all that comes at this moment is there."""
        if not self._awake:
            self._awake = True
            self._events.at(self._events.now, self._begin)

    def _begin(self, _: None = None) -> None:
        self._awake = False
        planned = self._admit(self._schedule())
        if planned.admit and self._kind.budgets[self._role].in_order:
            planned = self._admit(self._schedule())
        while planned.admit and not (planned.chunks or planned.decodes):  # no time has passed
            planned = self._admit(self._schedule())
        for one in (*(chunk.key for chunk in planned.chunks), *planned.decodes):
            one.has_slot = True
        if not planned.empty:
            self._span = _Span(self._events.now, planned.chunks, planned.decodes, self._steps_alike(planned))
            self._expect_end(self._span)

    def _schedule(self, ahead_steps: int = 0, chunks: Iterable[ScheduledChunk[_Sequence]] = ()) -> _Planned:
        """Ask for the next step, or for the one after so many that compute these chunks."""
        ahead = {chunk.key: ahead_steps * chunk.tokens for chunk in chunks}
        return schedule(
            ScheduleFacts(
                waiting=(WaitingSequence(one, 0) for one in islice(self._waiting.values(), self._places)),
                running=[one.facts(ahead.get(one, 0)) for one in self._held.values() if one.remaining_tokens],
                free_slots=self._free_slots,
                free_pages=_PLENTY,
                further_slots=0,
                most_decodes=self._kind.running,
            ),
            self._kind.budgets[self._role],
        )

    @property
    def _free_slots(self) -> int:
        return self._kind.slots - sum(one.has_slot for one in self._held.values())

    @property
    def _places(self) -> int:
        """How many more prompts may be computed here."""
        return max(0, self._kind.running - sum(one.computes for one in self._held.values()))

    def _admit(self, planned: _Planned) -> _Planned:
        for sequence in planned.admit:
            self._held[sequence.request] = self._waiting.pop(sequence.request)
            sequence.has_slot = True
        return planned

    def _steps_alike(self, planned: _Planned) -> int:
        """Return how many steps from now on compute the same, with nobody to tell before the last one ends."""
        if planned.admit or self._kind.measured or any(not one.drawn_tokens for one in planned.decodes):
            return 1
        told = self._kind.hands_over
        if any(tokens == 1 or (told and not one.answer_tokens) for one, tokens in planned.chunks):
            return 1
        steps = min(
            *(one.answer_tokens - one.drawn_tokens for one in planned.decodes),
            *(self._whole_chunks(one, tokens) for one, tokens in planned.chunks),
            _PLENTY,
        )
        if steps > 1 and len(planned.chunks) > 1 and self._schedule(steps - 1, planned.chunks).chunks != planned.chunks:
            return 1
        return steps

    @staticmethod
    def _whole_chunks(one: _Sequence, tokens: int) -> int:
        """Return how many chunks of so many tokens a prompt has, at least one. The last one of a prompt that is to be
        answered here may be a token shorter, and counts for itself."""
        facts = one.facts()
        ends = one.answer_tokens > 0 and facts.until_cut_tokens == facts.remaining_tokens
        return max(1, (facts.until_cut_tokens - ends) // tokens)

    def _expect_end(self, span: _Span) -> None:
        self._planned += 1
        self._events.at(span.began + self._seconds(span, span.steps), self._end, self._planned)

    def _seconds(self, span: _Span, steps: int) -> float:
        """Return the seconds of a span's first steps."""
        if self._kind.measured:
            return self._measured_seconds(self._kind.measured, span)
        lone = sum(tokens == 1 for _, tokens in span.chunks)  # goes with the decodes
        seconds = steps * self._kind.decode_seconds(len(span.decodes) + lone)
        for one, tokens in span.chunks:
            if tokens > 1:
                seconds += chunk_seconds(self._kind.profile, one.computed_tokens, steps * tokens, is_first=one.is_first)
        return seconds

    def _measured_seconds(self, times: StepTimes, span: _Span) -> float:
        """Return the seconds of a span's only step."""
        decodes = [*span.decodes, *(one for one, tokens in span.chunks if tokens == 1)]
        chunks = [
            StepChunk(one.computed_tokens, tokens, one.facts().until_cut_tokens, one.is_first)
            for one, tokens in span.chunks
            if tokens > 1
        ]
        context_tokens = sum(one.computed_tokens for one in decodes)
        return times.step_seconds(chunks, len(decodes), context_tokens, self._kind.budgets["mixed"].step_tokens)[1]

    def _catch_up(self) -> None:
        """Account for the steps of a span that have ended."""
        span = self._span
        if span is None or span.steps == 1:
            return
        elapsed = self._events.now - span.began
        ended = bisect_right(range(1, span.steps), elapsed, key=lambda steps: self._seconds(span, steps))
        if ended:
            seconds = self._seconds(span, ended)
            span.began += seconds
            span.steps -= ended
            self._advance(span, ended, seconds)

    def _cut_short(self) -> None:
        """Plan anew when the step under way ends."""
        self._catch_up()
        if self._span is not None and self._span.steps > 1:
            self._span.steps = 1
            self._expect_end(self._span)

    def _advance(self, span: _Span, steps: int, seconds: float) -> None:
        for one, tokens in span.chunks:
            if tokens > 1 and not one.gone:
                one.request.prefill_seconds += seconds
            one.computed_tokens += steps * tokens
            one.remaining_tokens -= steps * tokens
            one.is_first = False
        for one in span.decodes:
            if not one.gone:
                one.computed_tokens += steps
                one.drawn_tokens += steps
                self._generated += steps

    def _end(self, planned: int) -> None:
        span = self._span
        if span is None or planned != self._planned:
            return
        self._span, self._awake = None, True  # what comes of it is there before the next step begins
        self._advance(span, span.steps, self._events.now - span.began)
        for one, tokens in span.chunks:
            if not one.gone:
                self._end_chunk(one, tokens)
        for one in span.decodes:
            if not one.gone:
                self._tell_drawn(one)
        self._begin()

    def _end_chunk(self, one: _Sequence, tokens: int) -> None:
        if not one.answer_tokens:
            if self._kind.hands_over:
                self._notices.chunk(one.request, tokens)
            if not one.remaining_tokens:
                self._notices.prefilled(one.request)
        elif not one.remaining_tokens:
            one.remaining_tokens = one.drawn_tokens = 1
            self._generated += 1
            self._tell_drawn(one)

    def _tell_drawn(self, one: _Sequence) -> None:
        if one.drawn_tokens == 1:
            self._notices.first(one.request)
        if one.drawn_tokens == one.answer_tokens:
            del self._held[one.request]
            self._notices.last(one.request)
