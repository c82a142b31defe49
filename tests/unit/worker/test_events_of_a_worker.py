"""A router that reads only a real worker's events knows what the worker has cached: its prediction is the worker's own
count of cached tokens.
"""

import asyncio
import itertools
from typing import Any

import pytest

from prfaas.kvindex.blocks import BlockChain, chain_root

from .test_events import Reader
from .test_two_workers import text_of

pytestmark = pytest.mark.system


class Router:
    """What is known of one worker, from its stream: the names of attention blocks and of states."""

    def __init__(self) -> None:
        self.groups: dict[int, set[bytes]] = {0: set(), 1: set()}

    def take(self, events: list[Any]) -> None:
        for kind, *fields in events:
            match kind:
                case "BlockStored":
                    self.groups[fields[8]].update(fields[0])
                case "BlockRemoved":
                    self.groups[fields[2]].difference_update(fields[0])
                case "AllBlocksCleared":
                    self.groups = {0: set(), 1: set()}

    def cached_tokens(self, names: list[bytes]) -> int:
        """The longest n with attention blocks to n and a state at n."""
        best = 0
        for tokens, name in zip(range(64, len(names) * 64 + 1, 64), names, strict=True):
            if name not in self.groups[0]:
                break
            if name in self.groups[1]:
                best = tokens
        return best


async def read_all(worker) -> Router:
    """Read all events of a worker so far."""

    def run() -> Router:
        router, reader = Router(), Reader(worker.host)
        ((_, _, hello),) = reader.take(1)
        count = sum(place["next_seq"] for place in hello["topics"].values())
        events = (frame for frame in reader if not frame[0].startswith("prfaas."))
        for topic, _, payload in itertools.islice(events, count):
            if topic.startswith("kv@"):
                router.take(payload[1])
        reader.close()
        return router

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
        router = await read_all(worker)
        answer = await client.complete(worker, prompt=prompt, max_tokens=2)
        tokens = int(answer.headers["x-prfaas-prompt-tokens"])
        # Bytes are tokens here, behind one token at the beginning; the last token is never taken from the cache.
        chain.extend([*await token_ids(client, worker, prompt)][: tokens - 1])
        assert int(answer.headers["x-prfaas-cached-tokens"]) == router.cached_tokens(chain.hashes)
    assert int((await client.complete(worker, prompt=first + "x", max_tokens=2)).headers["x-prfaas-cached-tokens"]) > 0
    async with client.session.post(f"{worker.url}/v1/cache/reset") as answer:
        assert (await answer.json())["freed_pages"] > 0
    assert (await read_all(worker)).groups == {0: set(), 1: set()}
    again = await client.complete(worker, prompt=first + "x", max_tokens=2)
    assert int(again.headers["x-prfaas-cached-tokens"]) == 0


async def token_ids(client, worker, prompt: str) -> list[int]:
    async with client.session.post(f"{worker.url}/tokenize", json={"model": "tiny", "prompt": prompt}) as answer:
        return (await answer.json())["tokens"]
