"""Data connections over TCP, plain or inside TLS: whole buffers in and out, and a callback on every wait.

Plain TCP moves memory without copies: the kernel gathers and scatters. TLS cannot, since every byte is encrypted on its
way. OpenSSL makes records of 16 KiB, and on a socket it would make a system call for each that it sends, and two for
each that it receives. So it has memory instead of a socket, and many records cross the kernel's border at once. Pieces
of less than a record are first gathered into one buffer, and larger ones are encrypted as they are. (A call for each
piece of 4 KiB costs 2.5 times as much, of 1 KiB 10 times.)

A call waits for the socket timeout at most, all its waits together. Then `on_wait(silent_seconds)` decides, by
raising, whether to go on. The callback knows about the peer's other connections and about a cancelled transfer. It is
called between partial reads and writes too. So a peer that moves a byte now and then cannot outlast a deadline. Time in
which this process had no CPU is no silence of the peer: a wait that lasts longer than it should counts less. Plain
TCP waits inside the call that moves the bytes, all but the end of a frame at once. Polling in between costs a third
more CPU. One thread uses a stream; any may cut it.
"""

import logging
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from prfaas.errors import PeerError, UnreachableError
from prfaas.rights import Identity
from prfaas.wire.frames import Buffer
from prfaas_transfer.credentials import explain, is_alert
from prfaas_transfer.link_stats import read_tcp_info

log = logging.getLogger(__name__)

CUBIC, BBR = "cubic", "bbr"
NEAR_SECONDS = 0.002  # A peer within this round trip is in the same site.
SOCKET_TIMEOUT_SECONDS: Final = 0.2
TURN_SECONDS: Final = 2 * SOCKET_TIMEOUT_SECONDS
"""Most silence that one wait counts. A wait that lasts longer found this process without a CPU."""
_SOCKET_TIMEOUT: Final = struct.pack("@ll", 0, int(SOCKET_TIMEOUT_SECONDS * 1e6))  # struct timeval
STALL_SECONDS: Final = 5.0  # A peer that takes nothing, or sends nothing that is due, for this long counts as gone.
WRITE_BYTES: Final = 256 << 10  # Most that one call encrypts: 16 records.
READ_BYTES: Final = 256 << 10  # Most ciphertext that one call receives.
RECORD_BYTES: Final = 16 << 10
MAX_RECORD_BYTES: Final = RECORD_BYTES + 1024  # More than a record has with its header and tag.
# The kernel takes 1,024 at once.
_MAX_PIECES: Final = 512
LOW_WATER_BYTES: Final = 256 << 10  # A reader of a large payload is woken for this much.

OnWait = Callable[[float], None]
OnSent = Callable[[int], None]


def use_congestion(sock: socket.socket, name: str) -> None:
    """Choose a congestion control, if the kernel has it; accepted connections inherit the listener's.

    BBR paces what it sends, and the kernel goes on pacing after a change: a timer for each segment, half of what a near
    transfer costs. So a connection that may turn out to be near must not begin with it.
    """
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        log.debug("congestion control stays as it is: no %s (%s)", name, error)


