"""The mover's process: `python -m prfaas_transfer.mover SOCKET EVENTS MEMORY OPTIONS`, descriptors and JSON.

Its engine starts it and tells it what to do (messages.py). It ends with the engine: when the socket closes.
"""

import itertools
import logging
import mmap
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import msgspec

from prfaas.errors import PrfaasError, UnreachableError
from prfaas.telemetry.logs import configure_logs
from prfaas.wire.engine import (
    AskStats,
    EgressSet,
    SetEgress,
    Stats,
    TransferEnded,
    TransferOutcome,
    TransferSubject,
    read_body,
    with_length,
)
from prfaas.wire.frames import Address, FrameHeader, Kind
from prfaas.wire.transfer import Done, Manifest
from prfaas_transfer.cache import CacheLayout, EngineCache, MappedMemory, SharedPlace
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.events.engine_socket import hear, hear_at
from prfaas_transfer.events.log import EventLog
from prfaas_transfer.leases import Offer, Offers
from prfaas_transfer.limits import Traffic, traffic_of
from prfaas_transfer.mover.messages import (
    MAX_REASON,
    NO_MEMORY_STATUS,
    AnnounceCache,
    AwaitCache,
    BegunCache,
    CacheSlice,
    CancelFetch,
    ComputedParts,
    CopyDone,
    CopyPart,
    DeclineCache,
    EndedFetch,
    EndedOffer,
    FailedCache,
    FetchCache,
    Fetched,
    FinishCache,
    MoverCommand,
    MoverOptions,
    MoverReady,
    MoverRefused,
    MoverReport,
    decode_for_mover,
    encode,
)
from prfaas_transfer.mover.metrics import LOOPBACK, MoverMetrics, serve
from prfaas_transfer.mover.shared import Copies, SharedMemory, Slots
from prfaas_transfer.pull import Connections, FetchContext, Pull, SourceAddress, await_begin, decline, open_pull
from prfaas_transfer.send import Frame, Payload
from prfaas_transfer.transfer_log import TransferCounters, TransferLog, TransferTotals, outcome_of

log = logging.getLogger("prfaas.mover")

OfferCommand = AnnounceCache | ComputedParts | FinishCache | FailedCache


FULL: Final = "the mover has no room for another thread ({}): raise the container's limit on memory or processes"


