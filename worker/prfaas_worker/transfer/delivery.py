"""One connection's part in sending: takes frames from the shipment, sends them, and hears what the peer says meanwhile.

Any number of connections run this at once on the same outgoing. Between two frames, and while there is none, the peer
is listened to: it may want no more, or have everything.
"""

import select
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from prfaas.errors import CapacityError, DamagedError, PeerError, ProtocolError, UnreachableError
from prfaas.wire.codecs import Codec
from prfaas.wire.frames import (
    DATA_KINDS,
    HEADER_BYTES,
    MAX_HELLO_BYTES,
    FrameHeader,
    Kind,
    parse_header,
    seal,
    verify,
)
from prfaas.wire.shipment import Next, Parcel
from prfaas.wire.transfer import KEEP_ALIVE_SECONDS, Abort, Done, decode_message, message_frame
from prfaas_worker.refusals import MIXED, is_tls
from prfaas_worker.transfer.outgoing import Bell, Frame, Outgoing
from prfaas_worker.transfer.stop import StoppedError
from prfaas_worker.transfer.streams import OnWait, Stream, give_up
from prfaas_worker.transfer.traffic import Traffic


class Channel(NamedTuple):
    """A connection that serves a transfer: its number, the peer's cluster, and what was agreed on with it."""

    stream: Stream
    connection: int
    peer: str = ""
    codecs: tuple[int, ...] = (Codec.NONE,)


