"""A decode instance fetches a prompt's cache: asks the Prefill-as-a-Service API, receives the frames, acknowledges.

Each fetch is a thread that ends within about a second of anything that goes wrong on the way. The payload lands in the
pages and the slot of a sequence that does not use them before the receipt says that it is whole; they must stay that
sequence's until the fetch has ended, even when it was cancelled.
"""

import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import torch

from prfaas.errors import PeerError, PrfaasError, ProtocolError, UnreachableError
from prfaas.wire.prefill import PrefillGrant, PrefillRequest
from prfaas.wire.receipt import Destination, Hidden, Note, Receipt, Rows, State
from prfaas.wire.transfer import (
    HEADER_BYTES,
    NO_PROGRESS_SECONDS,
    Done,
    FrameHeader,
    Hello,
    Kind,
    LayerGroup,
    Manifest,
    message_frame,
    parse_header,
)
from prfaas_worker.cache.memory import bytes_of
from prfaas_worker.transfer.counters import Outcome, TransferCounters
from prfaas_worker.transfer.layout import Place, land, room_for
from prfaas_worker.transfer.sockets import receive_into, send_all, tune

log = logging.getLogger(__name__)

CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 2.0
"""The API answers from a process that computes nothing, so this is long."""
MAX_ANSWER_BYTES = 1 << 16


class Wanted(NamedTuple):
    """What to fetch, and from whom: rows from `start_token` on, and every state.

    `groups` and `fingerprint` are those of the model here.
    """

    request_id: str
    model_name: str
    prefill_url: str
    token_ids: list[int]
    start_token: int
    cache_salt: str
    fingerprint: str
    groups: tuple[LayerGroup, ...]
    hidden_size: int


class Fetched(NamedTuple):
    """What came: hidden state fp32 [hidden_size], P's account, cache bytes, first to last data byte received."""

    hidden: torch.Tensor
    done: Done
    received_bytes: int
    transfer_seconds: float


class Fetch:
    """One fetch into `place`. `on_end(result or error)` is called once, from its thread, which then touches nothing."""

    def __init__(self, wanted: Wanted, place: Place, counters: TransferCounters):
        self._wanted = wanted
        self._place = place
        self._counters = counters
        self._socket: socket.socket | None = None
        self._cancelled = False

    def start(self, on_end: Callable[[Fetched | PrfaasError], None]) -> None:
        """Begin, in a thread of its own."""
        threading.Thread(target=self._run, args=(on_end,), name="fetch", daemon=True).start()

    def cancel(self) -> None:
        """End it at once, whatever it waits for; P notices the closed connection."""
        self._cancelled = True
        sock = self._socket
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                log.debug("fetch of %s: was disconnected already", self._wanted.request_id)

    def _run(self, on_end: Callable[[Fetched | PrfaasError], None]) -> None:
        outcome: Outcome = "failed"
        result: Fetched | PrfaasError
        try:
            result = self._fetch()
            outcome = "delivered"
        except PrfaasError as error:
            result = PeerError(f"prefill at {self._wanted.prefill_url} failed: {error}")
        except Exception as error:  # a bug here must end this one request, never leave it waiting
            log.exception("fetch of %s", self._wanted.request_id)
            result = PeerError(f"prefill at {self._wanted.prefill_url} failed: {error!r}")
        self._counters.ended("receive", "cancelled" if self._cancelled else outcome)
        on_end(result)

    def _fetch(self) -> Fetched:
        grant = self._ask()
        said_hello = False
        try:
            host = urlsplit(self._wanted.prefill_url).hostname or ""
            with _connect(host, grant.data_port) as sock:
                self._hold(sock)
                sock.settimeout(NO_PROGRESS_SECONDS)
                manifest = self._expected(grant)
                hello = message_frame(Kind.HELLO, manifest.address, Hello(grant.token))
                send_all(sock, [hello], lambda _sent: None)
                said_hello = True
                fetched = Reception(sock, Receipt(manifest), self._place, self._counters).run()
                send_all(sock, [message_frame(Kind.ACK, manifest.address)], lambda _sent: None)
                return fetched
        finally:
            if not said_hello:  # after HELLO the closed connection tells P
                self._release(grant)

    def _ask(self) -> PrefillGrant:
        body = PrefillRequest(
            request_id=self._wanted.request_id,
            model=self._wanted.model_name,
            token_ids=self._wanted.token_ids,
            start_token=self._wanted.start_token,
            cache_salt=self._wanted.cache_salt,
        )
        url = self._wanted.prefill_url
        status, answer = _call(url, ("POST", "/v1/prefills"), msgspec.json.encode(body), self._hold)
        if status != http.client.CREATED:
            text = answer[:500].decode("utf-8", "replace")
            raise PeerError(f"refused with HTTP {status}: {text}")
        try:
            return msgspec.json.decode(answer, type=PrefillGrant)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the answer is no prefill grant: {error}") from error

    def _release(self, grant: PrefillGrant) -> None:
        """Tell P that nobody will come; its lease would end it anyway."""
        try:
            _call(self._wanted.prefill_url, ("DELETE", f"/v1/prefills/{grant.transfer_id}"), b"", lambda _sock: None)
        except PeerError as error:
            log.info("prefill %s is left to its lease: %s", grant.transfer_id, error)

    def _hold(self, sock: socket.socket) -> None:
        """Let `cancel` reach this socket."""
        self._socket = sock
        if self._cancelled:  # it may have come before it could see the socket
            raise UnreachableError("cancelled")

    def _expected(self, grant: PrefillGrant) -> Manifest:
        return Manifest(
            fingerprint=self._wanted.fingerprint,
            transfer_id=grant.transfer_id,
            epoch=grant.epoch,
            start_token=self._wanted.start_token,
            end_token=len(self._wanted.token_ids),
            groups=self._wanted.groups,
            hidden_size=self._wanted.hidden_size,
        )