def connect_tcp(host: str, port: int, timeout_seconds: float) -> socket.socket:
    """Return a socket connected to a host's first address that answers, tuned for a near peer; else raise OSError."""
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            use_congestion(sock, CUBIC)
            sock.settimeout(timeout_seconds)
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def tune(sock: socket.socket) -> None:
    """Set the options of the data path on a connected socket, whatever the host's defaults are.

    Small frames are sent at once. A near peer gets CUBIC; a far one gets BBR, which keeps a path with a loss in a
    thousand full where CUBIC reaches a third of it. The kernel sizes the buffers.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    use_congestion(sock, CUBIC if (read_tcp_info(sock).rtt_seconds or 0.0) < NEAR_SECONDS else BBR)


def give_up(silent_seconds: float) -> None:
    """Raise UnreachableError after `STALL_SECONDS` of silence."""
    if silent_seconds > STALL_SECONDS:
        raise UnreachableError(f"the peer moved no byte for {silent_seconds:.1f} s: given up")


class SentShare:
    """Counts a whole of `amount` in proportion to its `parts` that are done."""

    def __init__(self, amount: int, parts: int):
        self._amount, self._parts, self._done, self._told = amount, parts, 0, 0

    def add(self, parts: int) -> int:
        """Return by how much the amount grew."""
        self._done += parts
        before, self._told = self._told, self._amount * self._done // self._parts
        return self._told - before


class ProvenPeer(NamedTuple):
    """The result of a handshake: what the peer proved, its certificate (DER), the authorities that accepted it, and the
    generation of our own credentials."""

    identity: Identity
    certificate: bytes
    authorities: bytes
    generation: int = 0

    @property
    def cluster(self) -> str:
        return self.identity.cluster


class DataStream:
    """A connection to a peer, without TLS."""

    peer: ProvenPeer | None = None  # The proven peer; None without TLS.

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self._low_water = 1
        # Monotonic seconds of the last received byte, later by the time since then in which this process did not run.
        self.heard_at = time.monotonic()
        self.late_seconds = 0.0  # That time, in all waits.
        # Python's own time-out would poll before each call. The kernel's ends a call with EAGAIN, a BlockingIOError.
        sock.settimeout(None)
        for which in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, which, _SOCKET_TIMEOUT)

    def send(self, parts: Sequence[Buffer], on_sent: OnSent = lambda _sent: None, on_wait: OnWait = give_up) -> None:
        """Send all parts; `on_sent(bytes)` is called for every accepted piece. Raises UnreachableError if the peer is
        gone or `on_wait` raises it, IdentityError with the reason if the peer refused our certificate."""
        left = [memoryview(part) for part in parts if len(part)]
        left_bytes = sum(map(len, left))
        moved_at = turn_at = time.monotonic()
        while left_bytes:
            sent = self._send_some(left)
            now = time.monotonic()
            if sent:
                moved_at = now
                on_sent(sent)
                left_bytes -= sent
            else:
                moved_at += max(0.0, now - turn_at - TURN_SECONDS)  # in which this process did not run
            turn_at = now
            if left_bytes:
                _drop(left, sent)
                on_wait(now - moved_at)

    def receive_into(self, *buffers: Buffer, on_wait: OnWait = give_up) -> None:
        """Fill writable buffers, one after the other. Raises as `send`."""
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        left_bytes = sum(map(len, left))
        began_at = turn_at = time.monotonic()
        try:
            while left_bytes:
                received = self._receive_some(left, left_bytes)
                if received == 0:
                    raise UnreachableError("the peer closed the connection before everything was sent")
                if received is not None:
                    self.heard_at = time.monotonic()
                    left_bytes -= received
                if left_bytes:
                    _drop(left, received or 0)
                    now = time.monotonic()
                    if not received and (late_seconds := now - turn_at - TURN_SECONDS) > 0:
                        began_at += late_seconds
                        self.heard_at = min(now, self.heard_at + late_seconds)
                        self.late_seconds += late_seconds
                    turn_at = now
                    on_wait(now - max(began_at, self.heard_at))
        finally:
            self._wake_at(1)  # the next poll waits for a small frame

    def readable(self) -> bool:
        """True if a read would return at once: with bytes, or with the connection's end."""
        return self._poll(select.POLLIN | select.POLLRDHUP, 0.0)

    def fileno(self) -> int:
        """Return the descriptor to poll; call `readable` first, which knows of buffered bytes."""
        return self.socket.fileno()

    def shutdown(self) -> None:
        """Cut the connection from any thread: its readers and writers get UnreachableError."""
        with suppress(OSError):  # it is disconnected already
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        # Bytes that the peer's application has not acknowledged may be lost.
        self.socket.close()

    def _send_some(self, left: list[memoryview]) -> int:
        """Give the kernel what it takes; 0 after a timeout without room."""
        try:
            return self.socket.sendmsg(left[:_MAX_PIECES])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise UnreachableError(f"the connection broke while sending: {error}") from error

    def _receive_some(self, left: list[memoryview], left_bytes: int, /) -> int | None:
        """Receive all that is expected, or what comes before the timeout; None if no byte came, 0 at the end.

        The kernel wakes us for many bytes at once, half the CPU on a slow link, as long as that many are due. It does
        not count bytes that it has already given us, so in the middle of a call it would wait for bytes beyond the
        frame. So the end of a large frame is taken in its own call, once all of it is there.
        """
        pieces, flags = left[:_MAX_PIECES], 0
        if left_bytes >= 2 * LOW_WATER_BYTES:
            self._wake_at(LOW_WATER_BYTES)
            pieces, flags = _front(left, left_bytes - LOW_WATER_BYTES), socket.MSG_WAITALL
        elif left_bytes >= LOW_WATER_BYTES:
            self._wake_at(left_bytes)
            self._poll(select.POLLIN | select.POLLRDHUP, SOCKET_TIMEOUT_SECONDS)
            flags = socket.MSG_DONTWAIT
        else:
            self._wake_at(1)
        try:
            return self.socket.recvmsg_into(pieces, 0, flags)[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise UnreachableError(f"the connection broke while receiving: {error}") from error

    def _wake_at(self, low_water_bytes: int) -> None:
        if low_water_bytes != self._low_water:
            with suppress(OSError):  # it was closed: the next read reports that
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water_bytes)
            self._low_water = low_water_bytes

    def _poll(self, events: int, timeout_seconds: float) -> bool:
        poller = select.poll()
        poller.register(self.socket, events)
        return bool(poller.poll(timeout_seconds * 1000))


