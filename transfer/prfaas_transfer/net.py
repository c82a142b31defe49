"""Data connections over TCP, plain or inside TLS: whole buffers in and out, and a callback on every wait.

Plain TCP moves memory without copies: the kernel gathers and scatters. TLS cannot, since every byte is encrypted on its
way. OpenSSL makes records of 16 KiB. So smaller pieces are first gathered into one buffer, and larger ones go as they
are. (A call for each piece of 4 KiB costs 2.5 times as much, of 1 KiB 10 times.)

A call waits for the socket timeout at most, all its waits together. Then `on_wait(silent_seconds)` decides, by
raising, whether to go on. The callback knows about the peer's other connections and about a cancelled transfer. It is
called between partial reads and writes too. So a peer that moves a byte now and then cannot outlast a deadline. Plain
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
from prfaas.wire.frames import Buffer
from prfaas_transfer.credentials import explain, is_alert
from prfaas_transfer.link_stats import read_tcp_info

log = logging.getLogger(__name__)

CUBIC, BBR = "cubic", "bbr"
NEAR_SECONDS = 0.002  # A peer within this round trip is in the same site.
SOCKET_TIMEOUT_SECONDS: Final = 0.2
_SOCKET_TIMEOUT: Final = struct.pack("@ll", 0, int(SOCKET_TIMEOUT_SECONDS * 1e6))  # struct timeval
STALL_SECONDS: Final = 5.0  # A peer that takes nothing, or sends nothing that is due, for this long counts as gone.
WRITE_BYTES: Final = 64 << 10  # Most that one call encrypts: 4 records. Beyond it neither speed nor CPU changes.
RECORD_BYTES: Final = 16 << 10
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


class ProvenPeer(NamedTuple):
    """The result of a handshake: the peer's cluster, its certificate (DER), the authorities that accepted it, and the
    generation of our own credentials."""

    cluster: str
    certificate: bytes
    authorities: bytes
    generation: int = 0


class DataStream:
    """A connection to a peer, without TLS."""

    peer: ProvenPeer | None = None  # The proven peer; None without TLS.

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self._low_water = 1
        self.heard_at = time.monotonic()  # Monotonic seconds of the last received byte.
        sock.settimeout(None)
        for which in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, which, _SOCKET_TIMEOUT)

    def send(self, parts: Sequence[Buffer], on_sent: OnSent = lambda _sent: None, on_wait: OnWait = give_up) -> None:
        """Send all parts; `on_sent(bytes)` is called for every accepted piece. Raises UnreachableError if the peer is
        gone or `on_wait` raises it, IdentityError with the reason if the peer refused our certificate."""
        left = [memoryview(part) for part in parts if len(part)]
        left_bytes = sum(map(len, left))
        moved_at = time.monotonic()
        while left_bytes:
            if sent := self._send_some(left):
                moved_at = time.monotonic()
                on_sent(sent)
                left_bytes -= sent
            if left_bytes:
                _drop(left, sent)
                on_wait(time.monotonic() - moved_at)

    def receive_into(self, *buffers: Buffer, on_wait: OnWait = give_up) -> None:
        """Fill writable buffers, one after the other. Raises as `send`."""
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        left_bytes = sum(map(len, left))
        began_at = time.monotonic()
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
                    on_wait(time.monotonic() - max(began_at, self.heard_at))
        finally:
            self._wake_at(1)  # the next poll waits for a small frame

    def readable(self) -> bool:
        """True if a read would return at once: with bytes, or with the connection's end."""
        return self._poll(select.POLLIN | select.POLLRDHUP, 0.0)

    def fileno(self) -> int:
        """Return the descriptor to poll; call `readable` first, which knows of buffered bytes."""
        return self.socket.fileno()

    def blocking_socket(self, timeout_seconds: float) -> socket.socket:
        """Return the connection for a library that needs a socket; this stream ends."""
        self.socket.settimeout(timeout_seconds)
        return self.socket

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
        frame. So the end of a large frame is taken in a call of its own, once all of it is there.
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


class TlsStream(DataStream):
    """A connection to a peer inside TLS, after the handshake."""

    socket: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, peer: ProvenPeer):
        super().__init__(sock)
        self.peer = peer
        sock.setblocking(False)  # OpenSSL wants to be called again with what it could not send: waits are our own
        self._gathered = memoryview(bytearray())

    def send(self, parts: Sequence[Buffer], on_sent: OnSent = lambda _sent: None, on_wait: OnWait = give_up) -> None:
        for piece in self._pieces(parts):
            super().send([piece], on_sent, on_wait)

    def readable(self) -> bool:
        return bool(self.socket.pending()) or super().readable()  # OpenSSL may hold bytes

    def _send_some(self, left: list[memoryview]) -> int:
        try:
            return self.socket.send(left[0])
        except ssl.SSLWantWriteError:
            self._poll(select.POLLOUT, SOCKET_TIMEOUT_SECONDS)
            return 0
        except ssl.SSLWantReadError:
            self._poll(select.POLLIN, SOCKET_TIMEOUT_SECONDS)
            return 0
        except (OSError, ValueError) as error:  # ValueError: closed under us
            raise self._refusal(error) from error

    def _receive_some(self, left: list[memoryview], _left_bytes: int, /) -> int | None:
        try:
            return self.socket.recv_into(left[0])
        except ssl.SSLWantReadError:
            self._poll(select.POLLIN | select.POLLRDHUP, SOCKET_TIMEOUT_SECONDS)
            return None
        except ssl.SSLWantWriteError:
            self._poll(select.POLLOUT, SOCKET_TIMEOUT_SECONDS)
            return None
        except (OSError, ValueError) as error:
            raise explain(error, "while receiving") from error

    def _refusal(self, error: Exception) -> PeerError:
        """Return the reason of a failed send: the peer's alert, which a writer must read."""
        if isinstance(error, ConnectionError):
            try:
                self.socket.recv(1)
            except (OSError, ValueError) as said:
                error = said if is_alert(said) else error
        return explain(error, "while sending")

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