class Delivery:
    """Sends an outgoing's frames over one connection; `on_sent(bytes)` hears of every piece that the kernel took."""

    def __init__(self, channel: Channel, outgoing: Outgoing, traffic: Traffic, on_sent: Callable[[int], None]):
        self._channel = channel
        self._stream = channel.stream
        self._connection = channel.connection
        self._outgoing = outgoing
        self._traffic = traffic
        self._on_sent = on_sent

    def run(self) -> None:
        """Send until the peer acknowledged everything, over whichever connection.

        Raises:
            UnreachableError, DamagedError: this connection is of no use any more.
            PeerError: the peer gave up, breaks the protocol, or was told that we gave up.

        """
        bell = self._outgoing.enter()
        try:
            while not self._outgoing.acknowledged:
                self._step(bell)
            self._say(Kind.FREED)
        except (UnreachableError, DamagedError):
            if not self._outgoing.acknowledged:  # what breaks afterwards took nothing with it
                raise
        except ProtocolError as error:
            with suppress(PeerError):
                self._say(Kind.ABORT, Abort(str(error)))
            raise
        finally:
            self._outgoing.shipment.lost(self._connection)
            self._outgoing.leave(bell)

    def _step(self, bell: Bell) -> None:
        out = self._outgoing
        if out.failure is not None:
            self._say(Kind.ABORT, Abort(out.failure))
            raise PeerError(f"given up: {out.failure}")
        while self._stream.readable():
            self._hear()
            if out.acknowledged:
                return
        found = out.shipment.take(self._connection)
        if found is Next.WAIT:
            bell.hush()  # before looking again: what is put in after that look rings again
            found = out.shipment.take(self._connection)
        match found:
            case Parcel(sequence, frame):
                self._send(sequence, frame)
            case Next.DONE:
                self._say(Kind.DONE, out.account)
            case Next.WAIT if not out.acknowledged and not self._wait(bell):
                self._say(Kind.KEEP_ALIVE)

    def _send(self, sequence: int, frame: Frame) -> None:
        codec = self._codec(sequence) if frame.tensors else Codec.NONE
        held_bytes = frame.copied_bytes + (frame.header.payload_bytes if codec else 0)
        if not self._await_memory(held_bytes):
            return  # it failed meanwhile: the next step says so
        try:
            self._send_loaded(sequence, frame, codec)
        finally:
            self._traffic.memory.release(held_bytes)

    def _codec(self, sequence: int) -> Codec:
        """Return the codec that a frame goes through, the same each time that it leaves."""
        chosen = self._traffic.packer.codec(self._channel.peer, self._channel.codecs)
        return self._outgoing.codecs.setdefault(sequence, chosen)

    def _send_loaded(self, sequence: int, frame: Frame, codec: Codec) -> None:
        payload = frame.load()
        header = frame.header._replace(sequence=sequence)
        if codec:
            packed = self._traffic.packer.pack(codec, frame.tensors, frame.items, payload)
            payload = tuple(memoryview(part).cast("B") for part in packed.buffers)
            header = header._replace(codec=packed.codec, payload_bytes=packed.nbytes)
        sealed = seal(header, payload)
        self._outgoing.shipment.sealed(sequence, sealed.digest, header.payload_bytes)
        self._pace([memoryview(sealed.header), *payload])

    def _await_memory(self, count_bytes: int) -> bool:
        """Hold memory for a frame, and meanwhile keep the connection alive; False when the transfer is over."""
        while True:
            try:
                self._traffic.memory.acquire(count_bytes, self._outgoing.stop, KEEP_ALIVE_SECONDS)
            except CapacityError:
                self._say(Kind.KEEP_ALIVE)
            except StoppedError:
                return False
            else:
                return True

    def _pace(self, parts: list[memoryview]) -> None:
        """Send a frame, in portions as the egress cap lets them go."""
        left_bytes = sum(map(len, parts))
        self._outgoing.paced(left_bytes)
        try:
            for portion in self._traffic.egress.portions(parts, self._outgoing.stop):
                self._outgoing.begins()
                self._stream.send(portion, self._on_data, self._on_wait)
                portion_bytes = sum(map(len, portion))
                self._outgoing.paced(-portion_bytes)
                left_bytes -= portion_bytes
        except StoppedError as error:
            raise UnreachableError(f"given up in the middle of a frame: {self._outgoing.failure}") from error
        finally:
            self._outgoing.paced(-left_bytes)

    def _on_data(self, count_bytes: int) -> None:
        self._outgoing.heard()  # its kernel's buffers end where it does not read
        self._on_sent(count_bytes)

    def _on_wait(self, silent_seconds: float) -> None:
        if self._outgoing.failure is not None:
            raise UnreachableError(f"given up in the middle of a frame: {self._outgoing.failure}")
        give_up(silent_seconds)

    def _say(self, kind: Kind, message: Abort | Done | None = None) -> None:
        self._stream.send([message_frame(kind, self._outgoing.address, message)], self._on_sent)

    def _wait(self, bell: Bell) -> bool:
        """Wait for work or for the peer; False when neither came."""
        if self._stream.readable():
            return True
        poller = select.poll()
        poller.register(bell, select.POLLIN)
        poller.register(self._stream, select.POLLIN | select.POLLRDHUP)
        return bool(poller.poll(KEEP_ALIVE_SECONDS * 1000))

    def _hear(self) -> None:
        header, payload = receive_message(self._stream, self._on_wait)
        if header.address != self._outgoing.address:
            raise ProtocolError(f"{header.describe()} for {header.address}, want {self._outgoing.address}")
        match header.kind:
            case Kind.KEEP_ALIVE:
                self._outgoing.heard()
            case Kind.ACK if self._outgoing.shipment.all_left:
                self._outgoing.acknowledge()
            case Kind.ABORT:
                raise PeerError(f"the receiver gave up: {decode_message(header, payload, Abort).message}")
            case _:
                raise ProtocolError(f"{header.describe()} from a receiver has no place here")


def receive_message(
    stream: Stream, on_wait: OnWait = give_up, limit_bytes: int = MAX_HELLO_BYTES
) -> tuple[FrameHeader, bytes]:
    """Read one small frame, of `limit_bytes` at most.

    Raises:
        UnreachableError: the connection broke, or `on_wait` gave it up.
        ProtocolError: it is no message, or damaged.

    """
    header = receive_header(stream, on_wait)
    if header.payload_bytes > limit_bytes or header.kind in DATA_KINDS:
        raise ProtocolError(f"{header.describe()} of {header.payload_bytes} bytes where a message was due")
    payload = bytearray(header.payload_bytes)
    stream.receive_into(payload, on_wait=on_wait)
    verify(header, [payload])
    return header, bytes(payload)


def receive_header(stream: Stream, on_wait: OnWait) -> FrameHeader:
    """Read the next frame's header.

    Raises:
        UnreachableError: the connection broke, or `on_wait` gave it up.
        ProtocolError: it is none of ours, or damaged.

    """
    raw = bytearray(HEADER_BYTES)
    stream.receive_into(raw, on_wait=on_wait)
    try:
        return parse_header(raw)
    except DamagedError as error:
        if stream.peer is None and is_tls(raw):
            raise ProtocolError(f"the peer speaks TLS; {MIXED}") from error
        raise
