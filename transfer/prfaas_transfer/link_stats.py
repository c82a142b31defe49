"""Measures the links below the data connections, by peer cluster: delivery, delay, and the side that limits.

An idle link does not show its capacity. Bytes and seconds count as *backlogged* only while a connection to that peer
had unsent bytes at both ends of a short interval. The ratio of the two counters' rates is then the rate that the path
gave us. A source has no other honest measure of its capacity.

Connections open and close between two samples, are kept for several transfers, and number hundreds. Each is read at
both ends of its watch, and only what it added counts. No label but the peer's name ever leaves here.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from prfaas.names import HUB
from prfaas.wire.stats import LinkStats

# u32 tcpi_rtt 68 (us), total_retrans 100; u64 bytes_acked 120, bytes_received 128; u32 notsent_bytes 144, min_rtt 148
# (us); u64 delivery_rate 160 (bytes/s), busy_time 168, rwnd_limited 176, sndbuf_limited 184 (us).
_LAYOUT: Final = struct.Struct("=68xI28xI16xQQ8xII8xQQQQ")
# The kernel's tcpi_min_rtt before the first round trip: ~0.
_UNKNOWN_MICROS: Final = 0xFFFFFFFF
_MICRO: Final = 1e-6
SAMPLE_SECONDS: Final = 0.02
SHOWN_SECONDS: Final = 15.0
"""Time that delays and rates are shown after the last connection: most transfers are shorter than a scrape interval."""
MAX_PEERS: Final = 64
OTHERS: Final = "other"  # Label of all peers beyond MAX_PEERS: without TLS their names are only claims.
COUNTED: Final = (
    "sent_bytes",
    "received_bytes",
    "retransmits",
    "busy_seconds",
    "rwnd_limited_seconds",
    "sndbuf_limited_seconds",
)
"""The kernel's counters since a connection's start."""
BYTES_PER_MBIT: Final = 125_000
RENEW_SECONDS: Final = 0.25  # Interval of a link's new figures, and the backlogged time that they must cover.


class TcpInfo(NamedTuple):
    """One connection at one moment; round trips are None before the first.

    Counted from its start: bytes that the peer acknowledged (`sent`), bytes received, segments sent again (under BBR no
    sign of congestion), time with data under way (`busy`), and of that, time in which the peer's window or our own send
    buffer kept more from leaving.
    """

    rtt_seconds: float | None
    min_rtt_seconds: float | None
    retransmits: int
    sent_bytes: int
    received_bytes: int
    unsent_bytes: int
    delivery_rate_bytes_per_second: int
    busy_seconds: float
    rwnd_limited_seconds: float
    sndbuf_limited_seconds: float


def read_tcp_info(sock: socket.socket) -> TcpInfo:
    """Read the kernel's figures; an older kernel leaves zeros for unknown ones. OSError if the socket is closed."""
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAYOUT.size).ljust(_LAYOUT.size, b"\0")
    rtt, retransmits, acked, received, unsent, min_rtt, rate, busy, rwnd, sndbuf = _LAYOUT.unpack(raw)
    return TcpInfo(
        rtt_seconds=rtt * _MICRO if rtt else None,
        min_rtt_seconds=min_rtt * _MICRO if min_rtt not in (0, _UNKNOWN_MICROS) else None,
        retransmits=retransmits,
        sent_bytes=acked,
        received_bytes=received,
        unsent_bytes=unsent,
        delivery_rate_bytes_per_second=rate,
        busy_seconds=busy * _MICRO,
        rwnd_limited_seconds=rwnd * _MICRO,
        sndbuf_limited_seconds=sndbuf * _MICRO,
    )


class LinkReading(NamedTuple):
    """All connections to a peer at one moment: bytes waiting to be sent, and bytes delivered so far."""

    seconds: float
    unsent_bytes: int
    delivered_bytes: int


class Backlogged(NamedTuple):
    """Bytes delivered, and time passed, while data waited."""

    delivered_bytes: int
    seconds: float


def backlogged_between(before: LinkReading, after: LinkReading) -> Backlogged:
    """Return an interval's part of the counters: nothing unless data waited at both ends of it."""
    if not (before.unsent_bytes and after.unsent_bytes):
        return Backlogged(0, 0.0)
    return Backlogged(after.delivered_bytes - before.delivered_bytes, after.seconds - before.seconds)


class _Connection:
    def __init__(self, info: Callable[[], TcpInfo], queued_bytes: Callable[[], int]):
        self._info = info
        self._last = info()
        self.queued_bytes = queued_bytes

    def read(self) -> tuple[TcpInfo, TcpInfo]:
        """Return the last reading and a new one; the last one twice if the socket is closed."""
        before = self._last
        with contextlib.suppress(OSError):
            self._last = self._info()
        return before, self._last


