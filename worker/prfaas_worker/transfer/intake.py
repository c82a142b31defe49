"""What arrives in one direction of a transfer: any number of connections read frames straight into the cache.

The receipt says where a frame belongs and when everything is there. The memory is a sequence's that does not use it
before; it must stay that sequence's until no connection reads into it any more.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from prfaas.errors import CapacityError, DamagedError, PeerError, ProtocolError, UnreachableError
from prfaas.wire.codecs import Codec
from prfaas.wire.frames import (
    DATA_KINDS,
    HEADER_BYTES,
    MAX_HELLO_BYTES,
    Address,
    FrameHeader,
    Kind,
    verify,
)
from prfaas.wire.receipt import Destination, Hidden, Receipt
from prfaas.wire.transfer import HEARTBEAT_SECONDS, NO_PROGRESS_SECONDS, Abort, message_frame
from prfaas_worker.cache.memory import bytes_of
from prfaas_worker.transfer.budget import Budget
from prfaas_worker.transfer.codecs import decode_into
from prfaas_worker.transfer.delivery import receive_header
from prfaas_worker.transfer.layout import Place, land, room_for
from prfaas_worker.transfer.stop import Stop, StoppedError
from prfaas_worker.transfer.streams import Stream

STARVED_SECONDS = 5.0
"""A connection without a byte for this long is given up even while others of the same giver carry some."""


class Intake:
    """One incoming direction, shared by its connections.

    Args:
        receipt: what has to arrive.
        place: where it belongs.
        received: hears of the bytes of every frame.
        giver_silent_seconds: how long no connection to this giver brought anything.
        memory: what frames may use beside the place.

    """

    def __init__(
        self,
        receipt: Receipt,
        place: Place,
        received: Callable[[int], None],
        giver_silent_seconds: Callable[[], float],
        memory: Budget,
    ):
        self.receipt = receipt
        self.place = place
        self.hidden = torch.empty(receipt.expected.hidden_size, dtype=torch.float32)
        self.received = received
        self.giver_silent_seconds = giver_silent_seconds
        self.memory = memory
        self.stop = Stop()
        self.on_whole: Callable[[], None] = lambda: None
        """Called when everything is there, perhaps by several connections, from their threads."""
        self.gave_up: PeerError | None = None
        """Why a connection gave up for all, noted before the sender hears of it and tells the others."""
        self.codecs: set[int] = set()
        """Of the frames that arrived."""
        self._broken: list[int] = []
        self._first: float | None = None

    def begins(self) -> None:
        """Note that a data frame begins to arrive."""
        if self._first is None:
            self._first = time.monotonic()

    def lost(self, connection: int) -> None:
        """Note that a connection is through with this, whole or broken."""
        self.receipt.lost(connection)
        self._broken.append(connection)

    @property
    def broken(self) -> tuple[int, ...]:
        """Connections that nothing is read from any more."""
        return tuple(self._broken)

    @property
    def is_whole(self) -> bool:
        """Everything is there."""
        return self.receipt.whole

    @property
    def seconds(self) -> float:
        """Time since the first data frame began to arrive, 0 before it."""
        return time.monotonic() - self._first if self._first is not None else 0.0


class Reception:
    """Reads one connection of an intake."""

    def __init__(self, stream: Stream, connection: int, intake: Intake):
        self._stream = stream
        self._connection = connection
        self._intake = intake
        self._spoke = time.monotonic()
        self._acknowledged = False

    def run(self) -> None:
        """Receive until the sender freed its copy; whichever connection finds everything there says so, once it is.

        Whoever calls tells the intake afterwards that the connection is `lost`, also when it ended well.

        Raises:
            UnreachableError, DamagedError: this connection is of no use any more; another may be.
            PeerError: the sender gave up, or sent anything that is not this transfer.

        """
        receipt = self._intake.receipt
        try:
            while not self._receive():
                if not self._acknowledged and receipt.whole:
                    receipt.require_whole()
                    self._intake.on_whole()
                    self._say(Kind.ACK)
                    self._acknowledged = True
                self._show_life()
        except (UnreachableError, DamagedError):
            raise
        except PeerError as error:
            self._intake.gave_up = self._intake.gave_up or error
            with suppress(PeerError):
                self._say(Kind.ABORT, Abort(str(error)[:4096]))
            raise

    def _receive(self) -> bool:
        """Read one frame; True when it ends this connection's part."""
        header = receive_header(self._stream, self._wait)
        if header.kind in DATA_KINDS:
            self._take(header)
            return False
        if header.payload_bytes > MAX_HELLO_BYTES:
            raise ProtocolError(f"{header.describe()} of {header.payload_bytes} bytes where a message was due")
        payload = bytearray(header.payload_bytes)
        self._stream.receive_into(payload, on_wait=self._wait)
        if header.kind == Kind.FREED and self._intake.receipt.whole and header.address == self._address:
            verify(header, [payload])
            return True
        self._intake.receipt.note(header, payload)
        return False

    def _take(self, header: FrameHeader) -> None:
        intake = self._intake
        intake.begins()
        place = intake.receipt.claim(self._connection, header)
        with self._memory(self._copied_bytes(header, place)):
            room = self._room(place)
            payload = [memoryview(bytearray(header.payload_bytes))] if header.codec else room
            self._stream.receive_into(*payload, on_wait=self._wait)
            intake.receipt.accept(header, payload, lambda: self._land(header, place, payload, room))
        intake.codecs.add(header.codec)
        intake.received(HEADER_BYTES + header.payload_bytes)

    def _copied_bytes(self, header: FrameHeader, place: Destination) -> int:
        """Memory that a frame takes beside its place: a codec's payload, its planes, and the tensors made of them."""
        if isinstance(place, Hidden):
            return 0
        tensors_bytes = header.payload_bytes
        if header.codec:
            tensors_bytes = (header.tokens or 1) * self._intake.receipt.expected.groups[place.group].nbytes
        staged_bytes = tensors_bytes if self._intake.place.staging else 0
        return staged_bytes + (header.payload_bytes + 2 * tensors_bytes if header.codec else 0)

    def _land(self, header: FrameHeader, place: Destination, payload: list[memoryview], room: list[memoryview]) -> None:
        """Put a payload that is known to be right where it belongs."""
        if isinstance(place, Hidden):
            return
        expected = self._intake.receipt.expected
        if header.codec:
            decode_into(Codec(header.codec), expected.groups[place.group].tensors, header.tokens or 1, payload[0], room)
        land(expected, self._intake.place, place, room)

    @contextmanager
    def _memory(self, count_bytes: int) -> Iterator[None]:
        """Hold memory for a frame while the block runs; the sender waits meanwhile."""
        while True:
            try:
                self._intake.memory.acquire(count_bytes, self._intake.stop, HEARTBEAT_SECONDS)
                break
            except CapacityError:
                self._show_life()
            except StoppedError as error:
                raise UnreachableError("cancelled") from error
        try:
            yield
        finally:
            self._intake.memory.release(count_bytes)

    def _room(self, place: Destination) -> list[memoryview]:
        """Return the memory that a claimed frame's payload is read into."""
        if isinstance(place, Hidden):
            return [bytes_of(self._intake.hidden)]
        return list(room_for(self._intake.receipt.expected, self._intake.place, place))

    def _wait(self, silent_seconds: float) -> None:
        """Show life, or find out that there is none left at the other end."""
        if self._intake.stop.is_set:
            raise UnreachableError("cancelled")
        giver_silent_seconds = min(silent_seconds, self._intake.giver_silent_seconds())
        if giver_silent_seconds > NO_PROGRESS_SECONDS or silent_seconds > STARVED_SECONDS:
            raise UnreachableError(f"the peer sent no byte for {silent_seconds:.1f} s: given up")
        self._show_life()

    def _show_life(self) -> None:
        if time.monotonic() - self._spoke > HEARTBEAT_SECONDS:
            self._say(Kind.KEEP_ALIVE)

    def _say(self, kind: Kind, message: Abort | None = None) -> None:
        self._stream.send([message_frame(kind, self._address, message)])
        self._spoke = time.monotonic()

    @property
    def _address(self) -> Address:
        return self._intake.receipt.expected.address
