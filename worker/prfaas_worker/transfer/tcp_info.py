"""What the kernel knows of a TCP connection: TCP_INFO, as linux/tcp.h lays it out. It works below TLS as well."""

import socket
import struct
from typing import Final, NamedTuple

# u32 tcpi_rtt 68 (us), total_retrans 100; u64 bytes_acked 120, bytes_received 128; u32 notsent_bytes 144, min_rtt 148
# (us); u64 delivery_rate 160 (bytes/s), busy_time 168, rwnd_limited 176, sndbuf_limited 184 (us).
_LAYOUT: Final = struct.Struct("=68xI28xI16xQQ8xII8xQQQQ")
_UNKNOWN_MICROS: Final = 0xFFFFFFFF
_MICRO: Final = 1e-6


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


def read(sock: socket.socket) -> TcpInfo:
    """Ask the kernel; an older one leaves zeros where it does not know. OSError when the socket is closed."""
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
