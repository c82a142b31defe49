"""An engine that publishes cache events wants the gateway's memory, or to decide where the prompts of others go.

Its connection, its reader and its part of the index each have a bound. A control takes that bound out.
"""

import asyncio
import struct
from unittest.mock import Mock

import pytest
from tests.unit.gateway.publisher import CLEARED
from tests.unit.gateway.test_kv_numbered import OTHER, PROMPT, Peer
from tests.unit.kvindex.test_index import BLOCK_TOKENS, TEXTS, chain_of, keys_of, made, teach

from prfaas.errors import ProtocolError
from prfaas.kvindex import index as prefix_index
from prfaas.kvindex.bytes import BYTE_BLOCK, byte_hashes
from prfaas.kvindex.index import InstanceIndex, PrefixIndex
from prfaas_gateway.kv import cache_events, zmtp
from prfaas_gateway.kv.foreign_events import ForeignEventReader

UNBOUNDED = 1 << 40


def frame(body: bytes) -> bytes:
    """Return a frame of ZMTP which says that more of its message follow."""
    return b"\x03" + struct.pack(">Q", len(body)) + body


async def taken_of(sent: bytes) -> int:
    """Return how many bytes the gateway takes of what is sent as one message without an end."""
    reader = asyncio.StreamReader()
    reader.feed_data(sent)
    reader.feed_eof()
    with pytest.raises((ProtocolError, asyncio.IncompleteReadError)):
        await zmtp.ZmtpConnection(reader, Mock()).receive(1.0)
    return len(sent) - len(await reader.read())


ENDLESS = {"large frames": (frame(bytes(2 << 20)) * 6, 9 << 20), "many frames": (frame(b"") * 1000, 100)}
"""What is sent, and how many bytes of it may be taken."""


@pytest.mark.parametrize("what", ENDLESS)
async def test_a_message_without_end_is_not_gathered(what: str):
    """With libzmq, whose high-water mark counts messages, the process would grow by all of it."""
    sent, most_bytes = ENDLESS[what]
    assert 0 < await taken_of(sent) <= most_bytes


@pytest.mark.parametrize("what", ENDLESS)
async def test_control_without_the_bounds_of_a_message_all_of_it_is_gathered(monkeypatch, what: str):
    monkeypatch.setattr(zmtp, "MAX_MESSAGE_BYTES", UNBOUNDED)
    monkeypatch.setattr(zmtp, "MAX_PARTS", UNBOUNDED)
    sent, _ = ENDLESS[what]
    assert await taken_of(sent) == len(sent)


def flooded(max_blocks: int) -> Peer:
    """Return an engine that stored 600 blocks of names that nobody heard before, with states of a further group."""
    peer = Peer(index=InstanceIndex(max_blocks, 1 << 16))
    for number in range(3):
        tokens = list(range(number * 100_000, number * 100_000 + 16 * 200))
        peer.does(*peer.engine.stored(tokens))
        peer.does({**next(peer.engine.stored(tokens)), "group_idx": 5, "kv_cache_spec_kind": "mamba"})
    return peer


def test_a_flood_of_names_gets_its_share_of_memory_and_no_more():
    peer = flooded(max_blocks=100)
    assert len(peer.index.tree) == 100
    assert len(peer.events._chains) <= 102


def test_control_without_a_share_every_name_is_kept():
    peer = flooded(max_blocks=UNBOUNDED)
    assert len(peer.index.tree) == 600
    assert len(peer.events._chains) >= 600


def groups_after_a_flood() -> int:
    peer = Peer()
    (event,) = peer.engine.stored(PROMPT[:16])
    peer.does(*({**event, "group_idx": number, "kv_cache_spec_kind": "mamba"} for number in range(2000)))
    return len(peer.events._state_groups)


def test_a_flood_of_groups_is_not_remembered():
    assert groups_after_a_flood() == cache_events.PORTION_BLOCKS < 2000


def test_control_without_that_bound_each_group_is_remembered(monkeypatch):
    monkeypatch.setattr(cache_events, "PORTION_BLOCKS", UNBOUNDED)
    assert groups_after_a_flood() == 2000


