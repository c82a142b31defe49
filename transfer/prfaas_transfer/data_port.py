"""The data port: one thread accepts, one thread a connection sends.

A destination proves with its HELLO that it holds an open offer. Then frames leave as the engine puts them in, while
later layers and chunks still compute. When a transfer is over its connections wait for the next HELLO. A peer that is
silent, gone or wrong costs one thread for a moment. A connection that begins with `GET` follows the engine's cache
events, until it leaves. No buyer, and no address that proves nothing, has more than half of the connections.
Those that carry nothing make room for new ones.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial

from prfaas.errors import CapacityError, ConfigError, DamagedError, PeerError, ProtocolError, UnreachableError
from prfaas.rights import COUNTED_PART, TRANSFER
from prfaas.util import Deadline, network_of
from prfaas.wire.frames import Address, Kind
from prfaas.wire.kvevents import EVENTS_PATH
from prfaas.wire.transfer import (
    AWAIT_SILENT_SECONDS,
    AWAIT_VERSION,
    HEARTBEAT_SECONDS,
    KEEP_ALIVE_SECONDS,
    VERSION,
    Abort,
    Hello,
    Welcome,
    decode_message,
    message_frame,
)
from prfaas_transfer.events import follow
from prfaas_transfer.events.log import EventLog
from prfaas_transfer.leases import UNWANTED, NoRoomError, Offer, Offers
from prfaas_transfer.limits import Traffic
from prfaas_transfer.link_stats import read_tcp_info
from prfaas_transfer.net import CUBIC, DataStream, OnWait, use_congestion
from prfaas_transfer.send import SendChannel, SendLoop, receive_message

log = logging.getLogger(__name__)

HELLO_SECONDS = 2.0
IDLE_SECONDS = 30.0  # A connection without a transfer is closed after this.
POLL_SECONDS = 0.5
LATE_SECONDS = 2 * POLL_SECONDS
"""A round of the data port that took so long had no CPU."""
MAX_CONNECTIONS = 512
WARN_SECONDS = 60.0
"""Between two warnings that there was no room for a connection."""


def listen(host: str, port: int) -> socket.socket:
    """Open the data port on this address only. Raises ConfigError if it is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"data port {host}:{port} cannot be opened: {error.strerror}") from error
    listener.settimeout(POLL_SECONDS)
    use_congestion(listener, CUBIC)
    return listener


