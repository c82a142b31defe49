"""Fetches a cache over several connections: each has a thread that connects, sends HELLO, and reads until all is there.

When a connection breaks, or a frame is damaged, its thread opens another and lists the received frames. The source
sends the rest again. Only what no new connection can mend ends the transfer. Then the source gave up, is not to be
reached, or breaks the protocol. Connections are kept for the next transfer: their congestion window is open and their
handshake is done. A kept connection may have died unnoticed; its next user finds out at once, and asks for a fresh one.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from prfaas.errors import (
    DamagedError,
    InternalError,
    PeerError,
    PrfaasError,
    ProtocolError,
    UnreachableError,
    explained,
)
from prfaas.util import Deadline
from prfaas.wire.frames import MAX_MESSAGE_BYTES, Address, Kind
from prfaas.wire.receive_ledger import ReceiveLedger
from prfaas.wire.transfer import (
    AWAIT_SILENT_SECONDS,
    AWAIT_VERSION,
    NO_PROGRESS_SECONDS,
    Abort,
    Hello,
    Manifest,
    Welcome,
    decode_message,
    message_frame,
)
from prfaas_transfer.cache import CacheLayout, DestinationCache
from prfaas_transfer.compression import DECODABLE
from prfaas_transfer.limits import Traffic
from prfaas_transfer.link_stats import read_tcp_info
from prfaas_transfer.net import NEAR_SECONDS, DataStream, OnWait, connect_tcp
from prfaas_transfer.receive import ReceiveLoop, ReceiveState
from prfaas_transfer.send import receive_message
from prfaas_transfer.tls import CONNECT_SECONDS, PeerAuth
from prfaas_transfer.transfer_log import TransferCounters

log = logging.getLogger(__name__)

KEEP_SECONDS = 20.0  # Less than a source waits for the next HELLO.
KEEP_AT_MOST = 8  # Idle connections to one source.
NEAR_STRIPES, NEAR_TLS_STRIPES, FAR_STRIPES = 1, 2, 4
"""Most connections of a transfer. Near, one is enough without encryption, and threads cost. With encryption one sends
while the other encrypts: a single one left 1 Gbit/s a quarter empty on a busy machine. Far, windows limit."""
STRIPE_BYTES = 4 << 20  # Fewer bytes a connection are not worth another connection.
MAX_BREAKS = 16  # Breaks that one transfer survives.
REFUSED_SECONDS = 0.25
"""Before a connection is tried again for which the source has no room; twice as long each further time."""
AWAIT_AGAIN_SECONDS = 2.0
"""Before a source is asked again that had no room for one more who waits."""
GONE_SECONDS = 2 * NO_PROGRESS_SECONDS
"""A source that was silent for this long, on a new connection too, counts as gone."""


class SourceAddress(NamedTuple):
    """A data port, and the cluster that must answer (empty if unknown)."""

    host: str
    port: int
    cluster: str = ""


class _Idle(NamedTuple):
    stream: DataStream
    keep: Deadline


class Connections:
    """Opens and keeps connections."""

    def __init__(self, auth: PeerAuth):
        self._auth = auth
        self._lock = threading.Lock()
        self._idle: dict[SourceAddress, list[_Idle]] = {}
        self._used: dict[SourceAddress, set[DataStream]] = {}

    def take(self, source: SourceAddress) -> DataStream | None:
        with self._lock:
            self._sweep()
            kept = self._idle.get(source)
            if not kept:
                return None
            stream = kept.pop().stream
            self._used.setdefault(source, set()).add(stream)
        if self._auth.is_reusable(stream):
            return stream
        self.drop(source, stream)
        return None

    def open(self, source: SourceAddress) -> DataStream:
        """Return a fresh connection. Raises PeerError if the source, or its cluster, does not answer."""
        try:
            sock = connect_tcp(source.host, source.port, CONNECT_SECONDS)
        except (OSError, ValueError) as error:  # a name that cannot be one is a ValueError
            raise UnreachableError(f"cannot connect to {source.host}:{source.port}: {error}") from error
        try:
            stream = self._auth.connect(sock, source.cluster)
        except BaseException:
            sock.close()
            raise
        with self._lock:
            self._used.setdefault(source, set()).add(stream)
        return stream

    def keep(self, source: SourceAddress, stream: DataStream) -> None:
        with self._lock:
            self._forget(source, stream)
            self._sweep()
            kept = self._idle.setdefault(source, [])
            if len(kept) < KEEP_AT_MOST:
                kept.append(_Idle(stream, Deadline(KEEP_SECONDS)))
                return
        stream.close()

    def drop(self, source: SourceAddress, stream: DataStream) -> None:
        with self._lock:
            self._forget(source, stream)
        stream.close()

    def silent_seconds(self, source: SourceAddress) -> float:
        """Time since a connection to a source last received a byte."""
        with self._lock:
            heard = [stream.heard_at for stream in self._used.get(source, ())]
        return time.monotonic() - max(heard) if heard else float("inf")

    def _forget(self, source: SourceAddress, stream: DataStream) -> None:
        used = self._used.get(source, set())
        used.discard(stream)
        if not used:
            self._used.pop(source, None)

    def _sweep(self) -> None:
        """Close connections that were kept for too long; under the lock."""
        for source, kept in list(self._idle.items()):
            for idle in [one for one in kept if one.keep.is_over]:
                kept.remove(idle)
                idle.stream.close()
            if not kept:
                del self._idle[source]


def stripes_for(nbytes: int, round_trip_seconds: float, *, is_encrypted: bool) -> int:
    near = NEAR_TLS_STRIPES if is_encrypted else NEAR_STRIPES
    most = near if round_trip_seconds < NEAR_SECONDS else FAR_STRIPES
    return min(most, 1 + nbytes // STRIPE_BYTES)


class _UnwelcomeError(UnreachableError):
    """A connection broke before the source answered its HELLO."""


class _LaterError(PeerError):
    """The source has no room for one more who waits."""


class FetchContext(NamedTuple):
    """Objects that all fetches of an instance share."""

    layout: CacheLayout
    connections: Connections
    counters: TransferCounters
    traffic: Traffic


class Pull:
    """One transfer from one source; `run` is called once. `state` is the received state.
    `on_broken` is called with the number of breaks and the reason when another connection takes over."""

    def __init__(
        self,
        shared: FetchContext,
        source: SourceAddress,
        token: str,
        state: ReceiveState,
        on_broken: Callable[[int, str], None] = lambda _breaks, _reason: None,
    ):
        self._shared = shared
        self._connections = shared.connections
        self._source = source
        self._token = token
        self.state = self._state = state
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._whole = False
        self._failure: PrfaasError | None = None
        self.is_cancelled = False
        self._is_wide = False
        self._numbers = 0
        self._breaks = 0
        self._welcomed: dict[int, DataStream] = {}
        self._heard_at = time.monotonic()
        self._streams: dict[int, DataStream] = {}

    def run(self) -> None:
        """Receive everything; then no thread touches the state's memory. Raises PeerError if the transfer fails."""
        self._start_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._whole or self._failure)
            # Other connections may still wait for FREED; nothing is left for them to write.
            if self._whole:
                return
            self._state.stop.set()
            for stream in self._streams.values():
                stream.shutdown()
            self._changed.wait_for(lambda: not self._streams)
        raise self._failure or InternalError("a transfer ended without a reason")

    def cancel(self) -> None:
        self.is_cancelled = True
        self._fail(UnreachableError("cancelled"))

    def _start_thread(self) -> None:
        threading.Thread(target=self._carry, name="fetch-data", daemon=True).start()

    def _widen(self, stream: DataStream) -> None:
        """Start the other connections, once the first one has measured the round trip."""
        with self._changed:
            if self._is_wide:
                return
            self._is_wide = True
        round_trip_seconds = read_tcp_info(stream.socket).rtt_seconds or 0.0
        nbytes, is_encrypted = self._state.ledger.expected.nbytes, stream.peer is not None
        for _ in range(stripes_for(nbytes, round_trip_seconds, is_encrypted=is_encrypted) - 1):
            self._start_thread()

    def _carry(self) -> None:
        connected, pause_seconds = False, REFUSED_SECONDS
        while not self._has_ended:
            try:
                stream = self._connections.take(self._source) or self._connections.open(self._source)
            except PeerError as error:
                if connected and self._welcomed and isinstance(error, UnreachableError):
                    pause_seconds = self._pause(pause_seconds)
                    continue
                # Without this stripe the others do, unless something was lost on it that only a HELLO brings back.
                if connected or self._is_unconnected or not isinstance(error, UnreachableError):
                    self._fail(error)
                return
            except Exception as error:  # a bug here must end this transfer, never leave it waiting
                self._fail(explained(error))
                return
            connected = True
            try:
                self._receive(stream)
            except _UnwelcomeError as error:
                if self._welcomed:
                    pause_seconds = self._pause(pause_seconds)
                else:
                    self._broke(error)
            except (UnreachableError, DamagedError) as error:
                self._broke(error)
            except Exception as error:  # a bug here must end this transfer, never leave it waiting
                self._fail(explained(error))
            else:
                return

    def _pause(self, seconds: float) -> float:
        """Wait beside connections that carry bytes: the source may have no room for another. Return how long to wait
        the next time: the numbers of a transfer's connections are few. Try again in any case: if the source did read
        the HELLO, only another one brings back what it sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, seconds)
        return 2 * seconds

    def _receive(self, stream: DataStream) -> None:
        well, late_before = False, stream.late_seconds
        with self._changed:
            number, self._numbers = self._numbers, self._numbers + 1
            self._streams[number] = stream
        try:
            info = partial(read_tcp_info, stream.socket)
            with self._shared.traffic.monitor.watch(info, lambda: 0, self._source.cluster):
                try:
                    self._greet(stream, number)
                except UnreachableError as error:
                    raise _UnwelcomeError(str(error)) from error
                self._widen(stream)
                with self._changed:
                    self._welcomed[number] = stream
                ReceiveLoop(stream, number, self._state, self._finish).run()
            well = True
        finally:
            self._state.leave(number)
            (self._connections.keep if well else self._connections.drop)(self._source, stream)
            with self._changed:
                self._heard_at = self._last_heard_at
                if self._welcomed.pop(number, None) is None:  # else its own time of the last byte is later by that
                    late_seconds = stream.late_seconds - late_before
                    self._heard_at = min(time.monotonic(), self._heard_at + late_seconds)
                # Last: `run` waits for this, and then the memory may be another sequence's.
                del self._streams[number]
                self._changed.notify_all()

    def _greet(self, stream: DataStream, number: int) -> None:
        self._check_progress(0.0)
        ledger = self._state.ledger
        broken = self._state.broken  # before what was received: these receive no more
        received = ledger.received
        expected = ledger.expected
        hello = Hello(
            codecs=DECODABLE,
            token=self._token,
            connection=number,
            broken=broken,
            received=received,
            start_token=expected.start_token,
            rank=expected.rank,
            ranks=expected.ranks,
        )
        ledger.require_manifest(_greet(stream, expected.address, hello, self._check_progress).manifest)

    def _check_progress(self, silent_seconds: float) -> None:
        """Limit the wait for a WELCOME, and end it after a cancel."""
        if self._has_ended or silent_seconds > NO_PROGRESS_SECONDS:
            raise UnreachableError(f"the source sent no answer for {silent_seconds:.1f} s: given up")

    @property
    def _has_ended(self) -> bool:
        return self._whole or self._failure is not None

    @property
    def _last_heard_at(self) -> float:
        """Time of the last byte of any connection that had answered."""
        return max([self._heard_at, *(stream.heard_at for stream in self._welcomed.values())])

    @property
    def _is_unconnected(self) -> bool:
        with self._changed:
            return not self._streams

    def _finish(self) -> None:
        with self._changed:
            self._whole = True
            self._changed.notify_all()

    def _broke(self, error: PrfaasError) -> None:
        with self._changed:
            self._breaks += 1
            silent_seconds = time.monotonic() - self._last_heard_at
            patience_over = self._breaks > MAX_BREAKS or silent_seconds > GONE_SECONDS
        if patience_over:
            self._fail(error)
        elif not self._has_ended:
            self._on_broken(self._breaks, str(error))

    def _fail(self, error: PrfaasError) -> None:
        with self._changed:
            self._failure = self._failure or self._state.gave_up or error
            self._changed.notify_all()


def _greet(stream: DataStream, address: Address, hello: Hello, on_wait: OnWait) -> Welcome:
    """Send HELLO and return the answer; skip late messages about the previous transfer. One that awaits shows life when
    the source does. Raises PeerError for ABORT."""
    stream.send([message_frame(Kind.HELLO, address, hello)])
    while True:
        header, payload = receive_message(stream, on_wait, MAX_MESSAGE_BYTES)
        if header.address == address and header.kind == Kind.ABORT:
            abort = decode_message(header, payload, Abort)
            raise (_LaterError if abort.later else PeerError)(abort.message)
        if header.address == address and header.kind == Kind.WELCOME:
            return decode_message(header, payload, Welcome)
        if header.kind not in (Kind.KEEP_ALIVE, Kind.FREED):
            raise ProtocolError(f"{header.describe()} for {header.address} where WELCOME was due")
        if hello.awaits and header.kind == Kind.KEEP_ALIVE:
            on_wait(0.0)
            stream.send([message_frame(Kind.KEEP_ALIVE, address)])


def await_begin(
    connections: Connections, source: SourceAddress, token: str, address: Address, cancelled: threading.Event
) -> None:
    """Wait until a source begins to compute a prompt. Raises PeerError if it does not say so, or the wait is cancelled:
    the source is gone or of an older version, or the transfer is over. A pull finds out which."""

    def check_silence(silent_seconds: float) -> None:
        if cancelled.is_set() or silent_seconds > AWAIT_SILENT_SECONDS:
            raise UnreachableError(f"the source that is awaited was silent for {silent_seconds:.1f} s: given up")

    hello = Hello(versions=(AWAIT_VERSION,), token=token, awaits=True)
    while True:
        kept, well = connections.take(source), False
        stream = kept or connections.open(source)
        try:
            _greet(stream, address, hello, check_silence)
            well = True
            return
        except _LaterError:
            # Not as if it had begun: a prompt at the end of the queue would take the memory of those before it.
            cancelled.wait(AWAIT_AGAIN_SECONDS)
            check_silence(0.0)
        except UnreachableError:
            check_silence(0.0)
            if kept is None:
                raise  # else it had died unnoticed, and a further one is kept, or opened
        finally:
            (connections.keep if well else connections.drop)(source, stream)


def decline(connections: Connections, source: SourceAddress, token: str, address: Address, rank: int = 0) -> None:
    """Tell a source that this part of its cache is not wanted. Raises PeerError if that fails: it keeps the part for
    its lease. A source that does not know the part yet remembers it."""

    def check_patience(silent_seconds: float) -> None:
        if silent_seconds > NO_PROGRESS_SECONDS:
            raise UnreachableError("the source did not answer the message that its cache is not wanted")

    # A fresh one: the source answers with ABORT, and that closes the connection.
    stream = connections.open(source)
    try:
        stream.send([message_frame(Kind.HELLO, address, Hello(token=token, declines=True, rank=rank))])
        receive_message(stream, check_patience, MAX_MESSAGE_BYTES)
    finally:
        connections.drop(source, stream)


def open_pull(
    shared: FetchContext,
    source: SourceAddress,
    token: str,
    expected: Manifest,
    cache: DestinationCache,
    on_broken: Callable[[int, str], None],
) -> Pull:
    """Make a pull of all that a manifest describes into a cache; its arguments are those of `Pull`."""
    ledger = ReceiveLedger(expected, DECODABLE, guard=threading.Lock())
    silent_seconds = partial(shared.connections.silent_seconds, source)
    state = ReceiveState(ledger, cache, shared.counters.count_received, silent_seconds, shared.traffic.memory)
    return Pull(shared, source, token, state, on_broken)
