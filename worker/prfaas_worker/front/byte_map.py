"""What a request teaches routers that match bytes: which block of tokens surely lies behind each of its byte blocks.

The gateway hashes the same canonical bytes with the same code, and so learns, from one request that came here, how many
tokens of the next one this instance may have cached. It is a hint: workers decide on the tokens themselves. The work
comes after the request is on its way to the engine, for a long one in a thread.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from prfaas.kvindex.blocks import BLOCK_TOKENS, BlockChain, chain_root
from prfaas.kvindex.bytes import block_ends, byte_hashes
from prfaas.kvindex.canonical import canonical_chat, canonical_completion, tokens_before
from prfaas.wire.engine import Ready
from prfaas.wire.kvevents import ByteBlock
from prfaas_worker.front.openai import Job
from prfaas_worker.front.serving import Serving

INLINE_BYTES: Final = 16 << 10
"""A body up to this takes well under a millisecond."""


def teach(serving: Serving, body: bytes, job: Job) -> None:
    """Publish what a checked request teaches; nothing where it has several prompts."""
    ready = serving.engine.ready.result()
    if len(job.prompts) != 1 or not isinstance(ready, Ready):
        return
    token_bytes = serving.tokenizer.token_bytes
    if len(body) <= INLINE_BYTES:
        serving.events.learn(byte_blocks(body, job, ready.fingerprint, token_bytes))
        return
    loop = asyncio.get_running_loop()
    found = loop.run_in_executor(serving.reader(len(body)), byte_blocks, body, job, ready.fingerprint, token_bytes)
    found.add_done_callback(lambda done: done.cancelled() or serving.events.learn(done.result()))


def byte_blocks(body: bytes, job: Job, fingerprint: str, token_bytes: Callable[[int], bytes]) -> list[ByteBlock]:
    """Return the byte blocks of a request's body, with the last whole block of its only prompt's tokens in each.

    Those before the first whole block too: a reader that knows a byte block then knows all before it.
    """
    try:
        canonical = (canonical_chat if job.chat else canonical_completion)(msgspec.json.decode(body, type=dict))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    if canonical is None:
        return []
    token_ids = job.prompts[0].token_ids
    hashes = byte_hashes(canonical.root, canonical.data)
    counts = tokens_before(canonical, block_ends(hashes), token_ids, token_bytes)
    chain = BlockChain(chain_root(fingerprint, job.cache_salt))
    chain.extend(token_ids)
    blocks = [count // BLOCK_TOKENS for count in counts]
    return [
        ByteBlock(byte_hash, chain.hashes[block - 1] if block else b"", block * BLOCK_TOKENS)
        for byte_hash, block in zip(hashes, blocks, strict=True)
    ]
