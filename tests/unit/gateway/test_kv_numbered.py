"""Proves what a reader of numbered batches believes after losses, restarts and lies: what the log of this very engine
says, and where that is not to be had, nothing of before.
"""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tests.tables import make_instance

from prfaas.errors import ProtocolError
from prfaas.kvindex import bytes as byte_chains
from prfaas.kvindex.bytes import TokenChain, pack_tokens, token_digests
from prfaas.kvindex.canonical import TOKEN_BYTES
from prfaas.kvindex.index import InstanceIndex
from prfaas_gateway.kv import manager
from prfaas_gateway.kv.foreign_events import ForeignEventReader, ForeignEvents, NumberedBatch
from prfaas_gateway.limits import Limits
from prfaas_gateway.metrics import GatewayMetrics
from prfaas_gateway.state import GatewayState

from .publisher import CLEARED, Engine, Sglang, SglangMaps, Vllm, VllmMaps

PROMPT = [n * 7 % 50_000 for n in range(160)]
OTHER = [n * 11 % 50_000 + 1 for n in range(160)]
ENGINES = [Vllm, VllmMaps, Sglang, SglangMaps]


class Peer:
    """An engine, its log, and its reader."""

    def __init__(self, engine: Engine | None = None, index: InstanceIndex | None = None):
        self.engine = engine or Vllm()
        self.index = index or InstanceIndex(1000, 1 << 16)
        self.events = ForeignEvents(self.index)
        self.reading = ForeignEventReader(self.events)
        self.log: list[tuple[int, bytes]] = []
        self.life = b""

    def does(self, *events: dict, is_lost: bool = False) -> None:
        """The engine publishes a batch, which the reader may miss."""
        seq, payload = len(self.log), self.engine.batch(*events)
        self.log.append((seq, payload))
        if not is_lost:
            self.hear(seq, payload)

    def hear(self, seq: int, payload: bytes) -> None:
        for _ in self.reading.published(NumberedBatch(seq, payload, self.life)):
            pass

    def ask(self, first_kept: int = 0) -> bool:
        """Read the log; return False where it lacks batches."""
        start = self.reading.question()
        for seq, payload in self.log:
            if seq >= max(start, first_kept):
                portions = self.reading.logged(NumberedBatch(seq, payload, self.life))
                if portions is None:
                    return False
                for _ in portions:
                    pass
        return self.reading.log_ended()

    def match(self, tokens: list[int], salt: str = "") -> int:
        data = b"".join(token.to_bytes(4, "little") for token in tokens)
        return self.index.match_tokens(TokenChain(salt, data, TOKEN_BYTES * self.index.block_tokens))


@pytest.fixture(params=ENGINES)
def peer(request) -> Peer:
    return Peer(request.param())