class Reception:
    """Drives a receipt from one connection: each payload is read straight into the cache."""

    def __init__(self, sock: socket.socket, receipt: Receipt, place: Place, counters: TransferCounters):
        self._sock = sock
        self._receipt = receipt
        self._place = place
        self._counters = counters
        self._hidden = torch.empty(receipt.expected.hidden_size, dtype=torch.float32)
        self._first: float | None = None

    def run(self) -> Fetched:
        """Receive until DONE.

        Raises:
            PeerError: P gave up, is gone or silent, or sent anything that is not this transfer, whole.

        """
        raw = bytearray(HEADER_BYTES)
        while self._receipt.done is None:
            receive_into(self._sock, raw)
            header = parse_header(raw)
            place = self._receipt.claim(header)
            payload = self._room(header, place)
            receive_into(self._sock, *payload)
            self._receipt.accept(header, payload)
            if isinstance(place, (Rows, State)):
                land(self._receipt.expected, self._place, place, payload)
            self._counters.received(HEADER_BYTES + header.payload_bytes)
        done = self._receipt.require_whole()
        now = time.monotonic()
        seconds = now - self._first if self._first is not None else 0.0
        return Fetched(self._hidden, done, self._receipt.received_bytes, seconds)

    def _room(self, header: FrameHeader, place: Destination) -> list[memoryview]:
        """Return the memory that a claimed frame's payload is read into."""
        if not isinstance(place, Note) and self._first is None:
            self._first = time.monotonic()
        match place:
            case Rows() | State():
                return list(room_for(self._receipt.expected, self._place, place))
            case Hidden():
                return [bytes_of(self._hidden)]
            case Note():
                return [memoryview(bytearray(header.payload_bytes))]


def _call(url: str, line: tuple[str, str], body: bytes, hold: Callable[[socket.socket], None]) -> tuple[int, bytes]:
    """Make one HTTP call, `line` being method and path; `hold` gets the connected socket. Returns status and body."""
    target = urlsplit(url)
    host, port = target.hostname or "", target.port or http.client.HTTP_PORT
    connection = http.client.HTTPConnection(host, port)
    try:
        connection.sock = _connect(host, port)
        hold(connection.sock)
        connection.sock.settimeout(ANSWER_SECONDS)
        connection.request(*line, body, {"content-type": "application/json", "connection": "close"})
        response = connection.getresponse()
        return response.status, response.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"no answer to {' '.join(line)}: {error!r}") from error
    finally:
        connection.close()


def _connect(host: str, port: int) -> socket.socket:
    try:
        sock = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as error:
        raise UnreachableError(f"cannot connect to {host}:{port}: {error}") from error
    tune(sock)
    return sock
