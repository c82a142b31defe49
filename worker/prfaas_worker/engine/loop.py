"""The engine's step loop: take what arrived, ask the schedule, run the batch, hand out tokens.

It runs on one thread and never waits but when idle: other threads talk to it through `inbox`, and it talks to the front
through `answer`, which only queues, once a step.
"""

import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from prfaas.errors import CapacityError, PrfaasError, RequestError
from prfaas.kvindex.blocks import BlockChain, chain_root
from prfaas.wire.engine import (
    ALL_CHOICES,
    CacheReset,
    Cancel,
    Failed,
    Generate,
    KvEvents,
    ResetCache,
    Role,
    RoleSet,
    SetRole,
    Started,
    ToFront,
)
from prfaas.wire.headers import CODE_OVERLOADED, CODE_PREFILL_FAILED
from prfaas.wire.kvevents import KvEvent
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.engine import sequences
from prfaas_worker.engine.events import Event, FetchEnded, Offered, OfferEnded, Prepared
from prfaas_worker.engine.grammar import Grammars
from prfaas_worker.engine.preparing import Preparing
from prfaas_worker.engine.profile import Profiler
from prfaas_worker.engine.runner import Runner, Work
from prfaas_worker.engine.sampling import Outputs
from prfaas_worker.engine.schedule import BUDGETS, Batch, schedule
from prfaas_worker.engine.sequences import Phase, Request, Requests
from prfaas_worker.engine.voice import Heard, Voice, failure
from prfaas_worker.transfer.fetch import Fetch, Fetched


class Gauges(NamedTuple):
    """What the engine was busy with after its last step, and what it has done since its start."""

    requests_running: int = 0
    requests_waiting: int = 0
    prefills_running: int = 0
    prefills_waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    role: Role = "mixed"


class Parts(NamedTuple):
    """What an engine is put together from.

    `new_fetch` prepares the fetch of a sequence whose prompt another instance prefills; `answer` queues messages to
    the front, in order.
    """

    runner: Runner
    cache: HybridCache
    events: list[KvEvent]
    """What the cache has to tell routers since the last step."""
    grammars: Grammars
    profiler: Profiler
    new_fetch: Callable[[sequences.Sequence], Fetch]
    answer: Callable[[list[ToFront]], None]


