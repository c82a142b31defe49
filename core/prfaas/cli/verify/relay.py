"""A relay between a destination and a source's data port: it counts what crosses, and does harm where a check says so.

Harm is what a faulty source, or a link that nobody guards, would do: a page or a state of zeros whose digest is right,
frames of another epoch, a connection that ends and never comes back. Inside TLS the relay shows the certificate of the
cluster that the command was given, to both sides.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

from prfaas.cli.measured_server import tls_context
from prfaas.errors import PeerError, PrfaasError
from prfaas.names import TLS_CERT, TLS_KEY, TLS_TRUSTED
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, FrameHeader, Kind, parse_header, seal

CONNECT_SECONDS: Final = 5.0
_PIECE_BYTES: Final = 1 << 16


class RelayedFrame(NamedTuple):
    header: FrameHeader
    payload: bytes


Harm = Callable[[RelayedFrame], RelayedFrame | None]
"""Returns what passes instead of a frame; None ends all connections, and refuses new ones."""


def no_harm(frame: RelayedFrame) -> RelayedFrame:
    return frame


def zeroed(kind: Kind) -> Harm:
    """Zero the payload of the first frame of a kind."""
    left = [kind]

    def harm(frame: RelayedFrame) -> RelayedFrame:
        if frame.header.kind not in left:
            return frame
        left.clear()
        return RelayedFrame(frame.header._replace(codec=0), bytes(len(frame.payload)))

    return harm


def stale(frame: RelayedFrame) -> RelayedFrame:
    """Move a frame of cache to the epoch before."""
    address = frame.header.address
    older = address._replace(epoch=(address.epoch or 2) - 1)
    return frame._replace(header=frame.header._replace(address=older)) if frame.header.kind in DATA_KINDS else frame


def killed(frame: RelayedFrame) -> RelayedFrame | None:
    """End at the first frame of cache."""
    return None if frame.header.kind in DATA_KINDS else frame


class Relay:
    """Relays to a source's data port while its block runs. `seen` are the kinds of frames that came, `data_bytes` the
    cache among them, `first_seconds` and `last_seconds` when that began and ended (`time.perf_counter`)."""

    def __init__(self, source: tuple[str, int], host: str, harm: Harm = no_harm, tls_dir: Path | None = None):
        self._source, self._harm, self._tls_dir = source, harm, tls_dir
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._lock, self._sockets, self._is_closed = threading.Lock(), set[socket.socket](), False
        self.seen, self.data_bytes = set[Kind](), 0
        self.first_seconds = self.last_seconds = 0.0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """End all connections, and take no more."""
        with self._lock:
            self._is_closed = True
            for sock in (*self._sockets, self._listener):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the end
            while True:
                destination, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(destination,), daemon=True).start()

    def _relay(self, accepted: socket.socket) -> None:
        with suppress(OSError), accepted:  # ssl.SSLError is one
            accepted.settimeout(CONNECT_SECONDS)
            with self._wrapped(accepted) as destination, self._connected() as source:
                for sock in (destination, source):
                    sock.settimeout(None)
                with self._lock:
                    if self._is_closed:
                        return
                    self._sockets |= {destination, source}
                up = threading.Thread(target=self._pass_up, args=(destination, source), daemon=True)
                up.start()
                self._pass_down(source, destination)
                up.join()
                with self._lock:
                    self._sockets -= {destination, source}

    def _wrapped(self, sock: socket.socket) -> socket.socket:
        if self._tls_dir is None:
            return sock
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._tls_dir / TLS_CERT, self._tls_dir / TLS_KEY)
        context.load_verify_locations(self._tls_dir / TLS_TRUSTED)
        context.verify_mode = ssl.CERT_REQUIRED
        return context.wrap_socket(sock, server_side=True)

    def _connected(self) -> socket.socket:
        sock = socket.create_connection(self._source, CONNECT_SECONDS)
        if self._tls_dir is None:
            return sock
        context = tls_context(None, self._tls_dir)
        context.check_hostname = False  # a certificate names a cluster
        return context.wrap_socket(sock)

    def _pass_up(self, destination: socket.socket, source: socket.socket) -> None:
        with suppress(OSError):
            while piece := destination.recv(_PIECE_BYTES):
                source.sendall(piece)
        _end_both(destination, source)

    def _pass_down(self, source: socket.socket, destination: socket.socket) -> None:
        with suppress(OSError, PrfaasError):
            while True:
                header = parse_header(_read(source, HEADER_BYTES))
                self._count(header)
                frame = RelayedFrame(header, _read(source, header.payload_bytes))
                if header.kind in DATA_KINDS:
                    self.last_seconds = time.perf_counter()
                if (passed := self._harm(frame)) is None:
                    self._end()
                    break
                destination.sendall(seal(passed.header, [passed.payload]).header + passed.payload)
        _end_both(source, destination)

    def _count(self, header: FrameHeader) -> None:
        with self._lock:
            self.seen.add(header.kind)
            if header.kind in DATA_KINDS:
                self.first_seconds = self.first_seconds or time.perf_counter()
                self.data_bytes += header.payload_bytes


def address_towards(host: str) -> str:
    """Return this machine's address as a host sees it, without translation on the way. Raises PeerError if no way leads
    there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PeerError(f"no way leads to {host}: {error}") from error


def _end_both(*sockets: socket.socket) -> None:
    for sock in sockets:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _read(sock: socket.socket, count_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < count_bytes:
        if not (piece := sock.recv(count_bytes - len(data))):
            raise ConnectionError("the end")
        data += piece
    return bytes(data)
