"""The data port of a prefill instance: one thread accepts, one thread a connection sends.

A receiver proves with its HELLO that it holds an open offer; then frames leave as the engine puts them in the offer's
mailbox, while later layers and chunks still compute. Whoever is silent, gone or wrong costs one thread for a moment.
"""

import logging
import socket
import threading
import time

from prfaas.errors import PeerError, ProtocolError
from prfaas.wire.transfer import (
    HEADER_BYTES,
    KEEP_ALIVE_SECONDS,
    Done,
    Failure,
    FrameHeader,
    Hello,
    Kind,
    decode_message,
    message_frame,
    parse_header,
    seal,
    verify,
)
from prfaas_worker.transfer.accounting import Monitor
from prfaas_worker.transfer.layout import Frame
from prfaas_worker.transfer.mailbox import Failed
from prfaas_worker.transfer.offers import Offer, Offers
from prfaas_worker.transfer.sockets import receive_into, send_all, tune

log = logging.getLogger(__name__)

HELLO_SECONDS = 2.0
STALL_SECONDS = 5.0
"""A receiver that takes nothing, or does not acknowledge, for this long is gone."""
TICK_SECONDS = 0.5
MAX_CONNECTIONS = 256
MAX_HELLO_BYTES = 1024


def listen(host: str, port: int) -> socket.socket:
    """Open the data port on this address alone."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    listener.settimeout(TICK_SECONDS)
    return listener


class Sender:
    """Serves the data port from its own threads until the process ends."""

    def __init__(self, listener: socket.socket, offers: Offers):
        self._listener = listener
        self._offers = offers
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.monitor = Monitor()
        threading.Thread(target=self._accept, name="data-port", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._offers.expire()
            try:
                sock, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # out of descriptors, or the peer left in the backlog
                log.warning("data port: accepting failed: %s", error)
                time.sleep(TICK_SECONDS)
                continue
            if not self._free.acquire(blocking=False):
                log.warning("data port: %d connections are open, %s is turned away", MAX_CONNECTIONS, peer[0])
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, peer[0]), name="data-send", daemon=True).start()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with sock:
                tune(sock)
                offer = self._greet(sock)
                try:
                    with self.monitor.watch(sock, lambda: offer.mailbox.queued_bytes):
                        Delivery(sock, offer, self._offers).run()
                finally:
                    self._offers.disconnect(offer)
        except PeerError as error:
            log.info("data port: transfer to %s ended: %s", peer, error)
        except OSError as error:
            log.info("data port: connection of %s broke: %s", peer, error)
        finally:
            self._free.release()

    def _greet(self, sock: socket.socket) -> Offer:
        """Read HELLO and return the offer it has a right to."""
        sock.settimeout(HELLO_SECONDS)
        header, payload = _receive_frame(sock, Kind.HELLO)
        try:
            return self._offers.connect(header.address, decode_message(header, payload, Hello).token)
        except PeerError as error:
            send_all(sock, [message_frame(Kind.ERROR, header.address, Failure(str(error)))], lambda _sent: None)
            raise


class Delivery:
    """One offer on one connection, from MANIFEST to ACK."""

    def __init__(self, sock: socket.socket, offer: Offer, offers: Offers):
        self._sock = sock
        self._offer = offer
        self._offers = offers
        self._payload_bytes = 0
        self._first_sent: float | None = None

    def run(self) -> None:
        """Send until the offer is acknowledged or ends.

        Raises:
            PeerError: the receiver is gone, stalls, or breaks the protocol.

        """
        self._sock.settimeout(STALL_SECONDS)
        address = self._offer.manifest.address
        self._send(message_frame(Kind.MANIFEST, address, self._offer.manifest))
        while True:
            entry = self._offer.mailbox.take(self._sock, KEEP_ALIVE_SECONDS)
            if entry is None:
                self._send(message_frame(Kind.KEEP_ALIVE, address))
            elif isinstance(entry, Frame):
                self._send_data(entry)
            elif isinstance(entry, Failed):
                return self._send(message_frame(Kind.ERROR, address, Failure(entry.message)))
            else:
                self._send(message_frame(Kind.DONE, address, self._account(entry.prefill_seconds)))
                return self._await_acknowledgement()

    def _send_data(self, frame: Frame) -> None:
        self._payload_bytes += frame.header.payload_bytes
        payload = frame.load()
        self._send(seal(frame.header, payload), *payload, first=self._first_sent is None)

    def _send(self, *parts: bytes | memoryview, first: bool = False) -> None:
        send_all(self._sock, parts, self._on_first if first else self._offers.counters.sent)

    def _on_first(self, count_bytes: int) -> None:
        if self._first_sent is None:
            self._first_sent = time.monotonic()
        self._offers.counters.sent(count_bytes)

    def _account(self, prefill_seconds: float) -> Done:
        first = self._first_sent if self._first_sent is not None else time.monotonic()
        return Done(
            payload_bytes=self._payload_bytes,
            prefill_seconds=prefill_seconds,
            first_byte_seconds=first - self._offer.compute_started,
        )

    def _await_acknowledgement(self) -> None:
        header, _ = _receive_frame(self._sock, Kind.ACK)
        if header.address != self._offer.manifest.address:
            raise ProtocolError(f"acknowledgement for {header.address}, want {self._offer.manifest.address}")
        self._offers.end(self._offer, "delivered")


def _receive_frame(sock: socket.socket, kind: Kind) -> tuple[FrameHeader, bytes]:
    """Read one small frame of the given kind from a receiver."""
    raw = bytearray(HEADER_BYTES)
    receive_into(sock, raw)
    header = parse_header(raw)
    if header.kind != kind or header.payload_bytes > MAX_HELLO_BYTES:
        raise ProtocolError(f"{header.describe()} of {header.payload_bytes} bytes from a receiver, want {kind.name}")
    payload = bytearray(header.payload_bytes)
    receive_into(sock, payload)
    verify(header, [payload])
    return header, bytes(payload)
