"""A router that reads only a real worker's events knows what the worker has cached: its prediction is the worker's own
count of cached tokens.
"""

import asyncio
import itertools
from contextlib import closing
from typing import Any

import pytest

from prfaas.kvindex.blocks import BlockChain, chain_root
from prfaas.names import WORKER_DATA_PORT
from prfaas.wire.kvevents import MEDIUM_DEVICE, read_events

from ...event_reader import EventReader, cached_after
from ...waiting import eventually_async
from .prompts import text_of

pytestmark = pytest.mark.system


Blocks = dict[tuple[Any, ...], tuple[Any, ...]]


def cached_tokens(blocks: Blocks, names: list[bytes]) -> int:
    """The longest n with attention blocks to n and a state at n."""
    best = 0
    for tokens, name in zip(range(64, len(names) * 64 + 1, 64), names, strict=True):
        if (0, MEDIUM_DEVICE, name) not in blocks:
            break
        if (1, MEDIUM_DEVICE, name) in blocks:
            best = tokens
    return best


async def read_all(worker) -> Blocks:
    """Read all events of a worker so far."""

    def run() -> Blocks:
        with closing(EventReader(worker.host, WORKER_DATA_PORT)) as reader:
            ((_, _, hello),) = reader.take(1)
            batches = (frame for frame in reader if not frame[0].startswith("prfaas."))
            kept = [body for topic, _, body in itertools.islice(batches, hello["next_seq"]) if topic == "kv"]
        return cached_after(event for payload in kept for event in read_events(payload))

    return await asyncio.to_thread(run)


async def fingerprint(client, worker) -> str:
    async with client.session.get(f"{worker.url}/v1/profile") as answer:
        return (await answer.json())["fingerprint"]


@pytest.fixture
async def worker(launch):
    return await launch("cached", "--profile-seconds", "0").ready()


async def test_a_router_predicts_what_is_cached_and_a_reset_clears_its_index(client, worker):
    names = chain_root(await fingerprint(client, worker), "")
    first = text_of(700, seed=1)
    for prompt in (first, first + text_of(100, seed=2), first[:300] + text_of(300, seed=3)):
        chain = BlockChain(names)
        blocks = await read_all(worker)
        answer = await client.complete(worker, prompt=prompt, max_tokens=2)
        tokens = int(answer.headers["x-prfaas-prompt-tokens"])
        # Bytes are tokens here, behind one token at the beginning; the last token is never taken from the cache.
        chain.extend([*await token_ids(client, worker, prompt)][: tokens - 1])
        assert int(answer.headers["x-prfaas-cached-tokens"]) == cached_tokens(blocks, chain.hashes)
    assert int((await client.complete(worker, prompt=first + "x", max_tokens=2)).headers["x-prfaas-cached-tokens"]) > 0
    async with client.session.post(f"{worker.url}/v1/cache/reset") as answer:
        assert (await answer.json())["freed_pages"] > 0
    # The reset is answered before its event has gone through the mover.
    await eventually_async(lambda: _is_empty(worker), "the reset is among the events")
    again = await client.complete(worker, prompt=first + "x", max_tokens=2)
    assert int(again.headers["x-prfaas-cached-tokens"]) == 0


async def _is_empty(worker) -> bool:
    return await read_all(worker) == {}


async def token_ids(client, worker, prompt: str) -> list[int]:
    async with client.session.post(f"{worker.url}/tokenize", json={"model": "tiny", "prompt": prompt}) as answer:
        return (await answer.json())["tokens"]