class ReportOutbox:
    """Writes reports to the engine, from its own thread: whoever reads the engine's messages never waits."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._queue: queue.SimpleQueue[MoverReport] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine-write", daemon=True).start()

    def put(self, report: MoverReport) -> None:
        self._queue.put(report)

    def _run(self) -> None:
        while True:
            data = with_length(encode(self._queue.get()))
            while not self._queue.empty():
                data += with_length(encode(self._queue.get()))
            try:
                self._sock.sendall(data)
            except OSError:
                log.debug("the engine is gone")
                return


class OpenOffers:
    """The open offers, by the engine's names. `release` may come from any thread, all else comes from one."""

    def __init__(self, layout: CacheLayout, memory: EngineCache, say: Callable[[MoverReport], None]):
        self._layout, self._memory, self._say = layout, memory, say
        self._open: dict[str, Offer] = {}
        self._places: dict[str, SharedPlace] = {}
        self._key_of: dict[int, str] = {}  # By the number that an offer has here as its handle.
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def handle(self, message: OfferCommand, offers: Offers) -> None:
        if isinstance(message, AnnounceCache):
            self._announce(message, offers)
        elif (offer := self._open.get(message.key)) is not None:
            self._go_on(offer, message, offers)

    def release(self, handle: int) -> None:
        """Tell the engine that nothing reads an offer's cache any more."""
        with self._lock:
            key = self._key_of.pop(handle)
            self._open.pop(key, None)
            self._places.pop(key, None)
        self._say(EndedOffer(key))

    def _announce(self, message: AnnounceCache, offers: Offers) -> None:
        subject = TransferSubject(next(self._numbers), message.request_id, trace=message.trace)
        address = Address(message.transfer_id, message.epoch)
        manifest = _sliced(self._layout, message.slice).manifest(address, 0, message.end_token, message.prompt)
        try:
            with self._lock:  # a destination that waited may end the offer before it is noted here
                self._key_of[subject.handle] = message.key
                self._open[message.key] = offers.announce(subject, manifest, message.token)
        except PrfaasError as error:
            log.warning("cache of %s is not offered: %s", subject.request_id, error)
            self.release(subject.handle)

    def _go_on(self, offer: Offer, message: ComputedParts | FinishCache | FailedCache, offers: Offers) -> None:
        match message:
            case ComputedParts(_, parts, place):
                # Only before the first HELLO: one whose destination came and was lost has RESUME_SECONDS, however long
                # the prompt.
                if not offer.is_bound:
                    offer.note_life()  # a destination may come until a while after the last part
                offer.begin()
                if place is not None:
                    self._places[message.key] = place
                self._put(message.key, offer, parts)
            case FinishCache(_, prefill_seconds, is_exact, origins):
                offer.finish_computing(prefill_seconds, is_exact=is_exact, origins=origins)
            case FailedCache(_, reason, at_once):
                offer.fail(reason)
                if at_once:
                    offers.end(offer, "cancelled")

    def _put(self, key: str, offer: Offer, parts: Sequence[CopyPart]) -> None:
        for part in parts:
            offer.put(self._frame(key, offer.manifest, part))

    def _frame(self, key: str, manifest: Manifest, part: CopyPart) -> Frame:
        group, place = manifest.groups[part.group], self._places.get(key)
        if part.tokens:
            items, kind = part.tokens // group.row_tokens, Kind.BLOCK
        else:
            items, kind = 1, Kind.STATE
        where = {"group": part.group, "layer": part.layer, "start_token": part.start_token, "tokens": part.tokens}
        header = FrameHeader(kind, manifest.address, items * group.nbytes, **where)
        memory = self._memory

        def load(header: FrameHeader, show_life: Callable[[], None]) -> AbstractContextManager[Payload]:
            return memory.load(key, group, header, place, show_life)

        return Frame(header, load, memory.held_bytes, group.tensors, items)


