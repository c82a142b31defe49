"""Those who follow a mover's events are bounded in number, in time and by their certificates; and what a snapshot sends
fits into a frame.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from prfaas.errors import IdentityError, PeerError, UnreachableError
from prfaas.wire.kvevents import BlockStored
from prfaas_transfer.data_port import patient
from prfaas_transfer.events import follow as follow_module
from prfaas_transfer.events import log as log_module
from prfaas_transfer.events.follow import Followers
from prfaas_transfer.events.log import EventLog, LoggedBatch
from prfaas_transfer.net import DataStream

from ...waiting import eventually
from .test_events import batch, hear
from .test_events_snapshot import key, stored

pytestmark = pytest.mark.system
REQUEST = b"/v1/kv-events HTTP/1.1\r\n\r\n"
Connect = Callable[..., socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect to followers as the data port does, behind the request's first word; what ends a connection is noted."""
    sockets: list[socket.socket] = []

    def begin(followers: Followers, request: bytes = REQUEST, ends: Sequence[Exception] = (), **more):
        ours, theirs = socket.socketpair()
        sockets.append(ours)
        ours.settimeout(20)
        ours.sendall(request)

        def serve() -> None:
            try:
                followers.answer(DataStream(theirs), **{"on_wait": patient(20), "check": lambda: None} | more)
            except PeerError as error:
                if isinstance(ends, list):
                    ends.append(error)
            theirs.close()

        threading.Thread(target=serve, daemon=True).start()
        return ours

    yield begin
    for one in sockets:
        one.close()


def status_of(sock: socket.socket) -> bytes:
    return sock.recv(1 << 16).split(b" ")[1]


def test_followers_leave_connections_to_transfers(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(follow_module, "MAX_FOLLOWERS", 1)
    monkeypatch.setattr(follow_module, "ALIVE_SECONDS", 0.01)
    followers = Followers(EventLog())
    first = connect(followers)
    assert (status_of(first), status_of(connect(followers))) == (b"200", b"503")
    first.close()
    eventually(lambda: status_of(connect(followers)) == b"200", "the place of one that left is free")


def test_a_mover_without_events_has_no_stream(connect: Connect):
    assert status_of(connect(Followers(None))) == b"404"


def test_a_target_that_is_no_path_is_refused(connect: Connect):
    assert status_of(connect(Followers(EventLog()), b"//[ HTTP/1.1\r\n\r\n")) == b"400"


def test_a_request_that_comes_byte_by_byte_has_an_end(connect: Connect):
    ends: list[Exception] = []
    connect(Followers(EventLog()), b"/v1", ends, on_wait=patient(-1))
    eventually(lambda: ends, "it is given up, although bytes came")
    assert isinstance(ends[0], UnreachableError)


def test_a_follower_is_checked_again(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(follow_module, "ALIVE_SECONDS", 0.01)
    ends: list[Exception] = []
    results = iter([None, IdentityError("it has expired")])

    def check() -> None:
        if (error := next(results)) is not None:
            raise error

    assert status_of(connect(Followers(EventLog()), ends=ends, check=check)) == b"200"
    eventually(lambda: ends, "it is sent away")
    assert str(ends[0]) == "it has expired"


def test_a_follower_that_may_not_read_events_gets_the_reason_and_no_event(connect: Connect):
    ends: list[Exception] = []

    def check() -> None:
        raise IdentityError("only gateways may use this")

    sock = connect(Followers(hear(EventLog(), stored(0, 1))), ends=ends, check=check)
    answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert answer.endswith(b"\r\n\r\nonly gateways may use this\n")


def test_a_follower_that_takes_nothing_is_given_up(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(follow_module, "STALL_SECONDS", 0.0)
    ends: list[Exception] = []
    log = hear(EventLog(), *[large(number) for number in range(100)])
    connect(Followers(log), ends=ends)
    eventually(lambda: ends, "it is given up")
    assert "took no byte" in str(ends[0])


def large(number: int) -> BlockStored:
    """A block that depends on much more than its tokens."""
    return BlockStored([key(number)], None, [], 2, extra_keys=[("x" * 100_000,)], group_idx=0)


def test_a_snapshot_of_long_blocks_is_sent_in_parts():
    log = hear(EventLog(1), *[large(number) for number in range(60)])
    sizes = [len(payload) for _, payload in log.snapshot().payloads]
    assert max(sizes) < 2 * log_module.PART_BYTES < sum(sizes)


def test_a_batch_that_no_follower_could_take_counts_as_lost(monkeypatch: pytest.MonkeyPatch, caplog):
    log = hear(EventLog(), stored(0, 1))
    monkeypatch.setattr(log_module, "MAX_BATCH_BYTES", 1000)
    log.add(LoggedBatch("kv", 1, batch(large(1))))
    assert "followers take 1000 at most" in caplog.text
    log.add(LoggedBatch("kv", 2, batch(stored(2, 3))))
    assert not log.snapshot().is_whole
