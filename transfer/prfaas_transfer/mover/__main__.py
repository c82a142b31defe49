"""The mover's process: `python -m prfaas_transfer.mover SOCKET MEMORY OPTIONS`, descriptors and JSON.

Its engine starts it and tells it what to do (messages.py). It ends with the engine: when the socket closes.
"""

import itertools
import logging
import mmap
import os
import socket
import sys
import threading

import msgspec

from prfaas.errors import PrfaasError
from prfaas.telemetry.logs import configure_logs
from prfaas.wire.engine import Stats, TransferSubject
from prfaas.wire.frames import Address, FrameHeader, Kind
from prfaas.wire.transfer import LayerGroup, Manifest
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.leases import Offer, Offers
from prfaas_transfer.limits import Traffic, traffic_of
from prfaas_transfer.mover.messages import (
    MAX_MESSAGE_BYTES,
    MAX_REASON,
    AnnounceCache,
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
from prfaas_transfer.mover.shared import SharedCache, SharedMemory, Slots
from prfaas_transfer.pull import Connections, FetchContext, Pull, SourceAddress, decline, open_pull
from prfaas_transfer.send import Frame
from prfaas_transfer.transfer_log import TransferCounters, TransferLog, TransferTotals

log = logging.getLogger("prfaas.mover")

ANNOUNCED_SECONDS = 5.0
"""A destination may come this long before its source hears of the request."""
MAX_OFFERS = 1024


class Mover:
    """All transfers of one engine process. Calls come from the thread that reads the engine's messages."""

    def __init__(self, options: MoverOptions, sock: socket.socket, memory: mmap.mmap):
        self._sock = sock
        self._lock = threading.Lock()
        self.traffic: Traffic = traffic_of(options)
        self.shared = SharedMemory(Slots(memory, options.slot_bytes, options.slots), self.send)
        listener = listen(options.host, options.data_port)
        self.data_port: int = listener.getsockname()[1]
        self._layout = CacheLayout(options.fingerprint, options.groups, 0, options.rank, options.ranks)
        self._slot_bytes = options.slot_bytes
        self.metrics = MoverMetrics(options, self._stats)
        self.counters = TransferCounters(self.metrics.transfers.record_end)
        self._offers = Offers(self._layout, self.data_port, MAX_OFFERS, self._offer_over, self.counters)
        self._context = FetchContext(self._layout, Connections(self.traffic.auth), self.counters, self.traffic)
        self._open: dict[str, Offer] = {}
        self._numbers = itertools.count()
        self._handles: dict[int, str] = {}
        self._pulls: dict[str, Pull] = {}
        DataPort(listener, self._offers, self.traffic, ANNOUNCED_SECONDS)
        if options.metrics_port:
            first, port = options.mover == 0, options.metrics_port + options.mover
            others = range(port + 1, port + options.movers) if first else ()
            serve(options.host if first else LOOPBACK, port, self.metrics, others)

    def send(self, message: MoverReport) -> None:
        """Tell the engine; any thread may call."""
        try:
            self._sock.sendall(encode(message))
        except OSError:
            log.debug("the engine is gone")

    def handle(self, message: MoverCommand) -> None:
        match message:
            case CopyDone():
                self.shared.copies.finish(message)
            case AnnounceCache():
                self._announce(message)
            case ComputedParts() | FinishCache() | FailedCache():
                if (offer := self._open.get(message.key)) is not None:
                    self._continue(offer, message)
            case FetchCache():
                self._fetch(message)
            case CancelFetch(key):
                if (pull := self._pulls.get(key)) is not None:
                    pull.cancel()
            case DeclineCache():
                threading.Thread(target=self._decline, args=(message,), name="decline", daemon=True).start()

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

    def _announce(self, message: AnnounceCache) -> None:
        handle = next(self._numbers)
        subject = TransferSubject(handle, message.request_id)
        address = Address(message.transfer_id, message.epoch)
        try:
            with self._lock:  # a destination that waited may end the offer before it is noted here
                self._handles[handle] = message.key
                layout = self._layout_of(message.slice)
                manifest = layout.manifest(address, 0, message.end_token, is_prefix=True, prompt=message.prompt)
                offer = self._offers.announce(subject, manifest, message.token)
                self._open[message.key] = offer
        except PrfaasError as error:
            log.warning("cache of %s is not offered: %s", message.request_id, error)
            self._offer_over(handle)
            return
        offer.start_computing()

    def _continue(self, offer: Offer, message: ComputedParts | FinishCache | FailedCache) -> None:
        match message:
            case ComputedParts(key, parts):
                offer.note_life()  # a destination may come until a while after the last part
                for part in parts:
                    offer.put(self._frame(key, offer.manifest, part))
            case FinishCache(_, prefill_seconds):
                offer.finish_computing(prefill_seconds)
            case FailedCache(_, reason):
                offer.fail(reason)
                self._offers.end(offer, "cancelled")

    def _layout_of(self, part: CacheSlice | None) -> CacheLayout:
        if part is None:
            return self._layout
        return self._layout._replace(groups=part.groups, rank=part.rank, ranks=part.ranks)

    def _frame(self, key: str, manifest: Manifest, part: CopyPart) -> Frame:
        group: LayerGroup = manifest.groups[part.group]
        if part.tokens:
            items, kind = part.tokens // group.row_tokens, Kind.BLOCK
        else:
            items, kind = 1, Kind.STATE
        where = {"group": part.group, "layer": part.layer, "start_token": part.start_token, "tokens": part.tokens}
        header = FrameHeader(kind, manifest.address, items * group.nbytes, **where)
        return Frame(
            header, lambda header: self.shared.load(key, group, header), self._slot_bytes, group.tensors, items
        )

    def _offer_over(self, handle: int) -> None:
        with self._lock:
            key = self._handles.pop(handle)
            self._open.pop(key, None)
        self.send(EndedOffer(key))

    def _fetch(self, message: FetchCache) -> None:
        """Start a fetch, which `CancelFetch` finds from now on."""
        subject = TransferSubject(0, message.request_id, message.cluster)
        record = TransferLog("receive", subject, message.transfer_id)
        address = Address(message.transfer_id, message.epoch)
        layout = self._layout_of(message.slice)
        expected = layout.manifest(
            address, message.start_token, message.end_token, is_prefix=True, prompt=message.prompt
        )
        source = SourceAddress(message.host, message.port, message.cluster)
        cache = SharedCache(self.shared, message.key)
        pull = open_pull(self._context, source, message.token, expected, cache, record.record_break)
        self._pulls[message.key] = pull
        threading.Thread(target=self._run, args=(message, pull, record), name="fetch", daemon=True).start()

    def _decline(self, message: FetchCache | DeclineCache) -> None:
        source = SourceAddress(message.host, message.port, message.cluster)
        address = Address(message.transfer_id, message.epoch)
        rank = message.rank if isinstance(message, DeclineCache) else self._layout_of(message.slice).rank
        try:
            decline(self._context.connections, source, message.token, address, rank)
        except PrfaasError as error:
            log.info("the source of %s keeps its cache for its lease: %s", message.request_id, error)

    def _run(self, message: FetchCache, pull: Pull, record: TransferLog) -> None:
        """Run a fetch to its end, in a thread of its own."""
        key, reason = message.key, ""
        try:
            pull.run()
            pull.state.ledger.require_whole()
        except PrfaasError as error:
            reason = str(error)[:MAX_REASON]
        except Exception as error:  # a bug here must end this one request, never leave it waiting
            log.exception("fetch of %s", key)
            reason = repr(error)[:MAX_REASON]
        del self._pulls[key]
        state = pull.state
        totals = TransferTotals(state.ledger.received_bytes, state.seconds, state.codecs)
        failed = "cancelled" if pull.is_cancelled else "failed"
        self.counters.count_end(record.end(failed if reason else "delivered", reason, totals))
        self.send(EndedFetch(key, reason, state.ledger.received_bytes, state.seconds))
        if reason:
            self._decline(message)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    options = msgspec.json.decode(sys.argv[3], type=MoverOptions)
    configure_logs("mover")
    memory = mmap.mmap(int(sys.argv[2]), options.slots * options.slot_bytes)
    try:
        mover = Mover(options, sock, memory)
    except PrfaasError as error:
        sock.sendall(encode(MoverRefused(str(error))))
        return
    mover.send(MoverReady(mover.data_port))
    while data := sock.recv(MAX_MESSAGE_BYTES):
        mover.handle(decode_for_mover(data))
    log.info("the engine closed its end: the mover ends")
    os._exit(0)


if __name__ == "__main__":
    main()
