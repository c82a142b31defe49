"""The engine's step loop: take what arrived, ask the schedule, run the batch, hand out tokens.

It runs on one thread and never waits but when idle: other threads talk to it through `inbox`, and it talks to the front
through `answer`, which only queues.
"""

import queue
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from prfaas.errors import PrfaasError, RequestError
from prfaas.wire.engine import ALL_CHOICES, Cancel, Failed, Generate, Started, StartPrefill, ToFront, Tokens
from prfaas.wire.headers import CODE_OVERLOADED, CODE_PREFILL_FAILED
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.sampling import Draw, Drawn, draw
from prfaas_worker.engine.schedule import Limits, schedule
from prfaas_worker.engine.sequences import Choice, Phase, Request, Requests
from prfaas_worker.transfer.fetch import Fetch, Fetched
from prfaas_worker.transfer.offers import Offer


class Offered(NamedTuple):
    """A prefill was granted to another instance."""

    message: StartPrefill
    offer: Offer


class OfferEnded(NamedTuple):
    """It was delivered, cancelled, or expired."""

    handle: int


class FetchEnded(NamedTuple):
    """A fetch thread is done."""

    handle: int
    result: Fetched | PrfaasError


class Gauges(NamedTuple):
    """What the engine was busy with after its last step, and what it has done since its start."""

    requests_running: int = 0
    requests_waiting: int = 0
    prefills_running: int = 0
    prefills_waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


Inbox = queue.SimpleQueue[Generate | Cancel | Offered | OfferEnded | FetchEnded]
FetchFactory = Callable[[Request], Fetch]


