"""The engine's end of its mover: starts the process, passes messages on, and makes the copies that the mover asks for.

One thread owns the process. When it dies, all its transfers are over, and another starts.
"""

import logging
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Protocol, TypeAlias

import msgspec

from prfaas.errors import ConfigError, PrfaasError, explained
from prfaas.processes import ends_with_us
from prfaas.util import backoff_seconds
from prfaas.wire.engine import AskStats, EgressSet, SetEgress, Stats, TransferEnded, read_body, with_length
from prfaas_transfer.cache import SharedPlace
from prfaas_transfer.events.engine_socket import tell
from prfaas_transfer.events.log import BatchLog
from prfaas_transfer.mover.messages import (
    NO_MEMORY_STATUS,
    AnnounceCache,
    AskAnnounce,
    AwaitCache,
    BegunCache,
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
    MoverAnswer,
    MoverCommand,
    MoverOptions,
    MoverReady,
    MoverRefused,
    MoverReport,
    decode_from_mover,
    encode,
)

Question: TypeAlias = AskStats | SetEgress

log = logging.getLogger(__name__)

MOVER_PROGRAM: Final = ("-m", "prfaas_transfer.mover")
START_SECONDS: Final = 60.0
RESTART_SECONDS: Final = 1.0
MAX_RESTART_SECONDS: Final = 30.0
SEND_SECONDS: Final = 5
"""A mover that reads nothing for this long hangs. The engine's step waits meanwhile."""
STEADY_SECONDS: Final = 60.0
"""A mover that ran for so long is started again at once, whatever came before."""


class EngineMemory(Protocol):
    """An engine's memory, as a mover without a map of it reaches it: by copies."""

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        """Copy a part of an offer into `room`."""
        ...

    def land(self, key: str, part: CopyPart, received: memoryview) -> None:
        """Copy a received part into the memory of the request whose fetch this is."""
        ...


