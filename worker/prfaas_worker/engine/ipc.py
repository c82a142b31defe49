"""The engine's end of the unix socket to the front. One thread reads, one writes, so that the step loop does neither.

The reading thread answers at once what needs no step. It opens offers and reports statistics while a long chunk
computes. When the front closes its end, the process ends.
"""

import logging
import os
import queue
import socket
import threading

import msgspec

from prfaas.errors import CapacityError, RequestError
from prfaas.wire.engine import (
    Announced,
    AskStats,
    Cancel,
    Failed,
    Generate,
    GiveCache,
    LearnBytes,
    Measured,
    ResetCache,
    SetEgress,
    SetRole,
    Started,
    Stats,
    ToEngine,
    ToFront,
    decode_for_engine,
    encode_batch,
    read_body,
)
from prfaas.wire.headers import CODE_OVERLOADED
from prfaas.wire.profile import Profile
from prfaas_transfer.mover.messages import MoverAnswer
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.engine.remote import EngineTransfers
from prfaas_worker.engine.sequences import PrefillOffered, goal_of

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


def put_profile(outbox: Outbox, profile: Profile) -> None:
    """Tell the front what prefills cost here."""
    outbox.put([Measured(profile)])


class FrontMessages:
    """Answers some of the front's messages, and passes the others to the step loop."""

    def __init__(self, engine: EngineLoop, transfers: EngineTransfers, outbox: Outbox):
        self._engine = engine
        self._transfers = transfers
        self._outbox = outbox

    def handle(self, message: ToEngine) -> None:
        match message:
            case Generate() | Cancel() | ResetCache() | SetRole():
                self._engine.inbox.put(message)
            case GiveCache():
                self._announce(message)
            case SetEgress() | AskStats():
                self._transfers.ask(message)
            case LearnBytes(payload):
                self._transfers.publish("bytes", payload)

    def answer(self, answer: MoverAnswer) -> None:
        """Pass an answer of the mover's on."""
        self._outbox.put([self._with_ours(answer) if isinstance(answer, Stats) else answer])

    def _announce(self, message: GiveCache) -> None:
        """Open a leg's offer at once, not between two steps: its destination comes at the same time."""
        if not goal_of(message.token_ids, message.leg):  # nothing crosses
            self._outbox.put([Announced(message.handle, 0), Started(message.handle, 0, 0, 0.0, 0.0, 0.0)])
            return
        try:
            offer = self._transfers.announce(message)
        except CapacityError as error:
            self._outbox.put([Failed(message.handle, 503, CODE_OVERLOADED, str(error))])
        except RequestError as error:
            self._outbox.put([Failed(message.handle, error.status, error.code, str(error))])
        else:
            self._outbox.put([Announced(message.handle, offer.manifest.end_token)])
            self._engine.inbox.put(PrefillOffered(message, offer))

    def _with_ours(self, theirs: Stats) -> Stats:
        """Add the engine's figures to the mover's."""
        return msgspec.structs.replace(
            self._engine.stats,
            handle=theirs.handle,
            transfers=self._transfers.counters.snapshot()[0],
            sent_bytes=theirs.sent_bytes,
            received_bytes=theirs.received_bytes,
            cache=self._engine.cache.stats(),
            links=theirs.links,
            egress_mbps=theirs.egress_mbps,
            memory_bytes=theirs.memory_bytes,
            memory_limit_bytes=theirs.memory_limit_bytes,
            emulation=self._engine.runner.emulation(),
        )


def serve_front(sock: socket.socket, messages: FrontMessages) -> None:
    """Start the reading thread, which ends the process when the front closes its end."""
    threading.Thread(target=_read, args=(sock, messages), name="front-read", daemon=True).start()


def _read(sock: socket.socket, messages: FrontMessages) -> None:
    reader = sock.makefile("rb")
    try:
        while body := read_body(reader):
            for message in decode_for_engine(body):
                messages.handle(message)
    except ConnectionError as error:
        log.debug("the front's end broke: %s", error)
    except Exception:
        log.exception("the engine cannot read the front's messages")
        os._exit(1)
    log.info("the front closed its end: the engine ends")
    # `sys.exit` would end this thread alone.
    os._exit(0)