class _Peer:
    """All counters of one peer. The monitor's lock is held around every call."""

    def __init__(self, name: str, now_seconds: float):
        self.connections: list[_Connection] = []
        self._stats = LinkStats(peer=name)
        self._last = LinkReading(now_seconds, 0, 0)

    def sample(self, now_seconds: float) -> None:
        if not self.connections:
            return
        readings = [connection.read() for connection in self.connections]
        added = {
            field: getattr(self._stats, field)
            + sum(getattr(after, field) - getattr(before, field) for before, after in readings)
            for field in COUNTED
        }
        infos = [after for _, after in readings]
        # Connections of one transfer share its queue: it counts once.
        queues = {connection.queued_bytes for connection in self.connections}
        unsent_bytes = sum(info.unsent_bytes for info in infos) + sum(queued() for queued in queues)
        sample = LinkReading(now_seconds, unsent_bytes, added["sent_bytes"])
        backlogged = backlogged_between(self._last, sample)
        self._last = sample
        self._stats = msgspec.structs.replace(
            self._stats,
            **added,
            unsent_bytes=unsent_bytes,
            backlogged_bytes=self._stats.backlogged_bytes + backlogged.delivered_bytes,
            backlogged_seconds=self._stats.backlogged_seconds + backlogged.seconds,
            rtt_seconds=_mean(info.rtt_seconds for info in infos),
            min_rtt_seconds=min((one for info in infos if (one := info.min_rtt_seconds)), default=None),
            delivery_rate_bytes_per_second=sum(info.delivery_rate_bytes_per_second for info in infos),
        )

    def leave(self, connection: _Connection) -> None:
        self.connections.remove(connection)
        if not self.connections:
            self._stats = msgspec.structs.replace(self._stats, unsent_bytes=0)
            # Otherwise the pause until the next connection, which may be full at once, would count as backlogged.
            self._last = self._last._replace(unsent_bytes=0)

    def stats(self, now_seconds: float) -> LinkStats:
        """Return the current figures, without old delays and rates."""
        stats = msgspec.structs.replace(self._stats, connections=len(self.connections))
        if self.connections or now_seconds - self._last.seconds <= SHOWN_SECONDS:
            return stats
        return msgspec.structs.replace(
            stats, rtt_seconds=None, min_rtt_seconds=None, delivery_rate_bytes_per_second=None
        )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class LinkMonitor:
    """Samples the data connections, in its own thread, while there are any. The hub and the unnamed peer exist
    from the start, so that a rate sees the first transfer too."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._peers = {name: _Peer(name, time.monotonic()) for name in ("", HUB)}
        self._connections = 0
        threading.Thread(target=self._run, name="link-monitor", daemon=True).start()

    @contextmanager
    def watch(self, info: Callable[[], TcpInfo], queued_bytes: Callable[[], int], peer: str = "") -> Iterator[None]:
        """Count a connection to a peer cluster ("" if unknown) while the block runs.

        `info` asks the kernel; the socket may be closed meanwhile. `queued_bytes` returns the bytes that wait outside
        of the kernel: connections that share a queue pass equal functions. Raises OSError for a closed socket.
        """
        with self._changed:
            found = self._peer(peer)
            # What passed until now is that of the earlier connections alone.
            found.sample(time.monotonic())
            connection = _Connection(info, queued_bytes)
            found.connections.append(connection)
            self._connections += 1
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                # The last reading of a connection that closes: what it carried since the latest sample would be lost.
                found.sample(time.monotonic())
                found.leave(connection)
                self._connections -= 1

    def links(self) -> list[LinkStats]:
        now_seconds = time.monotonic()
        with self._changed:
            return [self._peers[name].stats(now_seconds) for name in sorted(self._peers)]

    def _peer(self, name: str) -> _Peer:
        if name not in self._peers and len(self._peers) >= MAX_PEERS:
            name = OTHERS
        return self._peers.setdefault(name, _Peer(name, time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._connections)
                now_seconds = time.monotonic()
                for peer in self._peers.values():
                    peer.sample(now_seconds)
            time.sleep(SAMPLE_SECONDS)


class _Rate(NamedTuple):
    """The monitor's last totals, the rate up to there, and the time of the next check."""

    backlogged_bytes: int
    backlogged_seconds: float
    mbps: float | None
    renew_at: float


class LinkRates:
    """Rates of all links of an instance. Any thread may call."""

    def __init__(self, monitor: LinkMonitor):
        self._monitor = monitor
        self._lock = threading.Lock()
        self._rates: dict[str, _Rate] = {}

    def mbps(self, peer: str) -> float | None:
        """Return the link's delivery rate to a peer cluster; None before data waited for long enough."""
        now = time.monotonic()
        with self._lock:
            rate = self._rates.get(peer) or _Rate(0, 0.0, None, 0.0)
            if now >= rate.renew_at:
                rate = self._rates[peer] = self._renewed(peer, rate)._replace(renew_at=now + RENEW_SECONDS)
            return rate.mbps

    def _renewed(self, peer: str, rate: _Rate) -> _Rate:
        """Compute the rate again if data waited for long enough since the last time."""
        stats = next((one for one in self._monitor.links() if one.peer == peer), None)
        if stats is None or stats.backlogged_seconds - rate.backlogged_seconds < RENEW_SECONDS:
            return rate
        delivered = stats.backlogged_bytes - rate.backlogged_bytes
        mbps = delivered / BYTES_PER_MBIT / (stats.backlogged_seconds - rate.backlogged_seconds)
        return _Rate(stats.backlogged_bytes, stats.backlogged_seconds, mbps, rate.renew_at)
