"""What a mover keeps of an engine's cache events, and what followers get of it: whatever they missed, and whenever they
or the mover begin.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import pytest

from prfaas.errors import RequestError
from prfaas.kvindex.bytes import pack_tokens, token_digests
from prfaas.wire.kvevents import (
    MEDIUM_DEVICE,
    BlockRemoved,
    BlockStored,
    ByteBlock,
    ByteMapBatch,
    EventBatch,
    KvEvent,
    encode_byte_map,
    encode_events,
    read_events,
)
from prfaas_transfer.events import log as log_module
from prfaas_transfer.events.follow import Wanted, follow, read_wanted
from prfaas_transfer.events.log import BATCH_BYTES, BYTE_BLOCKS_PER_BATCH, EventLog, LoggedBatch

from ...event_reader import cached_after
from .test_events_snapshot import key, state, stored

FROM_0 = Wanted()


def batch(*events: KvEvent) -> bytes:
    return encode_events(EventBatch(0.0, list(events), 0))


def learned(*numbers: int) -> bytes:
    """Byte blocks of these hashes."""
    return encode_byte_map(ByteMapBatch(0.0, [ByteBlock(n, key(n), 64 * n) for n in numbers]))


def hear(log: EventLog, *said: KvEvent | bytes) -> EventLog:
    """Have a mover hear a batch of each of these events and byte maps."""
    for one in said:
        topic, payload = ("bytes", one) if isinstance(one, bytes) else ("kv", batch(one))
        log.add(LoggedBatch(topic, log.next_seq, payload))
    return log


def read(written: list[bytes]) -> list[tuple[str, int, Any]]:
    frames: list[tuple[str, int, Any]] = []
    for frame in written:
        topic, seq, payload = msgspec.msgpack.decode(frame[4:])
        assert len(frame) == 4 + int.from_bytes(frame[:4], "big")
        frames.append((topic, seq, payload if topic == "kv" else msgspec.msgpack.decode(payload)))
    return frames


def frames(log: EventLog, wanted: Wanted = FROM_0) -> Iterator[tuple[str, int, Any]]:
    """What a follower reads, until there is nothing new."""
    for written in follow(log, wanted, alive_seconds=0):
        found = read(written)
        if found[0][0] == "prfaas.alive":
            return
        yield from found


def blocks(found: list[tuple[str, int, Any]]) -> dict[Any, Any]:
    return cached_after(event for topic, _, payload in found if topic == "kv" for event in read_events(payload))


def test_a_follower_hears_which_log_it_reads_and_then_all_that_happened():
    log = hear(EventLog(), stored(0, 1), learned(1, 2), BlockRemoved([key(0)], MEDIUM_DEVICE, 0))
    hello, first, taught, last = frames(log)
    assert hello == ("prfaas.hello", 0, {"epoch": log.epoch, "first_seq": 0, "next_seq": 3})
    assert (first[:2], taught[:2], last[:2]) == (("kv", 0), ("bytes", 1), ("kv", 2))
    assert list(read_events(last[2])) == [BlockRemoved([key(0)], MEDIUM_DEVICE, 0)]
    assert taught[2]["blocks"][1] == {"byte_hash": 2, "block_hash": key(2), "tokens": 128}
    assert [seq for _, seq, _ in frames(log, Wanted(1, log.epoch))] == [0, 1, 2], "it was away, and continues"


def test_events_arrive_as_they_happen():
    log = hear(EventLog(), stored(0, 1))
    following = follow(log, Wanted(), alive_seconds=0)
    assert len(list(islice(following, 3))) == 3, "hello, the batch, a sign of life"
    hear(log, stored(1, 2))
    assert [frame[:2] for frame in read(next(following))] == [("kv", 1)]


def test_a_late_follower_gets_a_marked_snapshot_and_then_what_happens():
    changes = [stored(0, 4), state(3), stored(4, 6), BlockRemoved([key(5)], MEDIUM_DEVICE, 0)]
    log = hear(EventLog(kept_bytes=1), *changes, learned(7))
    _, mark, cached, taught = frames(log)
    assert mark == ("prfaas.snapshot", 0, {"seq": 4, "batches": 2, "is_whole": True})
    assert (cached[:2], taught[:2]) == (("kv", 4), ("bytes", 4))
    assert blocks([cached]) == cached_after(changes)
    assert [one["byte_hash"] for one in taught[2]["blocks"]] == [7]
    hear(log, stored(6, 7))
    assert [frame[:2] for frame in frames(log, Wanted(5, log.epoch))][1:] == [("kv", 5)]


def test_a_snapshot_of_many_batches_is_one_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_module, "EVENTS_PER_BATCH", 3)
    numbers = list(range(BYTE_BLOCKS_PER_BATCH + 5))
    _, mark, *found = frames(hear(EventLog(kept_bytes=1), stored(0, 4), stored(4, 8), learned(*numbers)))
    assert mark[2]["batches"] == len(found) == 3 + 2
    assert {seq for _, seq, _ in found} == {2}
    assert blocks(found) == cached_after([stored(0, 8)])
    assert [one["byte_hash"] for topic, _, body in found if topic == "bytes" for one in body["blocks"]] == numbers


def test_a_follower_of_another_life_begins_anew_even_before_anything_happened():
    log = hear(EventLog(), stored(0, 1), stored(1, 2))
    assert [seq for _, seq, _ in frames(log, Wanted(1, "another"))] == [0, 0, 1]
    _, mark, snapshot = frames(log, Wanted(7, log.epoch))
    assert (mark[0], mark[2]["seq"], blocks([snapshot])) == ("prfaas.snapshot", 1, cached_after([stored(0, 2)]))
    log = EventLog()
    following = follow(log, Wanted(7), alive_seconds=0)
    (_,), (mark,) = (read(written) for written in islice(following, 2))
    assert mark[2] == {"seq": -1, "batches": 0, "is_whole": True}
    hear(log, stored(0, 1))
    assert [frame[:2] for frame in read(next(following))] == [("kv", 0)]


def test_a_follower_too_slow_for_the_log_gets_a_snapshot_in_the_middle():
    log = hear(EventLog(kept_bytes=2 * BATCH_BYTES), stored(0, 1))
    following = follow(log, Wanted(), alive_seconds=0)
    list(islice(following, 2))
    hear(log, *(stored(at, at + 1) for at in range(1, 9)))
    (mark,), snapshot = (read(written) for written in islice(following, 2))
    assert mark[0] == "prfaas.snapshot"
    assert blocks(snapshot) == cached_after([stored(0, 9)])


def test_byte_blocks_are_published_once_while_the_log_has_them():
    log = hear(EventLog(kept_bytes=3 * (BATCH_BYTES + len(learned(0)))), learned(0), learned(0, 1), learned(1))
    published = [[one["byte_hash"] for one in body["blocks"]] for topic, _, body in frames(log) if topic == "bytes"]
    assert published == [[0], [1], []]
    hear(log, learned(2), learned(3), learned(1, 0))
    *_, last = frames(log, Wanted(5, log.epoch))
    assert [one["byte_hash"] for one in last[2]["blocks"]] == [1, 0], "the log has lost their batches"


def test_lost_batches_void_what_was_known_also_for_who_follows_already():
    log = EventLog()
    following = follow(log, Wanted(), alive_seconds=0)
    list(islice(following, 2))
    log.add(LoggedBatch("kv", 5, batch(stored(7, 8))))  # the first ones were dropped before it began
    (mark,), snapshot = (read(written) for written in islice(following, 2))
    assert mark[2] == {"seq": 5, "batches": 1, "is_whole": False}
    log.add(LoggedBatch("kv", 5, batch(stored(7, 8))))
    assert log.next_seq == 6, "a repeated one is skipped"
    log.add(LoggedBatch("kv", 9, batch(stored(1, 2))))
    assert blocks(list(frames(log))) == cached_after([stored(1, 2)])
    assert blocks(snapshot) == cached_after([stored(7, 8)])


def test_a_batch_that_cannot_be_read_is_as_good_as_lost(caplog: pytest.LogCaptureFixture):
    log = hear(EventLog(), stored(0, 1))
    log.add(LoggedBatch("kv", 1, b"\xc1"))
    log.add(LoggedBatch("kv", 2, batch(stored(4, 5))))
    assert blocks(list(frames(log))) == cached_after([stored(4, 5)])
    assert "cannot be read" in caplog.text


def test_of_vllms_events_followers_get_digests_and_no_token_of_a_prompt():
    named = {"type": "BlockStored", "block_hashes": [5, 6], "parent_block_hash": None, "token_ids": [70_001, 2, 3, 4]}
    named |= {"block_size": 2, "medium": "GPU", "locality": "LOCAL"}
    of_state = named | {"block_hashes": [6], "group_idx": 1, "kv_cache_spec_kind": "mamba"}
    payload, token = msgspec.msgpack.encode([0.0, [named, of_state], 0]), msgspec.msgpack.encode(70_001)
    log = EventLog()
    log.add(LoggedBatch("kv", 0, payload))
    _, now = frames(log)
    *_, late = frames(log, Wanted(9))
    assert [token in one for one in (payload, now[2], late[2])] == [True, False, False]
    digests = token_digests(pack_tokens([70_001, 2, 3, 4]), 8)
    rows = BlockStored([5, 6], None, digests, 2, medium="GPU")
    state = BlockStored([6], None, b"", 2, medium="GPU", group_idx=1, kv_cache_spec_kind="mamba")
    assert list(read_events(now[2])) == [rows, state]
    each = [BlockStored([5], None, digests[:8], 2, medium="GPU"), BlockStored([6], 5, digests[8:], 2, medium="GPU")]
    assert list(read_events(late[2])) == [*each, state]


@pytest.mark.parametrize("query", ["from=-1", "from=x", "from=1.5", "from=" + "9" * 30, "from=\u0663"])
def test_a_number_that_is_none_is_refused(query: str):
    with pytest.raises(RequestError, match="give the number of the first batch wanted"):
        read_wanted(f"/v1/kv-events?{query}")
    assert read_wanted("/v1/kv-events?from=3&epoch=e") == Wanted(3, "e")
