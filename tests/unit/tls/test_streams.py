"""Proves that both kinds of data connection keep one contract: every byte in order, whatever the pieces; an end to
every wait; and nothing that was changed on the way inside TLS.
"""

import fcntl
import random
import socket
import ssl
import struct
import termios
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from prfaas.errors import PeerError, UnreachableError
from prfaas_transfer import link_stats, net
from prfaas_transfer.net import LOW_WATER_BYTES, WRITE_BYTES, DataStream, TlsStream, tune
from prfaas_transfer.tls import accept_tls, connect_tls

from ...waiting import PATIENCE_SECONDS, assert_prompt, eventually, within

pytestmark = pytest.mark.system
SECONDS = PATIENCE_SECONDS
Pair = tuple[DataStream, DataStream]


def ignore(_sent: int) -> None:
    pass


@pytest.fixture(params=["plain", "tls"])
def pair(request, sockets, hub, eu) -> Iterator[Pair]:
    """A client's and a server's stream, connected."""
    client, server = sockets()
    if request.param == "plain":
        tune(client)
        tune(server)
        made: Pair = DataStream(client), DataStream(server)
    else:
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(accept_tls, server, eu, SECONDS)
            made = connect_tls(client, hub, SECONDS, "eu"), accepted.result()
    yield made
    for stream in made:
        stream.close()


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def await_readable(stream: DataStream) -> None:
    eventually(stream.readable, "bytes arrive")


def await_taken(stream: DataStream) -> None:
    """Wait until a reader leaves less in its socket than the kernel would wake it for."""
    count = array("i", [0])

    def is_taken() -> bool:
        fcntl.ioctl(stream, termios.FIONREAD, count)
        return count[0] < LOW_WATER_BYTES

    eventually(is_taken, "the reader takes what came", poll=0.001)


@pytest.mark.parametrize("largest", [1, 100, 5_000, 40_000, 300_000])
def test_pieces_of_any_sizes_arrive_in_order_in_buffers_of_other_sizes(pair: Pair, largest: int):
    rng = random.Random(largest)
    parts = [rng.randbytes(rng.randint(0, largest)) for _ in range(60)]
    whole = b"".join(parts)
    sent: list[int] = []
    thread = in_thread(lambda: pair[0].send([memoryview(part) for part in parts], sent.append))
    heard = bytearray(len(whole))
    left, buffers = memoryview(heard), []
    while left:
        size = rng.randint(0, largest + 1)
        buffers.append(left[:size])
        left = left[size:]
    pair[1].receive_into(*buffers)
    thread.join()
    assert heard == whole
    assert sum(sent) == len(whole)


def test_parts_may_change_once_they_are_sent(pair: Pair):
    part = bytearray(3 * WRITE_BYTES)
    heard = bytearray(2 * len(part))
    thread = in_thread(lambda: pair[1].receive_into(heard))
    for fill in (b"a", b"b"):
        part[:] = fill * len(part)
        pair[0].send([part], ignore)
    thread.join()
    assert heard == b"a" * len(part) + b"b" * len(part)


def test_a_silent_peer_ends_a_read_and_a_full_one_ends_a_write_when_the_caller_says_so(pair: Pair):
    def give_up(silent_seconds: float) -> None:
        if silent_seconds > 0.3:
            raise UnreachableError("enough")

    with pytest.raises(UnreachableError, match="enough"):
        pair[0].receive_into(bytearray(1), on_wait=give_up)
    with pytest.raises(UnreachableError, match="enough"):
        pair[0].send([bytes(1 << 26)], ignore, give_up)


def test_checks_the_deadline_between_bytes_too_so_that_a_trickle_cannot_outlast_it(pair: Pair):
    silences: list[float] = []

    def give_up(silent_seconds: float) -> None:
        silences.append(silent_seconds)
        if len(silences) == 3:
            raise UnreachableError("too slow")

    ended = threading.Event()

    def trickle() -> None:
        for _ in range(1_000_000):
            pair[1].send([b"x"])
            if ended.wait(0.02):
                return

    thread = in_thread(trickle)
    with pytest.raises(UnreachableError, match="too slow"):
        pair[0].receive_into(bytearray(1_000_000), on_wait=give_up)
    ended.set()
    thread.join()


