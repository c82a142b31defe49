"""Proves by a recording of a real vLLM that the gateway matches of a prompt what vLLM itself finds cached.

vllm_cache_events.json holds for each of several prompts its token ids (for texts and chats, by /tokenize), vLLM's own
count of cached tokens, and the batches of cache events that it caused. Lists and batches are packed. vLLM 0.32.0
served a Qwen3-Next of random weights on a CPU (blocks of 256 tokens, three groups of states, `--mamba-cache-mode
align`) with a cache of 40 blocks, so that blocks and states are evicted.

`destination` is of an instance that loads each prompt's cache from another one by a connector. It reports attention
alone then, and a state only if the prompt ends at a page; the prompt is computed again at the next turn.
"""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from prfaas.kvindex.bytes import TokenChain
from prfaas.kvindex.canonical import TOKEN_BYTES
from prfaas.kvindex.index import InstanceIndex
from prfaas.kvindex.tree import BlockTree
from prfaas_gateway.kv.foreign_events import ForeignEvents

RECORDED = json.loads((Path(__file__).parent / "vllm_cache_events.json").read_text())


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def matches(steps: list[dict[str, Any]]) -> list[int]:
    """Return the match of each prompt just before vLLM served it."""
    index = InstanceIndex(10_000, 1 << 16)
    events, found = ForeignEvents(index), list[int]()
    for step in steps:
        data = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in json.loads(unpacked(step["token_ids"])))
        found.append(index.match_tokens(TokenChain("", data, TOKEN_BYTES * index.block_tokens)))
        for batch in step["batches"]:
            for _ in events.take(unpacked(batch)):
                pass
    return found


@pytest.mark.parametrize("name", ["steps", "destination"])
def test_the_match_of_every_prompt_is_the_prefix_that_vllm_finds(name):
    steps = RECORDED[name]
    assert matches(steps) == [step["hit"] for step in steps]
    assert len({step["hit"] for step in steps}) >= 3, "hits of several lengths, and misses"


def test_without_the_states_that_are_not_kept_a_match_would_promise_too_much(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BlockTree, "note_states", lambda _self: None)
    for name in ("steps", "destination"):
        steps = RECORDED[name]
        assert any(found > step["hit"] for found, step in zip(matches(steps), steps, strict=True))
