"""The measure of links: by peer, only what a watched connection added, and backlog only while data waits."""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial

import pytest

from prfaas.wire.stats import LinkStats
from prfaas_transfer import link_stats
from prfaas_transfer.link_stats import Backlogged, LinkMonitor, LinkReading, TcpInfo, backlogged_between, read_tcp_info
from prfaas_transfer.net import tune

from ...waiting import eventually

pytestmark = pytest.mark.system

Pair = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize(
    ("before", "after", "added"),
    [
        (LinkReading(1.0, 500, 1000), LinkReading(1.5, 300, 1200), Backlogged(200, 0.5)),
        (LinkReading(1.0, 500, 1000), LinkReading(1.5, 500, 1000), Backlogged(0, 0.5)),  # a dead link delivers nothing
        (LinkReading(1.0, 0, 1000), LinkReading(1.5, 300, 1200), Backlogged(0, 0.0)),
        (LinkReading(1.0, 500, 1000), LinkReading(1.5, 0, 1500), Backlogged(0, 0.0)),
        (LinkReading(1.0, 0, 1000), LinkReading(1.5, 0, 1000), Backlogged(0, 0.0)),
    ],
)
def test_an_interval_counts_only_if_data_waited_at_both_its_ends(
    before: LinkReading, after: LinkReading, added: Backlogged
):
    assert backlogged_between(before, after) == added


@pytest.fixture
def connection() -> Iterator[Pair]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with closing(ours), closing(theirs):
        tune(ours)
        yield ours, theirs


class Kernel:
    """What a kernel would report of a connection, set by the test."""

    def __init__(self, **figures: float):
        self.now = TcpInfo(None, None, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)._replace(**figures)

    def __call__(self) -> TcpInfo:
        return self.now

    def move(self, **figures: float) -> None:
        self.now = self.now._replace(**figures)


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> LinkMonitor:
    """A monitor that samples only where a watch begins and ends."""
    monkeypatch.setattr(link_stats, "SAMPLE_SECONDS", 1e6)
    return LinkMonitor()


def link(monitor: LinkMonitor, peer: str) -> LinkStats:
    (found,) = [one for one in monitor.links() if one.peer == peer]
    return found


def nothing() -> int:
    return 0


def fill(sock: socket.socket) -> int:
    """Send until the kernel takes no more; return how much it took."""
    sock.setblocking(False)
    filled = 0
    with suppress(BlockingIOError):
        while True:
            filled += sock.send(bytes(1 << 16))
    return filled


