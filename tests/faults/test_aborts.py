"""Thousands of transfers that end at a random point, for any reason, on either side: nothing is stranded.

Source and destination hold real leases of pages and slots, which go back as an engine gives them back: the source's
when the offer says that it ended, the destination's when the fetch has. Both memories are so small that they are reused
at once: bytes that arrive late would be found in one of the transfers in between that end well.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from prfaas.errors import PrfaasError
from prfaas.wire.prefill import LegParams
from prfaas.wire.receive_ledger import ReceiveLedger
from prfaas_transfer.leases import Offer
from prfaas_transfer.net import DataStream
from prfaas_transfer.pull import Connections, FetchContext, Pull, SourceAddress
from prfaas_transfer.receive import ReceiveState
from prfaas_transfer.send import Frame
from prfaas_transfer.tls import PeerAuth
from prfaas_transfer.transfer_log import TransferCounters
from prfaas_worker.cache.blocks import Lease
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.transfer_frames import CachePlace, block_frames, state_frames
from prfaas_worker.cache_spec import CacheGeometry

from ..unit.worker.transfer_bench import (
    ATTENTION,
    LINEAR,
    TRAFFIC,
    Model,
    Port,
    assert_same_bits,
    descriptors,
    fill,
    transfer_threads,
)
from ..waiting import PATIENCE_SECONDS, assert_freed, eventually

ABORTS = 2_000
AT_ONCE = 4
MODEL = Model((LINEAR, ATTENTION), 130)


class Side:
    """One side's cache, and its leases."""

    def __init__(self) -> None:
        geometry = CacheGeometry(MODEL.layers)
        self.memory = CacheMemory(
            geometry, num_pages=MODEL.pages * AT_ONCE, num_slots=AT_ONCE, max_context=MODEL.tokens
        )
        self.cache = HybridCache(self.memory)
        self.closed = 0
        self._changed = threading.Condition()

    def open(self) -> Lease:
        """Lease memory for a prompt; waits until there is some."""
        with self._changed:
            assert self._changed.wait_for(self._has_room, timeout=PATIENCE_SECONDS), "memory is stranded"
            opened = self.cache.open([], MODEL.tokens, 0)
            assert opened is not None
            return opened.lease

    def close(self, lease: Lease) -> None:
        with self._changed:
            self.cache.close(lease)
            self.closed += 1
            if self.closed % 20 == 0:
                self.cache.check_integrity()
            self._changed.notify_all()

    def place(self, lease: Lease) -> CachePlace:
        return CachePlace(self.memory, lease.slot, lease.pages)

    def assert_nothing_is_held(self) -> None:
        self.cache.check_integrity()
        assert self.cache.free_slots == self.memory.num_slots
        assert self.cache.free_pages == self.memory.num_pages

    def _has_room(self) -> bool:
        return self.cache.free_slots > 0 and self.cache.free_pages >= MODEL.pages


class OpeningConnections(Connections):
    """Says when a connection stands."""

    on_open: Callable[[], None] = staticmethod(lambda: None)

    def take(self, source: SourceAddress) -> DataStream | None:
        stream = super().take(source)
        if stream is not None:
            self.on_open()
        return stream

    def open(self, source: SourceAddress) -> DataStream:
        stream = super().open(source)
        self.on_open()
        return stream