class LeaseClock:
    """The rounds of the data port: whether the threads that read signs of life had the CPU lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._late, self._unread = Deadline(math.inf, clock), Deadline(-LATE_SECONDS, clock)

    def begin_round(self) -> bool:
        """Begin a round; return whether leases may end in it. After a late round signs of life may wait to be read."""
        if self._late.is_over:
            self._unread.renew(LATE_SECONDS)
        self._late.renew(LATE_SECONDS)
        return self._unread.is_over


class OpenConnections:
    """The connections of a data port, at most so many, and the names that each counts under.

    A connection counts for its address until it proves whose it is, by a certificate or, without TLS, by the token of
    an offer. Then it counts for a buyer or another member by its name, and still for its address; or for nobody, and
    has no names: the hub and the instance's own cluster may have all connections. One that waits for the end of its
    handshake, or for another transfer, makes room for a new one. Any thread may call.
    """

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._names: dict[socket.socket, tuple[str, ...]] = {}
        self._waiting: dict[socket.socket, None] = {}  # the one that has waited longest is first

    def count(self, connection: socket.socket, *names: str, waits: bool = False) -> None:
        """Count a new connection under names. If there are too many others, in all or of a name, shut down the one of
        them that has waited longest. Raises CapacityError if none waits."""
        with self._lock:
            self._place(connection, names)
            if waits:
                self._waiting[connection] = None

    def prove(self, connection: socket.socket, *names: str) -> None:
        """Count an open connection, from now on under the names that it has proven. Raises CapacityError also if it
        made room for another: it is shut down, and takes nobody's place."""
        with self._lock:
            if connection not in self._names:
                raise CapacityError("it made room for another one")
            self._place(connection, names)

    def begin_wait(self, connection: socket.socket) -> None:
        """Note that a connection carries nothing until its next transfer."""
        with self._lock:
            if connection in self._names:  # else it made room
                self._waiting[connection] = None

    def end_wait(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(connection, None)

    def leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._forget(connection)

    def _place(self, connection: socket.socket, names: tuple[str, ...]) -> None:
        for name in names:
            self._make_room(connection, self._most // COUNTED_PART, name)
        self._make_room(connection, self._most)
        self._names[connection] = names
        self._waiting.pop(connection, None)

    def _make_room(self, connection: socket.socket, most: int, name: str = "") -> None:
        others = {one for one, names in self._names.items() if one is not connection and (not name or name in names)}
        if len(others) < most:
            return
        oldest = next((one for one in self._waiting if one in others and self._names[one]), None)
        if oldest is None:
            raise CapacityError(f"{most} connections{name and f' of {name}'} are open")
        self._forget(oldest)
        with suppress(OSError):  # it is disconnected already
            oldest.shutdown(socket.SHUT_RDWR)

    def _forget(self, connection: socket.socket) -> None:
        self._names.pop(connection, None)
        self._waiting.pop(connection, None)


class DataPort:
    """Serves the data port from its own threads until the process ends. A destination may come `patience_seconds`
    before its transfer is announced. `catch_up` is called when it comes for an unknown one: then the engine hands over
    what it announced before, and says when that is done. Patience begins then."""

    def __init__(
        self,
        listener: socket.socket,
        offers: Offers,
        traffic: Traffic,
        patience_seconds: float = 0.0,
        catch_up: Callable[[], AbstractContextManager[Callable[[], bool]]] = lambda: nullcontext(lambda: True),
        events: EventLog | None = None,
    ):
        self._patience_seconds = patience_seconds
        self._catch_up = catch_up
        self._listener = listener
        self._offers = offers
        self._traffic = traffic
        self._followers = follow.Followers(events)
        self._open = OpenConnections(MAX_CONNECTIONS)
        self._next_warning = Deadline(0.0)
        threading.Thread(target=self._run, name="data-port", daemon=True).start()

    def _run(self) -> None:
        clock = LeaseClock()
        while True:
            if clock.begin_round():
                self._offers.expire()
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # out of descriptors, or the peer left in the backlog
                log.warning("data port: accepting failed: %s", error)
                time.sleep(POLL_SECONDS)
                continue
            try:
                self._open.count(sock, network_of(address[0]), waits=True)
            except CapacityError as error:
                self._warn(address[0], error)
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock, address[0]), name="data-send", daemon=True).start()
            except RuntimeError as error:  # no thread is left: this one must go on, which ends the leases
                log.warning("data port: %s is refused: %s", address[0], error)
                sock.close()
                self._open.leave(sock)

    def _serve(self, sock: socket.socket, host: str) -> None:
        try:
            with sock, closing(self._traffic.auth.accept(sock)) as stream:
                name = self._traffic.auth.counted_as(stream)
                self._open.prove(sock, *(() if name == "" else filter(None, (name, network_of(host)))))
                patience, begun = patient(HELLO_SECONDS), bytearray(len(follow.GET))
                stream.receive_into(begun, on_wait=patience)
                if begun == follow.GET:
                    self._followers.answer(stream, patience, partial(self._traffic.auth.check, stream, EVENTS_PATH))
                    return
                self._transfer(stream, patience, bytes(begun))
                while True:
                    self._open.begin_wait(sock)
                    self._transfer(stream, patient(IDLE_SECONDS))
        except UnreachableError as error:
            log.debug("data port: the connection of %s is over: %s", host, error)
        except PeerError as error:
            log.info("data port: transfer to %s ended: %s", host, error)
        except CapacityError as error:
            self._warn(host, error)
        except OSError as error:
            log.info("data port: connection of %s broke: %s", host, error)
        except Exception:  # a bug here must end this connection, and be seen
            log.exception("data port: connection of %s", host)
        finally:
            self._open.leave(sock)

    def _warn(self, host: str, error: CapacityError) -> None:
        """Log that a connection found no room, now and then: who is refused may come again at once."""
        if self._next_warning.is_over:
            self._next_warning.renew(WARN_SECONDS)
            log.warning("data port: a connection of %s is refused, and maybe others: %s", host, error)

    def _transfer(self, stream: DataStream, patience: OnWait, begun: bytes = b"") -> None:
        """Wait for a HELLO, or the rest of one, and serve the transfer to its end."""
        address, hello = _await_hello(stream, patience, begun)
        self._open.end_wait(stream.socket)
        try:
            spoken = AWAIT_VERSION if hello.awaits else VERSION
            if spoken not in hello.versions:
                raise ProtocolError(f"HELLO speaks versions {hello.versions}, this instance {spoken}: upgrade one side")
            # A kept connection was proven in an earlier handshake; certificates and authorities may have changed since.
            self._traffic.auth.check(stream, TRANSFER)
            if not hello.declines:  # one that comes early is remembered
                self._await_announced(stream, address, hello.rank)
            cluster = stream.peer.cluster if stream.peer else ""
            if hello.awaits:
                with self._offers.awaited(address, hello, cluster) as offer:
                    self._await_begin(stream, offer)
                return
            offer = self._offers.connect(address, hello, cluster, stream)
        except PeerError as error:
            with suppress(PeerError):
                abort = Abort(str(error), later=isinstance(error, NoRoomError))
                stream.send([message_frame(Kind.ABORT, address, abort)])
            raise
        try:
            if stream.peer is None:
                self._open.prove(stream.socket)  # without TLS it can prove no more than this token
            self._deliver(stream, offer, hello)
        finally:
            self._offers.disconnect(offer, hello.connection)

    def _await_announced(self, stream: DataStream, address: Address, rank: int) -> None:
        """Let a destination wait that came before the source knew of the transfer."""

        def show_life() -> None:
            stream.send([message_frame(Kind.KEEP_ALIVE, address)])

        def is_announced(seconds: float) -> bool:
            return self._offers.await_announced(address.transfer_id, rank, seconds)

        if self._offers.is_open(address.transfer_id, rank):
            return
        with self._catch_up() as is_caught_up:
            await_announced(is_announced, is_caught_up, self._patience_seconds, show_life)

    def _await_begin(self, stream: DataStream, offer: Offer) -> None:
        """Let a destination wait until its prompt begins to be computed: it takes memory then, and comes again. Raises
        PeerError if the offer is over, or the destination is silent."""
        if stream.peer is None:
            self._open.prove(stream.socket)  # without TLS it can prove no more than this token
        self._open.begin_wait(stream.socket)
        address, silence = offer.manifest.address, Deadline(AWAIT_SILENT_SECONDS)
        while not offer.await_begin(HEARTBEAT_SECONDS):
            stream.send([message_frame(Kind.KEEP_ALIVE, address)])
            while stream.readable():
                header, _ = receive_message(stream)
                if header.kind != Kind.KEEP_ALIVE:
                    raise ProtocolError(f"{header.describe()} from a destination that awaits, want KEEP_ALIVE")
                silence.renew(AWAIT_SILENT_SECONDS)
                offer.note_awaited()
            if silence.is_over:
                raise UnreachableError(f"a destination that awaits was silent for {AWAIT_SILENT_SECONDS:g} s")
        self._open.end_wait(stream.socket)
        if offer.ended:
            raise PeerError(f"transfer {address.transfer_id} is over: {offer.send_state.failure or UNWANTED}")
        welcome = Welcome(version=AWAIT_VERSION, manifest=offer.manifest)
        stream.send([message_frame(Kind.WELCOME, address, welcome)])

    def _deliver(self, stream: DataStream, offer: Offer, hello: Hello) -> None:
        traffic, sent = self._traffic, self._offers.counters.count_sent
        channel = SendChannel(stream, hello.connection, offer.subject.peer, hello.codecs)
        try:
            welcome = Welcome(version=VERSION, manifest=offer.manifest)
            stream.send([message_frame(Kind.WELCOME, offer.manifest.address, welcome)])
            info = partial(read_tcp_info, stream.socket)
            with traffic.monitor.watch(info, offer.send_state.queued_bytes, offer.subject.peer):
                SendLoop(channel, offer.send_state, traffic, sent).run()
        except (UnreachableError, DamagedError):
            raise  # the destination may reconnect
        except Exception as error:
            self._offers.end(offer, "failed", str(error) or repr(error))
            raise
        self._offers.end(offer, "delivered")


