"""Proves that a reader of an instance's events ends up with what stands there, whatever is lost, repeated or started
anew, and that a peer that lies gains nothing but nonsense about itself.
"""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tables import make_instance

from prfaas.errors import ProtocolError
from prfaas.kvindex.index import InstanceIndex
from prfaas.kvindex.keys import NONE, key_of
from prfaas.wire.kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ByteBlock,
    ByteMapBatch,
    EventBatch,
    KvEvent,
    encode_byte_map,
    encode_events,
)
from prfaas_gateway.kv.cache_events import LARGEST_BLOCK_TOKENS, CacheEvents
from prfaas_gateway.kv.mover_events import MoverEventReader, address_of

KV, BYTES = "kv", "bytes"


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(first: int, last: int, group: int = 0, kind: str = "mla_attention", **more) -> BlockStored:
    """The event of blocks first to last of one chain."""
    count = last - first + 1
    fields = {"block_size": 64, "medium": "GPU", "group_idx": group, "kv_cache_spec_kind": kind} | more
    parent = name(first - 1) if first > 1 else None
    return BlockStored([name(n) for n in range(first, last + 1)], parent, [0] * 64 * count, **fields)


def removed(*numbers: int, group: int = 0, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved([name(n) for n in numbers], medium, group)


class Peer:
    """An instance as its reader sees it."""

    def __init__(self, max_blocks: int = 1000):
        self.index = InstanceIndex(max_blocks, 1000)
        self.reading = MoverEventReader(self.index, CacheEvents(self.index))

    def say(self, topic: str, seq: int, payload: bytes) -> None:
        for _ in self.reading.take(topic, seq, payload):
            pass

    def tell(self, kind: str, **what) -> None:
        self.say(f"prfaas.{kind}", 0, msgspec.msgpack.encode(what))

    def greet(self, epoch: str = "e1") -> str:
        """Connect anew; return the path of the request."""
        path = self.reading.path
        self.tell("hello", epoch=epoch, first_seq=0, next_seq=9)
        return path

    def events(self, seq: int, *events: KvEvent) -> None:
        self.say(KV, seq, encode_events(EventBatch(0.0, list(events))))

    def teach(self, seq: int, *pairs: tuple[int, int]) -> None:
        blocks = [ByteBlock(byte_hash, name(block) if block else b"", 64 * block) for byte_hash, block in pairs]
        self.say(BYTES, seq, encode_byte_map(ByteMapBatch(0.0, blocks)))

    def match(self, last: int) -> int:
        return self.index.tree.usable(self.index.tree.find(key_of(name(last))))


@pytest.fixture
def peer() -> Peer:
    made = Peer()
    made.greet()
    return made


def test_distinguishes_attention_and_states_by_group(peer):
    peer.events(0, stored(1, 9), stored(4, 4, 1, "mamba"))
    assert peer.match(9) == 4
    peer.events(1, stored(8, 8, 1, "mamba", medium="CPU"), removed(8))
    assert peer.match(9) == 4, "a state without attention before it is none"
    peer.events(2, stored(8, 8))
    assert peer.match(9) == 8
    peer.events(3, removed(8, group=1))
    assert peer.match(9) == 8, "the state is in host memory"
    peer.events(4, removed(8, group=1, medium="CPU"))
    assert peer.match(9) == 4
    peer.events(5, AllBlocksCleared())
    assert (peer.match(9), len(peer.index.tree)) == (0, 0)


def test_windows_further_groups_and_other_sizes_are_left_out(peer):
    peer.events(0, stored(1, 3), stored(4, 5, 2, "sliding_window"), stored(4, 5, 3), stored(4, 5, block_size=16))
    peer.events(1, removed(2, group=3), removed(3, group=2))
    assert (peer.match(3), len(peer.index.tree)) == (3, 3)
    for size in (0, -1, LARGEST_BLOCK_TOKENS + 1):
        other = Peer()
        other.greet()
        other.events(0, stored(1, 3, block_size=size))
        assert len(other.index.tree) == 0


def test_a_reader_continues_where_it_was_and_takes_nothing_twice(peer):
    assert Peer().greet() == "/v1/kv-events"
    peer.events(0, stored(1, 2))
    peer.teach(1, (7, 1))
    peer.events(2, stored(3, 4))
    assert peer.greet() == "/v1/kv-events?from=3&epoch=e1"
    peer.events(2, AllBlocksCleared())
    assert peer.match(4) == 4


def test_a_gap_is_an_error_and_the_reader_requests_what_is_missing(peer):
    peer.events(0, stored(1, 2))
    with pytest.raises(ProtocolError, match="batch 2 came instead of batch 1"):
        peer.events(2, stored(3, 4))
    assert peer.greet() == "/v1/kv-events?from=1&epoch=e1"
    assert peer.reading.gaps == 1


def test_a_snapshot_takes_the_place_of_all_that_was_known(peer):
    peer.events(0, stored(1, 9))
    peer.teach(1, (7, 1))
    peer.tell("snapshot", seq=40, batches=2, is_whole=True)
    assert (len(peer.index.tree), len(peer.index.bytes)) == (0, 0)
    peer.events(40, stored(1, 3))
    peer.teach(40, (8, 2))
    peer.events(41, stored(4, 4))
    assert (peer.match(4), peer.index.bytes.get(8)) == (4, key_of(name(2)))
    assert (peer.reading.is_whole, peer.reading.snapshots) == (True, 1)
    peer.tell("snapshot", seq=50, batches=0, is_whole=False)
    peer.events(51, stored(1, 1))
    assert (len(peer.index.tree), peer.reading.is_whole) == (1, False), (
        "its mover began after its engine's first events"
    )


def test_a_reader_cut_off_within_a_snapshot_requests_another(peer):
    peer.events(0, stored(1, 9))
    peer.tell("snapshot", seq=40, batches=2, is_whole=True)
    peer.events(40, stored(1, 2))
    kv = int(peer.greet().partition("from=")[2].partition("&")[0])
    assert kv > 1 << 60, "a number that no log has"
    with pytest.raises(ProtocolError):
        peer.events(41, stored(3, 4))


def test_a_new_life_of_the_instance_voids_all_that_was_known(peer):
    peer.events(0, stored(1, 9), stored(4, 4, 1, "mamba"))
    peer.teach(1, (7, 1))
    peer.greet("e2")
    assert (len(peer.index.tree), len(peer.index.bytes)) == (0, 0)
    assert peer.reading.lives == 1
    peer.events(0, stored(1, 3, 5, "full_attention"))
    assert peer.match(3) == 3, "this model may have no states"


@pytest.mark.parametrize(("host", "rank", "port"), [("10.0.0.1", 0, 9001), ("[fd00::1]", 2, 9009)])
def test_a_rank_is_followed_at_its_first_data_port(host, rank, port):
    instance = make_instance("d0", url=f"https://{host}:8000", ranks=3, data_port=9001, rank_ports=4)
    assert address_of(instance, rank) == f"https://{host}:{port}"


NONSENSE = [
    (KV, b"\xc1"),
    (KV, msgspec.msgpack.encode([0.0, [["BlockStored"]]])),
    (BYTES, msgspec.msgpack.encode({"ts": 0, "blocks": [{"byte_hash": "x"}]})),
    ("prfaas.hello", msgspec.msgpack.encode({"epoch": "&from=0"})),
    ("prfaas.hello", msgspec.msgpack.encode({"epoch": "x" * 65})),
    ("prfaas.snapshot", msgspec.msgpack.encode({"seq": 1, "batches": -1, "is_whole": True})),
]


@pytest.mark.parametrize(("topic", "payload"), NONSENSE)
def test_nonsense_ends_the_connection_and_nothing_else(peer, topic, payload):
    with pytest.raises(ProtocolError):
        peer.say(topic, 0, payload)
    peer.greet()
    peer.events(0, stored(1, 2))
    assert peer.match(2) == 2


def test_refuses_frames_before_the_greeting_and_skips_unknown_topics(peer):
    with pytest.raises(ProtocolError, match=r"came before prfaas\.hello"):
        Peer().events(0, stored(1, 2))
    peer.say("prfaas.new", 0, b"whatever")
    peer.say("other@pod@m", 0, b"whatever")


def test_huge_batches_and_snapshots_stay_within_the_share():
    peer = Peer(max_blocks=100)
    peer.greet()
    steps = sum(1 for _ in peer.reading.take(KV, 0, encode_events(EventBatch(0.0, [stored(1, 10_000)]))))
    assert steps >= 10, "others run in between"
    assert (len(peer.index.tree), peer.index.tree.refused_blocks) == (100, 9900)
    assert peer.match(100) == 100, "the beginnings are kept"
    peer.tell("snapshot", seq=1 << 62, batches=1 << 62, is_whole=True)
    for _ in range(3):
        peer.events(1 << 62, *(stored(n, n, 9, "mamba") for n in range(1, 500)))
    assert len(peer.index.tree) <= 100
    peer.teach(1 << 62, *((number, 1) for number in range(50_000)))
    assert len(peer.index.bytes) <= 2 * 500 + 1024


events = st.one_of(
    st.builds(lambda first, more: stored(first, first + more), st.integers(1, 9), st.integers(0, 5)),
    st.builds(lambda at: stored(at, at, 1, "mamba"), st.integers(1, 12)),
    st.builds(lambda at, group: removed(at, group=group), st.integers(1, 12), st.integers(0, 1)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=12), st.data())
def test_after_any_losses_a_reader_ends_where_an_undisturbed_one_does(sent, data):
    whole, disturbed = Peer(), Peer()
    whole.greet()
    for seq, event in enumerate(sent):
        whole.events(seq, event)
    for is_last in [False] * 4 + [True]:
        start = int(disturbed.greet().partition("from=")[2].partition("&")[0] or 0)
        end, lost = (len(sent), -1) if is_last else data.draw(st.tuples(*[st.integers(start, len(sent))] * 2))
        with suppress(ProtocolError):
            for seq in range(start, end):
                if seq != lost:
                    disturbed.events(seq, sent[seq])
    for last in range(1, 15):
        found = [one.index.tree.find(key_of(name(last))) != NONE for one in (whole, disturbed)]
        assert found[0] == found[1]
        assert whole.match(last) == disturbed.match(last)
