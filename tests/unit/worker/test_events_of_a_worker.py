"""A router that reads a real worker's events alone knows what the worker has cached: its prediction is the worker's own
count of cached tokens, and what it learns of bytes leads to the same blocks.
"""

import asyncio
import http.client
import json
import random
import struct
from typing import Any

import msgspec
import pytest

from prfaas.kvindex.blocks import BlockChain, chain_root
from prfaas.kvindex.bytes import byte_hashes
from prfaas.kvindex.canonical import canonical_completion

pytestmark = pytest.mark.system


class Router:
    """What is known of one worker, from its stream: attention blocks and states by name, tokens behind byte blocks."""

    def __init__(self) -> None:
        self.groups: dict[int, set[bytes]] = {0: set(), 1: set()}
        self.behind: dict[int, tuple[bytes, int]] = {}
        self.places: set[tuple[int, str, bytes]] = set()
        self.removed = 0

    def take(self, topic: str, payload: Any) -> None:
        if topic.startswith("bytes@"):
            for pair in payload["blocks"]:
                self.behind[pair["byte_hash"]] = pair["block_hash"], pair["tokens"]
        elif topic.startswith("kv@"):
            for kind, *fields in payload[1]:
                match kind:
                    case "BlockStored":
                        self.groups[fields[8]].update(fields[0])
                        self.places.update((fields[8], fields[5], name) for name in fields[0])
                    case "BlockRemoved":
                        self.groups[fields[2]].difference_update(fields[0])
                        self.places.difference_update((fields[2], fields[1], name) for name in fields[0])
                        self.removed += 1
                    case "AllBlocksCleared":
                        self.groups = {0: set(), 1: set()}
                        self.places.clear()

    def cached_tokens(self, names: list[bytes]) -> int:
        """The longest n with attention blocks to n and a state at n."""
        best = 0
        for tokens, name in zip(range(64, len(names) * 64 + 1, 64), names, strict=True):
            if name not in self.groups[0]:
                break
            if name in self.groups[1]:
                best = tokens
        return best


async def read_all(worker, query: str = "") -> Router:
    """Read everything that a worker has told so far, or the snapshot of it."""

    def run() -> Router:
        router = Router()
        connection = http.client.HTTPConnection(worker.host, 8000, timeout=20)
        connection.request("GET", f"/v1/kv-events{query}")
        with connection.getresponse() as answer:
            left: dict[str, int] = {}
            while True:
                topic, _, payload = msgspec.msgpack.decode(answer.read(*struct.unpack("!I", answer.read(4))))
                body = msgspec.msgpack.decode(payload)
                if topic == "prfaas.hello":
                    left = {name: place["next_seq"] for name, place in body["topics"].items()}
                elif topic == "prfaas.snapshot":
                    left[body["topic"]] = body["batches"]
                else:
                    router.take(topic, body)
                    left[topic] = max(left.get(topic, 0) - 1, 0)
                if not any(left.values()):
                    break
        connection.close()
        return router

    return await asyncio.to_thread(run)


async def fingerprint(client, worker) -> str:
    async with client.session.get(f"{worker.url}/v1/profile") as answer:
        return (await answer.json())["fingerprint"]


def text_of(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh (),.\n", k=length))


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


async def test_bytes_lead_to_blocks_that_the_worker_has(client, worker):
    prompt = text_of(900, seed=4)
    await client.complete(worker, prompt=prompt, max_tokens=2)
    router = await read_all(worker)
    longer = json.dumps({"model": "tiny", "prompt": prompt + text_of(500, seed=5)}).encode()
    canonical = canonical_completion(json.loads(longer))
    assert canonical is not None
    known = [router.behind[name] for name in byte_hashes(canonical.root, canonical.data) if name in router.behind]
    assert [tokens for _, tokens in known] == [192, 448, 704]
    assert all(block in router.groups[0] for block, _ in known)


async def test_a_router_that_comes_late_knows_the_same(client, launch):
    # Too little memory for all prompts, beside 2 MiB of states: some blocks are gone.
    flags = ("--cache-mib", "3", "--max-context", "2048", "--profile-seconds", "0")
    worker = await launch("late", *flags).ready()
    for seed in (6, 7, 6, 8, 9, 10, 9):
        await client.complete(worker, prompt=text_of(1500, seed=seed), max_tokens=70)
    early, late = await read_all(worker), await read_all(worker, "?from=999999&bytes_from=999999")
    assert late.places == early.places
    assert {(group, medium) for group, medium, _ in late.places} == {(0, "GPU"), (1, "GPU")}
    assert late.behind == early.behind
    assert early.removed > 0 == late.removed


def test_a_router_that_ignored_states_would_promise_too_much():
    router = Router()
    router.groups[0].update([b"a", b"b", b"c"])
    router.groups[1].add(b"b")
    assert router.cached_tokens([b"a", b"b", b"c", b"d"]) == 128
    router.groups[1].clear()
    assert router.cached_tokens([b"a", b"b", b"c"]) == 0
