"""The link that transfers are measured on: it delays and loses as configured, and damages nothing."""

import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from benchmarks.transfer.link import Link, link

from prfaas.errors import ConfigError

from ...waiting import PATIENCE_SECONDS, eventually

PORT = 7000
TCP_INFO_RTT_OFFSET, TCP_INFO_RETRANSMITS_OFFSET, TCP_INFO_DUPLICATES_OFFSET = 68, 100, 216


def is_possible() -> bool:
    """Rights over namespaces, their programs and a compiler are there."""
    try:
        with link(round_trip_seconds=0.001):
            return True
    except ConfigError:
        return False


pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not is_possible(), reason="network namespaces or a C compiler are not to be had"),
]


@contextmanager
def connect(made: Link) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Open a connection from the destination to the source: the source's socket, then the destination's."""
    with made.source.inside():
        listener = socket.create_server((made.source.address, PORT))
    with (
        listener,
        made.destination.inside(),
        socket.create_connection(listener.getsockname(), PATIENCE_SECONDS) as theirs,
    ):
        ours, _ = listener.accept()
        with ours:
            ours.settimeout(PATIENCE_SECONDS)
            theirs.settimeout(PATIENCE_SECONDS)
            yield ours, theirs


def carry(ours: socket.socket, theirs: socket.socket, data: bytes) -> bytes:
    """Return what arrives when these bytes are sent."""
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(ours.sendall, data)
        received = bytearray()
        while len(received) < len(data):
            received += theirs.recv(1 << 20)
        sending.result()
    return bytes(received)


def read_tcp_info(sock: socket.socket, offset: int) -> int:
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240)
    return int.from_bytes(raw[offset : offset + 4], sys.byteorder)


def count_lost(sock: socket.socket) -> int:
    """Count the packets that were sent again, without those that the peer had twice then."""
    return read_tcp_info(sock, TCP_INFO_RETRANSMITS_OFFSET) - read_tcp_info(sock, TCP_INFO_DUPLICATES_OFFSET)


@pytest.mark.parametrize("shape", [{}, {"mbps": 400}, {"mbps": 400, "round_trip_seconds": 0.005}])
def test_bytes_cross_as_they_are(shape):
    data = os.urandom(3_000_000)
    with link(**shape) as made, connect(made) as (ours, theirs):
        assert carry(ours, theirs, data) == data


def test_the_round_trip_is_as_configured():
    with link(round_trip_seconds=0.1) as made, connect(made) as (ours, theirs):
        assert carry(ours, theirs, b"x") == b"x"
        assert read_tcp_info(theirs, TCP_INFO_RTT_OFFSET) >= 100_000
    with link() as made, connect(made) as (ours, theirs):
        assert carry(ours, theirs, b"x") == b"x"
        assert read_tcp_info(theirs, TCP_INFO_RTT_OFFSET) < 100_000


def test_lost_packets_are_sent_again_and_arrive_whole():
    data = os.urandom(4_000_000)
    with link(loss=0.02) as made, connect(made) as (ours, theirs):
        assert carry(ours, theirs, data) == data
        assert count_lost(ours) > 10
    with link(round_trip_seconds=0.001) as made, connect(made) as (ours, theirs):
        assert carry(ours, theirs, data) == data
        # On a busy machine an answer may come so late that something is sent again. It comes twice then: none was lost.
        eventually(lambda: count_lost(ours) <= 0, lambda: f"{count_lost(ours)} packets were lost")
