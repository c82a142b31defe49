"""The engine's end of its mover: starts the process, passes messages on, and makes the copies that the mover asks for.

One thread owns the process. When it dies, all its transfers are over, and another starts.
"""

import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from prfaas.errors import ConfigError, PrfaasError
from prfaas.processes import ends_with_us
from prfaas.util import backoff_seconds
from prfaas_transfer.mover.messages import (
    MAX_MESSAGE_BYTES,
    MAX_PARTS,
    AnnounceCache,
    CancelFetch,
    ComputedParts,
    CopyDone,
    CopyPart,
    CopyRequest,
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
    decode_from_mover,
    encode,
)

log = logging.getLogger(__name__)

START_SECONDS: Final = 60.0
RESTART_SECONDS: Final = 1.0
MAX_RESTART_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 60.0
"""A mover that ran for so long is started again at once, whatever came before."""


class EngineMemory(Protocol):
    """An engine's memory, as the mover reaches it: by copies, one at a time, on the client's own thread."""

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        """CopyRequest a part of an offer into `room`."""
        ...

    def land(self, key: str, part: CopyPart, received: memoryview) -> None:
        """CopyRequest a received part into the memory of the request whose fetch this is."""
        ...


class MoverClient:
    """Starts a mover, and another when it dies. Any thread may call; nothing waits for the network.

    `on_offer_over(key)` and `on_fetch_over(EndedFetch)` are called from the client's thread, once for each `announce`
    and `fetch`, by the key of that message. From then on nothing of them touches the engine's memory.
    """

    def __init__(
        self,
        options: MoverOptions,
        memory: EngineMemory,
        on_offer_over: Callable[[str], None],
        on_fetch_over: Callable[[EndedFetch], None],
    ):
        self._options, self._memory = options, memory
        self._on_offer_over, self._on_fetch_over = on_offer_over, on_fetch_over
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._offers: set[str] = set()
        self._fetches: set[str] = set()
        self._closed = threading.Event()
        self._started = threading.Event()
        self._refusal = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.data_port = 0
        self._descriptor = os.memfd_create("prfaas-mover")
        os.ftruncate(self._descriptor, options.slots * options.slot_bytes)
        self.shared = memoryview(mmap.mmap(self._descriptor, options.slots * options.slot_bytes))
        threading.Thread(target=self._run, name="mover", daemon=True).start()
        if not self._started.wait(START_SECONDS) or self._refusal:
            self.close()
            raise ConfigError(self._refusal or f"the mover did not start within {START_SECONDS:g} s; see its log")

    def announce(self, message: AnnounceCache) -> None:
        with self._lock:
            self._offers.add(message.key)
        self._send(message)

    def put(self, key: str, parts: list[CopyPart]) -> None:
        for first in range(0, len(parts), MAX_PARTS):
            self._send(ComputedParts(key, parts[first : first + MAX_PARTS]))

    def finish(self, key: str, prefill_seconds: float) -> None:
        self._send(FinishCache(key, prefill_seconds))

    def fail(self, key: str, reason: str) -> None:
        self._send(FailedCache(key, reason))

    def fetch(self, message: FetchCache) -> None:
        with self._lock:
            self._fetches.add(message.key)
        self._send(message)

    def cancel_fetch(self, key: str) -> None:
        self._send(CancelFetch(key))

    def decline(self, message: DeclineCache) -> None:
        self._send(message)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, message: MoverCommand) -> None:
        with self._lock:
            sock = self._socket
            if sock is not None:
                with suppress(OSError):  # the reading thread finds out too, and ends what is open
                    sock.sendall(encode(message))
                    return
        if isinstance(message, (AnnounceCache, FetchCache)):
            self._fail_open("the mover is not running")

    def _run(self) -> None:
        failures = 0
        try:
            while not self._closed.is_set():
                began = time.monotonic()
                reason = self._follow_one()
                self._fail_open(reason)
                if not self._started.is_set():
                    self._refusal = reason
                    self._started.set()
                    return
                failures = 0 if time.monotonic() - began > STEADY_SECONDS else failures + 1
                if not self._closed.is_set():
                    pause_seconds = backoff_seconds(failures, RESTART_SECONDS, MAX_RESTART_SECONDS, jitter=False)
                    log.error("%s; another one starts in %.0f s", reason, pause_seconds)
                    self._closed.wait(pause_seconds)
        finally:
            os.close(self._descriptor)

    def _follow_one(self) -> str:
        """Start a mover, and follow it to its end; return why there is none any more."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            try:
                with theirs:
                    process = self._process = self._start(theirs)
            except OSError as error:
                return f"the mover cannot be started: {error}"
            with self._lock:
                self._socket = ours
            refusal = ""
            try:
                while data := ours.recv(MAX_MESSAGE_BYTES):
                    match decode_from_mover(data):
                        case MoverRefused(reason):
                            refusal = f"the mover cannot start: {reason}"
                        case message:
                            self._handle(message)
            except OSError as error:
                log.debug("the mover's socket: %s", error)
            except Exception:  # a bug here must cost this mover, never the thread that starts the next
                log.exception("messages of the mover")
            with self._lock:
                self._socket = None
        process.kill()
        status = process.wait()
        return refusal or f"the mover ended with status {status}"

    def _start(self, theirs: socket.socket) -> "subprocess.Popen[bytes]":
        descriptors = (theirs.fileno(), self._descriptor)
        return subprocess.Popen(
            [
                *ends_with_us(),
                sys.executable,
                "-m",
                "prfaas_transfer.mover",
                *map(str, descriptors),
                msgspec.json.encode(self._options).decode(),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
        )

    def _handle(self, message: MoverReport) -> None:
        match message:
            case CopyRequest():
                self._copy(message)
            case EndedOffer(key):
                self._end_offer(key)
            case EndedFetch():
                self._end_fetch(message)
            case MoverReady(data_port):
                self.data_port = data_port
                self._started.set()

    def _copy(self, copy: CopyRequest) -> None:
        view = self.shared[copy.offset : copy.offset + copy.count_bytes]
        reason = ""
        try:
            if copy.direction == "load":
                self._memory.load(copy.key, copy.part, view)
            else:
                self._memory.land(copy.key, copy.part, view)
        except PrfaasError as error:
            reason = str(error)
        except Exception as error:  # a bug here must end this one transfer, and be seen
            log.exception("copy of %s", copy.key)
            reason = repr(error)
        self._send(CopyDone(copy.number, reason))

    def _end_offer(self, key: str) -> None:
        with self._lock:
            known = key in self._offers
            self._offers.discard(key)
        if known:
            self._on_offer_over(key)

    def _end_fetch(self, message: EndedFetch) -> None:
        with self._lock:
            known = message.key in self._fetches
            self._fetches.discard(message.key)
        if known:
            self._on_fetch_over(message)

    def _fail_open(self, reason: str) -> None:
        with self._lock:
            offers, fetches = list(self._offers), list(self._fetches)
        for key in offers:
            self._end_offer(key)
        for key in fetches:
            self._end_fetch(EndedFetch(key, reason))