@pytest.mark.quiet
def test_a_large_payload_that_comes_slowly_counts_as_progress(pair: Pair):
    size, silent = 4 * LOW_WATER_BYTES, [0.0]

    def trickle() -> None:
        for _ in range(4):
            pair[1].send([bytes(LOW_WATER_BYTES // 4)])
            time.sleep(0.3)
        pair[1].send([bytes(size - LOW_WATER_BYTES)])

    thread = in_thread(trickle)
    pair[0].receive_into(bytearray(size), on_wait=silent.append)
    thread.join()
    assert_prompt(max(silent), 0.6, "the low water mark hid the bytes that came")
    pair[1].send([b"y"])
    within(1.0, pair[0].readable, "a small frame wakes the reader of the next")


@pytest.mark.parametrize("last_bytes", [1, LOW_WATER_BYTES // 2, LOW_WATER_BYTES])
def test_the_end_of_a_large_payload_is_taken_when_it_comes_though_nothing_follows_it(
    pair: Pair, last_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    size, reader = 4 * LOW_WATER_BYTES, pair[1]
    reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 0))  # no timeout
    monkeypatch.setattr(net, "SOCKET_TIMEOUT_SECONDS", 3600.0)
    thread = in_thread(lambda: reader.receive_into(bytearray(size)))
    pair[0].send([bytes(size - last_bytes)])
    await_taken(reader)  # and the reader sleeps, or is about to
    pair[0].send([bytes(last_bytes)])
    thread.join(PATIENCE_SECONDS)
    asleep = thread.is_alive()
    reader.shutdown()
    thread.join()
    assert not asleep, "the reader waits for bytes that never come"


def test_a_peer_that_closes_ends_both(pair: Pair):
    pair[1].close()
    with pytest.raises(UnreachableError, match="closed the connection"):
        pair[0].receive_into(bytearray(1))
    with pytest.raises(UnreachableError):
        pair[0].send([bytes(1 << 20)] * 100, ignore)


@pytest.mark.parametrize("sent", [b"", b"half"])
@pytest.mark.parametrize("pair", ["tls"], indirect=True)
def test_a_peer_that_ends_tls_in_order_ends_a_read(pair: tuple[TlsStream, TlsStream], sent: bytes):
    """As proxies and other TLS libraries do. OpenSSL then reads 0 bytes, each time anew."""
    pair[0].send([sent])
    with suppress(ssl.SSLWantReadError):  # it would read the peer's own end next
        pair[0].channel.tls.unwrap()
    pair[0].channel._flush()
    with pytest.raises(UnreachableError, match="closed the connection"):
        pair[1].receive_into(bytearray(8))


@pytest.mark.parametrize("work", ["receive", "send"])
def test_an_abort_from_another_thread_ends_a_wait(pair: Pair, work: str):
    began, ended = threading.Event(), []

    def wait() -> None:
        began.set()
        try:
            if work == "send":
                pair[0].send([bytes(1 << 26)], ignore)
            else:
                pair[0].receive_into(bytearray(1))
        except PeerError as error:
            ended.append(error)

    thread = in_thread(wait)
    began.wait()
    pair[0].shutdown()
    pair[0].shutdown()
    thread.join(SECONDS)
    assert isinstance(ended[0], UnreachableError)


def test_readable_tells_of_bytes_also_of_those_that_tls_holds_and_of_an_end(pair: Pair):
    assert not pair[1].readable()
    pair[0].send([b"abcd"], ignore)
    await_readable(pair[1])
    pair[1].receive_into(bytearray(1))
    assert pair[1].readable(), "three are left, which with TLS the kernel does not know"
    pair[1].receive_into(bytearray(3))
    assert not pair[1].readable()
    pair[0].close()
    await_readable(pair[1])


def test_knows_a_peer_only_inside_tls_and_the_kernel_knows_what_arrived(pair: Pair):
    known = [stream.peer.cluster if stream.peer else "" for stream in pair]
    assert known in (["", ""], ["eu", "hub"])
    pair[0].send([bytes(100_000)], ignore)
    pair[1].receive_into(bytearray(100_000))
    assert link_stats.read_tcp_info(pair[1].socket).received_bytes >= 100_000
    assert pair[0].fileno() >= 0


def test_a_byte_changed_on_the_way_breaks_a_tls_stream(sockets, hub, eu):
    client, middle_in = sockets()
    middle_out, server = sockets()

    def relay(source: socket.socket, target: socket.socket, damage_at: int) -> None:
        seen = 0
        with suppress(ConnectionError):  # both ends are cut
            while piece := bytearray(source.recv(1 << 16)):
                if seen <= damage_at < seen + len(piece):
                    piece[damage_at - seen] ^= 1
                seen += len(piece)
                target.sendall(piece)

    threads = [
        in_thread(lambda: relay(middle_out, middle_in, -1)),
        in_thread(lambda: relay(middle_in, middle_out, 50_000)),
    ]
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_tls, server, eu, SECONDS)
        near, far = connect_tls(client, hub, SECONDS, "eu"), accepted.result()
    near.send([bytes(100_000)], ignore)
    with pytest.raises(PeerError, match="TLS broke while receiving: decryption failed or bad record mac"):
        far.receive_into(bytearray(100_000))
    for stream in (near, far):
        stream.shutdown()
        stream.close()
    for thread in threads:
        thread.join(SECONDS)