class Engine:
    """Owns all requests, at most `max_waiting` of which wait."""

    def __init__(self, parts: Parts, *, role: Role, max_waiting: int):
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.requests = Requests()
        self.gauges = Gauges(role=role)
        self.cache = parts.cache
        self._parts = parts
        self._runner, model = parts.runner, parts.runner.model
        self._voice = Voice(Outputs(model.vocab_size, tuple(sorted(model.eos_token_ids))))
        self._preparing = Preparing(parts.grammars, parts.cache, self.inbox.put)
        self._said: list[ToFront] = []
        self._max_waiting = max_waiting
        self._role: Role = role
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._preemptions = 0
        self._decode_steps = 0
        self._decode_seconds = 0.0

    def offer_ended(self, handle: int) -> None:
        """Have a prefill for another instance forgotten; called from any thread."""
        self.inbox.put(OfferEnded(handle))

    def run(self) -> None:
        """Step until the process ends."""
        idle = True
        while True:
            idle = not self.step(wait=idle)

    @torch.inference_mode()
    def step(self, *, wait: bool) -> bool:
        """Do one step; with `wait` first wait until something arrives. Returns whether anything was to do."""
        self._take(wait=wait)
        began = time.monotonic()
        batch = schedule(self.requests.facts(self.cache), BUDGETS[self._role])
        for sequence in batch.preempt:
            self._preempt(sequence)
        for sequence in batch.admit:
            if not self._admit(sequence):
                break
        work = self._work(batch)
        self._compute(work)
        if work.decodes and not work.chunks:
            self._decode_steps += 1
            self._decode_seconds += time.monotonic() - began
        self.gauges = self._measure()
        if events := self._parts.events:
            self._said.append(KvEvents(events[:]))
            events.clear()
        if self._said:
            self._parts.answer(self._said)
            self._said = []
        return not batch.empty

    def _take(self, *, wait: bool) -> None:
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
                self._arrive(event)
            case Cancel():
                self._cancel(event)
            case Offered(message, offer):
                request = Request(message.handle, len(message.token_ids), offer=offer)
                self._add(request, message.token_ids, message.cache_salt)
            case OfferEnded(handle):
                self._end(handle)
            case FetchEnded(handle, result):
                self._fetched(handle, result)
            case Prepared():
                self._prepared(event)
            case ResetCache(handle):
                self._said.append(CacheReset(handle, self.cache.reset()))
            case SetRole(handle, role):
                self._role = role
                self._said.append(RoleSet(handle, role))

    def _arrive(self, message: Generate) -> None:
        if self.requests.counts()[False, True] >= self._max_waiting:
            text = f"{self._max_waiting} requests are waiting already; try another instance, or later"
            self._said.append(Failed(message.handle, 503, CODE_OVERLOADED, text))
            return
        request = Request(message.handle, len(message.token_ids), generate=message)
        try:
            self._voice.check(request)
        except RequestError as error:
            self._said.append(failure(message.handle, error))
            return
        self._add(request, message.token_ids, message.cache_salt)

    def _prepared(self, event: Prepared) -> None:
        request = self.requests.get(event.handle)
        if request is None or event.part not in request.awaits:  # cancelled, or waited for long enough already
            return
        request.awaits.remove(event.part)
        if event.grammar is not None:
            try:
                request.grammar = event.grammar.result()
            except PrfaasError as error:
                self._said.append(failure(event.handle, error))
                self._end(event.handle)
                return
        if not request.awaits:
            request.sequences[0].phase = Phase.WAITING

    def _add(self, request: Request, token_ids: list[int], cache_salt: str) -> None:
        chain = BlockChain(chain_root(self._runner.model.fingerprint, cache_salt))
        chain.extend(token_ids)
        request.sequences.append(sequences.Sequence(request, 0, token_ids[:], chain))
        self.requests.add(request)
        self._preparing.begin(request)

    def _cancel(self, message: Cancel) -> None:
        request = self.requests.get(message.handle)
        if request is None or request.offer is not None:  # an offer's lease ends it
            return
        if message.choice == ALL_CHOICES:
            self._end(message.handle)
            return
        for sequence in [one for one in request.sequences if one.index == message.choice and request.started]:
            self._end_sequence(sequence)

    def _admit(self, sequence: sequences.Sequence) -> bool:
        """Give a sequence memory and start it; False when there is too little memory after all."""
        request, count = sequence.request, len(sequence.token_ids)
        remote = request.generate is not None and bool(request.generate.prefill_url) and not request.started
        opened = self.cache.open(sequence.chain.hashes, count, count - 1, use_state=not remote)
        if opened is None:
            return False
        sequence.lease, sequence.computed_tokens = opened.lease, opened.cached_tokens
        sequence.cuts = opened.checkpoints
        if request.queue_seconds is None:
            request.queue_seconds = time.monotonic() - request.arrived
            request.cached_tokens = opened.cached_tokens
        sequence.phase = Phase.RUNNING
        if remote:
            self._fetch(sequence)
        return True

    def _fetch(self, sequence: sequences.Sequence) -> None:
        sequence.phase = Phase.FETCHING
        handle = sequence.request.handle
        fetch = sequence.request.fetch = self._parts.new_fetch(sequence)
        fetch.start(lambda result: self.inbox.put(FetchEnded(handle, result)))

    def _fetched(self, handle: int, result: Fetched | PrfaasError) -> None:
        request = self.requests.get(handle)
        if request is None:
            return
        (sequence,) = request.sequences
        request.fetch = None
        if sequence.phase is Phase.ENDING:  # cancelled meanwhile
            self._end(handle)
            return
        if isinstance(result, PrfaasError):
            self._end(handle)
            self._said.append(Failed(handle, 502, CODE_PREFILL_FAILED, str(result)))
            return
        sequence.computed_tokens = len(sequence.token_ids)
        sequence.phase = Phase.RUNNING
        self.cache.publish(sequence.held, sequence.chain, len(sequence.chain.hashes))
        request.prefill_seconds = result.done.prefill_seconds
        started = self._started(request, result)
        hidden = result.hidden.to(self._runner.model.device).unsqueeze(0)
        self._draw(self._begin(sequence, started), self._runner.model.logits(hidden))

    def _preempt(self, sequence: sequences.Sequence) -> None:
        """Take a sequence's memory; what it had computed may still be in the prefix cache when its turn comes."""
        self.cache.close(sequence.held)
        sequence.lease, sequence.computed_tokens, sequence.phase = None, 0, Phase.WAITING
        sequence.request.alone = False
        self._preemptions += 1

    def _work(self, batch: Batch[sequences.Sequence]) -> Work:
        ready = [one for one in batch.decodes if self.cache.grow(one.held, one.computed_tokens + 1)]
        return Work(batch.chunks, ready)

    def _compute(self, work: Work) -> None:
        if not (work.chunks or work.decodes):
            return
        try:
            done = self._runner.run(work)
        except CapacityError as error:
            self._abandon(work, error)
            return
        alone = len(work.chunks) == 1 and not work.decodes
        finished: list[tuple[sequences.Sequence, int]] = []
        for row, (sequence, tokens) in enumerate(work.chunks):
            self._prompt_tokens += tokens
            sequence.request.alone &= alone
            finished += self._advance(sequence, tokens, row)
        for row, sequence in enumerate(work.decodes, len(work.chunks)):
            finished += self._advance(sequence, 1, row)
        if finished:
            rows = [row for _, row in finished]
            # As many rows may still be others: a prompt with two choices beside a chunk that goes on.
            hidden = done.hidden if rows == list(range(len(done.hidden))) else done.hidden[rows]
            self._draw([sequence for sequence, _ in finished], self._runner.model.logits(hidden))

    def _advance(self, sequence: sequences.Sequence, tokens: int, row: int) -> list[tuple[sequences.Sequence, int]]:
        """Note that tokens of a sequence are computed; returns who draws from the hidden state in `row` now."""
        request = sequence.request
        sequence.computed_tokens += tokens
        self._keep(sequence)
        if sequence.remaining_tokens:
            return []
        if request.alone and not request.started:
            count = request.prompt_tokens - request.cached_tokens
            self._parts.profiler.observe(count, request.prefill_seconds, request.cached_tokens)
        if request.offer is not None:
            sequence.phase = Phase.DELIVERING
            request.offer.computed(request.prefill_seconds)
            return []
        if request.started:
            return [(sequence, row)]
        return [(choice, row) for choice in self._begin(sequence, self._started(request, None))]

    def _keep(self, sequence: sequences.Sequence) -> None:
        """Let the prefix cache have the blocks that are complete now, and the state where it is wanted."""
        blocks, rest = divmod(sequence.computed_tokens, sequence.chain.block_tokens)
        decoding = sequence.computed_tokens > sequence.request.prompt_tokens
        if decoding:
            if rest:
                return
            sequence.chain.extend(sequence.token_ids[sequence.chain.tokens : sequence.computed_tokens])
        self.cache.publish(sequence.held, sequence.chain, blocks)
        if rest == 0 and (decoding or sequence.computed_tokens in sequence.cuts):
            self.cache.checkpoint(sequence.held, sequence.chain.hashes, blocks, rolling=decoding)

    def _started(self, request: Request, fetched: Fetched | None) -> Started:
        return Started(
            handle=request.handle,
            cached_tokens=request.cached_tokens,
            kv_bytes=fetched.received_bytes if fetched else 0,
            prefill_seconds=request.prefill_seconds,
            transfer_seconds=fetched.transfer_seconds if fetched else 0.0,
            first_byte_seconds=fetched.done.first_byte_seconds if fetched else 0.0,
            queue_seconds=request.queue_seconds or 0.0,
        )

    def _begin(self, sequence: sequences.Sequence, started: Started) -> list[sequences.Sequence]:
        """Turn a computed prompt into a sequence for each choice. One that finds no memory waits for some."""
        request = sequence.request
        for index in range(1, request.generation.choices):
            choice = sequences.Sequence(request, index, sequence.token_ids[:], sequence.chain.copy())
            choice.lease = self.cache.fork(sequence.held, sequence.computed_tokens)
            if choice.lease is not None:
                choice.phase, choice.computed_tokens = Phase.RUNNING, sequence.computed_tokens
            request.sequences.append(choice)
        for choice in request.sequences:
            choice.sampler = self._voice.sampler(request, choice.index, request.grammar)
        request.started = True
        self._said.append(started)
        return request.sequences[:]

    def _draw(self, drawing: Sequence[sequences.Sequence], logits: torch.Tensor) -> None:
        """Draw a token for each sequence, tell the front, and end what ends; one row of logits may serve all."""
        self._generation_tokens += len(drawing)
        for sequence, heard in zip(drawing, self._voice.draw(drawing, logits), strict=True):
            self._say(sequence, heard)

    def _say(self, sequence: sequences.Sequence, heard: Heard) -> None:
        request = sequence.request
        if self.requests.get(request.handle) is None:  # another choice of it has just failed
            return
        self._said.append(heard.message)
        if heard.request_ends:
            self._end(request.handle)
        elif heard.sequence_ends:
            self._end_sequence(sequence)

    def _abandon(self, work: Work, error: CapacityError) -> None:
        """Fail the prompts of a step that found no memory; what decoded beside them is computed anew."""
        for request in {sequence.request.handle: sequence.request for sequence, _ in work.chunks}.values():
            if request.offer is not None:
                request.offer.fail(str(error))
                request.sequences[0].phase = Phase.ENDING  # its frames may still be on their way out
            else:
                self._said.append(Failed(request.handle, 503, CODE_OVERLOADED, str(error)))
                self._end(request.handle)
        for sequence in work.decodes:
            if sequence.lease is not None:  # else another choice of its request was among the prompts
                self._preempt(sequence)

    def _end(self, handle: int) -> None:
        """Forget a request, and give its memory back as soon as no thread of a transfer uses it."""
        request = self.requests.get(handle)
        if request is None:
            return
        if request.fetch is not None:
            request.fetch.cancel()
            request.sequences[0].phase = Phase.ENDING
            return
        for sequence in request.sequences[:]:
            self._end_sequence(sequence)

    def _end_sequence(self, sequence: sequences.Sequence) -> None:
        request = sequence.request
        if sequence.lease is not None:
            self.cache.close(sequence.lease)
            sequence.lease = None
        request.sequences.remove(sequence)
        if not request.sequences:
            self.requests.remove(request.handle)

    def _measure(self) -> Gauges:
        counts = self.requests.counts()
        return Gauges(
            requests_running=counts[False, False],
            requests_waiting=counts[False, True],
            prefills_running=counts[True, False],
            prefills_waiting=counts[True, True],
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self._preemptions,
            decode_steps=self._decode_steps,
            decode_seconds=self._decode_seconds,
            role=self._role,
        )