class Aborts:
    """Source and destination in one process, and what became of their transfers."""

    def __init__(self, port: Port):
        self.port = port
        self.source, self.destination = Side(), Side()
        self.found: Counter[str] = Counter()
        self.ends: Counter[int] = Counter()
        self.begun = 0
        self._kept: list[Connections] = []
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        port.on_end = self._ended

    def run(self, rng: random.Random, count: int) -> None:
        connections = OpeningConnections(PeerAuth())
        self._kept.append(connections)
        for _ in range(count):
            self.once(rng, connections)

    def close_kept(self) -> None:
        """Close what is kept for further transfers. The thread of one that is whole may keep its connection later."""
        source = SourceAddress(*self.port.address)
        for connections in self._kept:
            while stream := connections.take(source):
                connections.drop(source, stream)

    def once(self, rng: random.Random, connections: OpeningConnections) -> None:
        """One transfer, aborted at some point, or in one of ten times not."""
        ours = self.source.open()
        with self._lock:
            handle, self.begun = self.begun, self.begun + 1
            self._leases[handle] = ours
        offer, leg = self.port.announce(handle)
        seed = rng.randrange(1 << 30)
        fill(self.source.place(ours), seed)
        frames = frames_of(offer, self.source.place(ours))
        theirs = self.destination.open()
        pull = self._pull(offer, leg, theirs, connections)
        reason = self._arm(rng, pull, offer, frames, connections)
        try:
            pull.run()
        except PrfaasError:
            assert reason != "no"
        else:
            wanted = MODEL.reserved()  # the source's pages may be others' by now
            fill(wanted, seed)
            assert_same_bits(MODEL, self.destination.place(theirs), wanted)
            reason = f"{reason}, too late" if reason != "no" else "no"
        connections.on_open = lambda: None
        self.destination.close(theirs)
        with self._lock:
            self.found[reason] += 1
        self.port.cancel(offer)  # as a destination declines when its fetch failed

    def _arm(
        self, rng: random.Random, pull: Pull, offer: Offer, frames: list[Frame], connections: OpeningConnections
    ) -> str:
        """Put frames in, and have one thing go wrong at one point. Returns what."""
        reasons: dict[str, Callable[[], object]] = {
            "no": lambda: None,
            "the destination cancels": pull.cancel,
            "the source cancels": partial(self.port.cancel, offer),
            "the engine fails": partial(offer.fail, "out of room"),
            "connections break and the destination leaves": partial(self._leave, pull),
        }
        reason = rng.choice([*reasons] * 2 + [*reasons][1:] * 3)
        act = reasons[reason]
        at = rng.randrange(-2, len(frames)) if reason != "no" else -3
        left = [at]

        def received(_count_bytes: int) -> None:
            left[0] -= 1
            if left[0] == 0:
                act()

        pull._state.received = received
        if at == -1:
            connections.on_open = act  # type: ignore[assignment]
        if at == 0:
            act()
        put = len(frames) if rng.random() < 0.5 or at < 0 else max(at, rng.randrange(len(frames) + 1))
        for frame in frames[:put]:
            offer.put(frame)
        if put == len(frames):
            offer.finish_computing(0.0)
        if at == -2:
            act()
        return reason

    @staticmethod
    def _leave(pull: Pull) -> None:
        for stream in list(pull._streams.values()):
            stream.shutdown()
        pull.cancel()

    def _pull(self, offer: Offer, leg: LegParams, lease: Lease, connections: Connections) -> Pull:
        source = SourceAddress(*self.port.address)
        silent_seconds = partial(connections.silent_seconds, source)
        state = ReceiveState(
            ReceiveLedger(offer.manifest),
            self.destination.place(lease),
            lambda _count: None,
            silent_seconds,
            TRAFFIC.memory,
        )
        return Pull(FetchContext(self.port.layout, connections, TransferCounters(), TRAFFIC), source, leg.token, state)

    def _ended(self, handle: int) -> None:
        with self._lock:
            self.ends[handle] += 1
            lease = self._leases.pop(handle)
        self.source.close(lease)


def frames_of(offer: Offer, place: CachePlace) -> list[Frame]:
    spans = [(start, min(start + 50, MODEL.tokens)) for start in range(0, MODEL.tokens, 50)]
    rows = [frame for span in spans for frame in block_frames(offer.manifest, place, 1, span)]
    return [*rows, *state_frames(offer.manifest, place, 0)]


def test_aborts_at_random_points_strand_no_page_no_slot_no_thread_and_no_descriptor():
    port = Port(MODEL, capacity=AT_ONCE + 1)
    before = descriptors()
    aborts = Aborts(port)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            aborts.run(random.Random(seed), ABORTS // AT_ONCE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    print(*(f"{count:6,d} {what}" for what, count in aborts.found.most_common()), sep="\n")
    eventually(lambda: len(aborts.ends) == ABORTS, "every offer ended")
    assert set(aborts.ends.values()) == {1}, "every offer ended once"
    aborts.source.assert_nothing_is_held()
    aborts.destination.assert_nothing_is_held()
    assert_freed(lambda: "fetch-data" not in transfer_threads(), "the threads of all fetches ended")
    aborts.close_kept()
    assert_freed(lambda: not transfer_threads(), "the threads of all transfers ended")
    assert_freed(lambda: descriptors() <= before, "what was opened is closed")
    assert sum(port.outcomes().values()) == ABORTS
    assert len(aborts.found) >= 8, "every reason hit in time, and too late"
