"""Two engines and their movers: caches cross bit by bit, and every way of failing gives the memory back."""

import datetime
import gc
import mmap
import os
import queue
import re
import secrets
import signal
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prfaas import identity
from prfaas.errors import ConfigError, PeerError
from prfaas.ports import free_ports
from prfaas.wire.engine import Stats, TransferEnded, TransferSubject, read_body
from prfaas.wire.frames import HEADER_BYTES, Kind
from prfaas.wire.transfer import VERSION, Welcome, message_frame
from prfaas_scheduler.engines import LINK
from prfaas_transfer.leases import Offer
from prfaas_transfer.mover.__main__ import Mover
from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import (
    AnnounceCache,
    AskAnnounce,
    CacheSlice,
    ComputedParts,
    CopyDone,
    CopyPart,
    DeclineCache,
    EndedFetch,
    EndedOffer,
    FetchCache,
    MoverOptions,
    OfferCache,
    decode_from_mover,
)
from prfaas_transfer.mover.metrics import MAX_SCRAPES, REQUEST_SECONDS, MoverMetrics, cache_bytes, serve

from ...waiting import PATIENCE_SECONDS, assert_freed, eventually, take_next
from ..tls.mounts import Mount
from ..worker.transfer_proxy import Proxy, Seen
from .layout import GROUPS, PAGE_TOKENS, TOKENS
from .patience import start_patient_movers

MISMATCH = "prfaas_transfer_mismatch_timestamp_seconds"
pytestmark = pytest.mark.system
SPANS = ((0, 16), (16, 32), (32, 44))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    start_patient_movers(monkeypatch)