class Pulls:
    """All fetches under way, by the engine's names. Calls come from one thread; each fetch has its own threads."""

    def __init__(self, context: FetchContext, memory: EngineCache, say: Callable[[MoverReport], None]):
        self._context, self._memory, self._say = context, memory, say
        self._running: dict[str, Pull] = {}
        self._cancelled: dict[str, threading.Event] = {}  # By the transfer that is awaited.

    def fetch(self, message: FetchCache) -> None:
        """Start a fetch, which `cancel` finds from now on."""
        subject = TransferSubject(0, message.request_id, message.cluster, message.trace)
        record = TransferLog("receive", subject, message.transfer_id)
        address = Address(message.transfer_id, message.epoch)
        expected = _sliced(self._context.layout, message.slice).manifest(
            address, message.start_token, message.end_token, message.prompt
        )
        source = SourceAddress(message.host, message.port, message.cluster)
        cache = self._memory.cache(message.key, message.place)
        pull = open_pull(self._context, source, message.token, expected, cache, record.record_break)
        self._running[message.key] = pull
        try:
            threading.Thread(target=self._run, args=(message, pull, record), name="fetch", daemon=True).start()
        except RuntimeError as error:  # no thread is left, and this one serves all others
            del self._running[message.key]
            self._say(EndedFetch(message.key, FULL.format(error)))

    def cancel(self, key: str) -> None:
        if (running := self._running.get(key)) is not None:
            running.cancel()

    def begin_await(self, message: AwaitCache) -> None:
        """Start to wait for a source, until `begin_decline`; whatever ends the wait is reported."""
        cancelled = self._cancelled[message.transfer_id] = threading.Event()
        try:
            threading.Thread(target=self._await, args=(message, cancelled), name="await", daemon=True).start()
        except RuntimeError as error:
            self._end_await(message, str(error))

    def begin_decline(self, message: DeclineCache) -> None:
        if (cancelled := self._cancelled.get(message.transfer_id)) is not None:
            cancelled.set()
        try:
            threading.Thread(target=self.decline, args=(message,), name="decline", daemon=True).start()
        except RuntimeError as error:
            log.info("the source of %s keeps its cache for its lease: %s", message.request_id, error)

    def decline(self, message: FetchCache | DeclineCache) -> None:
        """Tell a source that its cache is not wanted; this waits for it."""
        source = SourceAddress(message.host, message.port, message.cluster)
        address = Address(message.transfer_id, message.epoch)
        rank = message.rank if isinstance(message, DeclineCache) else _sliced(self._context.layout, message.slice).rank
        try:
            decline(self._context.connections, source, message.token, address, rank)
        except PrfaasError as error:
            log.info("the source of %s keeps its cache for its lease: %s", message.request_id, error)

    def _await(self, message: AwaitCache, cancelled: threading.Event) -> None:
        source, reason = SourceAddress(message.host, message.port, message.cluster), ""
        address = Address(message.transfer_id, message.epoch)
        try:
            await_begin(self._context.connections, source, message.token, address, cancelled)
        except PrfaasError as error:
            reason = str(error)
        except Exception as error:  # a bug here must not leave the request waiting
            log.exception("await of %s", message.transfer_id)
            reason = repr(error)
        self._end_await(message, reason)

    def _end_await(self, message: AwaitCache, reason: str) -> None:
        if reason:
            log.info("the source of %s is awaited no longer: %s", message.request_id, reason)
        del self._cancelled[message.transfer_id]
        self._say(BegunCache(message.transfer_id))

    def _run(self, message: FetchCache, pull: Pull, record: TransferLog) -> None:
        """Run a fetch to its end, in its own thread."""
        key, reason, is_unreachable = message.key, "", False
        outcome: TransferOutcome = "delivered"
        done: Done | None = None
        try:
            pull.run()
            done = pull.state.ledger.require_whole()
        except PrfaasError as error:
            reason, outcome = str(error)[:MAX_REASON], outcome_of(error)
            is_unreachable = isinstance(error, UnreachableError)
        except Exception as error:  # a bug here must end this one request, never leave it waiting
            log.exception("fetch of %s", key)
            reason, outcome = repr(error)[:MAX_REASON], "failed"
        del self._running[key]
        state = pull.state
        totals = TransferTotals(state.ledger.received_bytes, state.seconds, state.codecs, done)
        if reason and pull.is_cancelled:
            outcome = "cancelled"
        self._context.counters.count_end(record.end(outcome, reason, totals))
        fetched = None
        if done is not None:
            fetched = Fetched(
                tokens=message.end_token,
                done=done,
                received_bytes=totals.payload_bytes,
                transfer_seconds=totals.flow_seconds,
                is_exact=state.ledger.is_exact and done.is_exact,
                transfer_id=message.transfer_id,
            )
        self._say(EndedFetch(key, reason, fetched, is_unreachable))
        if reason:
            self.decline(message)


