"""A reader that comes too late for the events knows what one knows that read them all: from the stream, over ZMQ, and
whatever the order in which blocks came and went.
"""

from array import array
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from prfaas.wire.kvevents import (
    MEDIUM_DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ByteBlock,
    KvEvent,
    attention_stored,
    state_stored,
)
from prfaas_worker.front import kv_events
from prfaas_worker.front.kv_events import (
    BYTE_BLOCKS_PER_BATCH,
    EVENTS_PER_BATCH,
    CacheSnapshot,
    TopicLog,
    snapshot_batch_count,
    snapshot_batches,
)

from .test_events import next_frames, read

pytestmark = pytest.mark.system

KV, BYTES = "kv@pod-1@tiny", "bytes@pod-1@tiny"


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(first: int, last: int) -> BlockStored:
    """Blocks of one chain, in which each is the next one's parent."""
    tokens = [block for block in range(first, last) for _ in range(2)]
    parent = key(first - 1) if first else None
    return attention_stored([key(n) for n in range(first, last)], parent, tokens, "mla_attention")


def state(number: int) -> BlockStored:
    return state_stored(key(number), key(number - 1) if number else None, [number, number])


class Index:
    """What a router knows that knows only vLLM's format: every block with all its fields."""

    def __init__(self, events: list[KvEvent] = []):  # noqa: B006 - read only
        self.blocks: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for event in events:
            self.take(event)

    def take(self, event: KvEvent) -> None:
        match event:
            case AllBlocksCleared():
                self.blocks.clear()
            case BlockRemoved():
                for one in event.block_hashes:
                    self.blocks.pop((event.group_idx, event.medium, one), None)
            case BlockStored():
                parent, size = event.parent_block_hash, event.block_size
                for at, one in enumerate(event.block_hashes):
                    about = (parent, size, event.token_ids[at * size : (at + 1) * size], event.kv_cache_spec_kind)
                    self.blocks[event.group_idx, event.medium, one] = about
                    parent = one


def take_snapshot(events: list[KvEvent]) -> list[KvEvent]:
    kept = CacheSnapshot()
    kept.apply(events)
    return [event for batch in snapshot_batches(kept.blocks()) for event in batch]


chains = st.tuples(st.integers(0, 7), st.integers(1, 4)).map(lambda at: (at[0], at[0] + at[1]))
changes = st.one_of(
    st.builds(lambda at: stored(*at), chains),
    st.builds(state, st.integers(0, 9)),
    st.builds(
        lambda at, group: BlockRemoved([key(n) for n in range(*at)], MEDIUM_DEVICE, group),
        chains,
        st.sampled_from([0, 1]),
    ),
    st.just(AllBlocksCleared()),
)


@given(st.lists(changes, max_size=30))
def test_a_snapshot_leads_to_what_all_events_lead_to(events: list[KvEvent]):
    found = take_snapshot(events)
    assert found[0] == AllBlocksCleared()
    assert Index(found).blocks == Index(events).blocks
    # Also over whatever the reader believed before.
    assert Index([stored(3, 9), state(4), *found]).blocks == Index(events).blocks


@given(st.lists(changes, max_size=30))
def test_parents_come_before_their_children_and_rows_before_states(events: list[KvEvent]):
    found = [event for event in take_snapshot(events) if isinstance(event, BlockStored)]
    order = [event.block_hashes[0] for event in found]
    for place, event in enumerate(found):
        assert event.parent_block_hash not in order[place:]
    for before, after in pairwise(found):
        if before.block_hashes == after.block_hashes:
            assert (before.group_idx, after.group_idx) == (0, 1)


@pytest.mark.parametrize("count", [0, 1, EVENTS_PER_BATCH - 1, EVENTS_PER_BATCH, 3 * EVENTS_PER_BATCH])
def test_a_snapshot_has_as_many_batches_as_it_says(count: int):
    kept = CacheSnapshot()
    if count:
        kept.apply([stored(0, count)])
    blocks = kept.blocks()
    assert [len(batch) for batch in snapshot_batches(blocks)][-1] <= EVENTS_PER_BATCH
    assert snapshot_batch_count(blocks) == len(list(snapshot_batches(blocks)))


def test_removed_blocks_take_no_memory():
    kept = CacheSnapshot()
    kept.apply([stored(0, 9), state(8), BlockRemoved([key(n) for n in range(9)], MEDIUM_DEVICE, 0)])
    assert list(kept.blocks()) == [key(8)]
    kept.apply([BlockRemoved([key(8)], MEDIUM_DEVICE, 1)])
    assert kept.blocks() == {}