def test_a_prompt_of_token_ids_is_matched_as_far_as_its_blocks_stand(peer):
    peer.does(*peer.engine.stored(PROMPT[:80]))
    peer.does(*peer.engine.stored(PROMPT, first=80 // peer.engine.block_size))
    peer.does(*peer.engine.stored(OTHER[:64]))
    size = peer.engine.block_size
    assert peer.match(PROMPT) == 160
    assert peer.match([*PROMPT[:100], 9, *PROMPT[101:]]) == 100 // size * size
    assert (peer.match(OTHER), peer.match(OTHER[1:]), peer.match([])) == (64, 0, 0)
    assert peer.reading.is_whole
    peer.does(peer.engine.removed(PROMPT, first=3))
    assert peer.match(PROMPT) == 3 * size
    peer.does(peer.engine.removed(PROMPT), peer.engine.removed(OTHER[:64]))
    assert (peer.match(PROMPT), peer.events.emptied) == (0, 1)
    peer.does(*peer.engine.stored(PROMPT))
    peer.does(CLEARED, *peer.engine.stored(OTHER))
    assert (peer.match(PROMPT), peer.match(OTHER), peer.events.emptied) == (0, 160, 2)


def test_what_was_lost_is_taken_from_the_log_and_what_the_log_repeats_is_taken_once(peer):
    peer.does(*peer.engine.stored(PROMPT[:80]))
    peer.does(*peer.engine.stored(OTHER), is_lost=True)
    peer.does(peer.engine.removed(OTHER), is_lost=True)
    late = len(peer.log), peer.engine.batch(*peer.engine.stored(PROMPT, first=80 // peer.engine.block_size))
    peer.log.append(late)
    assert peer.reading.is_gap(NumberedBatch(3, b""))
    assert peer.ask()
    peer.hear(*late)
    assert (peer.match(PROMPT), peer.match(OTHER)) == (160, 0)
    assert (peer.reading.batches, peer.reading.lives, peer.reading.is_whole) == (4, 0, True)


def test_recognises_a_restarted_engine_by_its_log_despite_its_numbers(peer):
    for prompt in (PROMPT, OTHER, PROMPT[:20]):
        peer.does(*peer.engine.stored(prompt))
    reading = peer.reading
    for number, steps in enumerate(([OTHER], [OTHER, OTHER[:20], OTHER[:40], OTHER[:60]], []), 1):
        peer.log = [(seq, peer.engine.batch(*peer.engine.stored(tokens))) for seq, tokens in enumerate(steps)]
        reading.connected()
        assert not peer.ask()
        assert peer.ask()
        assert (peer.match(PROMPT), peer.match(OTHER)) == (0, 160 if steps else 0)
        assert (reading.lives, reading.is_whole) == (number, True)


def test_a_publisher_that_names_its_life_is_known_by_it_at_once(peer):
    peer.life = b"a" * 16
    peer.does(*peer.engine.stored(PROMPT))
    peer.log, peer.life = [], b"b" * 16
    peer.does(*peer.engine.stored(OTHER), is_lost=True)
    late = len(peer.log), peer.engine.batch(*peer.engine.stored(OTHER[:64]))
    assert peer.reading.is_gap(NumberedBatch(*late, peer.life)), "only its number fits"
    peer.log.append(late)
    assert not peer.ask()
    assert peer.ask()
    peer.hear(*late)
    assert (peer.match(PROMPT), peer.match(OTHER), peer.reading.lives, peer.reading.is_whole) == (0, 160, 1, True)


def test_a_log_that_forgot_the_beginning_gives_less_than_the_truth(peer):
    for prompt in (PROMPT[:80], OTHER):
        peer.does(*peer.engine.stored(prompt), is_lost=True)
    peer.does(*peer.engine.stored(PROMPT, first=80 // peer.engine.block_size), is_lost=True)
    peer.ask(first_kept=1)
    assert (peer.match(PROMPT), peer.match(OTHER)) == (0, 160)
    assert not peer.reading.is_whole


def test_without_a_log_a_gap_or_a_new_connection_voids_what_was_known(peer):
    peer.reading.question()
    peer.reading.no_log()
    peer.does(*peer.engine.stored(PROMPT))
    assert (peer.match(PROMPT), peer.reading.is_whole) == (160, True)
    peer.does(*peer.engine.stored(OTHER), is_lost=True)
    assert peer.reading.is_gap(NumberedBatch(2, b""))
    peer.reading.no_log()
    peer.does(*peer.engine.stored(OTHER[:40]))
    assert (peer.match(PROMPT), peer.match(OTHER) > 0, peer.reading.is_whole) == (0, True, False)
    peer.reading.connected()
    peer.reading.no_log()
    assert peer.match(OTHER) == 0


def test_requests_batches_again_that_the_log_lost_in_its_answer(peer):
    for end in (40, 80, 120, 160):
        peer.does(*peer.engine.stored(PROMPT[:end]), is_lost=True)
    whole, peer.log = peer.log, [peer.log[0], *peer.log[2:]]
    assert not peer.ask()
    assert peer.reading.next_number == 1
    peer.log = whole
    assert peer.ask()
    assert (peer.match(PROMPT), peer.reading.lives) == (160, 0)


def test_numbers_that_go_back_end_the_connection(peer):
    peer.does(*peer.engine.stored(PROMPT))
    with pytest.raises(ProtocolError, match="batch 0 came after batch 0"):
        peer.hear(0, peer.engine.batch())


def test_blocks_for_other_prompts_than_their_tokens_say_are_left_out():
    apart = [
        {"extra_keys": [["salt", ["image", 0]]] + [None] * 9},
        {"extra_keys": [[["image", 0]]] + [None] * 9},
        {"lora_name": "a"},
        {"lora_id": 3},
        {"extra_keys": [None, ["image"]]},
    ]
    for more in apart:
        for engine in (Vllm(), VllmMaps()):
            peer = Peer(engine)
            peer.does(*engine.stored(PROMPT[:80], **more))
            peer.does(*engine.stored(PROMPT, first=5))
            assert (peer.match(PROMPT), len(peer.index.tree), peer.reading.is_whole) == (0, 0, False)
            assert peer.match(PROMPT, "salt") == 0
    salted = Peer(SglangMaps())
    salted.does(*salted.engine.stored(PROMPT, cache_salt="s"))
    assert salted.match(PROMPT) == 0
    later = Peer()
    later.does(*later.engine.stored(PROMPT[:80]), *later.engine.stored(PROMPT, first=5, extra_keys=[["image"]]))
    assert later.match(PROMPT) == 80, "only a prompt's first block names a salt"
    harmless = Peer()
    harmless.does(*harmless.engine.stored(PROMPT, extra_keys=[None] * 10))
    assert harmless.match(PROMPT) == 160


@pytest.mark.parametrize("engine", [Vllm, VllmMaps])
def test_salted_blocks_are_matched_under_their_salt_alone(engine):
    """vLLM names the salt with the first block of a prompt."""
    peer = Peer(engine())
    peer.does(*peer.engine.stored(PROMPT[:80], extra_keys=[["s"], *[None] * 4]))
    peer.does(*peer.engine.stored(PROMPT, first=5, extra_keys=[None] * 5))
    assert [peer.match(PROMPT, salt) for salt in ("s", "t", "")] == [160, 0, 0]
    assert peer.reading.is_whole
    peer.does(*peer.engine.stored(OTHER))
    assert [peer.match(OTHER, salt) for salt in ("s", "")] == [0, 160], "control: without a salt"


@pytest.mark.parametrize("engine", [Vllm, VllmMaps])
def test_digests_of_tokens_which_movers_tell_are_as_good_as_the_tokens(engine):
    peer = Peer(engine())
    size = peer.engine.block_size

    def digests(tokens: list[int]) -> bytes:
        return token_digests(pack_tokens(tokens), TOKEN_BYTES * size)

    peer.does(*peer.engine.stored(PROMPT[:80], token_ids=digests(PROMPT[:80])))
    peer.does(*peer.engine.stored(PROMPT, first=80 // size))
    assert (peer.match(PROMPT), peer.match([*PROMPT[:100], 9, *PROMPT[101:]]), peer.match(OTHER)) == (160, 96, 0)
    assert peer.reading.is_whole
    peer.does(*peer.engine.stored(OTHER, token_ids=digests(OTHER)[:-1]))
    assert (peer.match(OTHER), peer.reading.is_whole) == (0, False), "control: not of all its blocks"


def test_of_a_hybrid_model_a_state_has_to_stand_at_the_match_in_any_order_of_events():
    peer = Peer()
    (blocks,), names = peer.engine.stored(PROMPT), peer.engine.names(PROMPT)
    state = blocks | {
        "group_idx": 1,
        "kv_cache_spec_kind": "mamba",
        "block_hashes": [names[4]],
        "parent_block_hash": names[3],
    }
    # Aligned states are sparse: one name, and the tokens of all blocks before it.
    peer.does(state, blocks)
    assert peer.match(PROMPT) == 80
    peer.does(state | {"block_hashes": [names[9]]})
    assert (peer.match(PROMPT), peer.match(PROMPT[:130])) == (160, 80), "a state beyond a prompt serves it nothing"
    removed = {"type": "BlockRemoved", "block_hashes": [names[9]], "medium": "GPU", "group_idx": 1}
    peer.does(removed)
    assert (peer.match(PROMPT), peer.reading.is_whole) == (80, True)
    peer.does(state | {"block_hashes": [names[7]]}, removed | {"block_hashes": [names[4], names[7]]})
    assert peer.match(PROMPT) == 0
    again = Peer()
    again.does(state, removed | {"block_hashes": [names[4]]}, blocks)
    assert again.match(PROMPT) == 0, "a state that came and went before its block"


def test_other_mediums_tell_only_names():
    peer = Peer()
    (blocks,), names = peer.engine.stored(PROMPT), peer.engine.names(PROMPT)
    host = blocks | {"medium": "CPU", "token_ids": [], "parent_block_hash": None}
    peer.does(host)
    assert len(peer.index.tree) == 0, "nothing is known of those blocks"
    peer.does(blocks, host, peer.engine.removed(PROMPT))
    assert peer.match(PROMPT) == 160
    peer.does({"type": "BlockRemoved", "block_hashes": names, "medium": "CPU"})
    assert peer.match(PROMPT) == 0


def test_blocks_of_tokens_or_sizes_that_cannot_be_match_nothing():
    for tokens in ([-1] * 16, [1 << 40] * 16):
        with pytest.raises(ProtocolError):
            Peer().does(*Vllm().stored(tokens))
    for size in (0, -16, 1 << 40):
        odd = Peer()
        odd.does(*Vllm().stored(PROMPT, block_size=size))
        assert odd.match(PROMPT) == 0


def test_recycled_places_do_not_keep_old_tokens():
    peer = Peer()
    for _ in range(3):
        peer.does(*peer.engine.stored(PROMPT), *peer.engine.stored(OTHER))
        peer.does(peer.engine.removed(PROMPT))
        peer.does(*peer.engine.stored([*OTHER[:32], *PROMPT], first=2))
        assert peer.match([*OTHER[:32], *PROMPT]) == 192
        assert (peer.match(PROMPT), peer.match(OTHER)) == (0, 160)
        peer.does(peer.engine.removed([*OTHER[:32], *PROMPT], first=2), peer.engine.removed(OTHER))
    assert len(peer.index.tree) == 0


@pytest.mark.parametrize("some_blocks", [9, 10])
async def test_the_blocks_of_a_long_prompt_are_hashed_in_a_thread(monkeypatch, some_blocks):
    threads: set[int] = set()

    def noted(data: bytes, block_bytes: int) -> bytes:
        threads.add(threading.get_ident())
        return token_digests(data, block_bytes)

    caches = manager.KvManager(GatewayState(Limits()), Mock(), GatewayMetrics(), 1000)
    caches.index.set_instances(["d0"])
    peer = Peer(index=caches.index["d0"])
    peer.does(*peer.engine.stored(PROMPT))
    part = manager.InstancePart(make_instance("d0", engine="vllm-nixl"), 0)
    stream = SimpleNamespace(is_whole=True)
    caches._followers["d0"] = SimpleNamespace(part=part, instance=part.instance, stream=stream, state="followed"), None
    monkeypatch.setattr(manager, "SOME_BLOCKS", some_blocks)
    monkeypatch.setattr(byte_chains, "token_digests", noted)
    assert await caches._by_tokens(pack_tokens(PROMPT), "") == {"d0": (160, True)}
    assert (threads == {threading.get_ident()}) == (some_blocks == 10)
