"""The plant: instances that prefill and decode, and links that their caches cross.

An instance prefills prompts one at a time; a decode step is shared among a batch. A prefill behind a link hands over
its cache chunk by chunk, so that the link works while the instance computes. An instance of the hub can do both,
whatever its present role, and its batch stands still while it prefills. One accelerator does either.

Transfers share a link equally. A transfer is on the link while bytes of it wait, whichever chunk they belong to. The
samples are those that the live system gets from its metrics: rates over a window. Delivery counts only the time in
which data waited.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from prfaas.capacity.system import HubPool
from prfaas.routing.links import LinkSample
from prfaas.simulate.events import EventQueue, FairShare
from prfaas.simulate.request import Request

Callback = Callable[[Request], None]
MBIT_BYTES = 1e6 / 8


class PrefillServer:
    """One instance: first come, first served. It calls `chunk` for every computed chunk but the last, then `done`."""

    def __init__(self, events: EventQueue, chunk: Callback, done: Callback):
        self._events = events
        self._chunk = chunk
        self._done = done
        self._queue: deque[Request] = deque()
        self._running: Request | None = None
        self._run = 0

    @property
    def waiting_prefills(self) -> int:
        return len(self._queue)

    @property
    def busy(self) -> bool:
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

    It calls `admitted` when a request enters the batch, where its first token is sampled; `done` when it got all its
    tokens; `prefilled` when this instance prefilled it itself.
    """

    def __init__(self, events: EventQueue, pool: HubPool, admitted: Callback, done: Callback, prefilled: Callback):
        self._pool = pool
        self._admitted = admitted
        self._done = done
        self._prefilled = prefilled
        self._queue: deque[Request] = deque()
        self._batch: FairShare[Request] = FairShare(events, self._tokens_per_second, self._end)
        self._prefills = PrefillServer(events, lambda _: None, self._end_prefill)

    @property
    def waiting_prefills(self) -> int:
        return self._prefills.waiting_prefills

    @property
    def generated_tokens(self) -> float:
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


class _Reading(NamedTuple):
    at_seconds: float
    sent_bytes: float
    busy_seconds: float


class _Rates(NamedTuple):
    """The rates between two readings. No delivery where no data waited."""

    traffic_mbps: float
    delivery_mbps: float | None
    busy_fraction: float

    @classmethod
    def between(cls, first: _Reading, last: _Reading) -> "_Rates":
        seconds = max(1e-9, last.at_seconds - first.at_seconds)
        sent_mbit = (last.sent_bytes - first.sent_bytes) / MBIT_BYTES
        busy_seconds = last.busy_seconds - first.busy_seconds
        delivery_mbps = sent_mbit / busy_seconds if busy_seconds > 0 else None
        return cls(sent_mbit / seconds, delivery_mbps, min(1.0, busy_seconds / seconds))


class SharedLink:
    """One link, in the direction to the hub."""

    def __init__(self, events: EventQueue, mbps: float, round_trip_seconds: float, arrived: Callback):
        self._events = events
        self.round_trip_seconds = round_trip_seconds
        self._mbps = mbps
        self._cut = False
        self.to_hub: FairShare[Request] = FairShare(events, self._bytes_per_second_each, arrived)
        self._readings = deque([_Reading(0.0, 0.0, 0.0)])

    @property
    def mbps(self) -> float:
        return 0.0 if self._cut else self._mbps

    @property
    def down(self) -> bool:
        return self._cut or self._mbps <= 0

    def set_mbps(self, mbps: float) -> None:
        """Carry so much from now on; 0: nothing."""
        self._mbps = mbps
        self._changed()

    def set_cut(self, cut: bool) -> None:
        """Cut the link, or mend it, whatever it would carry."""
        self._cut = cut
        self._changed()

    def sample(self, window_seconds: float, waiting_prefills: int) -> LinkSample:
        """Take a reading and return the sample that a scheduler would get now, with rates over a window."""
        now = self._events.now
        self._readings.append(_Reading(now, self.to_hub.served, self.to_hub.busy_seconds))
        while len(self._readings) > 2 and self._readings[1].at_seconds <= now - window_seconds:
            self._readings.popleft()
        window = _Rates.between(self._readings[0], self._readings[-1])
        latest = _Rates.between(self._readings[-2], self._readings[-1])
        return LinkSample(
            sampled_at_seconds=now,
            age_seconds=0.0,
            traffic_mbps=window.traffic_mbps,
            delivery_mbps=window.delivery_mbps,
            backlogged_fraction=window.busy_fraction,
            latest_delivery_mbps=latest.delivery_mbps,
            latest_backlogged_fraction=latest.busy_fraction,
            unsent_bytes=self.to_hub.unserved,
            waiting_prefills=float(waiting_prefills),
        )

    def _bytes_per_second_each(self, transfers: int) -> float:
        return 0.0 if self._cut else self._mbps * MBIT_BYTES / transfers

    def _changed(self) -> None:
        self.to_hub.rate_changed()
