"""Payloads by Mooncake Transfer Engine: bit for bit under the same digests, refused beyond its fabric, and a read that
fails or lies harms nothing. The engine here is a stand-in that reads memory by address within this process, as the real
one does across machines.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from prfaas.errors import ConfigError, PeerError
from prfaas.wire.receipt import Receipt
from prfaas_worker.transfer import mooncake
from prfaas_worker.transfer.carriers import refusal
from prfaas_worker.transfer.connections import Connections, Giver
from prfaas_worker.transfer.counters import TransferCounters
from prfaas_worker.transfer.door import Door
from prfaas_worker.transfer.intake import Intake
from prfaas_worker.transfer.layout import Place, layer_groups
from prfaas_worker.transfer.mooncake import Mooncake
from prfaas_worker.transfer.offers import Offers, Prompt
from prfaas_worker.transfer.pull import Pull, Shared
from prfaas_worker.transfer.sender import Sender, listen
from prfaas_worker.transfer.stop import Stop, StoppedError

from .transfer_bench import FINGERPRINT, HIDDEN, LARGE, TRAFFIC, assert_same_bits, compute, eventually


class Engine:
    """Reads any address of this process. `fail` and `damage` say how many of the next reads go wrong."""

    def __init__(self) -> None:
        self.reads = 0
        self.fail = 0
        self.damage = 0

    def get_rpc_port(self) -> int:
        return 1

    def register_memory(self, _address: int, _nbytes: int) -> int:
        return 0

    def transfer_sync_read(self, segment: str, local: int, remote: int, nbytes: int) -> int:
        assert segment == "127.0.0.1:1"
        self.reads += 1
        if self.fail:
            self.fail -= 1
            return -1
        ctypes.memmove(local, remote, nbytes)
        if self.damage:
            self.damage -= 1
            ctypes.memset(local + nbytes // 2, 0x5A, 8)
        return 0


class Fabric:
    """A giver and a taker with a carrier each, over loopback."""

    def __init__(self) -> None:
        self.giver, self.taker = (Mooncake(Engine(), "127.0.0.1", "rack", 8 << 22) for _ in range(2))
        self.engine: Engine = self.taker._engine
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.offers = Offers((FINGERPRINT, layer_groups(LARGE.layers), len(HIDDEN)), self.port, 4)
        Sender(listener, self.offers, TRAFFIC._replace(carrier=self.giver))
        self.connections = Connections(Door())

    def take(self, carrier: Mooncake | None) -> tuple[Place, Place, TransferCounters]:
        """Move a cache; returns where it came from, where it went, and what the connections carried."""
        offer, grant = self.offers.grant(Prompt(1, "r", LARGE.tokens, 0))
        source, target, counters = LARGE.filled(), LARGE.reserved(), TransferCounters()
        compute(LARGE, offer, source)
        giver = Giver("127.0.0.1", self.port)
        silent_seconds = partial(self.connections.silent_seconds, giver)
        receipt = Receipt(offer.manifest, guard=threading.Lock())
        intake = Intake(receipt, target, counters.received, silent_seconds, TRAFFIC.memory, carrier)
        try:
            Pull(Shared(self.connections, counters, TRAFFIC), giver, grant.token, intake).run()
            receipt.require_whole()
        finally:
            self.offers.end(offer, "cancelled")
        return source, target, self.offers.counters

    def free_slots(self) -> int:
        return self.giver._leaving.qsize() + self.taker._coming.qsize()


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric()
    yield made
    giver = Giver("127.0.0.1", made.port)
    while stream := made.connections.take(giver):
        with closing(stream):
            made.connections.drop(giver, stream)


def test_large_payloads_go_by_the_carrier_and_arrive_bit_for_bit(fabric: Fabric):
    slots = fabric.free_slots()
    source, target, counters = fabric.take(fabric.taker)
    assert_same_bits(LARGE, target, source)
    assert fabric.engine.reads > 0
    assert counters.snapshot()[1] < LARGE.nbytes / 100, "headers and small frames alone went over the connection"
    eventually(lambda: fabric.free_slots() == slots)


def test_without_a_fabric_the_same_giver_sends_everything_itself(fabric: Fabric):
    source, target, counters = fabric.take(None)
    assert_same_bits(LARGE, target, source)
    assert fabric.engine.reads == 0
    assert counters.snapshot()[1] > LARGE.nbytes


def test_bytes_that_the_carrier_changed_are_read_again_and_never_used(fabric: Fabric):
    fabric.engine.damage = 3
    source, target, _ = fabric.take(fabric.taker)
    assert fabric.engine.damage == 0
    assert_same_bits(LARGE, target, source)


def test_a_slot_whose_read_failed_is_set_aside_since_bytes_may_still_land_in_it(fabric: Fabric, monkeypatch):
    slots, fabric.engine.fail = fabric.free_slots(), 2
    source, target, _ = fabric.take(fabric.taker)
    assert_same_bits(LARGE, target, source)
    eventually(lambda: fabric.free_slots() == slots - 2)
    monkeypatch.setattr(mooncake.time, "monotonic", lambda: 1e12)
    fabric.taker._release_set_aside()
    assert fabric.free_slots() == slots


def test_a_carrier_that_always_fails_ends_the_transfer_and_holds_nothing(fabric: Fabric, monkeypatch):
    monkeypatch.setattr(mooncake, "COMING_SECONDS", 0.2)
    fabric.engine.fail = 10_000
    with pytest.raises(PeerError, match=r"no slot of Mooncake's memory came free"):
        fabric.take(fabric.taker)
    eventually(lambda: fabric.giver._leaving.qsize() == 4)


@pytest.mark.parametrize(
    ("ours", "theirs", "clusters", "why"),
    [
        ("rack", "other", ("hub", "hub"), "fabrics 'other' and 'rack'"),
        ("", "rack", ("", ""), "fabrics 'rack' and ''"),
        ("rack", "rack", ("hub", "eu"), "clusters 'eu' and 'hub'"),
    ],
)
def test_beyond_one_fabric_and_cluster_it_is_refused_with_the_reason(ours, theirs, clusters, why):
    assert why in refusal(ours, theirs, *clusters)
    assert "--mooncake-fabric" in refusal(ours, theirs, *clusters)
    assert refusal(ours, "", *clusters) == "", "TCP is never refused"
    assert refusal("rack", "rack", "hub", "hub") == ""


def test_a_taker_of_another_fabric_hears_why(fabric: Fabric):
    stranger = Mooncake(Engine(), "127.0.0.1", "elsewhere", 8 << 22)
    with pytest.raises(PeerError, match="refused between fabrics 'elsewhere' and 'rack'"):
        fabric.take(stranger)


def test_waiting_for_a_slot_ends_with_the_transfer(fabric: Fabric):
    stop = Stop()
    taken = [fabric.giver.lend([b"x"], stop, 1.0) for _ in range(4)]
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(StoppedError):
        fabric.giver.lend([b"x"], stop, 10.0)
    for slot in taken:
        fabric.giver.take_back(slot)


def test_without_the_package_the_option_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match="install mooncake-transfer-engine"):
        mooncake.start("127.0.0.1", "rack", 64 << 20)
