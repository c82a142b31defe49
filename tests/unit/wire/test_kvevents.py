"""KV cache events: what we write reads without our types, and what other engines write reads here, in all forms."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.wire.kvevents import (
    ATTENTION_GROUP,
    MEDIUM_DEVICE,
    STATE_GROUP,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ByteBlock,
    ByteMapBatch,
    EventBatch,
    KvEvent,
    attention_stored,
    decode_byte_map,
    encode_byte_map,
    encode_events,
    read_events,
    state_stored,
)

pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode  # without types: what any msgpack library sees


def read(payload: bytes) -> list[KvEvent]:
    return list(read_events(payload))


def test_attention_blocks_are_written_in_vllms_positions():
    event = attention_stored([b"a" * 32, b"b" * 32], b"p" * 32, 64, "mla_attention")
    ts, events, rank = unpack(encode_events(EventBatch(12.5, [event])))
    assert (ts, rank) == (12.5, None)
    hashes = [b"a" * 32, b"b" * 32]
    assert events == [["BlockStored", hashes, b"p" * 32, [], 64, None, "GPU", None, None, 0, "mla_attention", None]]


def test_writes_a_state_checkpoint_as_a_mamba_block_of_another_group():
    event = state_stored(b"s" * 32, None, 64)
    (raw,) = unpack(encode_events(EventBatch(0.0, [event])))[1]
    assert raw == ["BlockStored", [b"s" * 32], None, [], 64, None, "GPU", None, None, STATE_GROUP, "mamba", None]
    assert STATE_GROUP != ATTENTION_GROUP


def test_removals_and_the_end_of_everything_are_written_in_vllms_positions():
    events = [BlockRemoved([b"a"], MEDIUM_DEVICE, STATE_GROUP), AllBlocksCleared()]
    assert unpack(encode_events(EventBatch(0.0, events, 3))) == [
        0.0,
        [["BlockRemoved", [b"a"], "GPU", 1], ["AllBlocksCleared"]],
        3,
    ]


hashes = st.one_of(st.binary(min_size=1, max_size=32), st.integers(0, 2**64 - 1))
stored = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=3),
    parent_block_hash=st.none() | hashes,
    token_ids=st.lists(st.integers(0, 2**20), max_size=5),
    block_size=st.integers(1, 1024),
    lora_id=st.none() | st.integers(0, 9),
    medium=st.sampled_from([None, "GPU", "CPU"]),
    extra_keys=st.none() | st.just([("salt",), None]),
    group_idx=st.none() | st.integers(0, 3),
    kv_cache_spec_kind=st.sampled_from([None, "mamba", "full_attention"]),
    kv_cache_spec_sliding_window=st.none() | st.integers(1, 4096),
)
removed = st.builds(BlockRemoved, st.lists(hashes, max_size=3), st.sampled_from([None, "GPU"]), st.none() | st.just(1))
batches = st.builds(
    EventBatch,
    st.floats(0, 2**31),
    st.lists(st.one_of(stored, removed, st.just(AllBlocksCleared())), max_size=4),
    st.none() | st.just(2),
)


@given(batches)
def test_what_is_written_is_read_back(batch):
    assert read(encode_events(batch)) == batch.events


@given(batches, st.booleans())
def test_maps_tagged_by_type_say_the_same(batch, whole_batch):
    def named(struct):
        return {name: getattr(struct, name) for name in struct.__struct_fields__}

    events = [{"type": type(event).__name__} | named(event) for event in batch.events]
    as_array = [batch.ts, events, batch.data_parallel_rank]
    as_map = {"ts": batch.ts, "events": events, "data_parallel_rank": batch.data_parallel_rank}
    assert read(pack(as_map if whole_batch else as_array)) == batch.events


def test_a_first_version_without_medium_or_groups_is_read():
    raw = [1.0, [["BlockStored", [5, 6], None, [1, 2], 1, None], ["BlockRemoved", [5]]]]
    assert read(pack(raw)) == [BlockStored([5, 6], None, [1, 2], 1), BlockRemoved([5])]


def test_newer_fields_and_kinds_are_skipped():
    newer = ["BlockRemoved", [9], "GPU", 0, "LOCAL", "owner", {"more": 1}]
    unknown = ["BlockMigrated", [9], "elsewhere"]
    as_map = {"type": "AllBlocksCleared", "reason": "reset"}
    unknown_map = {"type": "BlockMigrated", "block_hashes": [9]}
    events = read(pack([1.0, [newer, unknown, as_map, unknown_map], 0, "new field of the batch"]))
    assert events == [BlockRemoved([9], "GPU", 0), AllBlocksCleared()]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack("text"),
        pack([1.0]),
        pack({"events": []}),
        pack([1.0, [[]]]),
        pack([1.0, [["BlockStored", [1]]]]),
        pack([1.0, [{"type": "BlockStored", "block_hashes": [1]}]]),
        pack([1.0, [["BlockRemoved", ["text"]]]]),
        pack([1.0, [{"type": ["BlockRemoved"]}]]),
        pack([1.0, [[["BlockRemoved"]]]]),
        pack([1.0, [7]]),
    ],
)
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(ProtocolError, match="KV cache events"):
        read(payload)


def test_the_byte_map_reads_without_types_and_damage_is_refused():
    batch = ByteMapBatch(3.0, [ByteBlock(2**63, b"h" * 32, 64)])
    payload = encode_byte_map(batch)
    assert unpack(payload) == {"ts": 3.0, "blocks": [{"byte_hash": 2**63, "block_hash": b"h" * 32, "tokens": 64}]}
    assert decode_byte_map(payload) == batch
    with pytest.raises(ProtocolError, match="byte map"):
        decode_byte_map(payload[:-1])


@pytest.mark.parametrize("nesting", [b"\x91" * 100_000, b"\x92" * 100_000, b"\x81\xa6events" * 100_000])
def test_nesting_without_end_is_refused_like_any_nonsense(nesting):
    for decode in (read, decode_byte_map):
        with pytest.raises(ProtocolError):
            decode(nesting)


def test_sglangs_way_to_name_a_salt_counts_as_vllms():
    stored = {"type": "BlockStored", "block_hashes": [-7], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    for salt, keys in (("s", [("s",)]), ("", None)):
        (event,) = read(pack({"ts": 0.0, "events": [stored | {"cache_salt": salt}]}))
        assert (event.extra_keys, event.block_hashes) == (keys, [-7])
    positional = ["BlockStored", [-7], None, [1], 1, None, "GPU", {"cache_salt": "s", "session_id": "x"}]
    (event,) = read(pack([0.0, [positional]]))
    assert (event.extra_keys, event.lora_name, event.medium) == ([("s",)], None, "GPU")
