"""Fetches a prompt's cache or a cached prefix: asks the source's API, receives the frames, acknowledges.

Each fetch is a thread that ends within about a second of any failure. The payload lands in the pages and the slot of a
sequence. The sequence does not use them before the ledger reports that the cache is whole. They must stay that
sequence's until the fetch has ended, even when it was cancelled.
"""

import http.client
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from prfaas.errors import PeerError, PrfaasError, ProtocolError, UnreachableError
from prfaas.util import decode_json
from prfaas.wire.engine import Cached, TransferOutcome, TransferSubject
from prfaas.wire.frames import Address
from prfaas.wire.prefill import CacheRequest, PrefillGrant, PrefixRequest
from prfaas.wire.trace import NO_TRACE, TraceContext
from prfaas.wire.transfer import Done
from prfaas_transfer.cache import DestinationCache
from prfaas_transfer.pull import FetchContext, Pull, SourceAddress, open_pull
from prfaas_transfer.receive import ReceiveState
from prfaas_transfer.tls import CONNECT_SECONDS, PeerAuth
from prfaas_transfer.transfer_log import TransferLog, TransferTotals, outcome_of

log = logging.getLogger(__name__)

CREATED: Final = http.client.CREATED
NOT_FOUND: Final = http.client.NOT_FOUND
MAX_ANSWER_BYTES = 1 << 16
PREFIX_SILENCE_SECONDS = 2.0  # Limit of a prefix fetch's silences in all: the prefix can be computed instead.
_POLL_SECONDS = 0.25


class SourceApi(NamedTuple):
    """Another instance's API: its URL, the cluster that must answer (empty for any), and our credentials."""

    url: str
    cluster: str
    auth: PeerAuth
    trace: TraceContext = NO_TRACE

    def call(self, method: str, path: str, body: bytes, hold: Callable[[socket.socket], None]) -> tuple[int, bytes]:
        """Make one call; return status and body. `hold` gets the connected socket. Raises PeerError if another cluster
        answers, UnreachableError without an answer or if `hold` cancels the call."""
        target = urlsplit(self.url)
        address = target.hostname or "", target.port or http.client.HTTP_PORT
        try:
            with socket.create_connection(address, CONNECT_SECONDS) as sock:
                hold(sock)
                with closing(self.auth.http(sock, address, self.cluster)) as connection:
                    headers = {"content-type": "application/json", "connection": "close", **self.trace.headers()}
                    connection.request(method, path, body, headers)
                    response = connection.getresponse()
                    return response.status, response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"no answer to {method} {path}: {error!r}") from error


class AbsentError(PeerError):
    """The other instance has no longer prefix than ours."""


class Fetched(NamedTuple):
    """The result of a fetch: cached tokens, hidden state fp32 [hidden_size] (empty for a prefix), the source's figures,
    cache bytes, seconds from first to last data byte, and if it is bit by bit the result of a prefill."""

    tokens: int
    hidden: bytearray
    done: Done
    received_bytes: int
    transfer_seconds: float
    is_exact: bool = True
    transfer_id: str = ""


class CacheFetch(Protocol):
    """A fetch of another instance's cache. `on_end(result or error)` is called once, from any thread; then nothing of
    the fetch touches its memory."""

    @property
    def transfer_id(self) -> str:
        """Empty until it was granted."""
        ...

    def start(self, on_end: Callable[[Fetched | PrfaasError], None]) -> None: ...

    def cancel(self) -> None:
        """End the fetch at once; its end is reported all the same."""
        ...


