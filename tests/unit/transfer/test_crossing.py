"""Two engines and their movers: caches cross bit by bit, and every way of failing gives the memory back."""

import datetime
import os
import queue
import secrets
import signal
import time
from collections.abc import Sequence

import msgspec
import pytest

from prfaas import identity
from prfaas.errors import PeerError
from prfaas.ports import free_ports
from prfaas.wire.frames import HEADER_BYTES, Kind
from prfaas.wire.transfer import VERSION, Hello, Welcome, decode_message, message_frame
from prfaas_transfer.mover.messages import CacheSlice, CopyPart

from ...waiting import eventually
from ..tls.mounts import Mount
from ..worker.transfer_proxy import Proxy, Seen
from .engines import make_announcement, read_samples
from .layout import GROUPS, PAGE_TOKENS

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("_patience")]
MISMATCH = "prfaas_transfer_mismatch_timestamp_seconds"


@pytest.mark.parametrize("sides", [(1, 2), (2, 1), (2, 2)], ids=["one to two", "two to one", "two to two"])
def test_slices_of_one_transfer_cross_apart_between_the_movers_that_hold_them(start_engine, sides):
    sources, destinations = ([start_engine() for _ in range(count)] for count in sides)
    whole = msgspec.structs.asdict(make_announcement())
    for rank in range(2):
        source, destination = sources[rank % len(sources)], destinations[rank % len(destinations)]
        destination.fetch(source, source.offer(**whole | {"slice": CacheSlice(rank, 2, GROUPS)}))
    ended = [destination.take_ended_fetch() for destination in destinations * (2 // len(destinations))]
    assert {(one.key, one.reason) for one in ended} == {(f"{whole['transfer_id']}/{rank}", "") for rank in range(2)}
    sent = {(key[-2:], part): found for source in sources for (key, part), found in source.parts.items()}
    landed = {(key[-2:], part): found for one in destinations for (key, part), found in one.landed.items()}
    assert landed == sent


def test_a_declined_slice_ends_no_other(pair):
    source, destination = pair
    first = source.offer(slice=CacheSlice(0, 2, GROUPS))
    second = source.offer(**msgspec.structs.asdict(first) | {"slice": CacheSlice(1, 2, GROUPS)})
    destination.decline(source, second, rank=1)
    assert source.take_ended_offer() == second.key
    destination.fetch(source, first)
    assert destination.take_ended_fetch().reason == ""
    assert source.take_ended_offer() == first.key


def test_a_slice_of_another_size_is_refused_with_both_values(pair):
    source, destination = pair
    message = source.announce(slice=CacheSlice(1, 2, GROUPS))
    destination.fetch(source, message, slice=CacheSlice(1, 4, GROUPS))
    assert "manifest field ranks is 2, this instance needs 4" in destination.take_ended_fetch().reason
    assert destination.landed == {}


@pytest.mark.parametrize("start_token", [0, 8, 32])
@pytest.mark.parametrize("first", ["source", "destination"])
def test_a_cache_of_pages_crosses_bit_by_bit_from_where_the_destination_wants_it(pair, start_token, first):
    source, destination = pair
    message = make_announcement()
    if first == "destination":
        destination.fetch(source, message, start_token=start_token)
        time.sleep(0.3)  # it waits at the source by then, as a rule
    source.offer(**msgspec.structs.asdict(message))
    if first == "source":
        destination.fetch(source, message, start_token=start_token)
    ended = destination.take_ended_fetch()
    assert ended.reason == ""
    assert source.take_ended_offer() == message.transfer_id
    wanted = {
        (message.key, part): found
        for (_, part), found in source.parts.items()
        if not part.tokens or part.start_token >= start_token
    }
    assert destination.landed == wanted
    assert ended.fetched is not None
    assert ended.fetched.received_bytes == sum(map(len, wanted.values()))


def test_a_destination_hears_when_its_source_begins_and_gets_the_cache_then(pair):
    source, destination = pair
    message, later = source.announce(), source.announce()
    destination.await_begin(source, message)
    destination.await_begin(source, later)
    with pytest.raises(queue.Empty):
        destination.begun.get(timeout=1.5)  # for longer than it takes to come
    source.mover.put(message.key, [])
    assert destination.take_begun() == message.transfer_id
    destination.fetch(source, message)
    source.compute(message)
    assert destination.take_ended_fetch().reason == ""
    source.compute(later)
    assert destination.take_begun() == later.transfer_id


def speak_another_version(seen: Seen) -> Sequence[bytes]:
    if seen.header.kind != Kind.HELLO:
        return [seen.raw]
    hello = decode_message(seen.header, seen.raw[HEADER_BYTES:], Hello)
    return [message_frame(Kind.HELLO, seen.header.address, msgspec.structs.replace(hello, versions=(9,)))]


@pytest.mark.parametrize("why", ["unknown", "ended", "gone", "silent", "of another version"])
def test_a_source_that_cannot_be_awaited_is_waited_for_no_longer(pair, why):
    source, destination = pair
    message = make_announcement() if why == "unknown" else source.announce()
    if why == "of another version":
        with Proxy(("127.0.0.1", source.mover.data_port), up=speak_another_version) as proxy:
            destination.await_begin(source, message, port=proxy.address[1])
            assert destination.take_begun() == message.transfer_id
        return
    destination.await_begin(source, message)
    if why == "ended":
        source.mover.fail(message.key, "its caller left")
    elif why == "gone":
        source.mover.close()
    elif why == "silent":
        os.kill(source.mover_pid, signal.SIGSTOP)
        destination.decline(source, message)
    assert destination.take_begun() == message.transfer_id


@pytest.mark.parametrize("asks_first", [False, True], ids=["has it all", "asks and thinks again"])
def test_an_unwanted_cache_is_not_kept_for_its_lease(start_engine, asks_first):
    source, destination = engines = [start_engine(metrics_port=port) for port in free_ports(2)]
    message = source.announce()
    if asks_first:
        destination.fetch(source, message)
        time.sleep(0.5)  # it is connected by then, as a rule
        destination.mover.cancel_fetch(message.key)
        assert destination.take_ended_fetch().reason
    else:
        destination.decline(source, message, token="other")
        with pytest.raises(queue.Empty):
            source.ended_offers.get(timeout=1)
        destination.decline(source, message)
    assert source.take_ended_offer() == message.transfer_id
    outcomes = [
        {one.labels["outcome"]: one.value for one in samples if one.name == "prfaas_transfers_total" and one.value}
        for samples in (read_samples(engine.options.metrics_port) for engine in engines)
    ]
    assert outcomes == [{"cancelled": 1}, {"cancelled": 1} if asks_first else {}]


def test_a_source_that_is_late_hears_that_its_cache_is_not_wanted(pair):
    """Its request may queue while its destination has decided."""
    source, destination = pair
    message, other = make_announcement(), make_announcement()
    destination.decline(source, message)
    destination.decline(source, other, token="another")
    time.sleep(0.5)  # both have come, as a rule
    source.mover.announce(other)
    source.mover.announce(message)
    assert source.take_ended_offer() == message.transfer_id
    third = source.offer()
    destination.fetch(source, third)
    assert source.take_ended_offer() == third.transfer_id, "a stranger has declined the other one"


def test_an_impossible_host_name_ends_a_fetch_at_once(pair):
    source, destination = pair
    for host in ("a" * 64 + ".example", "a..example"):
        destination.fetch(source, make_announcement(), host=host)
        assert f"cannot connect to {host}:" in destination.take_ended_fetch().reason


def test_both_models_are_named_where_they_differ(pair, start_engine):
    source, _ = pair
    (port,) = free_ports(1)
    other = start_engine(fingerprint="g", metrics_port=port)
    other.fetch(source, source.announce())
    reason = other.take_ended_fetch().reason
    assert "manifest field fingerprint is 'f', this instance needs 'g'" in reason
    samples = read_samples(port)
    noted = [one for one in samples if one.name == MISMATCH]
    assert [(one.labels["reason"], one.value > time.time() - 60) for one in noted] == [(reason, True)]
    ended = [one for one in samples if one.labels.get("outcome") == "mismatched"]
    assert [(one.labels["direction"], one.value) for one in ended] == [("receive", 1)]


@pytest.mark.parametrize("length", [150_000, 400_000])
def test_a_source_with_a_huge_manifest_fails_only_its_own_fetch(pair, length):
    source, destination = pair

    def enlarge(frame: Seen) -> list[bytes]:
        if frame.header.kind != Kind.WELCOME:
            return [frame.raw]
        welcome = msgspec.json.decode(frame.raw[HEADER_BYTES:], type=Welcome)
        manifest = msgspec.structs.replace(welcome.manifest, fingerprint="g" * length)
        return [message_frame(Kind.WELCOME, frame.header.address, Welcome(version=VERSION, manifest=manifest))]

    with Proxy(("127.0.0.1", source.mover.data_port), down=enlarge) as proxy:
        destination.fetch(source, source.announce(), port=proxy.address[1])
        assert destination.take_ended_fetch().reason.startswith("manifest field fingerprint is 'ggg")
    destination.fetch(source, source.offer())
    assert destination.take_ended_fetch().reason == ""


def test_a_destination_without_tls_hears_that_its_source_has_it(pair, start_engine, tmp_path):
    year = identity.valid_for(datetime.datetime.now(datetime.UTC), 365)
    authority = identity.make_authority("first", year)
    mount = Mount(tmp_path / "eu").put(identity.issue(authority, "eu", year), authority)
    source, (_, destination) = start_engine(tls_dir=str(mount.path)), pair
    destination.fetch(source, source.announce())
    reason = destination.take_ended_fetch().reason
    assert "the peer speaks TLS; give --tls-dir to both instances, or to none" in reason


def test_an_end_at_the_source_reaches_the_destination_and_the_other_way_round(pair):
    source, destination = pair
    message = source.announce()
    destination.fetch(source, message)
    part = CopyPart(1, 1, 0, PAGE_TOKENS)
    source.parts[message.transfer_id, part] = secrets.token_bytes(1000)
    source.mover.put(message.transfer_id, [part])
    eventually(lambda: (message.key, part) in destination.landed, "the part landed")
    source.mover.fail(message.transfer_id, "the prefill was aborted")
    assert "the prefill was aborted" in destination.take_ended_fetch().reason
    assert source.take_ended_offer() == message.transfer_id

    for pause_seconds in (0.5, 0.0):
        message = source.announce()
        destination.fetch(source, message)
        time.sleep(pause_seconds)
        destination.mover.cancel_fetch(message.key)
        assert "cancelled" in destination.take_ended_fetch().reason
        source.mover.fail(message.transfer_id, "its request is cancelled")
        assert source.take_ended_offer() == message.transfer_id


def test_a_destination_that_comes_after_the_end_of_an_offer_hears_so(pair):
    source, destination = pair
    message = source.announce()
    source.mover.fail(message.transfer_id, "the source needed its memory for other requests")
    assert source.take_ended_offer() == message.transfer_id
    destination.fetch(source, message)
    assert "ended, expired or foreign" in destination.take_ended_fetch().reason


def test_a_fetch_of_a_slice_that_fails_frees_that_slice_at_its_source(pair):
    source, destination = pair
    message = source.announce(slice=CacheSlice(1, 2, GROUPS))
    destination.fetch(source, message)
    time.sleep(0.3)
    destination.mover.cancel_fetch(message.key)
    assert destination.take_ended_fetch().reason
    assert source.take_ended_offer() == message.key


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PeerError("no blocks"), "the engine refused a copy: no blocks"),
        (RuntimeError("a bug"), "the engine refused a copy: RuntimeError('a bug')"),
        (MemoryError(), "the engine refused a copy: this process has no memory left: raise the container"),
    ],
)
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_copy_that_an_engine_cannot_make_ends_only_its_transfer(pair, monkeypatch, side, error, words):
    source, destination = pair

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(*((source, "load") if side == "source" else (destination, "land")), fail)
        message = source.offer()
        destination.fetch(source, message)
        assert words in destination.take_ended_fetch().reason
        assert source.take_ended_offer() == message.transfer_id
    destination.fetch(source, source.offer())
    assert destination.take_ended_fetch().reason == ""
