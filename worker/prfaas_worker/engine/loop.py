"""The engine's step loop: take what arrived, ask the schedule, run the batch, hand out tokens.

It runs on one thread and never waits but when idle: other threads talk to it through `inbox`, and it talks to the front
through `answer`, which only queues, once a step.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

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
    StartPrefix,
    ToFront,
)
from prfaas.wire.headers import CODE_OVERLOADED, CODE_PREFILL_FAILED
from prfaas.wire.prefill import PrefillRequest, PrefixRequest
from prfaas_worker.engine import sequences
from prfaas_worker.engine.events import End, Event, FetchEnded, Offered, OfferEnded, Prepared
from prfaas_worker.engine.gauges import Gauges
from prfaas_worker.engine.memory import give_back, keep
from prfaas_worker.engine.others import Others
from prfaas_worker.engine.parts import Parts
from prfaas_worker.engine.preparing import Preparing
from prfaas_worker.engine.runner import Work
from prfaas_worker.engine.sampling import Outputs
from prfaas_worker.engine.schedule import BUDGETS, Batch, schedule
from prfaas_worker.engine.sequences import Phase, Request, Requests
from prfaas_worker.engine.voice import Heard, Voice, failure, started
from prfaas_worker.transfer.fetch import Fetched

KEEP_SECONDS: Final = 3.0
"""Time at an orderly end for what a restart can use of the cache."""
_LAST_STEP_SECONDS: Final = 1.0


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
        self._others = Others(parts, self.inbox.put)
        self._said: list[ToFront] = []
        self._max_waiting = max_waiting
        self._end_at: float | None = None
        self._kept = threading.Event()

    def offer_ended(self, handle: int) -> None:
        """Have a prefill for another instance forgotten; called from any thread."""
        self.inbox.put(OfferEnded(handle))

    def end(self, seconds: float = KEEP_SECONDS) -> bool:
        """Have `run` return once the cache's tiers have what a restart can use, or so many seconds are over.

        Waits for that, but not much longer, and tells whether it was done; called from any other thread, again with 0
        to cut it short. Whenever the process goes, the files that it leaves are whole.
        """
        self._end_at = time.monotonic() + seconds
        self.inbox.put(End())
        return self._kept.wait(seconds + _LAST_STEP_SECONDS)

    def run(self) -> None:
        """Step until `end` is called."""
        idle = True
        while self._end_at is None:
            idle = not self.step(wait=idle)
        self.cache.flush(lambda: (self._end_at or 0.0) - time.monotonic())
        self._kept.set()

    @torch.inference_mode()
    def step(self, *, wait: bool) -> bool:
        """Do one step; with `wait` first wait until something arrives. Returns whether anything was to do."""
        self._take(wait=wait)
        began = time.monotonic()
        batch = schedule(self.requests.facts(self.cache), BUDGETS[self.gauges.role])
        for sequence in batch.preempt:
            self._preempt(sequence)
        for sequence in batch.admit:
            if not self._admit(sequence):
                break
        work = self._work(batch)
        self._compute(work)
        if work.decodes and not work.chunks:
            self.gauges = self.gauges.plus(decode_steps=1, decode_seconds=time.monotonic() - began)
        self._tell()
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
                prompt = message.request
                request = Request(message.handle, len(prompt.token_ids), asked=message, offer=offer)
                request.prefix_url, request.prefix_cluster = prompt.prefix_url, prompt.prefix_cluster
                self._add(request, prompt)
            case StartPrefix(handle, prompt):
                self._add(Request(handle, len(prompt.token_ids), asked=event), prompt)
            case OfferEnded(handle):
                self._end(handle)
            case FetchEnded(handle, result):
                self._fetched(handle, result)
            case Prepared():
                self._prepared(event)
            case ResetCache(handle):
                self._said.append(CacheReset(handle, self.cache.reset()))
            case SetRole(handle, role):
                self.gauges = self.gauges._replace(role=role)
                self._said.append(RoleSet(handle, role))
            case End():
                pass  # wakes a loop that waits; `run` looks for itself

    def _arrive(self, message: Generate) -> None:
        if self.requests.counts()[False, True] >= self._max_waiting:
            text = f"{self._max_waiting} requests are waiting already; try another instance, or later"
            self._said.append(Failed(message.handle, 503, CODE_OVERLOADED, text))
            return
        request = Request(message.handle, len(message.token_ids), generate=message)
        request.prefix_url = "" if message.prefill_url else message.prefix_url
        request.prefix_cluster = message.prefix_cluster
        try:
            self._voice.check(request)
        except RequestError as error:
            self._said.append(failure(message.handle, error))
            return
        self._add(request, message)

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
            self._ready(request)

    def _add(self, request: Request, prompt: Generate | PrefillRequest | PrefixRequest) -> None:
        generate = request.generate
        token_ids = prompt.token_ids + (generate.generated if generate else [])
        chain = BlockChain(chain_root(self._runner.model.fingerprint, prompt.cache_salt))
        chain.extend(token_ids)
        first = generate.choice if generate else 0
        request.sequences.append(sequences.Sequence(request, first, token_ids, chain))
        self.requests.add(request)
        self._preparing.begin(request)
        if not request.awaits:
            self._ready(request)

    def _ready(self, request: Request) -> None:
        """Let a request be admitted from now on; one that only wants what is cached has it, or not, at once."""
        (sequence,) = request.sequences
        sequence.phase = Phase.WAITING
        if isinstance(request.asked, StartPrefix):
            self._said.append(self._others.give(sequence, self.requests.facts(self.cache)))
            if sequence.lease is None:
                self._end(request.handle)

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
        if self._others.joins(sequence):
            return True
        request, count = sequence.request, len(sequence.token_ids)
        opened = self.cache.open(sequence.chain.hashes, count, count - 1, use_state=not request.is_remote)
        if opened is None:
            return False
        sequence.lease, sequence.computed_tokens = opened.lease, opened.cached_tokens
        sequence.cuts, sequence.is_exact = opened.checkpoints, True
        if request.queue_seconds is None:
            request.queue_seconds = time.monotonic() - request.arrived
            request.cached_tokens = opened.cached_tokens
        sequence.phase = Phase.RUNNING
        self._others.begin(sequence)
        return True

    def _fetched(self, handle: int, result: Fetched | PrfaasError) -> None:
        request = self.requests.get(handle)
        if request is None:
            return
        (sequence,) = request.sequences
        transfer_id = request.fetch.transfer_id if request.fetch else ""
        request.fetch = None
        prompt = self._others.came(sequence, result)
        if sequence.phase is Phase.ENDING:  # cancelled meanwhile
            self._end(handle)
        elif isinstance(prompt, PrfaasError):
            self._end(handle)
            self._said.append(Failed(handle, 502, CODE_PREFILL_FAILED, str(prompt), transfer_id))
        elif prompt is not None:
            self._prefilled(sequence, prompt)

    def _prefilled(self, sequence: sequences.Sequence, result: Fetched) -> None:
        """Draw the first tokens behind a prompt that another instance prefilled."""
        sequence.computed_tokens = len(sequence.token_ids)
        sequence.phase, sequence.is_exact = Phase.RUNNING, result.is_exact
        keep(self.cache, sequence)
        sequence.request.prefill_seconds = result.done.prefill_seconds
        hidden = result.hidden.to(self._runner.model.device).unsqueeze(0)
        self._draw(self._begin(sequence, result), self._runner.model.logits(hidden))

    def _preempt(self, sequence: sequences.Sequence) -> None:
        """Take a sequence's memory; what it had computed may still be in the prefix cache when its turn comes."""
        give_back(self.cache, sequence)
        sequence.request.alone = False
        self.gauges = self.gauges.plus(preemptions=1)

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
        self.gauges = self.gauges.plus(prompt_tokens=sum(tokens for _, tokens in work.chunks))
        for row, (sequence, tokens) in enumerate(work.chunks):
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
        keep(self.cache, sequence)
        if sequence.remaining_tokens:
            return []
        if request.alone and not request.started:
            count = len(sequence.token_ids) - request.cached_tokens
            self._parts.profiler.observe(count, request.prefill_seconds, request.cached_tokens)
        if request.offer is not None:
            sequence.phase = Phase.DELIVERING
            request.offer.computed(request.prefill_seconds, is_exact=sequence.is_exact)
            return []
        if request.started:
            return [(sequence, row)]
        return [(choice, row) for choice in self._begin(sequence)]

    def _begin(self, sequence: sequences.Sequence, fetched: Fetched | None = None) -> list[sequences.Sequence]:
        """Turn a computed prompt into a sequence for each choice. One that finds no memory waits for some."""
        request = sequence.request
        first = request.generation.choice
        for index in range(first + 1, first + request.generation.choices):
            choice = sequences.Sequence(request, index, sequence.token_ids[:], sequence.chain.copy())
            choice.lease = self.cache.fork(sequence.held, sequence.computed_tokens)
            if choice.lease is not None:
                choice.phase, choice.computed_tokens = Phase.RUNNING, sequence.computed_tokens
                choice.is_exact = sequence.is_exact
            request.sequences.append(choice)
        try:
            for choice in request.sequences:
                choice.sampler = self._voice.sampler(request, choice.index, request.grammar)
        except RequestError as error:
            self._said.append(failure(request.handle, error))
            self._end(request.handle)
            return []
        request.started = True
        self._said.append(started(request, fetched))
        return request.sequences[:]

    def _draw(self, drawing: Sequence[sequences.Sequence], logits: torch.Tensor) -> None:
        """Draw a token for each sequence, tell the front, and end what ends; one row of logits may serve all."""
        if not drawing:
            return
        self.gauges = self.gauges.plus(generation_tokens=len(drawing))
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

    def _tell(self) -> None:
        """Let others know what this step changed."""
        self.gauges = self._others.counted(self.gauges.now(self.requests.counts()))
        if events := self._parts.events:
            self._said.append(KvEvents(events[:]))
            events.clear()
        if self._said:
            self._parts.answer(self._said)
            self._said = []