class TlsChannel:
    """A socket and OpenSSL's side of it, with memory in between: many records cross the kernel's border at once."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool):
        self.socket = sock
        self._received, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._received, self._encrypted, server_side=server_side)

    def fileno(self) -> int:
        return self.socket.fileno()

    def do_handshake(self) -> None:
        """Go on as far as the peer's bytes reach, on a socket that does not block; SSLWantReadError: more must come."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                with suppress(BlockingIOError):
                    self.add(self.socket.recv(READ_BYTES))
                    continue
                raise
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # the alert that tells the peer what is wrong with it
                raise
            self._flush()
            return

    def add(self, received: Buffer) -> None:
        """Note ciphertext that came, or the connection's end."""
        if len(received):
            self._received.write(received)
        else:
            self._received.write_eof()

    def encrypt(self, piece: Buffer) -> bytes:
        self.tls.write(piece)
        return self._encrypted.read()

    @property
    def has_bytes(self) -> bool:
        return bool(self.tls.pending() or self._received.pending)

    def close(self) -> None:
        self.socket.close()

    def _flush(self) -> None:
        """Send what the handshake says: less than any socket's buffer has room for."""
        if sent := self._encrypted.read():
            self.socket.sendall(sent)


class TlsStream(DataStream):
    """A connection to a peer inside TLS, after the handshake."""

    def __init__(self, channel: TlsChannel, peer: ProvenPeer):
        super().__init__(channel.socket)
        self.peer = peer
        self.channel = channel
        self._gathered = memoryview(bytearray())
        self._room = memoryview(bytearray())

    def send(self, parts: Sequence[Buffer], on_sent: OnSent = lambda _sent: None, on_wait: OnWait = give_up) -> None:
        for piece in self._pieces(parts):
            try:
                encrypted = self.channel.encrypt(piece)
            except (OSError, ValueError) as error:
                raise explain(error, "while sending") from error
            # Callers count payload, and the kernel takes ciphertext.
            share = SentShare(len(piece), len(encrypted))
            super().send([encrypted], lambda sent, share=share: on_sent(share.add(sent)), on_wait)

    def readable(self) -> bool:
        return self.channel.has_bytes or super().readable()

    def _send_some(self, left: list[memoryview]) -> int:
        try:
            return super()._send_some(left)
        except UnreachableError as error:
            raise self._refusal(error) from error.__cause__

    def _receive_some(self, left: list[memoryview], left_bytes: int, /) -> int | None:
        """Decrypt what came; without any, wait for more, and return None; 0 at the end."""
        room, received = left[0], 0
        try:
            # A read returns one record at most: 16 KiB.
            while received < len(room):
                read: int = self.channel.tls.read(len(room) - received, room[received:])  # type: ignore[arg-type]
                if not read:  # the peer ended TLS in order: each further read returns 0, too
                    return received
                received += read
        except ssl.SSLWantReadError:
            if not received:
                self._fill(left_bytes)
        except (OSError, ValueError) as error:
            raise explain(error, "while receiving") from error
        return received or None

    def _fill(self, left_bytes: int) -> None:
        """Receive ciphertext, for a frame that has so many bytes left, of which OpenSSL may have a part of a record."""
        if not self._room:
            self._room = memoryview(bytearray(READ_BYTES))
        # At least so much ciphertext is still on its way. To wait for more would be to wait for the next frame.
        due_bytes = left_bytes - MAX_RECORD_BYTES
        is_large = due_bytes >= 2 * LOW_WATER_BYTES
        room = self._room[: min(len(self._room), due_bytes - LOW_WATER_BYTES)] if is_large else self._room
        self._wake_at(LOW_WATER_BYTES if is_large else 1)
        try:
            received = self.socket.recv_into(room, 0, socket.MSG_WAITALL if is_large else 0)
        except BlockingIOError:
            return
        except OSError as error:
            raise explain(error, "while receiving") from error
        if received:
            self.heard_at = time.monotonic()
        self.channel.add(room[:received])

    def _refusal(self, error: UnreachableError) -> PeerError:
        """Return the reason of a failed send: the peer's alert, which a writer must read."""
        try:
            self.channel.add(self.socket.recv(READ_BYTES, socket.MSG_DONTWAIT))
            self.channel.tls.read(1)
        except (OSError, ValueError) as answer:
            if is_alert(answer):
                return explain(answer, "while sending")
        return error

    def _pieces(self, parts: Sequence[Buffer]) -> Iterator[memoryview]:
        """Yield pieces to encrypt at once: large parts in slices without a copy, runs of small ones gathered."""
        filled = 0
        for part in parts:
            view = memoryview(part)
            if len(view) >= RECORD_BYTES or filled + len(view) > len(self._gathered):
                if filled:
                    yield self._gathered[:filled]
                filled = 0
            if len(view) >= RECORD_BYTES:
                for start in range(0, len(view), WRITE_BYTES):
                    yield view[start : start + WRITE_BYTES]
                continue
            if not self._gathered:
                self._gathered = memoryview(bytearray(WRITE_BYTES))
            self._gathered[filled : filled + len(view)] = view
            filled += len(view)
        if filled:
            yield self._gathered[:filled]


def plain(sock: socket.socket) -> DataStream:
    tune(sock)
    return DataStream(sock)


def _front(left: list[memoryview], count_bytes: int) -> list[memoryview]:
    """Return the first buffers, limited by bytes and by the kernel's number of pieces."""
    pieces: list[memoryview] = []
    for piece in left[:_MAX_PIECES]:
        pieces.append(piece[:count_bytes])
        count_bytes -= len(pieces[-1])
        if not count_bytes:
            break
    return pieces


def _drop(left: list[memoryview], count_bytes: int) -> None:
    done = 0
    for piece in left:
        if count_bytes < len(piece):
            break
        count_bytes -= len(piece)
        done += 1
    del left[:done]
    if count_bytes:
        left[0] = left[0][count_bytes:]
