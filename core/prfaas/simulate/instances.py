"""Instances: prompts are prefilled one at a time, and a decode step is shared among a batch.

A prefill behind a link hands over its cache chunk by chunk, so that the link works while it computes. An instance of
the hub does both, whatever its role asks for just now, and stands still for its batch while it prefills: one
accelerator does either.
"""

from collections import deque
from collections.abc import Callable

from prfaas.capacity.system import HubPool
from prfaas.simulate.events import Events
from prfaas.simulate.request import Request
from prfaas.simulate.sharing import FairShare

Told = Callable[[Request], None]


class PrefillServer:
    """One instance: first come, first served.

    Args:
        events: the run's clock.
        chunk: called with a prompt whenever a chunk of it, but the last, is computed.
        done: called with a prompt that is computed whole.

    """

    def __init__(self, events: Events, chunk: Told, done: Told):
        self._events = events
        self._chunk = chunk
        self._done = done
        self._queue: deque[Request] = deque()
        self._running: Request | None = None
        self._run = 0

    @property
    def waiting_prefills(self) -> int:
        """Prompts that wait for their turn."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether a prompt is being computed."""
        return self._running is not None

    def prefill(self, request: Request) -> None:
        """Take a prompt; its `prefill_seconds` and `chunk_ends` are set."""
        self._queue.append(request)
        if self._running is None:
            self._start()

    def withdraw(self, request: Request) -> None:
        """Forget a prompt, if it is here."""
        if self._running is request:
            self._start()
        elif request in self._queue:
            self._queue.remove(request)

    def _start(self) -> None:
        self._run += 1
        self._running = request = self._queue.popleft() if self._queue else None
        if request is None:
            return
        for share in request.chunk_ends:
            self._events.after(share * request.prefill_seconds, self._end_chunk, self._run)
        self._events.after(request.prefill_seconds, self._end, self._run)

    def _end_chunk(self, run: int) -> None:
        if run == self._run and self._running is not None:
            self._chunk(self._running)

    def _end(self, run: int) -> None:
        request = self._running
        if run == self._run and request is not None:
            self._start()
            self._done(request)


class HubServer:
    """One instance of the hub: a batch whose requests all get one token a step, a queue before it, and prefills.

    Args:
        events: the run's clock.
        pool: its batch and step time.
        admitted: called with a request that enters the batch, where its first token is sampled.
        done: called with a request that got all its tokens.
        prefilled: called with a request that this instance prefilled itself.

    """

    def __init__(self, events: Events, pool: HubPool, admitted: Told, done: Told, prefilled: Told):
        self._pool = pool
        self._admitted = admitted
        self._done = done
        self._prefilled = prefilled
        self._queue: deque[Request] = deque()
        self._batch: FairShare[Request] = FairShare(events, self._tokens_per_second, self._end)
        self._prefills = PrefillServer(events, lambda _: None, self._end_prefill)

    @property
    def waiting_prefills(self) -> int:
        """Prompts that wait for their turn."""
        return self._prefills.waiting_prefills

    @property
    def generated_tokens(self) -> float:
        """Tokens generated so far by all requests together."""
        return self._batch.served

    def prefill(self, request: Request) -> None:
        """Prefill a prompt on this instance; `prefilled` follows."""
        self._prefills.prefill(request)
        self._batch.rate_changed()

    def decode(self, request: Request) -> None:
        """Decode a request whose cache is here."""
        if len(self._batch) < self._pool.max_batch:
            self._admit(request)
        else:
            self._queue.append(request)

    def withdraw(self, request: Request) -> int:
        """Forget a request, if it is here, and return how many of its tokens were generated."""
        self._prefills.withdraw(request)
        if request in self._batch:
            left = self._batch.remove(request)
            self._fill()
            return max(0, int(request.output_left_tokens - left))
        self._batch.rate_changed()
        if request in self._queue:
            self._queue.remove(request)
        return 0

    def _tokens_per_second(self, _: int) -> float:
        return 0.0 if self._prefills.busy else 1.0 / self._pool.step_seconds

    def _admit(self, request: Request) -> None:
        self._batch.add(request, float(request.output_left_tokens))
        self._admitted(request)

    def _fill(self) -> None:
        while self._queue and len(self._batch) < self._pool.max_batch:
            self._admit(self._queue.popleft())

    def _end(self, request: Request) -> None:
        self._fill()
        self._done(request)

    def _end_prefill(self, request: Request) -> None:
        self._batch.rate_changed()
        self._prefilled(request)
