"""The sending half against the receiving half, over connections that break at any moment: every frame is placed once.

A schedule is drawn: connections open, their HELLOs arrive in any order, frames leave, wait in buffers, arrive, get
damaged or cut, and either end notices a break before the other. However it goes, the destination never sees a frame for
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
from prfaas.wire.send_queue import MAX_CONNECTIONS, NextStep, NumberedItem, SendQueue
from prfaas.wire.transfer import Ranges, message_frame

from .wire_bench import MANIFEST, Receiver, header_of, sent


@dataclass
class Connection:
    """What each end believes of a connection, and what is between them."""

    hello: tuple[tuple[int, ...], Ranges] | None
    known_broken: tuple[int, ...]
    source_serves: bool = False
    destination_reads: bool = True
    on_its_way: deque[bytes] = field(default_factory=deque)
    cut: bool = False
    """Nothing new gets through; what is on its way may still arrive."""


class Link:
    """A source, a destination, and what happens between them, one event a call, as `rng` says."""

    def __init__(self, queue: SendQueue[bytes], rng: random.Random):
        self.queue = queue
        self.rng = rng
        self.destination = Receiver()
        self.transfer = sent(rng.randrange(1000), rng.sample(range(3, 11), rng.randrange(5)))
        self.to_add = self.transfer.frames[:-2]
        self.connections: list[Connection] = []
        self.dones = 0

    @property
    def broken(self) -> tuple[int, ...]:
        """Connections that the destination no longer reads."""
        return tuple(number for number, one in enumerate(self.connections) if not one.destination_reads)

    def open(self) -> None:
        """The destination opens a connection; its HELLO is on the way."""
        if len(self.connections) < MAX_CONNECTIONS:
            self.connections.append(Connection((self.broken, self.destination.ledger.received), self.broken))

    def greet(self) -> None:
        """Some HELLO arrives, not always the oldest."""
        for number in self._any_of(lambda one: one.hello is not None and not one.cut):
            one = self.connections[number]
            broken, received = one.hello or ((), ())
            one.hello = None
            try:
                self.queue.connect(number, broken, received)
            except ProtocolError:
                assert number in self.broken, "only a connection that was dropped meanwhile may be refused"
            else:
                one.source_serves = True

    def add(self) -> None:
        if self.to_add:
            frame = self.to_add.pop(0)
            self.queue.add(frame, len(frame))
            if not self.to_add:
                self.queue.finish()

    def send(self) -> None:
        for number in self._any_of(lambda one: one.source_serves):
            one = self.connections[number]
            try:
                found = self.queue.take(number)
            except UnreachableError:
                assert number in self.broken
                self.source_breaks(number)
                return
            if isinstance(found, NumberedItem):
                header = header_of(found.item)
                self.queue.sealed(found.sequence, header.digest, header.payload_bytes)
                self._dispatch(one, found.item)
            elif found is NextStep.DONE:
                self.dones += 1
                self._dispatch(one, message_frame(Kind.DONE, MANIFEST.address, self.queue.done(2.0, 0.5)))

    def arrive(self) -> None:
        for number in self._any_of(lambda one: one.destination_reads and bool(one.on_its_way)):
            self._read(number, self.connections[number].on_its_way.popleft())

    def damage(self) -> None:
        """The next frame of a connection arrives with a flipped bit, or only in part."""
        for number in self._any_of(lambda one: one.destination_reads and bool(one.on_its_way)):
            frame = bytearray(self.connections[number].on_its_way.popleft())
            at = self.rng.randrange(len(frame))
            if self.rng.random() < 0.5:
                frame[at] ^= 1 << self.rng.randrange(8)
            else:
                del frame[at:]
            self._read(number, bytes(frame))

    def source_breaks(self, number: int | None = None) -> None:
        """The source notices a break; what left before is still on its way."""
        for at in self._any_of(lambda one: one.source_serves) if number is None else [number]:
            self.queue.lost(at)
            self.connections[at].source_serves = False
            self.connections[at].cut = True

    def destination_breaks(self, number: int | None = None) -> None:
        """The destination notices a break, and reads no more from there."""
        for at in self._any_of(lambda one: one.destination_reads) if number is None else [number]:
            self.destination.ledger.lost(at)
            self.connections[at].destination_reads = False

    def run(self, faults: int) -> None:
        """Let anything happen, `faults` breaks among it; then let everything come through."""
        faulty = [self.damage, self.source_breaks, self.destination_breaks]
        sound = [self.open, self.greet, self.add, self.add, self.send, self.send, self.arrive, self.arrive]
        while faults:
            event = self.rng.choice([*faulty, *sound, *sound])
            event()
            faults -= event in faulty
        while self.to_add:
            self.add()
        for _ in range(1000):
            if self.destination.ledger.whole:
                break
            if self._owes_a_connection:
                self.open()
            self.greet()
            self.send()
            self.arrive()
            self._ends_reach_the_destination()
        self.destination.ledger.require_whole()
        assert self.destination.memory == self.transfer.memory

    @property
    def _owes_a_connection(self) -> bool:
        """Whether no HELLO that can still arrive tells of the latest break."""
        known_broken = [one.known_broken for one in self.connections if one.destination_reads and not one.cut]
        return not known_broken or not set(self.broken) <= set().union(*known_broken)

    def _ends_reach_the_destination(self) -> None:
        for number, one in enumerate(self.connections):
            if one.cut and one.destination_reads and not one.on_its_way:
                self.destination_breaks(number)

    def _dispatch(self, one: Connection, frame: bytes) -> None:
        if not one.cut:
            one.on_its_way.append(frame)

    def _read(self, number: int, frame: bytes) -> None:
        if not self.destination.take_or_break(frame, number):
            self.connections[number].destination_reads = False

    def _any_of(self, wanted: Callable[[Connection], bool]) -> list[int]:
        found = [number for number, one in enumerate(self.connections) if wanted(one)]
        return [self.rng.choice(found)] if found else []


seeds = st.integers(0, 2**64)


@settings(max_examples=400)
@given(seeds, st.integers(0, 20))
def test_places_every_frame_exactly_once_although_connections_break_at_any_moment(seed: int, faults: int):
    Link(SendQueue(), random.Random(seed)).run(faults)


class Forgetful(SendQueue[bytes]):
    """Sends everything again that a broken connection carried, whether it arrived or not."""

    def connect(self, connection: int, broken: Collection[int], received: Ranges) -> None:
        super().connect(connection, broken, received and ())


class Trusting(SendQueue[bytes]):
    """Believes that what it sent has arrived."""

    def connect(self, connection: int, broken: Collection[int], received: Ranges) -> None:
        super().connect(connection, broken and (), received)


@pytest.mark.parametrize("wrong", [Forgetful, Trusting])
def test_the_schedules_find_a_source_that_repeats_or_loses_frames(wrong: type[SendQueue[bytes]]):
    def fails(seed: int) -> bool:
        try:
            Link(wrong(), random.Random(seed)).run(8)
        except (ProtocolError, AssertionError):
            return True
        return False

    assert sum(map(fails, range(40))) > 10


def shipped(count: int, connections: int) -> SendQueue[int]:
    """A queue whose items left over connections 0, 1, .. in turn."""
    queue: SendQueue[int] = SendQueue()
    for number in range(connections):
        queue.connect(number, (), ())
    for item in range(count):
        queue.add(item, 10)
    for item in range(count):
        assert queue.take(item % connections) == NumberedItem(item, item)
        queue.sealed(item, item, 10)
    return queue


def drained(queue: SendQueue[int], connection: int) -> list[int]:
    found = []
    while isinstance(parcel := queue.take(connection), NumberedItem):
        found.append(parcel.sequence)
    return found


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_hellos_of_connections_that_opened_together_may_arrive_in_any_order(order: tuple[int, ...]):
    queue = shipped(9, 3)  # connection n carried n, n + 3, n + 6
    # Each was written a moment later than the one before: it knows of more breaks, and of more that arrived.
    hellos = [(3, (0,), ((0, 2),)), (4, (0, 1), ((0, 2), (4, 5))), (5, (0, 1, 2), ((0, 3), (4, 5)))]
    for at in order:
        queue.connect(*hellos[at])
    assert sorted(drained(queue, 5)) == [3, 5, 6, 7, 8]
    assert queue.queued_bytes == 0


def test_what_was_lost_leaves_before_what_is_new_and_in_order():
    queue = shipped(6, 2)
    queue.add(6, 10)
    queue.connect(2, (1, 0), ((0, 1), (3, 4)))
    assert queue.queued_bytes == 50
    assert drained(queue, 2) == [1, 2, 4, 5, 6]


def test_done_leaves_once_and_again_only_when_the_connection_that_had_it_broke():
    queue = shipped(2, 2)
    assert queue.take(0) is NextStep.WAIT  # more may be added
    queue.finish()
    assert [queue.take(0), queue.take(0), queue.take(1)] == [NextStep.DONE, NextStep.WAIT, NextStep.WAIT]
    queue.connect(2, (0,), ((0, 2),))
    assert [queue.take(1), queue.take(2)] == [NextStep.DONE, NextStep.WAIT]
    assert queue.done(1.0, 0.5).frames == 2


def test_done_waits_for_what_a_broken_connection_may_have_lost():
    queue = shipped(2, 2)
    queue.finish()
    queue.lost(0)
    assert queue.take(1) is NextStep.WAIT
    queue.connect(2, (0,), ((1, 2),))
    assert queue.take(1) == NumberedItem(0, 0)
    assert queue.take(2) is NextStep.DONE


def test_a_connection_that_the_destination_dropped_carries_nothing():
    queue = shipped(2, 2)
    queue.add(2, 10)
    queue.connect(2, (0,), ((0, 2),))
    with pytest.raises(UnreachableError):
        queue.take(0)


@pytest.mark.parametrize(
    ("connection", "broken", "received"),
    [
        (0, (), ()),  # a HELLO that comes again, or was copied
        (9, (), ((0, 1),)),  # a later HELLO that came first dropped it
        (-1, (), ()),
        (MAX_CONNECTIONS, (), ()),
        (2, (), ((0, 3),)),
        (2, (0, 1), ((5, 6),)),
    ],
)
def test_a_hello_that_cannot_be_true_is_refused_and_changes_nothing(
    connection: int, broken: tuple[int, ...], received: Ranges
):
    queue = shipped(2, 2)
    queue.connect(8, (9,), ((0, 2),))
    with pytest.raises(ProtocolError):
        queue.connect(connection, broken, received)
    queue.finish()
    assert [queue.take(0), queue.take(1)] == [NextStep.DONE, NextStep.WAIT], (
        "both still serve, and nothing leaves again"
    )


def test_a_frame_that_changed_between_two_sendings_is_our_own_error():
    queue = shipped(2, 1)
    queue.connect(1, (0,), ())
    queue.take(1)
    with pytest.raises(InternalError, match="changed between two sendings"):
        queue.sealed(0, 99, 10)


def test_nothing_is_added_after_the_end():
    queue = shipped(2, 1)
    queue.finish()
    with pytest.raises(InternalError):
        queue.add(3, 10)
