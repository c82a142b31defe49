"""The engine's step loop: handle what arrived, ask the schedule, run the batch, send tokens.

It runs on one thread and waits only when idle. Other threads talk to it through `inbox`. It talks to the front through
`send`, which only queues, once a step.
"""

import queue
import time
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Final

import msgspec

from prfaas.errors import CapacityError, PrfaasError, RequestError
from prfaas.kvindex.blocks import BlockChain, chain_root
from prfaas.schedule import BUDGETS, Budgets, Schedule, schedule
from prfaas.wire.engine import (
    ALL_CHOICES,
    CacheReset,
    Cancel,
    Failed,
    FinishReason,
    Generate,
    GiveCache,
    ResetCache,
    Role,
    RoleSet,
    SetRole,
    Started,
    Stats,
    ToFront,
    Tokens,
)
from prfaas.wire.headers import CODE_OVERLOADED
from prfaas.wire.kvevents import EventBatch, KvEvent, encode_events
from prfaas.wire.trace import Moment
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.engine.profiler import Profiler
from prfaas_worker.engine.remote import RemoteCaches
from prfaas_worker.engine.sequences import (
    EngineRequest,
    Event,
    FetchEnded,
    OfferEnded,
    Outputs,
    Phase,
    PrefillOffered,
    Requests,
    Sampler,
    Sequence,
    SourceBegun,
    StoredPrompt,
    check_tokens,
    goal_of,
)
from prfaas_worker.engine.steps import ComputedStep, Drawn, StepRunner, StepWork

CODE_ENGINE_FAILED: Final = "engine_failed"


