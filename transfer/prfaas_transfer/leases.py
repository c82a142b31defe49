"""Leases of the caches that this instance offers to others, from their announcement until they are delivered or ended.

Until its destination connects, an offer lives `ANNOUNCED_SECONDS` from its latest part on. While connected it lives for
as long as the destination shows life. After a connection broke it lives for `RESUME_SECONDS`, in which the destination
may reconnect. ABORT and an end on this side end it at once. Every way an offer ends passes through `end`, once. Its
frames view the cache's own pages, so `on_end` waits until no connection sends them any more.
"""

import hmac
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from prfaas.errors import CapacityError, PeerError, ProtocolError
from prfaas.util import Deadline
from prfaas.wire.engine import TransferSubject
from prfaas.wire.frames import Address
from prfaas.wire.transfer import Hello, Manifest
from prfaas_transfer.net import DataStream
from prfaas_transfer.send import Frame, SendState
from prfaas_transfer.transfer_log import TransferCounters, TransferLog, TransferOutcome

LEASE_SECONDS = 10
ANNOUNCED_SECONDS = 120.0
"""A destination may have a queue before it connects; one that wants nothing declines. Of a cache that ends sooner it
would compute the prompt itself, which makes an overloaded queue still longer."""
RESUME_SECONDS = 5.0
DELIVERY_FLOOR_BYTES_PER_SECOND = 125_000
"""A destination that takes less on average after the computation is not worth its pages: 1 Mbit/s."""
REMEMBERED_ENDS: Final = 1024
"""A destination that comes later than so many ends waits as for a transfer that nobody knows; so many unknown ones may
be declined."""
MAX_AWAITED = 192
"""Offers whose begin is awaited, each on a connection of the data port: less than half of those. A buyer has no more
than the prefills that it may have open."""
UNWANTED = "the destination does not want it any more"
DELIVERY_GRACE_SECONDS = 30.0


class NoRoomError(PeerError):
    """As many destinations wait as may: another one may ask later."""


class Offer:
    """One cache for another instance. The engine's thread fills it, the connections' threads empty it."""

    def __init__(
        self, subject: TransferSubject, manifest: Manifest, token: str, clock: Callable[[], float] = time.monotonic
    ):
        self.subject = subject
        self.manifest = manifest
        self.token = token
        self.send_state = SendState(manifest.address, self.note_life)
        self.log = TransferLog("send", subject, manifest.transfer_id)
        self.lease = Deadline(ANNOUNCED_SECONDS, clock)
        self._delivery = Deadline(math.inf, clock)  # Limit for a destination that takes only a byte now and then.
        self.streams: dict[int, DataStream] = {}
        self.ended = False
        self._begun = threading.Event()
        self._lock = threading.Lock()
        self._held: list[Frame] | None = []  # Until a destination says which rows it lacks.
        self._finished: tuple[float, bool, tuple[str, ...] | None] | None = None

    def note_life(self) -> None:
        self.lease.renew(LEASE_SECONDS if self.is_bound else ANNOUNCED_SECONDS)

    @property
    def is_bound(self) -> bool:
        """True once a destination has come, whose cluster it belongs to from then on."""
        return self._held is None

    def begin(self) -> None:
        """Note that the prompt begins to be computed, or that nothing more will come: nobody awaits it any more."""
        self._begun.set()

    def await_begin(self, seconds: float) -> bool:
        """Wait until the prompt begins to be computed; False after so many seconds."""
        return self._begun.wait(seconds)

    def note_awaited(self) -> None:
        """Note a sign of life of a destination that awaits the prompt, which may be queued for longer than a lease."""
        if not (self.is_bound or self._begun.is_set()):
            self.note_life()

    def put(self, frame: Frame) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(frame)
                return
        self._put(frame)

    def start_at(self, peer: str, start_token: int) -> None:
        """Begin to send: the destination, of this cluster, has the rows before `start_token`. Raises ProtocolError if
        there is nothing behind that token."""
        with self._lock:
            if self._held is None:
                return
            if not 0 <= start_token < self.manifest.end_token:
                raise ProtocolError(f"the destination asks from token {start_token} of {self.manifest.end_token}")
            self.subject = self.subject._replace(peer=peer)
            self.manifest = msgspec.structs.replace(self.manifest, start_token=start_token)
            # Under the lock, so that a frame that is put meanwhile comes behind these.
            for frame in self._held:
                self._put(frame)
            self._held = None
            if self._finished is not None:
                self._finish(*self._finished)

    def finish_computing(
        self, prefill_seconds: float, *, is_exact: bool = True, origins: tuple[str, ...] | None = None
    ) -> None:
        """Note that every frame is queued; not `is_exact` if it was computed on a cache that passed a lossy codec.
        `origins` are the other clusters whose bytes it stands on; None: nobody knows."""
        self.log.mark("computed")
        self.begin()
        self.send_state.note_computed()
        with self._lock:
            if self._held is not None:
                self._finished = prefill_seconds, is_exact, origins
                return
        self._finish(prefill_seconds, is_exact, origins)

    def _put(self, frame: Frame) -> None:
        """Queue what the destination lacks of a frame."""
        start_token = self.manifest.start_token
        first, _ = self.manifest.groups[frame.header.group].rows_span(start_token, start_token)
        if (rest := frame.rest(first)) is not None:
            self.send_state.put(rest)

    def _finish(self, prefill_seconds: float, is_exact: bool, origins: tuple[str, ...] | None) -> None:
        self._delivery.renew(DELIVERY_GRACE_SECONDS + self.manifest.nbytes / DELIVERY_FLOOR_BYTES_PER_SECOND)
        self.send_state.finish(prefill_seconds, is_exact=is_exact, origins=origins)

    def fail(self, message: str) -> None:
        """Note that the prefill failed; its connections, or its lease, end it."""
        self.send_state.fail(message)
        self.begin()

    @property
    def is_late(self) -> bool:
        return self._delivery.is_over or self.lease.is_over


