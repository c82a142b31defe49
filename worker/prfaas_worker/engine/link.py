"""The engine's end of the unix socket to the front: one thread reads, one writes, so that the step loop does neither.

What needs no step is answered by the reading thread at once: leases are granted and figures told while a long chunk
computes. When the front goes away the engine has nobody to serve, and the process ends.
"""

import logging
import os
import queue
import socket
import threading

from prfaas.errors import CapacityError, UnreachableError
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
from prfaas_worker.engine.events import Offered
from prfaas_worker.engine.loop import Engine
from prfaas_worker.transfer.offers import Offers
from prfaas_worker.transfer.sockets import receive_into
from prfaas_worker.transfer.traffic import Traffic

log = logging.getLogger(__name__)


class Outbox:
    """Messages to the front. Those that gathered while a write was under way leave as one batch."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._queue: queue.SimpleQueue[list[ToFront]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="front-write", daemon=True).start()

    def put(self, messages: list[ToFront]) -> None:
        """Queue messages; never blocks."""
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


class Desk:
    """Takes the front's messages: answers some itself, passes the others to the step loop."""

    def __init__(self, engine: Engine, offers: Offers, traffic: Traffic, outbox: Outbox):
        self._engine = engine
        self._offers = offers
        self._traffic = traffic
        self._outbox = outbox

    def take(self, message: ToEngine) -> None:
        """Act on one message."""
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

    def end(self) -> None:
        """Have the engine keep what a restart can use, in the seconds that an orderly end has."""
        self._engine.end()

    def _grant(self, message: StartPrefill) -> None:
        try:
            offer, grant = self._offers.grant(message, len(message.request.token_ids))
        except CapacityError as error:
            self._outbox.put([Failed(message.handle, 503, CODE_OVERLOADED, str(error))])
            return
        self._engine.inbox.put(Offered(message, offer))
        self._outbox.put([Granted(message.handle, grant)])

    def _stats(self, handle: int) -> Stats:
        transfers, sent_bytes, received_bytes = self._offers.counters.snapshot()
        return Stats(
            handle=handle,
            **self._engine.gauges._asdict(),
            transfers=transfers,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            cache=self._engine.cache.stats(),
            links=tuple(self._traffic.monitor.links()),
            egress_mbps=self._traffic.egress.mbps,
            memory_bytes=self._traffic.memory.used_bytes,
            memory_limit_bytes=self._traffic.memory.limit_bytes,
        )


def serve_front(sock: socket.socket, desk: Desk) -> None:
    """Start the reading thread, which ends the process when the front is gone."""
    threading.Thread(target=_read, args=(sock, desk), name="front-read", daemon=True).start()


def _read(sock: socket.socket, desk: Desk) -> None:
    length = bytearray(LENGTH.size)
    try:
        while True:
            receive_into(sock, length)
            body = bytearray(LENGTH.unpack(length)[0])
            receive_into(sock, body)
            for message in decode_for_engine(body):
                desk.take(message)
    except UnreachableError:
        log.info("the front closed its end: the engine ends")
        desk.end()
        os._exit(0)
    except Exception:
        log.exception("the engine cannot read the front's messages")
        os._exit(1)
