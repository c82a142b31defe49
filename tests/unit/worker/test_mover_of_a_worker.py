"""The worker's mover: caches cross between two engines' memories bit by bit, mapped or through slots, and a mover that
dies costs its transfers and nothing else.
"""

import os
import queue
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from prfaas.errors import CapacityError, PeerError, PrfaasError, RequestError
from prfaas.ports import free_ports
from prfaas.schedule import slots_for
from prfaas.wire.engine import AskStats, EgressSet, Generate, GiveCache, Sampling, SetEgress, ToFront, TransferEnded
from prfaas.wire.prefill import LegParams, new_transfer
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.mover.messages import Fetched
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.staging import Staging
from prfaas_worker.cache.transfer_frames import CachePlace, block_frames, layer_groups, state_frames
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.engine.remote import EngineTransfers, MovedFetch, MovedOffer
from prfaas_worker.engine.sequences import Event, OfferEnded
from prfaas_worker.options import WAITING_PER_RUNNING, Options

from ...waiting import eventually, take_next
from ..transfer.patience import start_patient_movers
from .transfer_bench import ATTENTION, FINGERPRINT, LINEAR, Model, assert_same_bits

pytestmark = pytest.mark.system
MODEL = Model((LINEAR, ATTENTION, LINEAR, ATTENTION), 1000)
PROMPT = [1] * (MODEL.tokens + 1)  # the last token's cache does not cross
BUSY = 8


class Engine:
    """An engine without a loop: its memory, and its transfers."""

    def __init__(self, *, is_staged: bool):
        geometry = CacheGeometry(MODEL.layers)
        self.memory = CacheMemory(
            geometry, num_pages=MODEL.pages + 3, num_slots=2, max_context=MODEL.tokens, is_shared=not is_staged
        )
        self.memory.pages.zero_()
        staging = Staging(self.memory) if is_staged else None
        self.place = CachePlace(self.memory, 1, [n * 7 % (MODEL.pages + 3) for n in range(MODEL.pages)], staging)
        self.sent: list[ToFront] = []
        self.posted: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        (self.port,) = free_ports(1)
        options = Options(model_source="", model_name="tiny", data_port=self.port, max_running=1)
        layout = CacheLayout(FINGERPRINT, layer_groups(MODEL.layers))
        self.transfers = EngineTransfers(layout, self.memory, options, self.sent.extend, self.posted.put)
        self.transfers.start(self.answers.put)

    def close(self) -> None:
        self.transfers.mover.close()

    def fill(self) -> None:
        self.memory.pages.random_(0, 256, generator=torch.Generator().manual_seed(3))
        self.memory.slots.random_(0, 256, generator=torch.Generator().manual_seed(4))

    def compute(self, offer: MovedOffer) -> None:
        """Put in the whole cache, as an engine does that has just computed it in two chunks."""
        mark = self.place.staging.mark() if self.place.staging else None
        for span in ((0, 300), (300, MODEL.tokens)):
            for layer in range(len(MODEL.layers)):
                for frame in block_frames(offer.manifest, self.place, layer, span, mark):
                    offer.put(frame)
        for layer in range(len(MODEL.layers)):
            for frame in state_frames(offer.manifest, self.place, layer, mark):
                offer.put(frame)
        offer.finish_computing(0.5)

    def announce(
        self, handle: int = BUSY, leg: LegParams | None = None, caller: str = ""
    ) -> tuple[MovedOffer, LegParams]:
        """Offer a cache, and return what its destination knows of the transfer."""
        leg = leg or LegParams(role="source", **new_transfer())
        offer = self.transfers.announce(GiveCache(handle, "r", PROMPT, leg, caller=caller))
        return offer, msgspec.structs.replace(leg, role="destination", host="127.0.0.1", port=self.port)

    def prepare(self, leg: LegParams, handle: int = 7) -> MovedFetch:
        message = Generate(handle, "r", PROMPT, 1, 1, Sampling(0.0, 1.0, 0, 0), -1, leg=leg)
        return self.transfers.prepare_leg(message, leg, 0, self.place)

    def fetch(self, leg: LegParams, handle: int = 7) -> "queue.SimpleQueue[Fetched | PrfaasError]":
        return start(self.prepare(leg, handle))

    def ended(self) -> list[TransferEnded]:
        return [message for message in self.sent if isinstance(message, TransferEnded)]

    def kill_mover(self) -> None:
        process = self.transfers.mover._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)


