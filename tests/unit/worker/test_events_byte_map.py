"""The byte map: what a request teaches is what a gateway computes from the same bytes, and never too many tokens.

Hashes are computed here a second time, only from their description.
"""

import asyncio
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from prfaas.wire.engine import Generate, LearnBytes, Ready
from prfaas.wire.kvevents import ByteBlock, decode_byte_map
from prfaas_worker.front.generate import INLINE_MAP_BYTES
from prfaas_worker.front.serving import ServedModel
from prfaas_worker.tokenizer import load_tokenizer

pytestmark = pytest.mark.system

FINGERPRINT = "f" * 64
ASSETS = Path(__file__).parents[3] / "worker/prfaas_worker/assets/kimi-linear-tiny"


@pytest.fixture
async def loaded(front):
    """A front with the model that ships along."""
    served = ServedModel(model_name="tiny", fingerprint=FINGERPRINT, vocab_size=264, max_context=100_000, max_choices=4)
    front.serving.loaded(served, load_tokenizer(ASSETS))
    await front.say(Ready(FINGERPRINT, str(ASSETS), 264, 100_000, 9000))
    await front.serving.engine.ready
    return front


async def ask(client, front, path: str, body: dict[str, Any]) -> tuple[Generate, list[ByteBlock]]:
    """Send a request and leave, once the engine has heard of it; return also the pairs that it is to publish."""
    asking = asyncio.create_task(client.session.post(f"{front.url}{path}", json=body).__aenter__())
    message, taught = await front.hear(), await front.hear()
    assert isinstance(message, Generate)
    assert isinstance(taught, LearnBytes)
    asking.cancel()
    return message, decode_byte_map(taught.payload).blocks


def token_names(token_ids: list[int], salt: str = "") -> list[bytes]:
    """SHA-256 chain over blocks of 64 tokens, as little-endian 32-bit integers."""
    parts = (FINGERPRINT.encode(), salt.encode())
    parent = hashlib.sha256(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()
    names = []
    for start in range(0, len(token_ids) - 63, 64):
        parent = hashlib.sha256(parent + struct.pack("<64I", *token_ids[start : start + 64])).digest()
        names.append(parent)
    return names


def byte_names(kind: str, data: bytes, salt: str = "") -> list[int]:
    """xxh3 chain over blocks of 256 bytes, each seeded with the one before."""
    seed = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([kind, "tiny", salt]))
    names = []
    for start in range(0, len(data) - 255, 256):
        seed = xxhash.xxh3_64_intdigest(data[start : start + 256], seed)
        names.append(seed)
    return names


@pytest.mark.parametrize("length", [1000, 2 * INLINE_MAP_BYTES])
@pytest.mark.parametrize("salt", ["", "tenant"])
async def test_a_completion_teaches_what_follows_from_its_bytes(client, loaded, length, salt):
    text = "".join(chr(97 + n * n % 26) for n in range(length))
    body = {"model": "tiny", "prompt": text, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
    message, found = await ask(client, loaded, "/v1/completions", body)
    bytes_of, blocks = byte_names("text", text.encode(), salt), token_names(message.token_ids, salt)
    assert [pair.byte_hash for pair in found] == bytes_of
    for cut, pair in enumerate(found, 1):
        assert pair.block_hash == blocks[pair.tokens // 64 - 1]
        # One token a byte, and one before the text: 256 bytes surely hold four blocks but for the one at the cut.
        assert 256 * cut - 64 <= pair.tokens <= 256 * cut


async def test_a_chat_teaches_tokens_of_its_contents(client, loaded):
    text = 'A line with "quotes".\n' * 60
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    message, found = await ask(client, loaded, "/v1/chat/completions", {"model": "tiny", "messages": messages})
    blocks = token_names(message.token_ids)
    assert len(found) > 3
    for pair in found:
        assert pair.block_hash == blocks[pair.tokens // 64 - 1]
    escaped = sum(json.dumps(text).count(mark) for mark in ("\\n", '\\"'))
    assert found[-1].tokens >= len(text) - escaped - 256


async def test_byte_blocks_before_the_first_block_of_tokens_are_taught_too(client, loaded):
    """Otherwise a reader could not distinguish them from those of no request."""
    variables = {"chat_template_kwargs": {"unused": "x" * 800}}
    messages = [{"role": "user", "content": "What is there? " * 40}]
    body = {"model": "tiny", "messages": messages} | variables
    _, found = await ask(client, loaded, "/v1/chat/completions", body)
    tokens = [pair.tokens for pair in found]
    assert tokens == sorted(tokens)
    assert tokens[0] == 0
    assert tokens[-1] > 0
