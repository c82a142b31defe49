"""Transfers over connections that break: every bit is right at the end, nothing crosses twice, and the source frees its
copy once, also when the destination never comes back.
"""

import random
import socket
import threading
import time
from collections import Counter
from contextlib import closing

import pytest

from prfaas.errors import UnreachableError
from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, Kind
from prfaas_transfer import data_port as data_port_module
from prfaas_transfer import leases as leases_module
from prfaas_transfer import pull as pull_module
from prfaas_transfer.leases import Offer
from prfaas_transfer.pull import Connections
from prfaas_transfer.tls import PeerAuth

from ..unit.worker.transfer_bench import (
    LARGE,
    SMALL,
    Port,
    assert_same_bits,
    compute,
    connect,
    hello,
    kinds,
    transfer_threads,
)
from ..unit.worker.transfer_proxy import CutError, Proxy, Seen
from ..waiting import PATIENCE_SECONDS, eventually


class Log:
    """Passes frames on and counts data frames that went through whole."""

    def __init__(self) -> None:
        self.passed: Counter[int] = Counter()
        self.kinds: list[Kind] = []

    def __call__(self, seen: Seen) -> list[bytes]:
        self.kinds.append(seen.header.kind)
        if seen.header.kind in DATA_KINDS:
            self.passed[seen.header.sequence] += 1
        return [seen.raw]


FRAMES_OF_SMALL = 2 * 4 + 3
"""Rows of two layers in four chunks, states of three layers."""


# WELCOME, all data, DONE, FREED
@pytest.mark.parametrize("tail_bytes", [0, 1, HEADER_BYTES, HEADER_BYTES + 9])
@pytest.mark.parametrize("at", range(1 + FRAMES_OF_SMALL + 2))
def test_a_connection_cut_before_or_within_any_frame_is_replaced_and_nothing_crosses_twice(
    port: Port, at: int, tail_bytes: int
):
    log = Log()

    def down(seen: Seen) -> list[bytes]:
        if (seen.connection, seen.frame) == (0, at):
            raise CutError(seen.raw[: min(tail_bytes, len(seen.raw) - 1)])
        return log(seen)

    offer, leg = port.announce()
    cache = SMALL.filled()
    compute(SMALL, offer, cache)
    with Proxy(port.address, down) as proxy:
        taking = port.take(leg, at=proxy.address)
        assert taking.whole().frames == FRAMES_OF_SMALL
        assert_same_bits(SMALL, taking.place, cache)
        assert log.passed == dict.fromkeys(range(FRAMES_OF_SMALL), 1)
        assert port.ends()
        port.settle()
        assert proxy.connections == (1 if log.kinds[-1:] == [Kind.DONE] else 2), "only FREED may be lost for good"
    port.assert_ended_once(delivered=1)


@pytest.mark.parametrize("seed", range(4))
def test_four_connections_cut_again_and_again_bring_every_bit(seed: int):
    rng = random.Random(seed)
    cuts_left = 12

    def down(seen: Seen) -> list[bytes]:
        nonlocal cuts_left
        if cuts_left and seen.frame and rng.random() < 0.4:
            cuts_left -= 1
            raise CutError(seen.raw[: rng.randrange(len(seen.raw))])
        return [seen.raw]

    port = Port(LARGE)
    offer, leg = port.announce()
    cache = LARGE.filled()
    with Proxy(port.address, down) as proxy:
        taking = port.take(leg, at=proxy.address)
        compute(LARGE, offer, cache, step=64)
        taking.whole()
        assert_same_bits(LARGE, taking.place, cache)
        assert port.ends()
        port.settle()
        assert proxy.connections > 4
    port.assert_ended_once(delivered=1)