class RemoteFetch:
    """One fetch of `body` into `place`, for the front's call `handle`. `on_end(result or error)` is called once, from
    its thread, which then touches nothing."""

    def __init__(
        self, handle: int, body: CacheRequest, source: SourceApi, place: DestinationCache, shared: FetchContext
    ):
        self._body, self._api = body, source
        self._place, self._shared = place, shared
        self._is_prefix = isinstance(body, PrefixRequest)
        self._what: Cached = "prefix" if self._is_prefix else "prefill"
        subject = TransferSubject(handle, body.request_id, source.cluster, source.trace, self._what)
        self._log = TransferLog("receive", subject)
        self._state: ReceiveState | None = None
        self._grant: PrefillGrant | None = None
        self._pull: Pull | None = None
        self._socket: socket.socket | None = None
        self._source: SourceAddress | None = None
        self._cancelled = False
        self._over = threading.Event()

    @property
    def transfer_id(self) -> str:
        """Empty until it was granted."""
        return self._log.transfer_id

    def start(self, on_end: Callable[[Fetched | PrfaasError], None]) -> None:
        if self._is_prefix:
            threading.Thread(target=self._watch, name="fetch-watch", daemon=True).start()
        threading.Thread(target=self._run, args=(on_end,), name="fetch", daemon=True).start()

    def cancel(self) -> None:
        """End the fetch at once; inform the source afterwards."""
        self._cancelled = True
        self._cut()

    def _cut(self) -> None:
        # First: who sets the socket or the pull afterwards looks at this behind it, so one of the two sees the other.
        self._over.set()
        sock, pull = self._socket, self._pull
        if pull is not None:
            pull.cancel()
        elif sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                log.debug("fetch of %s: was disconnected already", self._body.request_id)

    def _run(self, on_end: Callable[[Fetched | PrfaasError], None]) -> None:
        outcome: TransferOutcome | None = "failed"
        result: Fetched | PrfaasError
        reason = ""
        try:
            result = self._fetch()
            outcome = "delivered"
        except AbsentError as error:
            result, outcome = error, None
        except PrfaasError as error:
            reason, outcome = str(error), outcome_of(error)
            result = PeerError(f"{self._what} at {self._api.url} failed: {error}")
        except Exception as error:  # a bug here must end this one request, never leave it waiting
            log.exception("fetch of %s", self._body.request_id)
            reason = repr(error)
            result = PeerError(f"{self._what} at {self._api.url} failed: {error!r}")
        self._over.set()
        if outcome is not None:
            ended = self._log.end("cancelled" if self._cancelled else outcome, reason, self._totals)
            self._shared.counters.count_end(ended)
        # Before `_release`: its call to a source that is gone would delay the request by its time-outs.
        on_end(result)
        if outcome != "delivered" and self._grant is not None:
            self._release(self._grant)

    def _watch(self) -> None:
        left_seconds = PREFIX_SILENCE_SECONDS
        while not self._over.wait(_POLL_SECONDS):
            source = self._source
            if source is None or self._shared.connections.silent_seconds(source) > _POLL_SECONDS:
                left_seconds -= _POLL_SECONDS
            if left_seconds <= 0:
                log.info("fetch of %s: %s is silent for too long", self._body.request_id, self._api.url)
                self._cut()

    def _fetch(self) -> Fetched:
        grant = self._grant = self._ask()
        self._log.transfer_id = grant.transfer_id
        self._log.mark("granted", tokens=grant.end_token, start_token=self._body.start_token)
        source = self._source = SourceAddress(
            urlsplit(self._api.url).hostname or "", grant.data_port, self._api.cluster
        )
        address = Address(grant.transfer_id, grant.epoch)
        expected = self._shared.layout.manifest(
            address, self._body.start_token, grant.end_token, is_prefix=self._is_prefix
        )
        pull = self._pull = open_pull(self._shared, source, grant.token, expected, self._place, self._log.record_break)
        state = self._state = pull.state
        ledger = state.ledger
        if self._over.is_set():  # `cancel` may have run before it could see the pull
            raise UnreachableError("cancelled")
        pull.run()
        done = ledger.require_whole()
        return Fetched(
            tokens=grant.end_token,
            hidden=state.hidden,
            done=done,
            received_bytes=ledger.received_bytes,
            transfer_seconds=state.seconds,
            is_exact=ledger.is_exact and done.is_exact,
            transfer_id=grant.transfer_id,
        )

    @property
    def _totals(self) -> TransferTotals:
        state = self._state
        return TransferTotals(state.ledger.received_bytes, state.seconds, state.codecs) if state else TransferTotals()

    def _ask(self) -> PrefillGrant:
        body = self._body
        path = "/v1/prefixes" if self._is_prefix else "/v1/prefills"
        status, answer = self._api.call("POST", path, msgspec.json.encode(body), self._hold)
        if self._is_prefix and status == NOT_FOUND:
            raise AbsentError(f"{self._api.url} has no prefix longer than {body.start_token} tokens")
        if status != CREATED:
            text = answer[:500].decode("utf-8", "replace")
            raise PeerError(f"refused with HTTP {status}: {text}")
        grant = decode_json(answer, PrefillGrant, "the answer is no prefill grant")
        count = len(body.token_ids)
        # A prefix leaves the last token, which is always computed: its logits are what the answer begins with.
        if not (body.start_token < grant.end_token < count if self._is_prefix else grant.end_token == count):
            raise ProtocolError(f"granted up to token {grant.end_token} of {count}, from {body.start_token}")
        return grant

    def _release(self, grant: PrefillGrant) -> None:
        """Delete the grant at the source; its lease would end it later."""
        try:
            self._api.call("DELETE", f"/v1/prefills/{grant.transfer_id}", b"", lambda _sock: None)
        except PeerError as error:
            log.info("prefill %s is left to its lease: %s", grant.transfer_id, error)

    def _hold(self, sock: socket.socket) -> None:
        self._socket = sock
        if self._over.is_set():  # `cancel` may have run before it could see the socket
            raise UnreachableError("cancelled")