class Engine:
    """Memory by part, and a mover."""

    def __init__(self, **options: object):
        self.parts: dict[tuple[str, CopyPart], bytes] = {}
        self.landed: dict[tuple[str, CopyPart], bytes] = {}
        self.offers_over: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.fetches_over: queue.SimpleQueue[EndedFetch] = queue.SimpleQueue()
        self.options = MoverOptions(
            **{"host": "127.0.0.1", "data_port": 0, "fingerprint": "f", "groups": GROUPS, "slot_bytes": 4096} | options  # type: ignore[arg-type]
        )
        self.mover = MoverClient(self.options, self, self.offers_over.put, self.fetches_over.put)

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        group = GROUPS[part.group]
        if not part.tokens:
            room[:] = self.parts[key, part]
            return
        for token in range(part.start_token, part.start_token + part.tokens, PAGE_TOKENS):
            at = (token - part.start_token) // PAGE_TOKENS * group.nbytes
            room[at : at + group.nbytes] = self.parts[key, part._replace(start_token=token, tokens=PAGE_TOKENS)]

    def land(self, key: str, part: CopyPart, received: memoryview) -> None:
        if not part.tokens:
            self.landed[key, part] = bytes(received)
            return
        for at in range(part.tokens // PAGE_TOKENS):
            page = part._replace(start_token=part.start_token + at * PAGE_TOKENS, tokens=PAGE_TOKENS)
            self.landed[key, page] = bytes(received[at * 1000 : (at + 1) * 1000])

    def compute(self, transfer_id: str) -> None:
        for span in SPANS:
            for token in range(*span, PAGE_TOKENS):
                self.parts[transfer_id, CopyPart(1, 1, token, PAGE_TOKENS)] = secrets.token_bytes(1000)
            self.mover.put(transfer_id, [CopyPart(1, 1, span[0], span[1] - span[0])])
        for layer in (0, 2):
            self.parts[transfer_id, CopyPart(0, layer)] = secrets.token_bytes(GROUPS[0].nbytes)
        self.mover.put(transfer_id, [CopyPart(0, 0), CopyPart(0, 2)])
        self.mover.finish(transfer_id, 0.5)

    def fetch(self, source: "Engine", announced: AnnounceCache, start_token: int = 0, **other: object) -> None:
        fields = {
            "request_id": announced.request_id,
            "transfer_id": announced.transfer_id,
            "epoch": announced.epoch,
            "token": announced.token,
            "host": "127.0.0.1",
            "port": source.mover.data_port,
            "cluster": "",
            "start_token": start_token,
            "end_token": announced.end_token,
        }
        self.mover.fetch(FetchCache(**(fields | other)))  # type: ignore[arg-type]


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    source, destination = Engine(), Engine()
    yield source, destination
    source.mover.close()
    destination.mover.close()


def announced() -> AnnounceCache:
    return AnnounceCache(secrets.token_hex(16), secrets.randbits(48), secrets.token_urlsafe(8), "request", TOKENS)


@pytest.mark.parametrize("sides", [(1, 2), (2, 1), (2, 2)], ids=["one to two", "two to one", "two to two"])
def test_slices_of_one_transfer_cross_apart_between_whatever_movers_hold_them(sides):
    sources, destinations = ([Engine() for _ in range(count)] for count in sides)
    whole = announced()
    for rank in range(2):
        source, destination = sources[rank % len(sources)], destinations[rank % len(destinations)]
        message = msgspec.structs.replace(whole, slice=CacheSlice(rank, 2, GROUPS))
        source.mover.announce(message)
        source.compute(message.key)
        destination.fetch(source, message, slice=message.slice)
    ended = {over(destination) for destination in destinations * (2 // len(destinations))}
    assert {(one.key, one.reason) for one in ended} == {("request/0", ""), ("request/1", "")}
    sent = {(key[-2:], part): found for source in sources for (key, part), found in source.parts.items()}
    landed = {(key[-2:], part): found for one in destinations for (key, part), found in one.landed.items()}
    assert landed == sent
    for one in (*sources, *destinations):
        one.mover.close()


def test_a_slice_that_is_declined_ends_alone(pair):
    source, destination = pair
    first, second = (msgspec.structs.replace(announced(), slice=CacheSlice(rank, 2, GROUPS)) for rank in range(2))
    second = msgspec.structs.replace(second, transfer_id=first.transfer_id, epoch=first.epoch, token=first.token)
    for message in (first, second):
        source.mover.announce(message)
        source.compute(message.key)
    common = ("request", first.transfer_id, first.epoch, first.token, "127.0.0.1", source.mover.data_port, "")
    destination.mover.decline(DeclineCache(*common, rank=1))
    assert over_at(source) == second.key
    destination.fetch(source, first, slice=first.slice)
    assert over(destination).reason == ""
    assert over_at(source) == first.key


def test_a_slice_of_another_size_is_refused_with_both_values(pair):
    source, destination = pair
    message = msgspec.structs.replace(announced(), slice=CacheSlice(1, 2, GROUPS))
    source.mover.announce(message)
    destination.fetch(source, message, slice=CacheSlice(1, 4, GROUPS))
    assert "manifest field ranks is 2, this instance needs 4" in over(destination).reason
    assert destination.landed == {}


def over(engine: Engine) -> EndedFetch:
    return take_next(engine.fetches_over, "a fetch ends")


def over_at(source: Engine) -> str:
    return take_next(source.offers_over, "an offer ends")


@pytest.mark.parametrize("start_token", [0, 8, 32])
@pytest.mark.parametrize("first", ["source", "destination"])
def test_a_cache_of_pages_crosses_bit_by_bit_from_where_the_destination_wants_it(pair, start_token, first):
    source, destination = pair
    message = announced()
    if first == "destination":
        destination.fetch(source, message, start_token)
        time.sleep(0.3)  # it waits at the source by then, as a rule
    source.mover.announce(message)
    source.compute(message.transfer_id)
    if first == "source":
        destination.fetch(source, message, start_token)
    ended = over(destination)
    assert ended.reason == ""
    assert over_at(source) == message.transfer_id
    wanted = {
        ("request", part): found
        for (_, part), found in source.parts.items()
        if not part.tokens or part.start_token >= start_token
    }
    assert destination.landed == wanted
    assert ended.received_bytes == sum(map(len, wanted.values()))


def outcomes(engine: Engine) -> dict[str, float]:
    """Return the ended transfers of a mover by outcome."""
    url = f"http://127.0.0.1:{engine.options.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [one for family in families for one in family.samples if one.name == "prfaas_transfers_total"]
    return {one.labels["outcome"]: one.value for one in samples if one.value}


@pytest.mark.parametrize("asks_first", [False, True], ids=["has it all", "asks and thinks again"])
def test_a_cache_that_nobody_wants_is_not_kept_for_its_lease(asks_first):
    source, destination = (Engine(metrics_port=port) for port in free_ports(2))
    message = announced()
    source.mover.announce(message)
    if asks_first:
        destination.fetch(source, message)
        time.sleep(0.5)  # it is connected by then, as a rule
        destination.mover.cancel_fetch(message.request_id)
        assert over(destination).reason
    else:
        place = ("127.0.0.1", source.mover.data_port, "")
        common = (message.request_id, message.transfer_id, message.epoch)
        destination.mover.decline(DeclineCache(*common, "other", *place))
        with pytest.raises(queue.Empty):
            source.offers_over.get(timeout=1)
        destination.mover.decline(DeclineCache(*common, message.token, *place))
    assert over_at(source) == message.transfer_id
    assert outcomes(source) == {"cancelled": 1}
    assert outcomes(destination) == ({"cancelled": 1} if asks_first else {})
    for one in (source, destination):
        one.mover.close()


def test_a_source_that_is_late_hears_that_its_cache_is_not_wanted(pair):
    """Its request may queue while its destination has decided."""
    source, destination = pair
    message = announced()
    place = ("127.0.0.1", source.mover.data_port, "")
    common = (message.request_id, message.transfer_id, message.epoch, message.token)
    destination.mover.decline(DeclineCache(*common, *place))
    time.sleep(2.5)  # longer than a source may be silent elsewhere
    source.mover.announce(message)
    assert over_at(source) == message.transfer_id


def test_a_destination_that_nobody_announced_hears_so_and_a_wrong_token_or_epoch_is_no_other(pair):
    source, destination = pair
    message = announced()
    source.mover.announce(message)
    for wrong in ({"token": "other"}, {"epoch": message.epoch + 1}):
        destination.fetch(source, message, **wrong)
        assert "no prefill" in over(destination).reason
    began = time.monotonic()
    destination.fetch(source, announced())
    assert "no prefill" in over(destination).reason
    assert time.monotonic() - began > 4, "it may be announced a moment later"
    assert destination.landed == {}


def test_a_place_that_is_none_ends_a_fetch_at_once(pair):
    source, destination = pair
    for host in ("a" * 64 + ".example", "a..example"):
        destination.fetch(source, announced(), host=host)
        assert f"cannot connect to {host}:" in over(destination).reason


def test_both_models_are_named_where_they_differ(pair):
    source, _ = pair
    port = free_ports(1)[0]
    other = Engine(fingerprint="g", metrics_port=port)
    message = announced()
    source.mover.announce(message)
    other.fetch(source, message)
    said = over(other).reason
    assert "manifest field fingerprint is 'f', this instance needs 'g'" in said
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [one for family in families for one in family.samples if one.name == MISMATCH]
    assert [(one.labels["reason"], one.value > time.time() - 60) for one in samples] == [(said, True)]
    ended = [one for family in families for one in family.samples if one.labels.get("outcome") == "mismatched"]
    assert [(one.labels["direction"], one.value) for one in ended] == [("receive", 1)]
    other.mover.close()


@pytest.mark.parametrize("length", [150_000, 400_000])
def test_a_source_that_says_too_much_costs_its_own_fetch_alone(pair, length):
    source, destination = pair

    def enlarge(frame: Seen) -> list[bytes]:
        if frame.header.kind != Kind.WELCOME:
            return [frame.raw]
        welcome = msgspec.json.decode(frame.raw[HEADER_BYTES:], type=Welcome)
        manifest = msgspec.structs.replace(welcome.manifest, fingerprint="g" * length)
        return [message_frame(Kind.WELCOME, frame.header.address, Welcome(version=VERSION, manifest=manifest))]

    message = announced()
    source.mover.announce(message)
    with Proxy(("127.0.0.1", source.mover.data_port), down=enlarge) as proxy:
        destination.fetch(source, message, port=proxy.address[1])
        assert over(destination).reason.startswith("manifest field fingerprint is 'ggg")
    message = announced()
    source.mover.announce(message)
    source.compute(message.transfer_id)
    destination.fetch(source, message)
    assert over(destination).reason == ""


def test_a_destination_without_tls_hears_that_its_source_has_it(pair, tmp_path):
    year = identity.valid_for(datetime.datetime.now(datetime.UTC), 365)
    authority = identity.make_authority("first", year)
    mount = Mount(tmp_path / "eu").put(identity.issue(authority, "eu", year), authority)
    source = Engine(tls_dir=str(mount.path))
    message = announced()
    source.mover.announce(message)
    pair[1].fetch(source, message)
    assert "the peer speaks TLS; give --tls-dir to both instances, or to none" in over(pair[1]).reason
    source.mover.close()


def test_an_end_at_the_source_reaches_the_destination_and_the_other_way_round(pair):
    source, destination = pair
    message = announced()
    source.mover.announce(message)
    destination.fetch(source, message)
    part = CopyPart(1, 1, 0, PAGE_TOKENS)
    source.parts[message.transfer_id, part] = secrets.token_bytes(1000)
    source.mover.put(message.transfer_id, [part])
    eventually(lambda: ("request", part) in destination.landed, "the part landed")
    source.mover.fail(message.transfer_id, "the prefill was aborted")
    assert "the prefill was aborted" in over(destination).reason
    assert over_at(source) == message.transfer_id

    for pause_seconds in (0.5, 0.0):
        message = announced()
        source.mover.announce(message)
        destination.fetch(source, message)
        time.sleep(pause_seconds)
        destination.mover.cancel_fetch("request")
        assert "cancelled" in over(destination).reason
        source.mover.fail(message.transfer_id, "nobody wants it")
        assert over_at(source) == message.transfer_id


def mover_behind(theirs: socket.socket) -> Mover:
    """A mover in this process."""
    options = MoverOptions(host="127.0.0.1", data_port=0, fingerprint="f", groups=GROUPS, slot_bytes=4096)
    return Mover(options, theirs, mmap.mmap(-1, options.slots * options.slot_bytes))


def test_an_announced_cache_waits_from_its_latest_part_on_for_a_destination_that_has_not_come_yet():
    ours, theirs = socket.socketpair()
    mover = mover_behind(theirs)
    first, second = announced(), announced()
    granted = OfferCache(TransferSubject(1, "r"), second.transfer_id, second.epoch, second.token, 0, TOKENS)
    for message in (first, granted):
        mover.handle(message)
        offer = mover._open._open[message.transfer_id]
        offer.lease.renew(5)
        mover.handle(ComputedParts(message.transfer_id, []))
        assert (offer.lease.left_seconds > 5) == (message is first)
    offer = mover._open._open[first.transfer_id]
    offer.start_at("", 0)
    offer.was_connected = True
    offer.lease.renew(5)  # its last connection broke
    mover.handle(ComputedParts(first.transfer_id, []))
    assert offer.lease.left_seconds <= 5
    for end in (ours, theirs):
        end.close()


def test_an_offer_that_ends_while_it_is_announced_is_forgotten(monkeypatch):
    """A destination may have waited for it, and go at once."""
    ours, theirs = socket.socketpair()
    mover = mover_behind(theirs)
    announce = mover._offers.announce

    def announced_and_ended(*arguments: Any) -> Offer:
        offer = announce(*arguments)
        ending = threading.Thread(target=mover._offers.end, args=(offer, "cancelled"))
        ending.start()
        ending.join(0.2)
        return offer

    monkeypatch.setattr(mover._offers, "announce", announced_and_ended)
    message = announced()
    mover.handle(message)
    with ours.makefile("rb") as reader:
        said = [decode_from_mover(read_body(reader)) for _ in range(2)]
    assert isinstance(said[0], TransferEnded)
    assert said[1] == EndedOffer(message.transfer_id)
    assert (mover._open._open, mover._open._key_of) == ({}, {})
    for end in (ours, theirs):
        end.close()


def test_a_mover_without_a_thread_to_spare_ends_a_fetch_and_goes_on(monkeypatch):
    ours, theirs = socket.socketpair()
    mover, message = mover_behind(theirs), announced()
    at_source = (message.request_id, message.transfer_id, message.epoch, message.token, "127.0.0.1", 1, "")
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name in ("fetch", "decline"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    mover.handle(FetchCache(*at_source, 0, TOKENS))
    mover.handle(DeclineCache(*at_source))
    with ours.makefile("rb") as reader:
        assert decode_from_mover(read_body(reader)) == EndedFetch(message.request_id, "can't start new thread")
    assert mover._fetches._running == {}
    for end in (ours, theirs):
        end.close()


def test_an_offer_that_failed_is_over_at_once_though_nobody_came_for_it(pair):
    source, _ = pair
    message = announced()
    source.mover.announce(message)
    source.mover.fail(message.transfer_id, "the prefill was aborted")
    assert over_at(source) == message.transfer_id


def test_a_destination_that_comes_after_the_end_of_an_offer_hears_so(pair):
    source, destination = pair
    message = announced()
    source.mover.announce(message)
    source.mover.fail(message.transfer_id, "the source needed its memory for other requests")
    assert over_at(source)
    destination.fetch(source, message)
    assert "ended, expired or foreign" in over(destination).reason


def test_a_fetch_of_a_slice_that_fails_frees_that_slice_at_its_source(pair):
    source, destination = pair
    message = msgspec.structs.replace(announced(), slice=CacheSlice(1, 2, GROUPS))
    source.mover.announce(message)
    destination.fetch(source, message, slice=message.slice)
    time.sleep(0.3)
    destination.mover.cancel_fetch("request/1")
    assert over(destination).reason
    assert over_at(source) == message.key


@pytest.mark.parametrize("error", [PeerError("no blocks"), RuntimeError("a bug")])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_copy_that_an_engine_cannot_make_ends_its_transfer_alone(pair, monkeypatch, side, error):
    source, destination = pair

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(*((source, "load") if side == "source" else (destination, "land")), fail)
        message = announced()
        source.mover.announce(message)
        source.compute(message.transfer_id)
        destination.fetch(source, message)
        assert str(error) in over(destination).reason
        assert over_at(source) == message.transfer_id
    message = announced()
    source.mover.announce(message)
    source.compute(message.transfer_id)
    destination.fetch(source, message)
    assert over(destination).reason == ""


def test_what_a_mover_tells_before_the_call_returns_is_heard_and_once(pair, monkeypatch):
    engine, _ = pair
    told: list[object] = []

    def answer(message: object) -> None:
        for _ in range(2):
            if isinstance(message, AnnounceCache):
                engine.mover._handle(EndedOffer(message.key))
            if isinstance(message, FetchCache):
                engine.mover._handle(EndedFetch(message.key, "refused"))

    def answered_at_once(message: object) -> bool:
        told.append(message)
        readers.append(threading.Thread(target=answer, args=(message,)))
        readers[-1].start()  # it reads before this call returns
        return True

    readers: list[threading.Thread] = []
    monkeypatch.setattr(engine.mover, "_say", answered_at_once)
    message = announced()
    engine.mover.announce(message)
    engine.fetch(engine, message)
    for reader in readers:
        reader.join(5)
    assert engine.offers_over.get_nowait() == message.transfer_id
    assert engine.fetches_over.get_nowait().reason == "refused"
    assert engine.offers_over.empty()
    assert engine.fetches_over.empty()
    told.clear()
    engine.mover._handle(AskAnnounce(7))
    assert told == [CopyDone(7)], "what was said before is on its way"


def test_without_a_mover_offers_and_fetches_are_over_at_once():
    engine = Engine()
    engine.mover.close()
    eventually(lambda: not engine.mover.is_running, "the mover ended")
    message = announced()
    engine.mover.announce(message)
    assert over_at(engine) == message.transfer_id
    engine.mover.fetch(FetchCache("r", *("a" * 32, 1, "t", "127.0.0.1", 1, ""), 0, TOKENS))
    assert over(engine) == EndedFetch("r", "the mover is not running")


def test_a_mover_outlives_the_signals_of_its_engines_group(pair):
    engine, _ = pair
    (pid,) = children_of(engine)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    message = announced()
    engine.mover.announce(message)
    engine.compute(message.transfer_id)
    engine.fetch(engine, message)
    assert over(engine).reason == ""
    assert children_of(engine) == [pid]


def test_a_mover_that_is_closed_while_it_starts_again_does_not_stay(monkeypatch):
    engine = Engine()
    start = engine.mover._start
    started: list[Any] = []

    def closed_meanwhile(theirs: socket.socket) -> Any:
        started.append(start(theirs))
        engine.mover.close()
        return started[0]

    monkeypatch.setattr(engine.mover, "_start", closed_meanwhile)
    os.kill(children_of(engine)[0], signal.SIGKILL)
    eventually(lambda: bool(started), "another mover starts")
    eventually(lambda: started[0].poll() is not None, "the mover that was started ended")


def test_a_mover_that_dies_ends_its_transfers_and_another_serves_the_next(pair):
    source, destination = pair
    message = announced()
    source.mover.announce(message)
    destination.fetch(source, message)
    time.sleep(0.3)
    os.kill(children_of(source)[0], signal.SIGKILL)
    assert over_at(source) == message.transfer_id
    assert over(destination).reason

    def is_served() -> bool:
        message = announced()
        source.mover.announce(message)
        source.compute(message.transfer_id)
        destination.fetch(source, message)
        return not over(destination).reason

    eventually(is_served, "another mover serves")


class HeldUp:
    """A lock whose thread goes on, once it has left it for the first time, when the mover was killed and replaced."""

    def __init__(self, engine: Engine):
        self._engine, self._lock = engine, engine.mover._lock
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.get_ident() == self._thread:
            self._thread = 0
            former = children_of(self._engine)
            os.kill(former[0], signal.SIGKILL)
            eventually(
                lambda: children_of(self._engine) != former and self._engine.mover.is_running, "another mover took over"
            )


def test_a_fetch_that_ended_with_its_mover_is_not_made_by_the_next(pair):
    """Its memory is another request's by then."""
    source, destination = pair
    message = announced()
    source.mover.announce(message)
    source.compute(message.transfer_id)
    destination.mover._lock = HeldUp(destination)  # type: ignore[assignment]
    destination.fetch(source, message)
    over(destination)
    landed = len(destination.landed)
    time.sleep(2)
    assert len(destination.landed) == landed


def test_a_mover_that_hangs_is_replaced_before_its_engine_hangs_too(monkeypatch):
    monkeypatch.setattr("prfaas_transfer.mover.client.SEND_SECONDS", 1)
    source, message = Engine(), announced()
    hanging = children_of(source)
    os.kill(hanging[0], signal.SIGSTOP)
    source.mover.announce(message)

    def say_much() -> None:
        for _ in range(3000):
            source.mover.put(message.transfer_id, [CopyPart(1, 1, *SPANS[0])])

    step = threading.Thread(target=say_much, daemon=True)
    step.start()
    step.join(PATIENCE_SECONDS)
    is_held_up = step.is_alive()
    with suppress(ProcessLookupError):
        os.kill(hanging[0], signal.SIGCONT)
    assert not is_held_up, "a step waits for a mover that reads nothing"
    assert over_at(source) == message.transfer_id
    eventually(lambda: children_of(source) != hanging, "another mover took over")
    source.mover.close()


def test_a_destination_whose_mover_dies_hears_so_at_once(pair):
    source, destination = pair
    message = announced()
    source.mover.announce(message)
    destination.fetch(source, message)
    time.sleep(0.3)
    os.kill(children_of(destination)[0], signal.SIGKILL)
    assert over(destination) == EndedFetch("request", "the mover ended with status -9")


def test_a_mover_that_cannot_start_again_says_why_and_is_tried_until_it_can(caplog):
    port = free_ports(1)[0]
    engine = Engine(data_port=port)
    first = children_of(engine)
    os.kill(first[0], signal.SIGKILL)
    eventually(lambda: "the mover ended with status -9; another one starts in 1 s" in caplog.text, "its end is logged")
    with socket.create_server(("127.0.0.1", port)):
        reason = f"the mover cannot start: data port 127.0.0.1:{port} cannot be opened"
        eventually(lambda: reason in caplog.text, "the reason is logged")

    def is_back() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    eventually(is_back, "the port is open again")
    engine.mover.close()


def descriptors_of_movers() -> int:
    """Count what this process has open for movers: sockets to a mover, and memory that it shares with one."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found += "memfd:prfaas-mover" in str(descriptor.readlink()) or is_unix_pair(int(descriptor.name))
    return found


def is_unix_pair(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as found:
        return found.family == socket.AF_UNIX


def test_a_closed_mover_leaves_no_process_thread_or_descriptor():
    def is_followed() -> bool:
        return any(thread.name == "mover" for thread in threading.enumerate())

    assert_freed(lambda: not is_followed(), "no thread follows a mover of other tests")
    gc.collect()
    before = descriptors_of_movers()
    engine = Engine()
    process = engine.mover._process
    assert process is not None
    assert is_followed()
    assert descriptors_of_movers() == before + 3, "the socket, the memory, and the one that its mapping keeps"
    engine.mover.close()
    assert_freed(lambda: not is_followed(), "no thread follows a mover")
    assert process.poll() is not None
    assert descriptors_of_movers() == before + 1, "what the mapping keeps goes with the client"
    del engine
    gc.collect()
    assert_freed(lambda: descriptors_of_movers() <= before, "what the mapping kept is closed")


def test_the_first_rank_serves_the_figures_of_all_ranks(pair):
    port = free_ports(2)[0]
    ranks = [Engine(rank=rank, ranks=2, mover=rank, movers=2, metrics_port=port) for rank in (0, 1)]
    source = ranks[0]
    message = announced()
    source.mover.announce(message)
    source.compute(message.transfer_id)
    pair[1].fetch(source, message)
    assert "manifest field rank" in over(pair[1]).reason
    other = Engine(ranks=2)
    message = announced()
    source.mover.announce(message)
    source.compute(message.transfer_id)
    other.fetch(source, message)
    assert over(other).reason == ""
    for _ in range(2):  # the one that was refused is over, too
        over_at(source)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        text = answer.read().decode()
    samples = {
        (sample.name, sample.labels["rank"], sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["prfaas_transfers_total", "0", "delivered"] == 1
    assert samples["prfaas_transfer_sent_bytes_total", "0", ""] > 12_000
    assert samples["prfaas_transfer_sent_bytes_total", "1", ""] == 0
    assert text.count("# TYPE prfaas_transfers_total counter") == 1
    for engine in (*ranks, other):
        engine.mover.close()


@pytest.mark.parametrize("is_file", [False, True])
def test_the_movers_of_an_instance_have_its_egress_cap_together(tmp_path: Path, is_file: bool):
    (tmp_path / "mbps").write_text("41")
    cap = {"egress_file": str(tmp_path / "mbps")} if is_file else {"egress_mbps": 41}
    port = free_ports(2)[0]
    ranks = [Engine(rank=rank, ranks=2, mover=rank, movers=2, metrics_port=port, **cap) for rank in (0, 1)]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    (caps,) = [family.samples for family in families if family.name == "prfaas_egress_cap_mbps"]
    assert [sample.value for sample in caps] == [20, 20]
    for engine in ranks:
        engine.mover.close()


def test_silent_peers_cost_a_mover_few_threads_and_its_figures_only_for_a_moment():
    port = free_ports(1)[0]
    engine = Engine(metrics_port=port)
    tasks = Path(f"/proc/{children_of(engine)[0]}/task")
    at_rest = len(list(tasks.iterdir()))
    silent = [socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) for _ in range(100)]
    for one in silent:
        one.sendall(b"GET /metrics HTTP/1.1\r\n")
    eventually(lambda: len(list(tasks.iterdir())) > at_rest, "the mover serves")
    assert len(list(tasks.iterdir())) <= at_rest + MAX_SCRAPES
    eventually(lambda: len(list(tasks.iterdir())) <= at_rest, f"their threads end after {REQUEST_SECONDS} s")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        assert answer.status == 200
    for one in silent:
        one.close()
    engine.mover.close()


def test_a_port_that_is_taken_is_said_with_its_number(pair):
    source, _ = pair
    with pytest.raises(ConfigError, match=f"data port 127.0.0.1:{source.mover.data_port} cannot be opened"):
        Engine(data_port=source.mover.data_port)


def children_of(engine: Engine) -> list[int]:
    process = engine.mover._process
    assert process is not None
    return [process.pid]


def test_a_mover_shows_what_the_scheduler_asks_of_a_link_and_the_size_of_a_cache():
    port = free_ports(2)[0]
    engine = Engine(rank=0, ranks=2, copies=(1, 2), metrics_port=port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    engine.mover.close()
    names = {sample.name for family in families for sample in family.samples}
    asked = {name for query in LINK.values() for name in re.findall(r"prfaas_\w+", query)}
    assert len(asked) == 4
    assert asked <= names
    sizes = {
        sample.labels["tokens"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "prfaas_profile_cache_bytes"
    }
    state_bytes, token_bytes = 2 * GROUPS[0].nbytes, GROUPS[1].nbytes // PAGE_TOKENS
    assert sizes["1024"] == 2 * state_bytes + 1024 * token_bytes, "a state of each rank, rows that both hold once"
    assert sizes["65536"] - sizes["1024"] == (65_536 - 1024) * token_bytes
    alone = MoverOptions(host="127.0.0.1", data_port=0, fingerprint="f", groups=GROUPS, slot_bytes=4096, ranks=2)
    assert cache_bytes(alone, 1024) == 2 * (state_bytes + 1024 * token_bytes), "where each rank has rows of its own"


def test_a_rank_that_is_gone_costs_its_own_figures_alone_and_other_paths_are_none(caplog):
    port, gone = free_ports(2)
    options = MoverOptions(host="127.0.0.1", data_port=0, fingerprint="f", groups=GROUPS, slot_bytes=4096)
    serve("127.0.0.1", port, MoverMetrics(options, lambda: Stats(sent_bytes=5)), (gone,))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics?x=1", timeout=PATIENCE_SECONDS) as answer:
        assert 'prfaas_transfer_sent_bytes_total{rank="0"} 5.0' in answer.read().decode()
    assert f"the figures of the rank at port {gone} are missing" in caplog.text
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_SECONDS)
    refused.value.close()
