"""The sending half against the receiving half, over connections that break at any moment: every frame is placed once.

A schedule is drawn: connections open, their HELLOs arrive in any order, frames leave, wait in buffers, arrive, get
damaged or cut, and either end notices a break before the other. However it goes, the receiver never sees a frame for
the second time, and once connections hold for long enough everything is there, DONE last.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import InternalError, ProtocolError, UnreachableError
from prfaas.wire.frames import Kind
from prfaas.wire.shipment import MAX_CONNECTIONS, Next, Parcel, Shipment
from prfaas.wire.transfer import Ranges, message_frame

from .wire_bench import MANIFEST, Receiver, header_of, sent


@dataclass
class Connection:
    """What each end believes of a connection, and what is between them."""

    hello: tuple[tuple[int, ...], Ranges] | None
    told: tuple[int, ...]
    giver_serves: bool = False
    taker_reads: bool = True
    on_its_way: deque[bytes] = field(default_factory=deque)
    cut: bool = False
    """Nothing new gets through; what is on its way may still arrive."""


class Link:
    """A giver, a taker, and what happens between them, one event a call, as `rng` says."""

    def __init__(self, shipment: Shipment[bytes], rng: random.Random):
        self.shipment = shipment
        self.rng = rng
        self.receiver = Receiver()
        self.transfer = sent(rng.randrange(1000), rng.sample(range(3, 11), rng.randrange(5)))
        self.to_add = self.transfer.frames[:-2]
        self.connections: list[Connection] = []
        self.dones = 0

    @property
    def broken(self) -> tuple[int, ...]:
        """Connections that the taker does not read from any more."""
        return tuple(number for number, one in enumerate(self.connections) if not one.taker_reads)

    def open(self) -> None:
        """The taker opens a connection; its HELLO is on the way."""
        if len(self.connections) < MAX_CONNECTIONS:
            self.connections.append(Connection((self.broken, self.receiver.receipt.received), self.broken))

    def greet(self) -> None:
        """Some HELLO arrives, not always the oldest."""
        for number in self._any_of(lambda one: one.hello is not None and not one.cut):
            one = self.connections[number]
            broken, received = one.hello or ((), ())
            one.hello = None
            try:
                self.shipment.connect(number, broken, received)
            except ProtocolError:
                assert number in self.broken, "only a connection that was given up meanwhile may be refused"
            else:
                one.giver_serves = True

    def add(self) -> None:
        if self.to_add:
            frame = self.to_add.pop(0)
            self.shipment.add(frame, len(frame))
            if not self.to_add:
                self.shipment.finish()

    def send(self) -> None:
        for number in self._any_of(lambda one: one.giver_serves):
            one = self.connections[number]
            try:
                found = self.shipment.take(number)
            except UnreachableError:
                assert number in self.broken
                self.giver_breaks(number)
                return
            if isinstance(found, Parcel):
                header = header_of(found.item)
                self.shipment.sealed(found.sequence, header.digest, header.payload_bytes)
                self._dispatch(one, found.item)
            elif found is Next.DONE:
                self.dones += 1
                self._dispatch(one, message_frame(Kind.DONE, MANIFEST.address, self.shipment.done(2.0, 0.5)))

    def arrive(self) -> None:
        for number in self._any_of(lambda one: one.taker_reads and bool(one.on_its_way)):
            self._read(number, self.connections[number].on_its_way.popleft())

    def damage(self) -> None:
        """The next frame of a connection arrives with a flipped bit, or only in part."""
        for number in self._any_of(lambda one: one.taker_reads and bool(one.on_its_way)):
            frame = bytearray(self.connections[number].on_its_way.popleft())
            at = self.rng.randrange(len(frame))
            if self.rng.random() < 0.5:
                frame[at] ^= 1 << self.rng.randrange(8)
            else:
                del frame[at:]
            self._read(number, bytes(frame))

    def giver_breaks(self, number: int | None = None) -> None:
        """The giver notices a break; what left before is still on its way."""
        for at in self._any_of(lambda one: one.giver_serves) if number is None else [number]:
            self.shipment.lost(at)
            self.connections[at].giver_serves = False
            self.connections[at].cut = True

    def taker_breaks(self, number: int | None = None) -> None:
        """The taker notices a break, and hears no more from there."""
        for at in self._any_of(lambda one: one.taker_reads) if number is None else [number]:
            self.receiver.receipt.lost(at)
            self.connections[at].taker_reads = False

    def run(self, faults: int) -> None:
        """Let anything happen, `faults` breaks among it; then let everything come through."""
        faulty = [self.damage, self.giver_breaks, self.taker_breaks]
        sound = [self.open, self.greet, self.add, self.add, self.send, self.send, self.arrive, self.arrive]
        while faults:
            event = self.rng.choice([*faulty, *sound, *sound])
            event()
            faults -= event in faulty
        while self.to_add:
            self.add()
        for _ in range(1000):
            if self.receiver.receipt.whole:
                break
            if self._owes_a_connection:
                self.open()
            self.greet()
            self.send()
            self.arrive()
            self._ends_reach_the_taker()
        self.receiver.receipt.require_whole()
        assert self.receiver.memory == self.transfer.memory

    @property
    def _owes_a_connection(self) -> bool:
        """Whether no HELLO that can still arrive tells of the latest break."""
        told = [one.told for one in self.connections if one.taker_reads and not one.cut]
        return not told or not set(self.broken) <= set().union(*told)

    def _ends_reach_the_taker(self) -> None:
        for number, one in enumerate(self.connections):
            if one.cut and one.taker_reads and not one.on_its_way:
                self.taker_breaks(number)

    def _dispatch(self, one: Connection, frame: bytes) -> None:
        if not one.cut:
            one.on_its_way.append(frame)

    def _read(self, number: int, frame: bytes) -> None:
        if not self.receiver.take_or_break(frame, number):
            self.connections[number].taker_reads = False

    def _any_of(self, wanted: Callable[[Connection], bool]) -> list[int]:
        found = [number for number, one in enumerate(self.connections) if wanted(one)]
        return [self.rng.choice(found)] if found else []


seeds = st.integers(0, 2**64)


@settings(max_examples=400)
@given(seeds, st.integers(0, 20))
def test_over_connections_that_break_at_any_moment_every_frame_is_placed_exactly_once(seed: int, faults: int):
    Link(Shipment(), random.Random(seed)).run(faults)


class Forgetful(Shipment[bytes]):
    """Sends everything again that a broken connection carried, whether it arrived or not."""

    def connect(self, connection: int, broken: Collection[int], received: Ranges) -> None:
        super().connect(connection, broken, received and ())


class Trusting(Shipment[bytes]):
    """Believes that what it sent has arrived."""

    def connect(self, connection: int, broken: Collection[int], received: Ranges) -> None:
        super().connect(connection, broken and (), received)


@pytest.mark.parametrize("wrong", [Forgetful, Trusting])
def test_the_schedules_find_a_sender_that_repeats_or_loses_frames(wrong: type[Shipment[bytes]]):
    def fails(seed: int) -> bool:
        try:
            Link(wrong(), random.Random(seed)).run(8)
        except (ProtocolError, AssertionError):
            return True
        return False

    assert sum(map(fails, range(40))) > 10


def shipped(count: int, connections: int) -> Shipment[int]:
    """A shipment whose items left over connections 0, 1, .. in turn."""
    shipment: Shipment[int] = Shipment()
    for number in range(connections):
        shipment.connect(number, (), ())
    for item in range(count):
        shipment.add(item, 10)
    for item in range(count):
        assert shipment.take(item % connections) == Parcel(item, item)
        shipment.sealed(item, item, 10)
    return shipment


def drained(shipment: Shipment[int], connection: int) -> list[int]:
    found = []
    while isinstance(parcel := shipment.take(connection), Parcel):
        found.append(parcel.sequence)
    return found


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_hellos_of_connections_that_opened_together_may_arrive_in_any_order(order: tuple[int, ...]):
    shipment = shipped(9, 3)  # connection n carried n, n + 3, n + 6
    # Each was written a moment later than the one before: it knows of more breaks, and of more that arrived.
    hellos = [(3, (0,), ((0, 2),)), (4, (0, 1), ((0, 2), (4, 5))), (5, (0, 1, 2), ((0, 3), (4, 5)))]
    for at in order:
        shipment.connect(*hellos[at])
    assert sorted(drained(shipment, 5)) == [3, 5, 6, 7, 8]
    assert shipment.queued_bytes == 0


def test_what_was_lost_leaves_before_what_is_new_and_in_order():
    shipment = shipped(6, 2)
    shipment.add(6, 10)
    shipment.connect(2, (1, 0), ((0, 1), (3, 4)))
    assert shipment.queued_bytes == 50
    assert drained(shipment, 2) == [1, 2, 4, 5, 6]


def test_done_leaves_once_and_again_only_when_the_connection_that_had_it_broke():
    shipment = shipped(2, 2)
    assert shipment.take(0) is Next.WAIT  # more may be added
    shipment.finish()
    assert [shipment.take(0), shipment.take(0), shipment.take(1)] == [Next.DONE, Next.WAIT, Next.WAIT]
    shipment.connect(2, (0,), ((0, 2),))
    assert [shipment.take(1), shipment.take(2)] == [Next.DONE, Next.WAIT]
    assert shipment.done(1.0, 0.5).frames == 2


def test_done_waits_for_what_a_broken_connection_may_have_lost():
    shipment = shipped(2, 2)
    shipment.finish()
    shipment.lost(0)
    assert shipment.take(1) is Next.WAIT
    shipment.connect(2, (0,), ((1, 2),))
    assert shipment.take(1) == Parcel(0, 0)
    assert shipment.take(2) is Next.DONE


def test_a_connection_that_the_receiver_gave_up_carries_nothing_any_more():
    shipment = shipped(2, 2)
    shipment.add(2, 10)
    shipment.connect(2, (0,), ((0, 2),))
    with pytest.raises(UnreachableError):
        shipment.take(0)


@pytest.mark.parametrize(
    ("connection", "broken", "received"),
    [
        (0, (), ()),  # a HELLO that comes again, or was copied
        (9, (), ((0, 1),)),  # it was given up by a later HELLO that came first
        (-1, (), ()),
        (MAX_CONNECTIONS, (), ()),
        (2, (), ((0, 3),)),
        (2, (0, 1), ((5, 6),)),
    ],
)
def test_a_hello_that_cannot_be_true_is_refused_and_changes_nothing(
    connection: int, broken: tuple[int, ...], received: Ranges
):
    shipment = shipped(2, 2)
    shipment.connect(8, (9,), ((0, 2),))
    with pytest.raises(ProtocolError):
        shipment.connect(connection, broken, received)
    shipment.finish()
    assert [shipment.take(0), shipment.take(1)] == [Next.DONE, Next.WAIT], "both still serve, and nothing leaves again"


def test_a_frame_that_changed_between_two_sendings_is_our_own_error():
    shipment = shipped(2, 1)
    shipment.connect(1, (0,), ())
    shipment.take(1)
    with pytest.raises(InternalError, match="changed between two sendings"):
        shipment.sealed(0, 99, 10)


def test_nothing_is_added_after_the_end():
    shipment = shipped(2, 1)
    shipment.finish()
    with pytest.raises(InternalError):
        shipment.add(3, 10)