class Mover:
    """All transfers of one engine process. Calls come from the thread that reads the engine's messages."""

    def __init__(self, options: MoverOptions, sock: socket.socket, memory: mmap.mmap, events: EventLog | None):
        outbox = ReportOutbox(sock)
        self.say = outbox.put
        self.traffic: Traffic = traffic_of(options, options.movers)
        engine_cache, self._copies = _engine_cache(options, memory, outbox.put)
        listener = listen(options.host, options.data_port)
        self.data_port: int = listener.getsockname()[1]
        layout = CacheLayout(options.fingerprint, options.groups, options.rank, options.ranks)
        self.metrics = MoverMetrics(options, self._stats)
        self.counters = TransferCounters(self._ended)
        self._open = OpenOffers(layout, engine_cache, outbox.put)
        self._offers = Offers(options.max_offers, self._open.release, self.counters)
        context = FetchContext(layout, Connections(self.traffic.auth), self.counters, self.traffic)
        self._pulls = Pulls(context, engine_cache, outbox.put)
        DataPort(listener, self._offers, self.traffic, options.patience_seconds, self._copies.catch_up, events)
        if options.metrics_port:
            first, port = options.mover == 0, options.metrics_port + options.mover
            others = range(port + 1, port + options.movers) if first else ()
            serve(options.host if first else LOOPBACK, port, self.metrics, others)

    def handle(self, message: MoverCommand) -> None:
        match message:
            case CopyDone():
                self._copies.finish(message)
            case FetchCache():
                self._pulls.fetch(message)
            case AwaitCache():
                self._pulls.begin_await(message)
            case CancelFetch(key):
                self._pulls.cancel(key)
            case DeclineCache():
                self._pulls.begin_decline(message)
            case AskStats(handle):
                self.say(msgspec.structs.replace(self._stats(), handle=handle))
            case SetEgress(handle, mbps):
                self.traffic.egress.set_mbps(mbps)
                self.say(EgressSet(handle, mbps))
            case _:
                self._open.handle(message, self._offers)

    def _ended(self, transfer: TransferEnded) -> None:
        self.metrics.transfers.record_end(transfer)
        self.say(transfer)

    def _stats(self) -> Stats:
        transfers, sent_bytes, received_bytes = self.counters.snapshot()
        return Stats(
            transfers=transfers,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            links=tuple(self.traffic.monitor.links()),
            egress_mbps=self.traffic.egress.mbps,
            memory_bytes=self.traffic.memory.used_bytes,
            memory_limit_bytes=self.traffic.memory.limit_bytes,
        )


def _sliced(layout: CacheLayout, part: CacheSlice | None) -> CacheLayout:
    return layout if part is None else layout._replace(groups=part.groups, rank=part.rank, ranks=part.ranks)


def _engine_cache(
    options: MoverOptions, memory: mmap.mmap, say: Callable[[MoverReport], None]
) -> tuple[EngineCache, Copies]:
    """Return what the options say of the memory, and who asks the engine for copies."""
    if options.map is not None:
        # Without slots: nothing is copied here, and `catch_up` needs none.
        return MappedMemory(memoryview(memory), options.map), Copies(Slots(memory, 1, 0), say)
    shared = SharedMemory(Slots(memory, options.slot_bytes, options.slots), say)
    return shared, shared.copies


def end_with_a_thread(failed: threading.ExceptHookArgs) -> None:
    """End the mover with any of its threads: what that one did would be waited for in vain. Another mover begins."""
    try:
        if not issubclass(failed.exc_type, MemoryError):
            threading.__excepthook__(failed)
    finally:
        os._exit(NO_MEMORY_STATUS if issubclass(failed.exc_type, MemoryError) else 1)


def main() -> None:
    threading.excepthook = end_with_a_thread
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the engine knows when its transfers are over
        signal.signal(ignored, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    options = msgspec.json.decode(sys.argv[4], type=MoverOptions)
    configure_logs(options.log_place, options.log_format)
    memory = mmap.mmap(int(sys.argv[3]), options.memory_bytes)
    events = EventLog()
    hear(socket.socket(fileno=int(sys.argv[2])), events)
    if options.events_path:
        hear_at(options.events_path, events)
    try:
        mover = Mover(options, sock, memory, events if options.has_events else None)
    except PrfaasError as error:
        sock.sendall(with_length(encode(MoverRefused(str(error)))))
        return
    mover.say(MoverReady(mover.data_port))
    reader = sock.makefile("rb")
    while body := read_body(reader):
        mover.handle(decode_for_mover(body))
    log.info("the engine closed its end: the mover ends")
    os._exit(0)


if __name__ == "__main__":
    main()
