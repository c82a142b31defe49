"""The mover's process: `python -m prfaas_transfer.mover SOCKET MEMORY OPTIONS`, descriptors and JSON.

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
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

import msgspec

from prfaas.errors import PeerError, PrfaasError
from prfaas.telemetry.logs import configure_logs
from prfaas.wire.engine import (
    AskPrefill,
    AskStats,
    CancelPrefill,
    EgressSet,
    PrefillAnswer,
    SetEgress,
    Stats,
    TransferEnded,
    TransferOutcome,
    TransferSubject,
    read_body,
    with_length,
)
from prfaas.wire.frames import Address, FrameHeader, Kind
from prfaas.wire.prefill import PrefillGrant
from prfaas.wire.transfer import Manifest
from prfaas_transfer.cache import CacheLayout, EngineCache, MappedMemory, SharedPlace
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.fetch import AbsentError, Fetched, RemoteFetch, SourceApi
from prfaas_transfer.leases import LEASE_SECONDS, Offer, Offers
from prfaas_transfer.limits import Traffic, traffic_of
from prfaas_transfer.mover.messages import (
    MAX_REASON,
    NO_MEMORY_STATUS,
    AnnounceCache,
    CacheSlice,
    CancelFetch,
    ComputedHidden,
    ComputedParts,
    CopyDone,
    CopyPart,
    DeclineCache,
    EndedFetch,
    EndedOffer,
    FailedCache,
    FetchCache,
    FinishCache,
    MoverCommand,
    MoverOptions,
    MoverReady,
    MoverRefused,
    MoverReport,
    OfferCache,
    RequestCache,
    StartCache,
    decode_for_mover,
    encode,
)
from prfaas_transfer.mover.metrics import LOOPBACK, MoverMetrics, serve
from prfaas_transfer.mover.shared import Copies, SharedMemory, Slots
from prfaas_transfer.pull import Connections, FetchContext, Pull, SourceAddress, decline, open_pull
from prfaas_transfer.send import Frame, Payload
from prfaas_transfer.transfer_log import TransferCounters, TransferLog, TransferTotals, outcome_of

log = logging.getLogger("prfaas.mover")

OfferCommand = AnnounceCache | OfferCache | StartCache | ComputedParts | ComputedHidden | FinishCache | FailedCache


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
        self._key_of: dict[int, str] = {}  # By handle.
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def handle(self, message: OfferCommand, offers: Offers) -> None:
        match message:
            case AnnounceCache():
                self._announce(message, offers)
            case OfferCache():
                grant = _grant(message)
                key = message.transfer_id
                self._add(message.subject, key, lambda: offers.open(message.subject, grant, message.start_token))
            case _:
                if (offer := self._open.get(message.key)) is not None:
                    self._go_on(offer, message, offers)

    def release(self, handle: int) -> None:
        """Tell the engine that nothing reads an offer's cache any more."""
        with self._lock:
            key = self._key_of.pop(handle)
            self._open.pop(key, None)
            self._places.pop(key, None)
        self._say(EndedOffer(key))

    def _announce(self, message: AnnounceCache, offers: Offers) -> None:
        subject = TransferSubject(next(self._numbers), message.request_id)
        address = Address(message.transfer_id, message.epoch)

        def announce() -> Offer:
            layout = _sliced(self._layout, message.slice)
            manifest = layout.manifest(address, 0, message.end_token, is_prefix=True, prompt=message.prompt)
            return offers.announce(subject, manifest, message.token)

        offer = self._add(subject, message.key, announce)
        if offer is not None:
            offer.start_computing()

    def _add(self, subject: TransferSubject, key: str, make: Callable[[], Offer]) -> Offer | None:
        try:
            with self._lock:  # a destination that waited may end the offer before it is noted here
                self._key_of[subject.handle] = key
                offer = self._open[key] = make()
        except PrfaasError as error:
            log.warning("cache of %s is not offered: %s", subject.request_id, error)
            self.release(subject.handle)
            return None
        return offer

    def _go_on(
        self,
        offer: Offer,
        message: StartCache | ComputedParts | ComputedHidden | FinishCache | FailedCache,
        offers: Offers,
    ) -> None:
        match message:
            case StartCache():
                offer.start_computing()
            case ComputedParts(_, parts, place):
                # Only before the first HELLO: one whose destination came and was lost has RESUME_SECONDS, however long
                # the prompt.
                if offer.is_announced:
                    offer.note_life()  # a destination may come until a while after the last part
                if place is not None:
                    self._places[message.key] = place
                self._put(message.key, offer, parts)
            case ComputedHidden(_, hidden):
                header = FrameHeader(Kind.HIDDEN, offer.manifest.address, len(hidden))
                offer.put(Frame(header, lambda *_: nullcontext((memoryview(hidden),))))
            case FinishCache(_, prefill_seconds, is_exact):
                offer.finish_computing(prefill_seconds, is_exact=is_exact)
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


def _grant(message: OfferCache) -> PrefillGrant:
    return PrefillGrant(
        transfer_id=message.transfer_id,
        token=message.token,
        epoch=message.epoch,
        data_port=0,  # the destination has it from the engine
        end_token=message.end_token,
        expires_seconds=LEASE_SECONDS,
    )


class RunningFetch(Protocol):
    """A fetch under way."""

    def cancel(self) -> None: ...