@dataclass(kw_only=True, eq=False)
class EngineLoop:
    """Owns all requests, of which at most `max_running` decode at once and `max_waiting` wait. `kv_events` are the
    cache's since the last step, and `publish` takes a batch of them. `stats` are replaced whole, so that any thread may
    read them: their counters are those after the last step, and requests are counted as the step under way has them."""

    inbox: queue.SimpleQueue[Event]
    runner: StepRunner
    cache: HybridCache
    kv_events: list[KvEvent]
    publish: Callable[[bytes], None]
    remote: RemoteCaches
    profiler: Profiler
    send: Callable[[list[ToFront]], None]
    role: InitVar[Role]
    max_running: InitVar[int]
    max_waiting: int
    budgets: Mapping[Role, Budgets] = field(default_factory=lambda: BUDGETS)
    stats: Stats = field(init=False)
    requests: Requests = field(init=False)
    _messages: list[ToFront] = field(default_factory=list, init=False)
    _step_began: float = field(default=0.0, init=False)

    def __post_init__(self, role: Role, max_running: int) -> None:
        self.stats, self.requests = Stats(role=role), Requests(max_running)
        model = self.runner.model
        self._outputs = Outputs(model.vocab_size, tuple(sorted(model.eos_token_ids)))

    def run(self) -> None:
        """Step until the process ends."""
        idle = True
        while True:
            idle = not self.step(wait=idle)

    def step(self, *, wait: bool) -> bool:
        """Do one step; with `wait` first wait for a message. Return True if there was work."""
        self._handle_events(wait=wait)
        self._step_began = time.monotonic()
        planned = self._arranged(self._plan())
        if planned.admit and self.budgets[self.stats.role].in_order:
            planned = self._arranged(self._plan())
        for sequence in [*(one for one, _ in planned.chunks), *planned.decodes]:
            if not sequence.held.has_slot:
                self.cache.take_slot(sequence.held)
        growing = [one for one in planned.decodes if self.cache.grow(one.held, one.computed_tokens + 1)]
        work = StepWork(planned.chunks, growing)
        for sequence, _ in work.chunks:
            _begin(sequence.request)
        self._count_requests()  # a step may last a second
        self._compute(work)
        if work.decodes and not work.chunks:
            self._count(decode_steps=1, decode_seconds=time.monotonic() - self._step_began)
        self._send_messages()
        if planned.empty:
            self.runner.rest()
        return not planned.empty

    def _arranged(self, planned: Schedule[Sequence]) -> Schedule[Sequence]:
        """Take and give the memory of a step; return the step."""
        for sequence in planned.preempt:
            self._preempt(sequence)
        for sequence in planned.admit:
            if not self._admit(sequence):
                break
        return planned

    def _plan(self) -> Schedule[Sequence]:
        """Return the next step. Stored prompts give way before a sequence does, and before all stand still."""
        budgets = self.budgets[self.stats.role]
        planned = schedule(self.requests.facts(self.cache), budgets)
        if (planned.preempt or planned.empty) and self.requests.drop_stored(self.cache):
            planned = schedule(self.requests.facts(self.cache), budgets)
        return planned

    def _handle_events(self, *, wait: bool) -> None:
        try:
            event = self.inbox.get(block=wait)
            while True:
                self._handle(event)
                event = self.inbox.get(block=False)
        except queue.Empty:
            return

    def _handle(self, event: Event) -> None:
        match event:
            case Generate():
                self._add_generation(event)
            case Cancel():
                self._cancel(event)
            case PrefillOffered(message, offer):
                self._add_prefill(EngineRequest(message, offer), has_ended=offer.ended)
            case OfferEnded(handle):
                self._end_offer(handle)
            case SourceBegun(handle, at):
                self._end_await(handle, at)
            case FetchEnded():
                self._finish_fetch(event)
            case ResetCache(handle):
                self._messages.append(CacheReset(handle, self.cache.reset()))
            case SetRole(handle, role):
                self.stats = msgspec.structs.replace(self.stats, role=role)
                self._messages.append(RoleSet(handle, role))

    def _add_generation(self, message: Generate) -> None:
        if self.requests.has_too_many(self.max_waiting, self.cache.num_slots):
            text = f"{self.max_waiting} requests are waiting already; try another instance, or later"
            self._refuse(message, Failed(message.handle, 503, CODE_OVERLOADED, text))
            return
        try:
            check_tokens(message, self._outputs.vocab_size)
        except RequestError as error:
            self._refuse(message, _failure(message.handle, error))
            return
        self._add(EngineRequest(message))

    def _refuse(self, message: Generate, failure: Failed) -> None:
        self._messages.append(failure)
        self.remote.decline_leg(EngineRequest(message))

    def _add_prefill(self, request: EngineRequest, *, has_ended: bool) -> None:
        if not has_ended:
            self._add(request)
        elif request.is_owed_answer:  # its destination declined before it was here
            self._answer_leg(request)

    def _add(self, request: EngineRequest) -> None:
        prompt = request.message
        token_ids, choice = prompt.token_ids[:], 0
        if isinstance(prompt, GiveCache):
            token_ids = token_ids[: goal_of(token_ids, prompt.leg)]
        elif request.is_generation:
            token_ids, choice = token_ids + request.generate.generated, request.generate.choice
        chain = BlockChain(chain_root(self.runner.model.fingerprint, prompt.cache_salt))
        chain.extend(token_ids)
        sequence = Sequence(request, choice, token_ids, chain)
        request.sequences.append(sequence)
        self.requests[request.handle] = request
        if request.gives_prefix:
            self._give_prefix(sequence)
        elif sequence.comes_whole(self.cache):
            self.remote.await_source(sequence)

    def _give_prefix(self, sequence: Sequence) -> None:
        """Give what is cached of a prompt, at once, or nothing. Its answer waits for the end of the offer: so a caller
        that leaves, since nobody wants it any more, frees its memory."""
        facts, slots = self.requests.facts(self.cache), self.requests.slots_to_give(self.cache)
        refusal = self.remote.give_prefix(sequence, slots, len(facts.running))
        if refusal is not None:
            self._refuse_leg(sequence.request, refusal)

    def _cancel(self, message: Cancel) -> None:
        request = self.requests.get(message.handle)
        if request is None:
            return
        if request.offer is not None:  # an offer's lease ends it, unless its caller left before the answer
            if request.is_owed_answer:
                request.started = True
                request.sequences[0].phase = Phase.ENDING
                request.offer.cancel()
            return
        if message.choice == ALL_CHOICES:
            self._end(message.handle)
            return
        for sequence in [one for one in request.sequences if one.index == message.choice and request.started]:
            self._end_sequence(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a sequence memory and start it; False if there is too little memory."""
        if (stored := sequence.request.stored) is not None:
            return self._fork(sequence, stored)
        if self.remote.join_fetch(sequence):
            return True
        request, count = sequence.request, len(sequence.token_ids)
        has_nearly_all = sequence.has_nearly_all(self.cache)
        most = count - 1 if has_nearly_all else sequence.most_cached_tokens
        take = self.cache.reserve if request.is_remote and not has_nearly_all else self.cache.open
        opened = take(sequence.chain.hashes, count, most, places=request.message.places)
        if opened is None:
            return False
        if has_nearly_all:
            self.remote.decline_leg(request)
        sequence.lease, sequence.computed_tokens = opened.lease, opened.cached_tokens
        sequence.cuts, sequence.is_exact = opened.checkpoints, True
        if request.queue_seconds is None:
            request.queue_seconds = time.monotonic() - request.queued_at
            request.cached_tokens = opened.cached_tokens
        sequence.phase = Phase.RUNNING
        self.remote.start_fetch(sequence)
        return True

    def _end_offer(self, handle: int) -> None:
        request = self.requests.get(handle)
        if request is not None and request.is_owed_answer:  # its destination wants nothing, or is gone
            self._answer_leg(request)
        self._end(handle)

    def _answer_leg(self, request: EngineRequest) -> None:
        request.started = True
        self._messages.append(_started(request))

    def _refuse_leg(self, request: EngineRequest, refusal: Failed) -> None:
        """Give nothing more of an offer, which ends when its destination has heard why."""
        if request.is_owed_answer:
            request.started = True
            self._messages.append(refusal)
        if request.offer is not None:
            request.offer.fail(refusal.message)
        request.sequences[0].phase = Phase.ENDING  # its frames may still be on their way out

    def _fork(self, sequence: Sequence, prompt: StoredPrompt) -> bool:
        """Let a choice go on from its computed prompt; False if there is too little memory."""
        lease = self.cache.fork(prompt.lease, prompt.tokens)
        if lease is None:
            return False
        if not self.cache.grow(lease, len(sequence.token_ids)):
            self.cache.close(lease)
            return False
        sequence.lease, sequence.computed_tokens, sequence.phase = lease, prompt.tokens, Phase.RUNNING
        sequence.cuts, sequence.is_exact = (), prompt.is_exact
        sequence.request.drop_unneeded(self.cache)
        return True

    def _end_await(self, handle: int, at: float) -> None:
        """Let a request have memory in its turn, by its arrival."""
        request = self.requests.get(handle)
        if request is not None:
            request.queued_at = at
            request.sequences[0].phase = Phase.WAITING

    def _finish_fetch(self, ended: FetchEnded) -> None:
        request = self.requests.get(ended.handle)
        if request is None:
            return
        # Choices are made of a computed prompt, so there is one while anything is fetched.
        (sequence,) = request.sequences
        request.fetch, request.fetched_at = None, ended.at
        self.remote.finish_fetch(sequence, ended.result)
        if sequence.phase is Phase.ENDING:  # cancelled meanwhile
            self._end(ended.handle)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.release(self.cache)
        sequence.request.ran_alone = False
        self._count(preemptions=1)

    def _compute(self, work: StepWork) -> None:
        if not (work.chunks or work.decodes):
            return
        try:
            result = self.runner.run(work)
        except CapacityError as error:
            self._abandon(work, error)
            return
        alone = len(work.chunks) == 1 and not work.decodes
        finished: list[tuple[Sequence, int]] = []
        self._count(prompt_tokens=sum(tokens for _, tokens in work.chunks))
        for sequence in self.requests.sequences():
            sequence.continues = False
        for row, (sequence, tokens) in enumerate(work.chunks):
            sequence.request.ran_alone &= alone
            finished += self._advance(sequence, tokens, row)
        for row, sequence in enumerate(work.decodes, len(work.chunks)):
            finished += self._advance(sequence, 1, row)
        if finished:
            self._draw(result, finished)

    def _advance(self, sequence: Sequence, tokens: int, row: int) -> list[tuple[Sequence, int]]:
        """Record that tokens of a sequence are computed; return the sequences that draw from `row` now."""
        request = sequence.request
        sequence.computed_tokens += tokens
        sequence.publish(self.cache)
        if sequence.remaining_tokens:
            return []
        if request.ran_alone and not request.started:
            count = len(sequence.token_ids) - request.cached_tokens
            self.profiler.observe(count, request.prefill_seconds, request.cached_tokens)
        if request.offer is not None:
            sequence.phase = Phase.DELIVERING
            origins = tuple(sorted(sequence.held.origins))
            request.offer.finish_computing(request.prefill_seconds, is_exact=sequence.is_exact, origins=origins)
            if request.is_owed_answer:
                self._answer_leg(request)
            return []
        sequence.continues = True
        if request.started:
            return [(sequence, row)]
        return [(choice, row) for choice in self._start_choices(sequence)]

    def _start_choices(self, sequence: Sequence) -> list[Sequence]:
        """Turn a computed prompt into a sequence for each choice. A choice without memory waits, and the prompt is
        stored for it."""
        request, generate = sequence.request, sequence.request.generate
        prompt = StoredPrompt(sequence.held, sequence.computed_tokens, sequence.is_exact)
        further_slots = self.requests.further_slots() if generate.choices > 1 else 0
        for index in range(generate.choice + 1, generate.choice + generate.choices):
            choice = Sequence(request, index, sequence.token_ids[:], sequence.chain.copy())
            request.sequences.append(choice)
            if further_slots > 0 and self._fork(choice, prompt):
                further_slots -= 1
            elif request.stored is None and (lease := self.cache.store(prompt.lease, prompt.tokens)) is not None:
                request.stored = prompt._replace(lease=lease)
        for choice in request.sequences:
            choice.sampler = Sampler(generate, choice.index, self._outputs, generate.generated)
        request.started = True
        self._messages.append(_started(request, request.moments(self._step_began)))
        return request.sequences[:]

    def _draw(self, step: ComputedStep, finished: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Draw a token for each sequence from its row of the step; one row may serve several."""
        self._count(generation_tokens=len(finished))
        drawing = [sequence for sequence, _ in finished]
        drawn = step.draw([row for _, row in finished], drawing)
        for sequence, one in zip(drawing, drawn, strict=True):
            self._append_token(sequence, one)

    def _append_token(self, sequence: Sequence, drawn: Drawn) -> None:
        request = sequence.request
        if self.requests.get(request.handle) is None:  # another choice of it has just failed
            return
        if drawn.error is not None:
            self._messages.append(_failure(request.handle, drawn.error))
            self._end(request.handle)
            return
        sequence.token_ids.append(drawn.token)
        stopped = drawn.token in sequence.ready_sampler.ends
        reason: FinishReason | None = None
        if stopped:
            reason = "stop"
        elif sequence.generated_tokens == request.generate.max_tokens:
            reason = "length"
        token_ids = [] if stopped else [drawn.token]
        logprobs = [drawn.logprob] if drawn.logprob is not None and not stopped else []
        self._messages.append(Tokens(request.handle, sequence.index, token_ids, logprobs, reason))
        if reason is not None:
            self._end_sequence(sequence)

    def _abandon(self, work: StepWork, error: CapacityError) -> None:
        """Fail the prompts of a step that ran out of memory; preempt its decodes."""
        for request in {sequence.request.handle: sequence.request for sequence, _ in work.chunks}.values():
            refusal = Failed(request.handle, 503, CODE_OVERLOADED, str(error))
            if request.offer is not None:
                self._refuse_leg(request, refusal)
            else:
                self._messages.append(refusal)
                self._end(request.handle)
        for sequence in work.decodes:
            if sequence.lease is not None:  # else another choice of its request was among the prompts
                self._preempt(sequence)

    def _end(self, handle: int) -> None:
        request = self.requests.get(handle)
        if request is None:
            return
        if request.fetch is not None:
            request.fetch.cancel()
            request.sequences[0].phase = Phase.ENDING
            return
        self.remote.decline_leg(request)
        for sequence in request.sequences[:]:
            self._end_sequence(sequence)

    def _end_sequence(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.lease is not None:
            self.cache.close(sequence.lease)
            sequence.lease = None
        request.sequences.remove(sequence)
        request.drop_unneeded(self.cache)
        if not request.sequences:
            self.requests.pop(request.handle, None)

    def _count(self, **more: float) -> None:
        counts = {name: getattr(self.stats, name) + value for name, value in more.items()}
        self.stats = msgspec.structs.replace(self.stats, **counts)

    def _count_requests(self) -> None:
        counts = self.requests.counts()
        self.stats = msgspec.structs.replace(
            self.stats,
            requests_running=counts[False, False],
            requests_waiting=counts[False, True],
            prefills_running=counts[True, False],
            prefills_waiting=counts[True, True],
        )

    def _send_messages(self) -> None:
        self._count_requests()
        self.stats = msgspec.structs.replace(
            self.stats, prefixes=tuple(sorted(self.remote.outcomes.items())), prefix_tokens=self.remote.prefix_tokens
        )
        if self.kv_events:
            self.publish(encode_events(EventBatch(time.time(), self.kv_events, 0)))
            self.kv_events.clear()
        if self._messages:
            self.send(self._messages)
            self._messages = []


def _begin(request: EngineRequest) -> None:
    """Note that some of a prompt is computed in the step that begins."""
    if not request.begun and request.offer is not None:
        request.offer.begin()
    request.begun = True


def _started(request: EngineRequest, moments: tuple[Moment, ...] = ()) -> Started:
    cache = request.prefix
    return Started(
        handle=request.handle,
        cached_tokens=request.cached_tokens,
        kv_bytes=cache.received_bytes if cache else 0,
        prefill_seconds=request.prefill_seconds,
        transfer_seconds=cache.transfer_seconds if cache else 0.0,
        first_byte_seconds=cache.done.first_byte_seconds if cache else 0.0,
        queue_seconds=request.queue_seconds or 0.0,
        transfer_id=cache.transfer_id if cache else "",
        lost_transfer=request.lost_transfer,
        moments=moments,
    )


def _failure(handle: int, error: PrfaasError) -> Failed:
    if isinstance(error, RequestError):
        return Failed(handle, error.status, error.code, str(error))
    return Failed(handle, 500, CODE_ENGINE_FAILED, str(error))