def test_a_break_while_the_source_computes_is_mended_before_there_is_anything_to_send(port: Port):
    with Proxy(port.address) as proxy:
        offer, leg = port.announce()
        taking = port.take(leg, at=proxy.address)
        for _ in range(3):
            eventually(lambda: offer.streams, "the destination is connected")
            before = proxy.connections
            proxy.cut()
            eventually(lambda before=before: proxy.connections > before, "the destination connected again")
        cache = SMALL.filled()
        compute(SMALL, offer, cache)
        taking.whole()
        assert_same_bits(SMALL, taking.place, cache)
        assert port.ends()
        port.settle()
    port.assert_ended_once(delivered=1)


def test_a_destination_gives_up_after_a_bounded_number_of_breaks_and_the_source_frees(
    port: Port, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leases_module, "RESUME_SECONDS", 0.0)

    def down(seen: Seen) -> list[bytes]:
        raise CutError

    _, leg = port.announce()
    with Proxy(port.address, down) as proxy:
        assert isinstance(port.take(leg, at=proxy.address).failure(), UnreachableError)
        assert proxy.connections <= pull_module.MAX_BREAKS + 1
    assert port.ends()
    port.assert_ended_once(failed=1)


def begin_a_lease_of(seconds: float, offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its destination is there, however long that took."""
    monkeypatch.setattr(leases_module, "LEASE_SECONDS", seconds)
    offer.lease.renew(seconds)


def test_a_destination_that_trickles_bytes_of_a_frame_holds_nothing_beyond_its_lease(
    port: Port, monkeypatch: pytest.MonkeyPatch
):
    offer, leg = port.announce()
    done = threading.Event()
    with closing(connect(port, hello(leg))) as sock:
        assert kinds(sock, 1) == [Kind.WELCOME]
        begin_a_lease_of(0.4, offer, monkeypatch)

        def trickle() -> None:
            for byte in hello(leg):
                try:
                    sock.send(bytes([byte]))
                except OSError:
                    return
                if done.wait(0.1):
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert port.ends()
        done.set()
        thread.join()
    port.assert_ended_once(failed=1)


def test_a_hello_that_comes_byte_by_byte_is_cut_off_and_costs_no_other(port: Port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_port_module, "HELLO_SECONDS", 0.4)
    offer, leg = port.announce()
    compute(SMALL, offer, SMALL.filled())
    slow = socket.create_connection(port.address, PATIENCE_SECONDS)
    with closing(slow):
        taking = port.take(leg)
        for byte in hello(leg):
            try:
                slow.send(bytes([byte]))
            except OSError:
                break
            time.sleep(0.02)
        else:
            pytest.fail("it may last for ever")
        taking.whole()
    assert port.ends()
    port.assert_ended_once(delivered=1)


def test_replaces_kept_connections_of_a_source_that_restarted(port: Port):
    connections = Connections(PeerAuth())
    with Proxy(port.address) as proxy:
        for handle in range(3):
            offer, leg = port.announce(handle)
            cache = SMALL.filled()
            compute(SMALL, offer, cache)
            taking = port.take(leg, at=proxy.address, connections=connections)
            taking.whole()
            assert_same_bits(SMALL, taking.place, cache)
            assert port.ends(handle)
            eventually(lambda: "fetch-data" not in transfer_threads(), "no destination receives")
            proxy.cut()  # the destination does not read from kept connections: it finds out when it takes one
        assert proxy.connections == 3
        port.settle()
    port.assert_ended_once(delivered=3)


@pytest.mark.usefixtures("wary")
def test_a_kept_connection_that_died_silently_is_replaced(port: Port):
    connections = Connections(PeerAuth())
    silent = False

    def up(seen: Seen) -> list[bytes]:
        return [] if silent and seen.connection == 0 else [seen.raw]

    with Proxy(port.address, up=up) as proxy:
        for handle in range(2):
            offer, leg = port.announce(handle)
            cache = SMALL.filled()
            compute(SMALL, offer, cache)
            taking = port.take(leg, at=proxy.address, connections=connections)
            taking.whole()
            assert_same_bits(SMALL, taking.place, cache)
            assert port.ends(handle)
            eventually(lambda: "fetch-data" not in transfer_threads(), "no destination receives")
            silent = True
        port.settle()
    port.assert_ended_once(delivered=2)