def test_the_data_path_does_not_depend_on_the_hosts_congestion_control(connection: Pair):
    name = connection[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert name.rstrip(b"\0") == b"cubic"


def test_the_kernel_reports_what_the_peer_has_and_what_still_waits(connection: Pair):
    ours, theirs = connection
    before, theirs_before = read_tcp_info(ours), read_tcp_info(theirs)
    ours.sendall(bytes(5000))
    theirs.recv(5000, socket.MSG_WAITALL)
    assert read_tcp_info(theirs).received_bytes - theirs_before.received_bytes == 5000
    after = read_tcp_info(ours)
    assert after.sent_bytes - before.sent_bytes == 5000
    assert after.rtt_seconds is not None
    assert after.min_rtt_seconds is not None
    assert 0 < after.min_rtt_seconds <= after.rtt_seconds < 10
    assert after.delivery_rate_bytes_per_second > 0
    filled = fill(ours)
    assert 0 < read_tcp_info(ours).unsent_bytes <= filled


def test_distinguishes_the_peers_full_window_from_our_own_buffer(connection: Pair):
    ours, _ = connection
    fill(ours)
    # The kernel counts in ticks, and once it has tried to send into the full window.
    eventually(lambda: read_tcp_info(ours).rwnd_limited_seconds > 0, "the kernel knows whose fault it is")
    info = read_tcp_info(ours)
    assert info.rwnd_limited_seconds > info.sndbuf_limited_seconds
    assert info.rwnd_limited_seconds <= info.busy_seconds


def test_of_a_kept_connection_only_what_each_watch_added_counts(monitor: LinkMonitor):
    kernel = Kernel(sent_bytes=10_000, retransmits=3, busy_seconds=9.0)
    for total in (11_000, 12_500):
        with monitor.watch(kernel, nothing, "hub"):
            kernel.move(sent_bytes=total, received_bytes=total // 10, retransmits=total // 1000)
        kernel.move(sent_bytes=total + 70)  # between two watches: of neither
    found = link(monitor, "hub")
    assert (found.sent_bytes, found.received_bytes, found.retransmits) == (1000 + 1430, 1250, 12 - 3)
    assert found.busy_seconds == 0


def test_peers_are_counted_apart_and_the_hub_and_the_unknown_from_the_start(monitor: LinkMonitor):
    assert [one.peer for one in monitor.links()] == ["", "hub"]
    kernels = {peer: Kernel(rtt_seconds=0.01) for peer in ("", "hub", "eu")}
    with ExitStack() as stack:
        for count, (peer, kernel) in enumerate(kernels.items(), 1):
            stack.enter_context(monitor.watch(kernel, nothing, peer))
            kernel.move(sent_bytes=count)
    assert [(one.peer, one.sent_bytes) for one in monitor.links()] == [("", 1), ("eu", 3), ("hub", 2)]


def test_peers_beyond_a_number_share_one_name(monitor: LinkMonitor):
    for number in range(200):
        kernel = Kernel()
        with monitor.watch(kernel, nothing, f"peer-{number}"):
            kernel.move(sent_bytes=1)
    links = monitor.links()
    assert len(links) == link_stats.MAX_PEERS + 1
    assert link(monitor, link_stats.OTHERS).sent_bytes == 200 - (link_stats.MAX_PEERS - 2)


def test_delays_are_means_rates_sums_and_the_least_delay_the_least(monitor: LinkMonitor):
    kernels = [
        Kernel(rtt_seconds=0.02, min_rtt_seconds=0.01, delivery_rate_bytes_per_second=100, unsent_bytes=5),
        Kernel(rtt_seconds=0.06, min_rtt_seconds=0.03, delivery_rate_bytes_per_second=200, unsent_bytes=6),
        Kernel(),
    ]
    with ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(monitor.watch(kernel, nothing, "hub"))
        with monitor.watch(Kernel(), nothing, "hub"):  # samples the others
            pass
        found = link(monitor, "hub")
    assert (found.rtt_seconds, found.min_rtt_seconds) == (pytest.approx(0.04), 0.01)
    assert (found.delivery_rate_bytes_per_second, found.unsent_bytes, found.connections) == (300, 11, 3)


class Queue:
    def queued_bytes(self) -> int:
        return 100


def test_connections_that_share_a_queue_count_it_once(monitor: LinkMonitor):
    shared, own = Queue(), Queue()
    with ExitStack() as stack:
        for queue in (shared, shared, shared, own):
            stack.enter_context(monitor.watch(Kernel(), queue.queued_bytes, "hub"))
        with monitor.watch(Kernel(), nothing, "hub"):
            pass
        assert link(monitor, "hub").unsent_bytes == 200
    assert link(monitor, "hub").unsent_bytes == 0


def test_delays_and_rates_fade_some_time_after_the_last_connection(
    monitor: LinkMonitor, monkeypatch: pytest.MonkeyPatch
):
    kernel = Kernel(rtt_seconds=0.02, min_rtt_seconds=0.01, delivery_rate_bytes_per_second=9, sent_bytes=1)
    with monitor.watch(kernel, nothing):
        kernel.move(sent_bytes=5)
    found = link(monitor, "")
    assert (found.rtt_seconds, found.delivery_rate_bytes_per_second, found.connections) == (0.02, 9, 0)
    monkeypatch.setattr(link_stats, "SHOWN_SECONDS", 0.0)
    found = link(monitor, "")
    assert (found.rtt_seconds, found.min_rtt_seconds, found.delivery_rate_bytes_per_second) == (None, None, None)
    assert found.sent_bytes == 4


def test_a_socket_closed_under_the_monitor_disturbs_no_other(monitor: LinkMonitor, connection: Pair):
    ours, theirs = connection
    with monitor.watch(partial(read_tcp_info, ours), nothing, "hub"):
        ours.sendall(bytes(100))
        theirs.recv(100, socket.MSG_WAITALL)
        with monitor.watch(Kernel(), nothing, "hub"):
            pass
        ours.close()
    assert link(monitor, "hub").sent_bytes == 100
    with pytest.raises(OSError, match="descriptor"), monitor.watch(partial(read_tcp_info, ours), nothing):
        pass
    assert link(monitor, "").connections == 0


def test_a_destination_that_reads_slowly_makes_a_backlog_and_its_end_clears_it(connection: Pair):
    ours, theirs = connection
    monitor = LinkMonitor()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    size_bytes, received_bytes = 2 << 20, 0
    sending = threading.Thread(target=ours.sendall, args=(bytes(size_bytes),), daemon=True)
    grown = threading.Event()
    with monitor.watch(partial(read_tcp_info, ours), lambda: 100, "hub"):
        sending.start()
        while link(monitor, "hub").backlogged_seconds < 0.05:
            received_bytes += len(theirs.recv(1 << 12))
            grown.wait(0.001)
        assert link(monitor, "hub").unsent_bytes >= 100
        while received_bytes < size_bytes:
            received_bytes += len(theirs.recv(1 << 20))
        sending.join()
    found = link(monitor, "hub")
    assert 0 < found.backlogged_bytes <= size_bytes == found.sent_bytes
    assert found.unsent_bytes == 0
    assert link(monitor, "").backlogged_seconds == 0


def test_connections_may_come_and_go_from_many_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_stats, "SAMPLE_SECONDS", 0.0005)
    monitor = LinkMonitor()

    def transfer(peer: str) -> None:
        kernel = Kernel(sent_bytes=7)
        for total in itertools.islice(itertools.count(1), 100):
            with monitor.watch(kernel, nothing, peer):
                kernel.move(sent_bytes=7 + total)

    work: list[Callable[[], None]] = [partial(transfer, peer) for peer in ("hub", "eu") * 4]
    threads = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = {one.peer: (one.sent_bytes, one.connections) for one in monitor.links()}
    assert found == {"": (0, 0), "hub": (400, 0), "eu": (400, 0)}