def match_after_a_forgery() -> int:
    """Return what is known of the victim's cache after another instance said that the victim's blocks are gone."""
    index = PrefixIndex()
    index.set_instances(["victim", "evil"])
    victim, evil = (Peer(index=index[name]) for name in ("victim", "evil"))
    victim.does(*victim.engine.stored(PROMPT))
    assert victim.match(PROMPT) == len(PROMPT)
    evil.does(evil.engine.removed(PROMPT), CLEARED)
    return victim.match(PROMPT)


def test_a_forged_batch_about_another_instances_blocks_changes_nothing_there():
    assert match_after_a_forgery() == len(PROMPT)


def test_control_in_one_part_for_all_instances_it_empties_the_others(monkeypatch):
    shared = InstanceIndex(1000, 1 << 16)
    monkeypatch.setattr(PrefixIndex, "__getitem__", lambda _self, _name: shared)
    assert match_after_a_forgery() == 0


def after_it_took_the_address() -> Peer:
    """Return an engine at whose address another one goes on with its numbers."""
    peer = Peer()
    peer.life = b"a" * 16
    peer.does(*peer.engine.stored(PROMPT))
    peer.life = b"b" * 16
    peer.does(*peer.engine.stored(OTHER))
    return peer


def test_who_takes_the_address_of_an_engine_gets_no_prompt_for_what_that_one_had():
    peer = after_it_took_the_address()
    assert (peer.match(PROMPT), peer.match(OTHER), peer.reading.is_whole) == (0, 160, False)


def test_control_without_the_look_at_its_life_it_passes_for_the_former(monkeypatch):
    monkeypatch.setattr(ForeignEventReader, "_is_of_another_life", lambda *_: False)
    peer = after_it_took_the_address()
    assert (peer.match(PROMPT), peer.match(OTHER)) == (160, 160)


def forge(index: InstanceIndex, text: bytes, instead: bytes) -> None:
    """Say that blocks of another text lie behind the bytes of this one, and hold them."""
    keys = keys_of(instead)
    index.bytes.learn(byte_hashes(b"root", text), [keys[-1]] * (len(text) // BYTE_BLOCK))
    index.tree.store(keys, None, False, 0)


def test_a_false_map_changes_nothing_of_an_instance_that_has_its_own():
    index = made(d0=(30,), d1=(7,), evil=None)
    before = index.match(chain_of(TEXTS[0]), ["d0", "d1"], [])
    forge(index["evil"], TEXTS[0], TEXTS[1])
    index["evil"].tree.remove(keys_of(TEXTS[0]), False, 0)
    index["evil"].tree.store(keys_of(TEXTS[0]), keys_of(TEXTS[1])[-1], True, 0)
    found = index.match(chain_of(TEXTS[0]), ["d0", "d1", "evil"], [])
    assert {name: found[name] for name in before} == before


def test_control_in_one_map_for_all_instances_it_hides_their_caches():
    index = made(d0=(30,), evil=None)
    assert index.match(chain_of(TEXTS[0]), ["d0"], [])["d0"] > 0
    index["d0"].bytes = index["evil"].bytes
    forge(index["evil"], TEXTS[0], TEXTS[1])
    assert "d0" not in index.match(chain_of(TEXTS[0]), ["d0"], [])


def match_of_a_prefiller() -> int:
    """Return what is believed of an instance without a map. Two instances know the prompt, and a third one forges."""
    index = made(d0=None, d1=None, evil=None, p=None)
    index["p"].tree.store(keys_of(TEXTS[0])[:10], None, False, 0)
    index["p"].tree.store(keys_of(TEXTS[1])[10:], keys_of(TEXTS[1])[9], False, 0)
    for name in ("d0", "d1"):
        teach(index[name], TEXTS[0])
    forge(index["evil"], TEXTS[0], TEXTS[1])
    return index.match(chain_of(TEXTS[0]), ["d0", "d1", "evil"], ["p"])["p"]


def test_a_false_map_is_outvoted_about_instances_that_have_none():
    assert match_of_a_prefiller() == 10 * BLOCK_TOKENS


def test_control_without_the_vote_it_invents_a_cache_for_them(monkeypatch):
    monkeypatch.setattr(prefix_index, "_reference_map", lambda _chain, maps: maps[0])
    assert match_of_a_prefiller() == len(keys_of(TEXTS[1])) * BLOCK_TOKENS