class Engine:
    """Owns all requests. `new_fetch` prepares the fetch of a request whose prompt another instance prefills."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        max_waiting: int,
        new_fetch: FetchFactory,
        answer: Callable[[ToFront], None],
    ):
        self.inbox: Inbox = queue.SimpleQueue()
        self.requests = Requests()
        self.gauges = Gauges()
        self._runner = runner
        self._limits = limits
        self._max_waiting = max_waiting
        self._new_fetch = new_fetch
        self._answer = answer
        self._prompt_tokens = 0
        self._generation_tokens = 0

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
        """Do one step; with `wait` first wait until something arrives. Returns whether anything was to compute."""
        self._take(wait=wait)
        batch = schedule(self.requests.facts(), self._limits)
        for handle in batch.admit:
            self._admit(self.requests[handle])
        for chunk in batch.prefill:
            self._prefill(self.requests[chunk.handle], chunk.tokens)
        if batch.decode:
            self._decode([self.requests[handle] for handle in batch.decode])
        self.gauges = self._measure()
        return not batch.empty

    def _take(self, *, wait: bool) -> None:
        try:
            event = self.inbox.get(block=wait)
            while True:
                self._handle(event)
                event = self.inbox.get(block=False)
        except queue.Empty:
            return

    def _handle(self, event: Generate | Cancel | Offered | OfferEnded | FetchEnded) -> None:
        match event:
            case Generate():
                self._arrive(event)
            case Cancel():
                self._cancel(event)
            case Offered(message, offer):
                self.requests.add(Request(message.handle, message.token_ids, offer=offer))
            case OfferEnded(handle):
                self.requests.remove(handle)
            case FetchEnded(handle, result):
                self._fetched(handle, result)

    def _arrive(self, message: Generate) -> None:
        if len(self.requests.in_phase(Phase.WAITING, offered=False)) >= self._max_waiting:
            text = f"{self._max_waiting} requests are waiting already; try another instance, or later"
            self._answer(Failed(message.handle, 503, CODE_OVERLOADED, text))
        else:
            self.requests.add(Request(message.handle, message.token_ids, generate=message))

    def _cancel(self, message: Cancel) -> None:
        request = self.requests.get(message.handle)
        if request is None:
            return
        if message.choice != ALL_CHOICES:
            request.choices = [choice for choice in request.choices if choice.index != message.choice]
        if message.choice == ALL_CHOICES or not request.choices:
            self.requests.remove(message.handle)
            if request.fetch is not None:
                request.fetch.cancel()

    def _admit(self, request: Request) -> None:
        more_tokens = request.generate.max_tokens if request.generate else 0
        request.cache = self._runner.reserve(len(request.token_ids), more_tokens)
        if request.generate is None or not request.generate.prefill_url:
            request.phase = Phase.PREFILLING
            return
        request.phase = Phase.FETCHING
        request.fetch = self._new_fetch(request)
        handle = request.handle
        request.fetch.start(lambda result: self.inbox.put(FetchEnded(handle, result)))

    def _fetched(self, handle: int, result: Fetched | PrfaasError) -> None:
        request = self.requests.get(handle)
        if request is None:  # cancelled meanwhile
            return
        request.fetch = None
        if isinstance(result, PrfaasError):
            self.requests.remove(handle)
            self._answer(Failed(handle, 502, CODE_PREFILL_FAILED, str(result)))
            return
        done = result.done
        times = (done.prefill_seconds, result.transfer_seconds, done.first_byte_seconds)
        self._begin(request, result.hidden, Started(handle, 0, result.received_bytes, *times))

    def _prefill(self, request: Request, tokens: int) -> None:
        try:
            hidden = self._runner.prefill(request, tokens)
        except RequestError as error:
            self._refuse(request, error)
            return
        self._prompt_tokens += tokens
        if request.remaining_tokens:
            return
        if request.offer is not None:
            request.phase = Phase.DELIVERING
            request.offer.computed(request.prefill_seconds)
        else:
            self._begin(request, hidden, Started(request.handle, 0, 0, request.prefill_seconds, 0.0, 0.0))

    def _refuse(self, request: Request, error: RequestError) -> None:
        """End a request that the model cannot run."""
        self.requests.remove(request.handle)
        if request.offer is not None:
            request.offer.fail(str(error))
        else:
            self._answer(Failed(request.handle, error.status, error.code, str(error)))

    def _begin(self, request: Request, hidden: torch.Tensor, started: Started) -> None:
        """Draw the first token of every choice from the prompt's hidden state."""
        generate, cache = request.generation, request.admitted_cache
        logits = self._runner.model.logits(hidden).expand(generate.choices, -1)
        caches = [cache, *(self._runner.fork(cache) for _ in range(generate.choices - 1))]
        request.cache, request.phase = None, Phase.DECODING
        request.choices = [Choice(index, cache) for index, cache in enumerate(caches)]
        self._answer(started)
        self._draw([(request, choice) for choice in request.choices], logits)

    def _decode(self, requests: Sequence[Request]) -> None:
        running = [(request, choice) for request in requests for choice in request.choices]
        self._draw(running, self._runner.decode([choice for _, choice in running]))

    def _draw(self, running: Sequence[tuple[Request, Choice]], logits: torch.Tensor) -> None:
        draws = [
            Draw(generate.sampling, choice.index, choice.cache.length, generate.logprobs)
            for generate, choice in ((request.generation, choice) for request, choice in running)
        ]
        for (request, choice), drawn in zip(running, draw(logits, draws), strict=True):
            self._hand_out(request, choice, drawn)

    def _hand_out(self, request: Request, choice: Choice, drawn: Drawn) -> None:
        """Tell the front of a choice's new token, and end the choice where it ends."""
        choice.last_token = drawn.token
        choice.generated += 1
        self._generation_tokens += 1
        stopped = drawn.token in self._runner.model.eos_token_ids
        ended = "stop" if stopped else "length" if choice.generated == request.generation.max_tokens else None
        token_ids = [] if stopped else [drawn.token]
        logprobs = [drawn.logprob] if drawn.logprob is not None and not stopped else []
        self._answer(Tokens(request.handle, choice.index, token_ids, logprobs, ended))
        if ended:
            request.choices.remove(choice)
            if not request.choices:
                self.requests.remove(request.handle)

    def _measure(self) -> Gauges:
        busy = (Phase.FETCHING, Phase.PREFILLING, Phase.DECODING, Phase.DELIVERING)
        count = self.requests.in_phase
        return Gauges(
            requests_running=len(count(*busy, offered=False)),
            requests_waiting=len(count(Phase.WAITING, offered=False)),
            prefills_running=len(count(*busy, offered=True)),
            prefills_waiting=len(count(Phase.WAITING, offered=True)),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )
