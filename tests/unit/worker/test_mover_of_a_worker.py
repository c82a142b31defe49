"""The worker's mover: caches cross between two engines' memories bit by bit, mapped or through slots, and a mover that
dies costs its transfers and nothing else.
"""

import asyncio
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from aiohttp import ClientResponse

from prfaas.errors import CapacityError, PeerError, PrfaasError
from prfaas.ports import free_ports
from prfaas.wire.engine import (
    AskPrefill,
    AskStats,
    EgressSet,
    PrefillAnswer,
    SetEgress,
    StartPrefill,
    ToFront,
    TransferEnded,
)
from prfaas.wire.frames import Kind
from prfaas.wire.prefill import PrefillGrant, PrefillRequest
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.fetch import Fetched
from prfaas_transfer.leases import Offers
from prfaas_transfer.limits import unlimited
from prfaas_worker.cache.memory import CacheGeometry, CacheMemory
from prfaas_worker.cache.transfer_frames import (
    CachePlace,
    Staging,
    block_frames,
    hidden_frame,
    layer_groups,
    state_frames,
)
from prfaas_worker.engine.remote import EngineTransfers, MovedOffer
from prfaas_worker.engine.sequences import Event, OfferEnded
from prfaas_worker.options import WAITING_PER_RUNNING, Options

from ...waiting import eventually, eventually_async, take_next
from ..transfer.patience import start_patient_movers
from .granted_offers import GrantedOffers
from .transfer_bench import ATTENTION, FINGERPRINT, HIDDEN, LINEAR, Model, assert_same_bits, hello, kinds

pytestmark = pytest.mark.system
MODEL = Model((LINEAR, ATTENTION, LINEAR, ATTENTION), 1000)
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
        (port,) = free_ports(1)
        options = Options(model_source="", model_name="tiny", data_port=port, max_running=1)
        layout = CacheLayout(FINGERPRINT, layer_groups(MODEL.layers), len(HIDDEN))
        self.transfers = EngineTransfers(layout, self.memory, options, self.sent.extend, self.posted.put)
        self.transfers.start(self.answers.put)
        self.apis: list[ThreadingHTTPServer] = []

    def close(self) -> None:
        self.transfers.mover.close()
        for server in self.apis:
            server.shutdown()
            server.server_close()

    def fill(self) -> None:
        self.memory.pages.random_(0, 256, generator=torch.Generator().manual_seed(3))
        self.memory.slots.random_(0, 256, generator=torch.Generator().manual_seed(4))

    def compute(self, offer: MovedOffer) -> None:
        """Put in the whole cache, as an engine does that has just computed it in two chunks."""
        offer.start_computing()
        mark = self.place.staging.mark() if self.place.staging else None
        for span in ((0, 300), (300, MODEL.tokens)):
            for layer in range(len(MODEL.layers)):
                for frame in block_frames(offer.manifest, self.place, layer, span, mark):
                    offer.put(frame)
        for layer in range(len(MODEL.layers)):
            for frame in state_frames(offer.manifest, self.place, layer, mark):
                offer.put(frame)
        offer.put(hidden_frame(offer.manifest, HIDDEN))
        offer.finish_computing(0.5)

    def fetch(self, url: str, handle: int = 7) -> "queue.SimpleQueue[Fetched | PrfaasError]":
        body = PrefillRequest(request_id="r", model="tiny", token_ids=[1] * MODEL.tokens)
        fetch = self.transfers.prepare_fetch(StartPrefill(handle, body), url, "", self.place)
        ended: queue.SimpleQueue[Fetched | PrfaasError] = queue.SimpleQueue()
        fetch.start(ended.put)
        return ended

    def ended(self) -> list[TransferEnded]:
        return [message for message in self.sent if isinstance(message, TransferEnded)]

    def kill_mover(self) -> None:
        process = self.transfers.mover._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)


class Api(NamedTuple):
    """The API port of a source: what it granted, and whether it computes at once."""

    server: ThreadingHTTPServer
    offers: list[tuple[MovedOffer, PrefillGrant]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


def api_of(engine: Engine, *, computes: bool) -> Api:
    offers: list[tuple[MovedOffer, PrefillGrant]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])), type=PrefillRequest)
            made = engine.transfers.grant(StartPrefill(BUSY + len(offers), body).subject, 0, len(body.token_ids))
            offers.append(made)
            if computes:
                engine.compute(made[0])
            answer = msgspec.json.encode(made[1])
            self.send_response(201)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def do_DELETE(self) -> None:
            engine.transfers.cancel(self.path.rpartition("/")[2])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine.apis.append(server)
    return Api(server, offers)


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
    result = take_next(destination.fetch(api_of(source, computes=True).url), "a fetch ends")
    assert isinstance(result, Fetched), result
    assert_same_bits(MODEL, destination.place, source.place)
    others = set(range(destination.memory.num_pages)) - set(destination.place.pages)
    assert all(bool((destination.memory.pages[page] == 9).all()) for page in others), "nothing else is written"
    assert not destination.memory.slots[0].any()
    assert torch.equal(torch.frombuffer(result.hidden, dtype=torch.float32), HIDDEN)
    assert (result.tokens, result.done.prefill_seconds, result.is_exact) == (MODEL.tokens, 0.5, True)
    assert result.received_bytes == MODEL.nbytes
    assert take_next(source.posted, "an offer ends") == OfferEnded(BUSY)
    (sent,), (received,) = source.ended(), destination.ended()
    assert (sent.outcome, sent.subject.handle, sent.payload_bytes) == ("delivered", BUSY, MODEL.nbytes)
    assert (received.outcome, received.subject.handle, received.transfer_id) == ("delivered", 7, sent.transfer_id)
    assert {"granted", "computing", "connected", "first_byte", "computed"} >= {name for name, _ in sent.marks}
    assert source.transfers.counters.snapshot()[0] == [("send", "delivered", 1)]
    for copies in (source.transfers._copies, destination.transfers._copies):
        assert copies is None or not (copies._frames or copies._places or copies._running)


def test_a_mover_that_dies_fails_what_is_open_and_another_one_serves(engines):
    source, destination = engines
    source.fill()
    api = api_of(source, computes=False)
    waiting = destination.fetch(api.url)
    eventually(lambda: bool(api.offers), "the source granted an offer")
    destination.transfers.ask(SetEgress(1, 70))
    assert take_next(destination.answers, "an answer") == EgressSet(1, 70)
    destination.kill_mover()
    lost = take_next(waiting, "a fetch ends")
    assert isinstance(lost, PeerError)
    assert str(lost) == f"prefill at {api.url} failed: the mover ended with status -9"
    (end,) = destination.ended()
    assert (end.outcome, end.direction, end.subject.handle) == ("failed", "receive", 7)
    destination.transfers.ask(AskStats(2))  # sent while there is no mover: the next one answers
    stats = take_next(destination.answers, "an answer")
    assert (stats.handle, stats.egress_mbps) == (2, 70), "the cap that was set stays"
    source.transfers.cancel(api.offers[0][1].transfer_id)  # nothing was left to delete it
    eventually(lambda: not source.transfers._handles, "the source has no open offer")
    again = take_next(destination.fetch(api_of(source, computes=True).url, handle=9), "a fetch ends")
    assert isinstance(again, Fetched)
    assert_same_bits(MODEL, destination.place, source.place)


def test_a_sources_mover_that_dies_gives_the_memory_back_and_its_engine_grants_again(engines):
    source, destination = engines
    source.fill()
    waiting = destination.fetch(api_of(source, computes=False).url)
    eventually(lambda: bool(source.transfers._handles), "the source has an open offer")
    source.kill_mover()
    assert take_next(source.posted, "an offer ends") == OfferEnded(BUSY)
    assert isinstance(take_next(waiting, "a fetch ends"), PeerError)
    (end,) = source.ended()
    assert (end.outcome, end.reason) == ("failed", "the mover ended")

    def granted() -> bool:
        body = PrefillRequest(request_id="r", model="tiny", token_ids=[1] * MODEL.tokens)
        try:
            offer, _ = source.transfers.grant(StartPrefill(3, body).subject, 0, MODEL.tokens)
        except CapacityError:
            return False
        source.transfers.cancel(offer.manifest.transfer_id)
        return True

    eventually(granted, "the source grants again")
    assert take_next(source.posted, "an offer ends") == OfferEnded(3)
    assert isinstance(take_next(destination.fetch(api_of(source, computes=True).url), "a fetch ends"), Fetched)


def test_an_engine_grants_no_more_than_it_may_and_says_how_a_grant_stands(engines):
    source, _ = engines
    body = PrefillRequest(request_id="r", model="tiny", token_ids=[1] * 10)
    capacity = 1 + WAITING_PER_RUNNING
    handles = range(1, 1 + capacity)
    grants = [source.transfers.grant(StartPrefill(handle, body).subject, 0, 10)[1] for handle in handles]
    with pytest.raises(CapacityError, match=f"{capacity} prefills are queued or undelivered already"):
        source.transfers.grant(StartPrefill(99, body).subject, 0, 10)
    assert [grant.epoch for grant in grants] == list(range(grants[0].epoch, grants[0].epoch + capacity))
    source.transfers.ask(AskPrefill(5, grants[0].transfer_id))
    answer = take_next(source.answers, "an answer")
    assert isinstance(answer, PrefillAnswer)
    assert answer.status is not None
    assert (answer.handle, answer.status.state, answer.status.prompt_tokens) == (5, "waiting", 10)
    source.transfers.cancel(grants[0].transfer_id)
    assert take_next(source.posted, "an offer ends") == OfferEnded(1)
    source.transfers.grant(StartPrefill(99, body).subject, 0, 10)


def test_a_fetch_that_is_cancelled_ends_at_once_and_the_source_learns_of_it(engines):
    source, destination = engines
    api = api_of(source, computes=False)
    body = PrefillRequest(request_id="r", model="tiny", token_ids=[1] * MODEL.tokens)
    fetch = destination.transfers.prepare_fetch(StartPrefill(7, body), api.url, "", destination.place)
    ended: queue.SimpleQueue[Fetched | PrfaasError] = queue.SimpleQueue()
    fetch.start(ended.put)
    eventually(lambda: bool(api.offers), "the source granted an offer")
    fetch.cancel()
    assert isinstance(take_next(ended, "a fetch ends"), PeerError)
    eventually(lambda: bool(destination.ended()), "the fetch ended")
    assert destination.ended()[0].outcome == "cancelled"
    assert take_next(source.posted, "an offer ends") == OfferEnded(BUSY)


@pytest.mark.parametrize("catches_up", [True, False])
def test_a_transfer_that_was_granted_a_moment_ago_is_not_refused(catches_up):
    layout = CacheLayout(FINGERPRINT, layer_groups(MODEL.layers), 0)
    offers, known = Offers(layout, 4), GrantedOffers(layout, 1, 4)
    body = PrefillRequest(request_id="r", model="tiny", token_ids=[1] * 10)
    subject = StartPrefill(1, body).subject
    _, grant = known.grant(subject, 0, 10)

    def hand_over() -> AbstractContextManager[Callable[[], bool]]:
        offers.open(subject, grant, 0)
        return nullcontext(lambda: True)

    listener = listen("127.0.0.1", 0)
    DataPort(listener, offers, unlimited(), **{"catch_up": hand_over} if catches_up else {})
    sock = socket.create_connection(listener.getsockname())
    sock.sendall(hello(grant))
    assert kinds(sock, 1) == [Kind.WELCOME if catches_up else Kind.ABORT]
    sock.close()


async def test_a_worker_whose_mover_is_killed_serves_on(client, launch):
    prefill, decode = launch("source", "--role", "prefill"), launch("destination", "--role", "decode")
    await asyncio.gather(prefill.ready(), decode.ready())
    wanted = (await (await client.complete(prefill, prompt="def main(" * 40)).json())["choices"]

    async def served() -> ClientResponse | None:
        answer = await client.complete(decode, prefill, prompt="def main(" * 40)
        assert answer.status in (200, 502, 503), await answer.text()
        return answer if answer.status == 200 else None

    for worker in (decode, prefill):
        os.kill(mover_pid(worker.engine_pid), signal.SIGKILL)
        answer = await eventually_async(served, "it is answered again", poll=0.2)
        assert (await answer.json())["choices"] == wanted
    assert await client.status(decode, "/readyz") == await client.status(prefill, "/readyz") == 200


def mover_pid(engine_pid: int) -> int:
    children = [
        int(pid)
        for task in Path(f"/proc/{engine_pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    (pid,) = children
    return pid