def too_many(capacity: int, caller: str = "") -> CapacityError:
    """Return the refusal of a further offer, in all or of a caller."""
    of = f" of {caller}" if caller else ""
    return CapacityError(f"{capacity} prefills{of} are queued or undelivered already; try another instance")


class Offers:
    """All offers of this instance, at most `capacity` open ones. `on_end` is called with the handle, from any thread,
    once an offer ended. `counters` are those of all transfers."""

    def __init__(
        self,
        capacity: int,
        on_end: Callable[[int], None] = lambda _handle: None,
        counters: TransferCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._capacity = capacity
        self._lock = threading.Lock()
        self._announced = threading.Condition(self._lock)
        self._offers: dict[tuple[str, int], Offer] = {}  # By transfer and rank.
        self._ended: deque[tuple[str, int]] = deque(maxlen=REMEMBERED_ENDS)
        self._declined: dict[tuple[str, int], tuple[int, str]] = {}  # Epochs and tokens, of what is not announced yet.
        self._awaited: set[Offer] = set()
        self.counters = counters or TransferCounters()
        self._on_end = on_end
        self._clock = clock

    def announce(self, subject: TransferSubject, manifest: Manifest, token: str) -> Offer:
        """Open an offer, whose destination says in HELLO what it lacks. Raises
        CapacityError if too many are open, ProtocolError if this transfer was announced before for this rank, and
        PeerError if its destination has declined it."""
        offer = self._add(Offer(subject, manifest, token, self._clock))
        offer.log.mark("announced", tokens=manifest.end_token)
        return offer

    def _require_wanted(self, offer: Offer) -> None:
        place = _place(offer.manifest)
        epoch, token = self._declined.get(place, (-1, ""))
        if epoch == offer.manifest.epoch and hmac.compare_digest(offer.token.encode(), token.encode()):
            del self._declined[place]
            self._ended.append(place)
            raise PeerError(f"transfer {offer.manifest.transfer_id} is over: {UNWANTED}")

    def _add(self, offer: Offer) -> Offer:
        place = _place(offer.manifest)
        with self._lock:
            self._require_wanted(offer)
            if len(self._offers) >= self._capacity:
                self._ended.append(place)  # else a destination that comes for it would wait in vain
                raise too_many(self._capacity)
            if place in self._offers:
                raise ProtocolError(f"transfer {offer.manifest.transfer_id} was announced before")
            self._offers[place] = offer
            self._announced.notify_all()
        return offer

    def await_announced(self, transfer_id: str, rank: int, seconds: float) -> bool:
        """Wait until a transfer is open for a destination's rank, or over; False after so many seconds."""
        place = transfer_id, rank
        with self._lock:
            return self._announced.wait_for(lambda: place in self._offers or place in self._ended, seconds)

    def is_open(self, transfer_id: str, rank: int) -> bool:
        with self._lock:
            return (transfer_id, rank) in self._offers

    def connect(self, address: Address, hello: Hello, peer: str, stream: DataStream) -> Offer:
        """Bind a connection to the offer of its token; `disconnect` must follow. Raises PeerError for a wrong token,
        epoch or cluster, with one answer for all: strangers learn nothing; also for an impossible report of frames,
        and to who declines: the offer is over then, or as soon as it is announced."""
        with self._lock:
            if hello.declines:
                self._note_declined(address, hello)
            offer = self._find(address, hello, peer)
            stale = [] if hello.declines else _bind(offer, hello, peer, stream)
        if hello.declines:
            self.end(offer, "cancelled", UNWANTED)
            raise PeerError(f"transfer {address.transfer_id} is over: {UNWANTED}")
        for other in stale:
            other.shutdown()
        offer.log.mark("connected", connection=hello.connection)
        offer.log.record_break(len(set(hello.broken)), f"connection {hello.connection} takes over")
        return offer

    @contextmanager
    def awaited(self, address: Address, hello: Hello, peer: str) -> Iterator[Offer]:
        """Give the offer whose begin a destination awaits meanwhile, which is bound to nobody by that. Raises as
        `connect`, and NoRoomError if it has not begun and is awaited already, or too many are."""
        with self._lock:
            offer = self._find(address, hello, peer)
            is_full = offer in self._awaited or len(self._awaited) >= MAX_AWAITED
            if is_full and not offer.await_begin(0):
                raise NoRoomError(f"transfer {address.transfer_id} is awaited already, or {MAX_AWAITED} others are")
            self._awaited.add(offer)
        try:
            yield offer
        finally:
            with self._lock:
                self._awaited.discard(offer)

    def _note_declined(self, address: Address, hello: Hello) -> None:
        place = address.transfer_id, hello.rank
        if place not in self._offers and place not in self._ended:
            self._declined[place] = address.epoch, hello.token
            if len(self._declined) > REMEMBERED_ENDS:
                del self._declined[next(iter(self._declined))]

    def _find(self, address: Address, hello: Hello, peer: str) -> Offer:
        offer = self._offers.get((address.transfer_id, hello.rank))
        # As bytes: of text compare_digest takes ASCII alone, and a stranger may have chosen this.
        known = offer is not None and hmac.compare_digest(offer.token.encode(), hello.token.encode())
        if offer is None or not known or offer.manifest.epoch != address.epoch:
            raise _unknown(address)
        # An offer has no peer before its first HELLO; that one binds it (`start_at`).
        if offer.is_bound and offer.subject.peer != peer:
            raise _unknown(address)
        return offer

    def disconnect(self, offer: Offer, connection: int) -> None:
        with self._lock:
            del offer.streams[connection]
            if not offer.streams:
                offer.lease.renew(RESUME_SECONDS)
            released = offer.ended and not offer.streams
        if released:
            self._on_end(offer.subject.handle)

    def end(self, offer: Offer, outcome: TransferOutcome, reason: str = "") -> None:
        """End an offer; `reason` is empty after a delivery or an earlier failure. Only the first call counts."""
        with self._lock:
            if self._offers.pop(_place(offer.manifest), None) is None:
                return
            offer.ended = True
            self._ended.append(_place(offer.manifest))
            self._announced.notify_all()
            released = not offer.streams
        # From here on without the lock: `on_end` may take one under which offers are opened (the mover's `OpenOffers`).
        reason = "" if outcome == "delivered" else offer.send_state.failure or reason
        self.counters.count_end(offer.log.end(outcome, reason, offer.send_state.totals))
        offer.fail(f"the prefill was {outcome}")  # its connections send ABORT and end
        if released:
            self._on_end(offer.subject.handle)

    def expire(self) -> None:
        """End offers whose destination did not connect, reconnect, or show life in time."""
        with self._lock:
            late = [offer for offer in self._offers.values() if offer.is_late]
        for offer in late:
            if offer.is_bound:
                self.end(offer, "failed", "the destination was silent or slow for too long, or did not reconnect")
            else:
                self.end(offer, "expired", f"no destination connected within {ANNOUNCED_SECONDS:g} s")


def _place(manifest: Manifest) -> tuple[str, int]:
    return manifest.transfer_id, manifest.rank


def _bind(offer: Offer, hello: Hello, peer: str, stream: DataStream) -> list[DataStream]:
    """Bind a connection to an offer; return those that it takes over from."""
    offer.start_at(peer, hello.start_token)
    offer.send_state.queue.connect(hello.connection, hello.broken, hello.received)
    offer.note_life()
    stale = [other for number, other in offer.streams.items() if number in hello.broken]
    offer.streams[hello.connection] = stream
    return stale


def _unknown(address: Address) -> PeerError:
    """One answer for every reason, so that strangers learn nothing."""
    return PeerError(f"no prefill {address.transfer_id} with this token and epoch: ended, expired or foreign")
