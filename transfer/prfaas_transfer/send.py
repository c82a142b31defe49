"""Sends a cache: the queue of its frames, and the loop that each connection of the transfer runs.

The engine's thread puts frames in while it computes; the threads of the connections take them out. A connection that
waits polls its socket and its wake-up together. So it reacts to its peer and to the engine at once. Between two frames,
and while there is none, it reads from the destination, which may cancel, or have everything.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import NamedTuple

import msgspec

from prfaas.errors import (
    CapacityError,
    DamagedError,
    PeerError,
    PrfaasError,
    ProtocolError,
    UnreachableError,
    explained,
)
from prfaas.wire.frames import (
    DATA_KINDS,
    HEADER_BYTES,
    MAX_HELLO_BYTES,
    Address,
    Codec,
    FrameHeader,
    Kind,
    parse_header,
    seal,
    verify,
)
from prfaas.wire.send_queue import NextStep, NumberedItem, SendQueue
from prfaas.wire.transfer import KEEP_ALIVE_SECONDS, Abort, Done, TensorLayout, decode_message, message_frame
from prfaas_transfer.cache import SharedPlace
from prfaas_transfer.credentials import MIXED, is_tls
from prfaas_transfer.limits import Stop, StoppedError, Traffic
from prfaas_transfer.net import DataStream, OnWait, give_up
from prfaas_transfer.transfer_log import TransferTotals

Payload = Sequence[memoryview]


class Frame(NamedTuple):
    """A frame to send. `load(header, show_life)`, called in the sending thread, gives its payload for a block: the
    cache's own memory, which the lease keeps, or a copy of `copied_bytes`. While it waits it calls `show_life` each
    KEEP_ALIVE_SECONDS. The payload is `items` rows or states of `tensors`, or bytes that no codec handles. It lies at
    `place` in memory that a mover may have, too."""

    header: FrameHeader
    load: Callable[..., AbstractContextManager[Payload]]
    copied_bytes: int = 0
    tensors: tuple[TensorLayout, ...] = ()
    items: int = 1
    place: SharedPlace | None = None

    def rest(self, start_token: int) -> "Frame | None":
        """Return this frame without the rows before `start_token`, where a row begins; None if nothing is left."""
        header = self.header
        tokens = header.start_token + header.tokens - start_token
        if header.kind != Kind.BLOCK or tokens >= header.tokens:
            return self
        if tokens <= 0:
            return None
        payload_bytes = header.payload_bytes * tokens // header.tokens
        cut = header._replace(start_token=start_token, tokens=tokens, payload_bytes=payload_bytes)
        return self._replace(header=cut, items=self.items * tokens // header.tokens)


class WakeUp:
    """Wakes one thread that polls; setting it never blocks and is harmless after `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return -1 if self._descriptor is None else self._descriptor

    def set(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Clear earlier rings; the caller checks for work afterwards."""
        with self._lock:
            if self._descriptor is not None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class SendState:
    """The send queue of a transfer. The engine's thread calls `put`, `finish` and `fail`, the connections the rest;
    `note_life` is called at every sign of life of the peer."""

    def __init__(self, address: Address, note_life: Callable[[], None]):
        self.address = address
        self.note_life = note_life
        self.queue: SendQueue[Frame] = SendQueue(threading.Lock())
        self.failure: str | None = None
        self.acknowledged = False
        self.codecs: dict[int, Codec] = {}  # By sequence number: a frame that is sent again is the same.
        self.stop = Stop()  # Set with the failure: ends the waits of connections on this side.
        self._announced_at = time.monotonic()
        self._prefill_seconds = 0.0
        self._is_exact = True
        self._origins: tuple[str, ...] | None = None
        self._computed_seconds: float | None = None
        self._paced_bytes = 0
        self._first_sent: float | None = None
        self._lock = threading.Lock()
        self._wakeups: set[WakeUp] = set()

    def put(self, frame: Frame) -> None:
        """Append a frame; never blocks. After a failure it is dropped."""
        if self.failure is None:
            self.queue.add(frame, frame.header.payload_bytes)
            self._wake_loops()

    def note_computed(self) -> None:
        """Note that the cache is computed now: its frames may wait for the destination."""
        self._computed_seconds = time.monotonic() - self._announced_at

    def finish(self, prefill_seconds: float, *, is_exact: bool = True, origins: tuple[str, ...] | None = None) -> None:
        """Note that all frames are queued; `prefill_seconds` is their compute time, on a cache that `is_exact`, with
        bytes of the clusters `origins`; None: nobody knows of which."""
        self._prefill_seconds, self._is_exact, self._origins = prefill_seconds, is_exact, origins
        self.queue.finish()
        self._wake_loops()

    def fail(self, message: str) -> None:
        """Fail the transfer, unless everything arrived already: connections send ABORT with this reason."""
        if not self.acknowledged:
            self.failure = self.failure or message
            self.stop.set()
        self._wake_loops()

    def acknowledge(self) -> None:
        """Note that everything arrived: connections send FREED."""
        self.acknowledged = True
        self._wake_loops()

    def enter(self) -> WakeUp:
        wakeup = WakeUp()
        with self._lock:
            self._wakeups.add(wakeup)
        return wakeup

    def leave(self, wakeup: WakeUp) -> None:
        with self._lock:
            self._wakeups.discard(wakeup)
        wakeup.close()

    def queued_bytes(self) -> int:
        """Bytes that no connection has taken yet, or that wait for the egress cap."""
        return self.queue.queued_bytes + self._paced_bytes

    def add_paced(self, count_bytes: int) -> None:
        """Note bytes that a connection has in hand; a negative count means given to the kernel."""
        with self._lock:
            self._paced_bytes += count_bytes

    def start(self) -> None:
        """Note the start of the first data frame: the kernel takes its first bytes at once."""
        if self._first_sent is None:
            self._first_sent = time.monotonic()

    @property
    def totals(self) -> TransferTotals:
        flow_seconds = time.monotonic() - self._first_sent if self._first_sent is not None else 0.0
        return TransferTotals(self.queue.left_bytes, flow_seconds, set(self.codecs.values()))

    @property
    def account(self) -> Done:
        """The figures of all sent frames, and the times of the first and of the last computation."""
        first = self._first_sent if self._first_sent is not None else time.monotonic()
        done = self.queue.done(self._prefill_seconds, first - self._announced_at)
        noted = {"is_exact": self._is_exact, "computed_seconds": self._computed_seconds, "origins": self._origins}
        return msgspec.structs.replace(done, **noted)

    def _wake_loops(self) -> None:
        with self._lock:
            for wakeup in self._wakeups:
                wakeup.set()


class SendChannel(NamedTuple):
    """A connection that serves a transfer: its number, the peer's cluster, and the agreed codecs."""

    stream: DataStream
    connection: int
    peer: str = ""
    codecs: tuple[int, ...] = (Codec.NONE,)


class SendLoop:
    """Sends a transfer's frames over one connection; calls `on_sent(bytes)` for every piece that the kernel took."""

    def __init__(self, channel: SendChannel, state: SendState, traffic: Traffic, on_sent: Callable[[int], None]):
        self._channel = channel
        self._stream = channel.stream
        self._connection = channel.connection
        self._state = state
        self._traffic = traffic
        self._on_sent = on_sent

    def run(self) -> None:
        """Send until the peer acknowledged everything, over any connection. Raises UnreachableError or DamagedError if
        this one is of no more use, PeerError if the peer gave up, broke the protocol, or got our ABORT."""
        wakeup = self._state.enter()
        try:
            while not self._state.acknowledged:
                self._step(wakeup)
            self._say(Kind.FREED)
        except (UnreachableError, DamagedError):
            if not self._state.acknowledged:  # what breaks afterwards took nothing with it
                raise
        except ProtocolError as error:
            with suppress(PeerError):
                self._say(Kind.ABORT, Abort(str(error)))
            raise
        finally:
            self._state.queue.lost(self._connection)
            self._state.leave(wakeup)

    def _step(self, wakeup: WakeUp) -> None:
        out = self._state
        if out.failure is not None:
            self._say(Kind.ABORT, Abort(out.failure))
            raise PeerError(f"given up: {out.failure}")
        while self._stream.readable():
            self._read_message()
            if out.acknowledged:
                return
        found = out.queue.take(self._connection)
        if found is NextStep.WAIT:
            wakeup.clear()  # before looking again: what is put in after that look sets it again
            found = out.queue.take(self._connection)
        match found:
            case NumberedItem(sequence, frame):
                self._send(sequence, frame)
            case NextStep.DONE:
                self._say(Kind.DONE, out.account)
            case NextStep.WAIT if not out.acknowledged and not self._wait(wakeup):
                self._show_life()

    def _send(self, sequence: int, frame: Frame) -> None:
        codec = self._codec(sequence) if frame.tensors else Codec.NONE
        held_bytes = frame.copied_bytes + (frame.header.payload_bytes if codec else 0)
        if not self._await_memory(held_bytes):
            return  # it failed meanwhile: the next step reports that
        try:
            self._send_loaded(sequence, frame, codec)
        finally:
            self._traffic.memory.release(held_bytes)

    def _codec(self, sequence: int) -> Codec:
        """Return a frame's codec, the same each time that it is sent."""
        chosen = self._traffic.packer.codec(self._channel.peer, self._channel.codecs)
        # The digest in DONE is over the bytes on the wire, so a repeated frame must have the same ones.
        return self._state.codecs.setdefault(sequence, chosen)

    def _send_loaded(self, sequence: int, frame: Frame, codec: Codec) -> None:
        header = frame.header._replace(sequence=sequence)
        with ExitStack() as held:
            try:
                payload = held.enter_context(frame.load(frame.header, self._show_life))
                if codec:
                    packed = self._traffic.packer.pack(codec, frame.tensors, frame.items, payload)
                    payload = [memoryview(part).cast("B") for part in packed.buffers]
                    header = header._replace(codec=packed.codec, payload_bytes=packed.nbytes)
            except UnreachableError:
                raise  # it broke meanwhile: another connection may load the frame
            except (PrfaasError, MemoryError) as error:
                # The next step tells the destination, which would wait for more.
                self._state.fail(str(explained(error)))
                return
            sealed = seal(header, payload)
            self._state.queue.sealed(sequence, sealed.digest, header.payload_bytes)
            self._pace([memoryview(sealed.header), *payload])

    def _await_memory(self, count_bytes: int) -> bool:
        """Hold memory for a frame, and meanwhile keep the connection alive; False when the transfer is over."""
        while True:
            try:
                self._traffic.memory.acquire(count_bytes, self._state.stop, KEEP_ALIVE_SECONDS)
            except CapacityError:
                self._show_life()
            except StoppedError:
                return False
            else:
                return True

    def _pace(self, parts: list[memoryview]) -> None:
        left_bytes = sum(map(len, parts))
        self._state.add_paced(left_bytes)
        try:
            for portion in self._traffic.egress.portions(parts, self._state.stop):
                self._state.start()
                self._stream.send(portion, self._on_data, self._on_wait)
                portion_bytes = sum(map(len, portion))
                self._state.add_paced(-portion_bytes)
                left_bytes -= portion_bytes
        except StoppedError as error:
            raise UnreachableError(f"given up in the middle of a frame: {self._state.failure}") from error
        finally:
            # What broke off goes back into the queue, which counts it again.
            self._state.add_paced(-left_bytes)

    def _on_data(self, count_bytes: int) -> None:
        self._state.note_life()  # its kernel's buffers end where it does not read
        self._on_sent(count_bytes)

    def _on_wait(self, silent_seconds: float) -> None:
        if self._state.failure is not None:
            raise UnreachableError(f"given up in the middle of a frame: {self._state.failure}")
        give_up(silent_seconds)

    def _show_life(self) -> None:
        self._say(Kind.KEEP_ALIVE)

    def _say(self, kind: Kind, message: Abort | Done | None = None) -> None:
        self._stream.send([message_frame(kind, self._state.address, message)], self._on_sent)

    def _wait(self, wakeup: WakeUp) -> bool:
        """Wait for work or for the peer; False if neither appeared."""
        if self._stream.readable():
            return True
        poller = select.poll()
        poller.register(wakeup, select.POLLIN)
        poller.register(self._stream, select.POLLIN | select.POLLRDHUP)
        return bool(poller.poll(KEEP_ALIVE_SECONDS * 1000))

    def _read_message(self) -> None:
        header, payload = receive_message(self._stream, self._on_wait)
        if header.address != self._state.address:
            raise ProtocolError(f"{header.describe()} for {header.address}, want {self._state.address}")
        match header.kind:
            case Kind.KEEP_ALIVE:
                self._state.note_life()
            # An earlier ACK cannot be true: the peer would have what was never sent.
            case Kind.ACK if self._state.queue.all_left:
                self._state.acknowledge()
            case Kind.ABORT:
                raise PeerError(f"the destination gave up: {decode_message(header, payload, Abort).message}")
            case _:
                raise ProtocolError(f"{header.describe()} from a destination has no place here")


def receive_message(
    stream: DataStream, on_wait: OnWait = give_up, limit_bytes: int = MAX_HELLO_BYTES, begun: bytes = b""
) -> tuple[FrameHeader, bytes]:
    """Read one small frame, of `limit_bytes` at most, whose first bytes may have been read before. Raises
    UnreachableError if the connection broke or `on_wait` raises it, ProtocolError for a damaged or other frame."""
    header = receive_header(stream, on_wait, begun)
    if header.payload_bytes > limit_bytes or header.kind in DATA_KINDS:
        raise ProtocolError(f"{header.describe()} of {header.payload_bytes} bytes where a message was due")
    payload = bytearray(header.payload_bytes)
    stream.receive_into(payload, on_wait=on_wait)
    verify(header, [payload])
    return header, bytes(payload)


def receive_header(stream: DataStream, on_wait: OnWait, begun: bytes = b"") -> FrameHeader:
    """Read the next frame's header. Raises as `receive_message`."""
    raw = bytearray(HEADER_BYTES)
    raw[: len(begun)] = begun
    try:
        stream.receive_into(memoryview(raw)[len(begun) :], on_wait=on_wait)
        return parse_header(raw)
    except (DamagedError, UnreachableError) as error:  # an alert of TLS is shorter than a header
        if stream.peer is None and is_tls(raw):
            raise ProtocolError(f"the peer speaks TLS; {MIXED}") from error
        raise