class Pulls:
    """All fetches under way, by the engine's names. Calls come from one thread; each fetch has its own threads."""

    def __init__(self, context: FetchContext, memory: EngineCache, say: Callable[[MoverReport], None]):
        self._context, self._memory, self._say = context, memory, say
        self._running: dict[str, RunningFetch] = {}

    def fetch(self, message: FetchCache) -> None:
        """Start a fetch, which `cancel` finds from now on."""
        subject = TransferSubject(0, message.request_id, message.cluster)
        record = TransferLog("receive", subject, message.transfer_id)
        address = Address(message.transfer_id, message.epoch)
        expected = _sliced(self._context.layout, message.slice).manifest(
            address, message.start_token, message.end_token, is_prefix=True, prompt=message.prompt
        )
        source = SourceAddress(message.host, message.port, message.cluster)
        cache = self._memory.cache(message.key, None)
        pull = open_pull(self._context, source, message.token, expected, cache, record.record_break)
        self._running[message.key] = pull
        try:
            threading.Thread(target=self._run, args=(message, pull, record), name="fetch", daemon=True).start()
        except RuntimeError as error:  # no thread is left, and this one serves all others
            self._end(message.key, "", PeerError(FULL.format(error)))

    def request(self, message: RequestCache) -> None:
        """Start a fetch that asks for its grant first; `cancel` finds it from now on."""
        wanted = message.wanted
        source = SourceApi(message.url, message.cluster, self._context.traffic.auth, wanted.trace)
        cache = self._memory.cache(message.key, message.place)
        fetch = RemoteFetch(wanted.handle, wanted.request, source, cache, self._context)
        self._running[message.key] = fetch
        try:
            fetch.start(lambda result: self._end(message.key, fetch.transfer_id, result))
        except RuntimeError as error:
            self._end(message.key, "", PeerError(FULL.format(error)))

    def cancel(self, key: str) -> None:
        if (running := self._running.get(key)) is not None:
            running.cancel()

    def _end(self, key: str, transfer_id: str, result: Fetched | PrfaasError) -> None:
        del self._running[key]
        if isinstance(result, Fetched):
            self._say(EndedFetch(key, "", result.received_bytes, result.transfer_seconds, transfer_id, fetched=result))
        else:
            is_absent = isinstance(result, AbsentError)
            self._say(EndedFetch(key, str(result)[:MAX_REASON], transfer_id=transfer_id, is_absent=is_absent))

    def begin_decline(self, message: DeclineCache) -> None:
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

    def _run(self, message: FetchCache, pull: Pull, record: TransferLog) -> None:
        """Run a fetch to its end, in its own thread."""
        key, reason = message.key, ""
        outcome: TransferOutcome = "delivered"
        try:
            pull.run()
            pull.state.ledger.require_whole()
        except PrfaasError as error:
            reason, outcome = str(error)[:MAX_REASON], outcome_of(error)
        except Exception as error:  # a bug here must end this one request, never leave it waiting
            log.exception("fetch of %s", key)
            reason, outcome = repr(error)[:MAX_REASON], "failed"
        del self._running[key]
        state = pull.state
        totals = TransferTotals(state.ledger.received_bytes, state.seconds, state.codecs)
        if reason and pull.is_cancelled:
            outcome = "cancelled"
        self._context.counters.count_end(record.end(outcome, reason, totals))
        self._say(EndedFetch(key, reason, state.ledger.received_bytes, state.seconds))
        if reason:
            self.decline(message)


class Mover:
    """All transfers of one engine process. Calls come from the thread that reads the engine's messages."""

    def __init__(self, options: MoverOptions, sock: socket.socket, memory: mmap.mmap):
        outbox = ReportOutbox(sock)
        self.say = outbox.put
        self.traffic: Traffic = traffic_of(options, options.movers)
        engine_cache, self._copies = _engine_cache(options, memory, outbox.put)
        listener = listen(options.host, options.data_port)
        self.data_port: int = listener.getsockname()[1]
        layout = CacheLayout(options.fingerprint, options.groups, options.hidden_size, options.rank, options.ranks)
        self.metrics = MoverMetrics(options, self._stats)
        self.counters = TransferCounters(self._ended)
        self._open = OpenOffers(layout, engine_cache, outbox.put)
        self._offers = Offers(layout, options.max_offers, self._open.release, self.counters)
        context = FetchContext(layout, Connections(self.traffic.auth), self.counters, self.traffic)
        self._pulls = Pulls(context, engine_cache, outbox.put)
        DataPort(listener, self._offers, self.traffic, options.patience_seconds, self._copies.catch_up)
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
            case RequestCache():
                self._pulls.request(message)
            case CancelFetch(key):
                self._pulls.cancel(key)
            case DeclineCache():
                self._pulls.begin_decline(message)
            case CancelPrefill(transfer_id):
                self._offers.cancel(transfer_id)
            case AskPrefill(handle, transfer_id):
                self.say(PrefillAnswer(handle, self._offers.status(transfer_id)))
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
    options = msgspec.json.decode(sys.argv[3], type=MoverOptions)
    configure_logs(options.log_place, options.log_format)
    memory = mmap.mmap(int(sys.argv[2]), options.memory_bytes)
    try:
        mover = Mover(options, sock, memory)
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