class MoverClient:
    """Starts a mover, and another when it dies. Any thread may call; nothing waits for the network.

    `on_offer_end(key)` and `on_fetch_end(EndedFetch)` are called from the client's thread, once for each offer and
    fetch, by its message's key. From then on nothing of them touches the engine's memory. `on_answer` gets the records
    of ended transfers, and the answers to `ask`, which outlive a mover. `descriptor` is that of a mapped cache, which
    has no `memory` to copy from.
    """

    def __init__(
        self,
        options: MoverOptions,
        memory: EngineMemory | None,
        on_offer_end: Callable[[str], None],
        on_fetch_end: Callable[[EndedFetch], None],
        on_answer: Callable[[TransferEnded | MoverAnswer], None] = lambda _answer: None,
        descriptor: int | None = None,
    ):
        self._options, self._memory = options, memory
        self._on_offer_end, self._on_fetch_end, self._on_answer = on_offer_end, on_fetch_end, on_answer
        self._copiers: ThreadPoolExecutor | None = None
        self._questions: dict[int, Question] = {}
        self._egress: SetEgress | None = None
        self.events = BatchLog()  # Each mover hears all that it keeps, and what comes.
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._offers: set[str] = set()
        self._fetches: set[str] = set()
        self._awaited: dict[str, Callable[[], None]] = {}
        self._is_in_step = False
        self._asked: list[int] = []  # Questions for what is announced, until the step is over.
        self._closed = threading.Event()
        self._started = threading.Event()
        self._refusal = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.data_port = 0
        if descriptor is None:
            self._descriptor = os.memfd_create("prfaas-mover")
            os.ftruncate(self._descriptor, options.memory_bytes)
        else:
            # A copy of our own: the thread closes it at its end, whenever the engine closes its own.
            self._descriptor = os.dup(descriptor)
        self.shared = memoryview(mmap.mmap(self._descriptor, options.memory_bytes))
        threading.Thread(target=self._run, name="mover", daemon=True).start()
        if not self._started.wait(START_SECONDS) or self._refusal:
            self.close()
            raise ConfigError(self._refusal or f"the mover did not start within {START_SECONDS:g} s; see its log")

    @property
    def is_running(self) -> bool:
        return self._socket is not None

    def announce(self, message: AnnounceCache) -> None:
        if not self._begin(self._offers, message.key, message):
            self._end_offer(message.key)

    def put(self, key: str, parts: list[CopyPart], place: SharedPlace | None = None) -> None:
        self._send(ComputedParts(key, parts, place))

    def finish(
        self, key: str, prefill_seconds: float, *, is_exact: bool = True, origins: tuple[str, ...] | None = None
    ) -> None:
        self._send(FinishCache(key, prefill_seconds, is_exact, origins))

    def fail(self, key: str, reason: str, *, at_once: bool = True) -> None:
        self._send(FailedCache(key, reason, at_once))

    def fetch(self, message: FetchCache) -> None:
        if not self._begin(self._fetches, message.key, message):
            self._end_fetch(EndedFetch(message.key, "the mover is not running"))

    def await_begin(self, message: AwaitCache, on_begin: Callable[[], None]) -> None:
        """Have `on_begin` called once, from any thread, when a source begins to compute a cache, or cannot be awaited.
        So it is for the second of two requests that name one transfer: only one of both may fetch it."""
        with self._lock:
            is_awaited = message.transfer_id not in self._awaited and self._say(message)
            if is_awaited:
                self._awaited[message.transfer_id] = on_begin
        if not is_awaited:
            on_begin()

    def ask(self, question: Question) -> None:
        """Have a question of the engine's front answered, by the next mover if this one dies. An egress cap stays."""
        with self._lock:
            self._questions[question.handle] = question
            if isinstance(question, SetEgress):
                self._egress = question
        self._send(question)

    def cancel_fetch(self, key: str) -> None:
        self._send(CancelFetch(key))

    def decline(self, message: DeclineCache) -> None:
        self._send(message)

    def begin_step(self) -> None:
        """Begin a step of an engine that hears of requests between its steps: those that come meanwhile are announced
        after `end_step`, and no destination of theirs is to be sent away before."""
        with self._lock:
            self._is_in_step = True

    def end_step(self) -> None:
        with self._lock:
            self._is_in_step = False
            asked, self._asked = self._asked, []
        for number in asked:
            self._send(CopyDone(number))

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _begin(self, keys: set[str], key: str, message: MoverCommand) -> bool:
        """Note what begins and say it at once: it would end with one mover, and be made by the next. As `_send`."""
        with self._lock:
            keys.add(key)
            return self._say(message)

    def _send(self, message: MoverCommand) -> bool:
        """Say something; False if no mover can hear it. What is open then, the reading thread ends."""
        with self._lock:
            return self._say(message)

    def _say(self, message: MoverCommand) -> bool:
        """As `_send`, under the lock. A mover that hangs is killed: a part of a message is of no use to it."""
        if self._socket is None:
            return False
        try:
            self._socket.sendall(with_length(encode(message)))
        except OSError as error:
            if isinstance(error, BlockingIOError):
                log.error("the mover has read nothing for %d s: it is killed", SEND_SECONDS)
            if self._process is not None:
                self._process.kill()
            self._socket = None
            return False
        return True

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
        """Start a mover, and follow it to its end, and that of the copies that it asked for; return why there is none
        any more."""
        threads = self._options.copy_threads
        self._copiers = ThreadPoolExecutor(threads, "mover-copy") if threads else None
        try:
            return self._follow_process()
        finally:
            if self._copiers is not None:
                # A copy that is late would answer the next mover's copy of its number, or write into its slot.
                self._copiers.shutdown(cancel_futures=True)

    def _follow_process(self) -> str:
        try:
            ours, theirs = socket.socketpair()
            says, hears = socket.socketpair()
            tell(says, self.events)
        except (OSError, RuntimeError) as error:  # no descriptor or no thread is free
            return f"the mover cannot be started: {error}"
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        with ours, says, ours.makefile("rb") as reader:
            try:
                # Our copy of the mover's end closes with the block: while any process has it open, a dead mover gives
                # no end of file.
                with theirs, hears:
                    process = self._process = self._start(theirs, hears)
            except OSError as error:
                return f"the mover cannot be started: {error}"
            with self._lock:
                self._socket, self._asked = ours, []
                if self._closed.is_set():  # before there was a socket
                    ours.shutdown(socket.SHUT_RDWR)
                repeated = [*([self._egress] if self._egress else []), *self._questions.values()]
            for question in repeated:
                self._send(question)
            refusal = ""
            try:
                while body := read_body(reader):
                    match decode_from_mover(body):
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
        if status == NO_MEMORY_STATUS:
            return "the mover had no memory left: raise the container's limit, or give transfers less of it"
        return refusal or f"the mover ended with status {status}"

    def _start(self, theirs: socket.socket, hears: socket.socket) -> "subprocess.Popen[bytes]":
        descriptors = (theirs.fileno(), hears.fileno(), self._descriptor)
        return subprocess.Popen(
            [
                *ends_with_us(),
                sys.executable,
                *MOVER_PROGRAM,
                *map(str, descriptors),
                msgspec.json.encode(self._options).decode(),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
        )

    def _handle(self, message: MoverReport) -> None:
        match message:
            case CopyRequest() if self._copiers is not None:
                self._copiers.submit(self._copy, message)
            case CopyRequest():
                self._copy(message)
            case AskAnnounce(number):
                self._answer_or_wait(number)
            case TransferEnded():
                self._on_answer(message)
            case Stats(handle) | EgressSet(handle):
                with self._lock:
                    answered = self._questions.pop(handle, None)
                if answered is not None:
                    self._on_answer(message)
            case BegunCache(transfer_id):
                self._end_await(transfer_id)
            case EndedOffer(key):
                self._end_offer(key)
            case EndedFetch():
                self._end_fetch(message)
            case MoverReady(data_port):
                self.data_port = data_port
                self._started.set()

    def _answer_or_wait(self, number: int) -> None:
        with self._lock:
            if self._is_in_step:
                self._asked.append(number)
                return
        self._send(CopyDone(number))

    def _copy(self, copy: CopyRequest) -> None:
        view = self.shared[copy.offset : copy.offset + copy.count_bytes]
        reason = ""
        try:
            if self._memory is None:
                reason = "the cache is mapped, and nothing of it is copied"
            elif copy.direction == "load":
                self._memory.load(copy.key, copy.part, view)
            else:
                self._memory.land(copy.key, copy.part, view)
        except (PrfaasError, MemoryError) as error:
            reason = str(explained(error))
        except Exception as error:  # a bug here must end this one transfer, and be seen
            log.exception("copy of %s", copy.key)
            reason = repr(error)
        self._send(CopyDone(copy.number, reason))

    def _end_offer(self, key: str) -> None:
        with self._lock:
            known = key in self._offers
            self._offers.discard(key)
        if known:
            self._on_offer_end(key)

    def _end_fetch(self, message: EndedFetch) -> None:
        with self._lock:
            known = message.key in self._fetches
            self._fetches.discard(message.key)
        if known:
            self._on_fetch_end(message)

    def _end_await(self, transfer_id: str) -> None:
        with self._lock:
            on_begin = self._awaited.pop(transfer_id, None)
        if on_begin is not None:
            on_begin()

    def _fail_open(self, reason: str) -> None:
        with self._lock:
            offers, fetches, awaited = list(self._offers), list(self._fetches), list(self._awaited)
        for key in offers:
            self._end_offer(key)
        for key in fetches:
            self._end_fetch(EndedFetch(key, reason))
        for transfer_id in awaited:
            self._end_await(transfer_id)
