"""The measure of the link: bytes and time count only while data waits, and a monitor reads them from real sockets."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from prfaas_worker.transfer.accounting import Backlogged, Monitor, Sample, backlogged_between
from prfaas_worker.transfer.sockets import progress, tune


@pytest.mark.parametrize(
    ("before", "after", "added"),
    [
        (Sample(1.0, 500, 1000), Sample(1.5, 300, 1200), Backlogged(200, 0.5)),
        (Sample(1.0, 500, 1000), Sample(1.5, 500, 1000), Backlogged(0, 0.5)),  # a dead link delivers nothing
        (Sample(1.0, 0, 1000), Sample(1.5, 300, 1200), Backlogged(0, 0.0)),
        (Sample(1.0, 500, 1000), Sample(1.5, 0, 1500), Backlogged(0, 0.0)),
        (Sample(1.0, 0, 1000), Sample(1.5, 0, 1000), Backlogged(0, 0.0)),
    ],
)
def test_an_interval_counts_only_if_data_waited_at_both_its_ends(before: Sample, after: Sample, added: Backlogged):
    assert backlogged_between(before, after) == added


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with closing(ours), closing(theirs):
        tune(ours)
        yield ours, theirs


def test_the_data_path_does_not_depend_on_the_hosts_congestion_control(connection: tuple[socket.socket, socket.socket]):
    name = connection[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert name.rstrip(b"\0") == b"cubic"


def test_the_kernel_tells_what_the_peer_has_and_what_still_waits(connection: tuple[socket.socket, socket.socket]):
    ours, theirs = connection
    before = progress(ours)
    ours.sendall(bytes(5000))
    theirs.recv(5000, socket.MSG_WAITALL)
    assert progress(ours).delivered_bytes - before.delivered_bytes == 5000
    ours.setblocking(False)
    filled = 0
    while True:
        try:
            filled += ours.send(bytes(1 << 16))
        except BlockingIOError:
            break
    found = progress(ours)
    assert 0 < found.unsent_bytes <= filled


def test_a_receiver_that_reads_slowly_makes_a_backlog_and_its_end_clears_it(
    connection: tuple[socket.socket, socket.socket],
):
    ours, theirs = connection
    monitor = Monitor()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    size_bytes, received_bytes = 8 << 20, 0
    sending = threading.Thread(target=ours.sendall, args=(bytes(size_bytes),))
    grown = threading.Event()
    with monitor.watch(ours, lambda: 100):
        sending.start()
        while monitor.backlogged.seconds < 0.05:
            received_bytes += len(theirs.recv(1 << 12))
            grown.wait(0.001)
        assert monitor.unsent_bytes >= 100
        while received_bytes < size_bytes:
            received_bytes += len(theirs.recv(1 << 20))
        sending.join()
    assert 0 < monitor.backlogged.delivered_bytes <= 8 << 20
    assert monitor.unsent_bytes == 0
