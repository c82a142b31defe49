"""The link that transfers are tried on: it delays and loses what it is told to, damages nothing, can be cut and mended
without a word to the ends, and leaves nothing behind however its maker ends.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

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
def connected(made: Link) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from the destination to the source: the source's socket, then the destination's."""
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
    """What arrives when these bytes are sent."""
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(ours.sendall, data)
        received = bytearray()
        while len(received) < len(data):
            received += theirs.recv(1 << 20)
        sending.result()
    return bytes(received)


def tcp_info(sock: socket.socket, offset: int) -> int:
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240)
    return int.from_bytes(raw[offset : offset + 4], sys.byteorder)


def lost(sock: socket.socket) -> int:
    """Count the packets that were sent again, without those that the peer had twice then."""
    return tcp_info(sock, TCP_INFO_RETRANSMITS_OFFSET) - tcp_info(sock, TCP_INFO_DUPLICATES_OFFSET)


@pytest.mark.parametrize("shape", [{}, {"mbps": 400}, {"mbps": 400, "round_trip_seconds": 0.005}])
def test_bytes_cross_as_they_are(shape):
    data = os.urandom(3_000_000)
    with link(**shape) as made, connected(made) as (ours, theirs):
        assert carry(ours, theirs, data) == data


def test_the_round_trip_is_what_was_asked_and_not_there_otherwise():
    with link(round_trip_seconds=0.1) as made, connected(made) as (ours, theirs):
        assert carry(ours, theirs, b"x") == b"x"
        assert tcp_info(theirs, TCP_INFO_RTT_OFFSET) >= 100_000
    with link() as made, connected(made) as (ours, theirs):
        assert carry(ours, theirs, b"x") == b"x"
        assert tcp_info(theirs, TCP_INFO_RTT_OFFSET) < 100_000


def test_lost_packets_are_sent_again_and_what_is_left_of_a_read_stays_whole():
    data = os.urandom(4_000_000)
    with link(loss=0.02) as made, connected(made) as (ours, theirs):
        assert carry(ours, theirs, data) == data
        assert lost(ours) > 10
    with link(round_trip_seconds=0.001) as made, connected(made) as (ours, theirs):
        assert carry(ours, theirs, data) == data
        # On a busy machine an answer may come so late that something is sent again. It comes twice then: none was lost.
        eventually(lambda: lost(ours) <= 0, lambda: f"{lost(ours)} of the packets that were sent again arrived once")


@pytest.mark.parametrize("shape", [{}, {"mbps": 100}, {"round_trip_seconds": 0.002}])
def test_a_cut_link_says_nothing_and_a_mended_one_goes_on(shape):
    with link(**shape) as made, connected(made) as (ours, theirs):
        assert carry(ours, theirs, b"before") == b"before"
        made.cut()
        ours.sendall(b"meanwhile")
        assert select.select([theirs, ours], [], [], 0.3)[0] == []
        made.mend()
        assert theirs.recv(100) == b"meanwhile"


def test_what_is_made_inside_stays_inside():
    with link() as made:
        outside = Path("/proc/thread-self/ns/net").readlink()
        with made.source.inside():
            inside = Path("/proc/thread-self/ns/net").readlink()
            with ThreadPoolExecutor(1) as thread:
                of_thread = thread.submit(lambda: Path("/proc/thread-self/ns/net").readlink()).result()
        assert inside == of_thread != outside
        assert Path("/proc/thread-self/ns/net").readlink() == outside


def test_a_program_that_fails_is_named_with_its_reason():
    with link() as made, pytest.raises(ConfigError, match=r"ip link set nothing up failed: .*nothing"):
        made.source.run("ip", "link", "set", "nothing", "up")


MAKER = """
import signal, subprocess, sys, time
from benchmarks.transfer.link import link
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in a shell's background inherits that it is ignored
with link(round_trip_seconds=0.001) as made:
    sleeper = made.source.start(["sleep", "1000"])
    children = open("/proc/thread-self/children").read()
    print(children, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_however_its_maker_ends(how):
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
    ) as maker:
        assert maker.stdout is not None
        children = {int(child): began(int(child)) for child in maker.stdout.readline().split()}
        assert len(children) == 2
        assert None not in children.values()
        maker.send_signal(how)
    eventually(
        lambda: not any(began(child) == when for child, when in children.items()), "what the maker started ended"
    )


def began(pid: int) -> str | None:
    """Return when a process began, which tells it from a later one of the same number; None: it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
