"""The engine's end of the unix socket to the front. One thread reads, one writes, so that the step loop does neither.

The reading thread answers at once what needs no step. It grants leases and reports statistics while a long chunk
computes. When the front closes its end, the process ends.
"""

import logging
import os
import queue
import socket
import threading

import msgspec

from prfaas.errors import CapacityError
from prfaas.wire.engine import (
    LENGTH,
    AskPrefill,
    AskStats,
    Cancel,
    CancelPrefill,
    EgressSet,
    Failed,
    Generate,
    Granted,
    PrefillAnswer,
    ResetCache,
    SetEgress,
    SetRole,
    StartPrefill,
    StartPrefix,
    Stats,
    ToEngine,
    ToFront,
    decode_for_engine,
    encode_batch,
)
from prfaas.wire.headers import CODE_OVERLOADED
from prfaas_transfer.leases import Offers
from prfaas_transfer.limits import Traffic
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.engine.sequences import PrefillOffered

log = logging.getLogger(__name__)


class Outbox:
    """Writes messages to the front; messages queued during a write leave as one batch."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._queue: queue.SimpleQueue[list[ToFront]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="front-write", daemon=True).start()

    def put(self, messages: list[ToFront]) -> None:
        self._queue.put(messages)

    def _run(self) -> None:
        while True:
            batch = self._queue.get()
            while not self._queue.empty():
                batch = batch + self._queue.get()
            try:
                self._sock.sendall(encode_batch(batch))
            except OSError:
                return  # the reading thread sees the same end and acts on it


class FrontMessages:
    """Answers some of the front's messages, and passes the others to the step loop."""

    def __init__(self, engine: EngineLoop, offers: Offers, traffic: Traffic, outbox: Outbox):
        self._engine = engine
        self._offers = offers
        self._traffic = traffic
        self._outbox = outbox

    def handle(self, message: ToEngine) -> None:
        match message:
            case Generate() | StartPrefix() | Cancel() | ResetCache() | SetRole():
                self._engine.inbox.put(message)
            case StartPrefill():
                self._grant(message)
            case CancelPrefill(transfer_id):
                self._offers.cancel(transfer_id)
            case AskPrefill(handle, transfer_id):
                self._outbox.put([PrefillAnswer(handle, self._offers.status(transfer_id))])
            case SetEgress(handle, mbps):
                self._traffic.egress.set_mbps(mbps)
                self._outbox.put([EgressSet(handle, mbps)])
            case AskStats(handle):
                self._outbox.put([self._stats(handle)])

    def _grant(self, message: StartPrefill) -> None:
        try:
            request = message.request
            offer, grant = self._offers.grant(message.subject, request.start_token, len(request.token_ids))
        except CapacityError as error:
            self._outbox.put([Failed(message.handle, 503, CODE_OVERLOADED, str(error))])
            return
        self._engine.inbox.put(PrefillOffered(message, offer))
        self._outbox.put([Granted(message.handle, grant)])

    def _stats(self, handle: int) -> Stats:
        transfers, sent_bytes, received_bytes = self._offers.counters.snapshot()
        return msgspec.structs.replace(
            self._engine.stats,
            handle=handle,
            transfers=transfers,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            cache=self._engine.cache.stats(),
            links=tuple(self._traffic.monitor.links()),
            egress_mbps=self._traffic.egress.mbps,
            memory_bytes=self._traffic.memory.used_bytes,
            memory_limit_bytes=self._traffic.memory.limit_bytes,
        )


def serve_front(sock: socket.socket, engine: EngineLoop, messages: FrontMessages) -> None:
    """Start the reading thread, which ends the engine and the process when the front closes its end."""
    threading.Thread(target=_read, args=(sock, engine, messages), name="front-read", daemon=True).start()


def _read(sock: socket.socket, engine: EngineLoop, messages: FrontMessages) -> None:
    reader = sock.makefile("rb")
    try:
        while len(length := reader.read(LENGTH.size)) == LENGTH.size:
            for message in decode_for_engine(reader.read(LENGTH.unpack(length)[0])):
                messages.handle(message)
    except ConnectionError as error:
        log.debug("the front's end broke: %s", error)
    except Exception:
        log.exception("the engine cannot read the front's messages")
        os._exit(1)
    log.info("the front closed its end: the engine ends")
    engine.end()
    os._exit(0)