def start(fetch: MovedFetch) -> "queue.SimpleQueue[Fetched | PrfaasError]":
    ended: queue.SimpleQueue[Fetched | PrfaasError] = queue.SimpleQueue()
    fetch.start(ended.put)
    return ended


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    start_patient_movers(monkeypatch)


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    staged = getattr(request, "param", (False, False))
    made = Engine(is_staged=staged[0]), Engine(is_staged=staged[1])
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize("engines", [(False, False), (True, True), (False, True), (True, False)], indirect=True)
def test_a_cache_crosses_bit_by_bit_mapped_or_through_slots(engines):
    source, destination = engines
    source.fill()
    destination.memory.pages.fill_(9)
    offer, leg = source.announce()
    source.compute(offer)
    result = take_next(destination.fetch(leg), "a fetch ends")
    assert isinstance(result, Fetched), result
    assert_same_bits(MODEL, destination.place, source.place)
    others = set(range(destination.memory.num_pages)) - set(destination.place.pages)
    assert all(bool((destination.memory.pages[page] == 9).all()) for page in others), "nothing else is written"
    assert not destination.memory.slots[0].any()
    assert (result.tokens, result.done.prefill_seconds, result.is_exact) == (MODEL.tokens, 0.5, True)
    assert result.received_bytes == MODEL.nbytes
    assert take_next(source.posted, "an offer ends") == OfferEnded(BUSY)
    (sent,), (received,) = source.ended(), destination.ended()
    assert (sent.outcome, sent.subject.handle, sent.payload_bytes) == ("delivered", BUSY, MODEL.nbytes)
    assert (received.outcome, received.subject.handle, received.transfer_id) == ("delivered", 7, sent.transfer_id)
    assert {"announced", "connected", "first_byte", "computed"} >= {name for name, _ in sent.marks}
    assert source.transfers.counters.snapshot()[0] == [("send", "delivered", 1)]
    for engine in (source, destination):
        left = (engine.transfers._sources, engine.transfers._fetches, engine.transfers._records)
        assert [len(one) for one in left] == [0, 0, 0]


def test_a_mover_that_dies_fails_what_is_open_and_another_one_serves(engines):
    source, destination = engines
    source.fill()
    offer, leg = source.announce()
    waiting = destination.fetch(leg)
    destination.transfers.ask(SetEgress(1, 70))
    assert take_next(destination.answers, "an answer") == EgressSet(1, 70)
    destination.kill_mover()
    lost = take_next(waiting, "a fetch ends")
    assert isinstance(lost, PeerError)
    assert str(lost) == f"the fetch from 127.0.0.1:{source.port} failed: the mover ended with status -9"
    (end,) = destination.ended()
    assert (end.outcome, end.direction, end.subject.handle) == ("failed", "receive", 7)
    destination.transfers.ask(AskStats(2))  # sent while there is no mover: the next one answers
    stats = take_next(destination.answers, "an answer")
    assert (stats.handle, stats.egress_mbps) == (2, 70), "the cap that was set stays"
    offer.cancel()  # nobody was left to decline it
    eventually(lambda: not source.transfers._sources, "the source has no open offer")
    offer, leg = source.announce()
    source.compute(offer)
    assert isinstance(take_next(destination.fetch(leg, handle=9), "a fetch ends"), Fetched)
    assert_same_bits(MODEL, destination.place, source.place)


def test_an_engine_offers_no_more_than_it_may_and_no_transfer_twice(engines):
    source, _ = engines
    capacity = slots_for(1) + WAITING_PER_RUNNING
    first, leg = source.announce(1)
    with pytest.raises(RequestError, match="is open here, for another request") as refused:
        source.announce(2, leg)
    assert (refused.value.status, refused.value.code) == (409, "transfer_open")
    for handle in range(2, 1 + capacity):
        source.announce(handle)
    with pytest.raises(CapacityError, match=f"{capacity} prefills are queued or undelivered already"):
        source.announce(99)
    first.cancel()
    assert take_next(source.posted, "an offer ends") == OfferEnded(1)
    assert source.ended()[0].reason == "its caller left before the prompt was computed"
    source.announce(99)


def test_a_fetch_that_is_cancelled_ends_at_once_and_the_source_learns_of_it(engines):
    source, destination = engines
    fetch = destination.prepare(source.announce()[1])
    ended = start(fetch)
    fetch.cancel()
    assert isinstance(take_next(ended, "a fetch ends"), PeerError)
    eventually(lambda: bool(destination.ended()), "the fetch ended")
    assert destination.ended()[0].outcome == "cancelled"
    assert take_next(source.posted, "an offer ends") == OfferEnded(BUSY)