def await_announced(
    is_announced: Callable[[float], bool],
    is_caught_up: Callable[[], bool],
    patience_seconds: float,
    show_life: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until a transfer is announced, or for some time since all was that had to be. `is_announced(seconds)` waits
    for so long at most."""
    patience = Deadline(patience_seconds, clock)
    while True:
        left_seconds = patience.left_seconds
        if not is_caught_up():
            left_seconds = KEEP_ALIVE_SECONDS
            patience.renew(patience_seconds)
        if left_seconds <= 0 or is_announced(min(KEEP_ALIVE_SECONDS, left_seconds)):
            return
        show_life()


def patient(seconds: float) -> OnWait:
    """Return a check that raises UnreachableError after so many seconds from now."""
    deadline = Deadline(seconds)

    def check_deadline(_silent_seconds: float) -> None:
        if deadline.is_over:
            raise UnreachableError(f"no HELLO within {seconds:g} s")

    return check_deadline


def _await_hello(stream: DataStream, patience: OnWait, begun: bytes) -> tuple[Address, Hello]:
    """Read the next HELLO; skip late messages about the previous transfer."""
    while True:
        header, payload = receive_message(stream, patience, begun=begun)
        begun = b""
        if header.kind == Kind.HELLO:
            return header.address, decode_message(header, payload, Hello)
        if header.kind not in (Kind.ACK, Kind.KEEP_ALIVE):
            raise ProtocolError(f"{header.describe()} from a destination, want HELLO")