def test_a_snapshot_does_not_change_while_it_is_sent():
    kept = CacheSnapshot()
    kept.apply([stored(0, 2)])
    sending = snapshot_batches(kept.blocks())
    kept.apply([AllBlocksCleared(), stored(5, 9)])
    assert [event for batch in sending for event in batch][1:] == [stored(0, 1), stored(1, 2)]


@pytest.fixture
def moved_on(front):
    """A front whose logs keep two batches."""
    events = front.serving.events
    events.kv, events.byte_map = TopicLog(KV, kept_batches=2), TopicLog(BYTES, kept_batches=2)
    return front


def index(frames: list[tuple[str, int, Any]]) -> Index:
    found = Index()
    for _, _, (_, events, _) in frames:
        for kind, *fields in events:
            found.take({one.__name__: one for one in (BlockStored, BlockRemoved, AllBlocksCleared)}[kind](*fields))
    return found


async def test_a_late_reader_gets_a_marked_snapshot_and_then_what_happens(moved_on):
    changes = [stored(0, 4), state(3), stored(4, 6), BlockRemoved([key(5)], MEDIUM_DEVICE, 0)]
    for change in changes:
        await moved_on.change_cache(change)
    _, mark, batch = await read(moved_on, "", 3)
    assert mark[::2] == ("prfaas.snapshot", {"topic": KV, "seq": 3, "batches": 1})
    assert batch[:2] == (KV, 3)
    assert index([batch]).blocks == Index(changes).blocks
    await moved_on.change_cache(stored(6, 7))
    assert [frame[:2] for frame in await read(moved_on, "?from=4", 2)][1] == (KV, 4)


async def test_a_snapshot_of_many_batches_is_one_number(moved_on, monkeypatch):
    monkeypatch.setattr(kv_events, "EVENTS_PER_BATCH", 3)
    for change in (AllBlocksCleared(), stored(0, 4), stored(4, 8)):
        await moved_on.change_cache(change)
    _, mark, *frames = await read(moved_on, "", 2 + 3)
    assert mark[2]["batches"] == 3
    assert [seq for _, seq, _ in frames] == [2, 2, 2]
    assert index(frames).blocks == Index([stored(0, 8)]).blocks


@pytest.mark.parametrize("query", ["?from=7", "?from=1&epoch=another"])
async def test_numbers_of_another_life_begin_with_a_snapshot(front, query: str):
    await front.change_cache(stored(0, 1))
    await front.change_cache(stored(1, 2))
    _, mark, batch = await read(front, query, 3)
    assert (mark[0], mark[2]["seq"], batch[1]) == ("prfaas.snapshot", 1, 1)
    assert index([batch]).blocks == Index([stored(0, 2)]).blocks


async def test_what_a_reader_knew_is_void_even_before_anything_happened(front):
    _, mark, cleared = await read(front, "?from=7", 3)
    assert mark[2] == {"topic": KV, "seq": 0, "batches": 1}
    assert (cleared[1], cleared[2][1]) == (0, [["AllBlocksCleared"]])
    await front.change_cache(stored(0, 1))
    assert front.serving.events.kv.next_seq == 2, "no batch has the snapshot's number"


async def test_a_late_reader_learns_the_byte_map(moved_on):
    blocks = [ByteBlock(n, key(n), 64 * n) for n in range(BYTE_BLOCKS_PER_BATCH + 5)]
    for at in range(0, len(blocks), 300):
        moved_on.serving.events.learn(blocks[at : at + 300])
    _, mark, *frames = await read(moved_on, "", 4)
    assert mark[2] == {"topic": BYTES, "seq": 3, "batches": 2}
    assert [frame[:2] for frame in frames] == [(BYTES, 3)] * 2
    assert [pair["byte_hash"] for _, _, body in frames for pair in body["blocks"]] == list(range(len(blocks)))


@pytest.fixture
async def asker(moved_on) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    found = context.socket(zmq.DEALER)
    found.connect(f"tcp://{moved_on.host}:{moved_on.events_port + 1}")
    yield found
    context.destroy(linger=0)


async def test_a_replay_that_reaches_back_too_far_begins_with_a_snapshot(moved_on, asker):
    for n in range(5):
        await moved_on.change_cache(stored(n, n + 1))
    await asker.send_multipart([b"", bytes(8)])
    _, number, payload = await next_frames(asker)
    assert int.from_bytes(number, "big") == 4
    assert index([("", 4, msgspec.msgpack.decode(payload))]).blocks == Index([stored(0, 5)]).blocks
    assert (await next_frames(asker))[1:] == [b"\xff" * 8, b""]


def test_a_block_in_both_groups_is_kept_once():
    kept = CacheSnapshot()
    kept.apply([stored(0, 1), state(0)])
    (block,) = kept.blocks().values()
    assert (len(block.groups), block.token_ids) == (2, array("I", [0, 0]))
