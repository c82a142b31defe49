"""Proves that every data-parallel rank of an engine counts as a cache of its own, and that a request names its rank."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from prfaas import names
from prfaas.names import HUB
from prfaas.wire import headers
from prfaas.wire.routes import MAX_RANKS, EngineName, Instance
from prfaas_gateway.kv import foreign_events, manager

from .caches import until_metric
from .conftest import Worker, World, answer
from .publisher import CLEARED, Publisher, Vllm, next_host

pytestmark = pytest.mark.system

RANKS = 3
BATCHES = "prfaas_gateway_kv_batches_total"
PROMPTS = [[(n * (7 + seed) + seed) % 50_000 for n in range(9600)] for seed in range(RANKS)]


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
    monkeypatch.setattr(manager, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(manager, "MAX_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(foreign_events, "SILENCE_SECONDS", 0.2)


class Ranked:
    """Instance d0 of three ranks beside d1 of one, with a gateway before them."""

    def __init__(self, world: World):
        self.world = world
        self.publishers: list[Publisher] = []

    async def start(self, engine: EngineName = "vllm-nixl") -> None:
        instances = []
        for name, ranks in (("d0", RANKS), ("d1", 1)):
            worker = self.world.workers[name] = Worker(name, next_host())
            await worker.start()
            self.world.stack.push_async_callback(worker.stop)
            one = Instance(name=name, pool="d", cluster=HUB, role="decode", url=worker.url, ranks=ranks, engine=engine)
            instances.append(one)
            for rank in range(ranks):
                ports = names.KV_EVENTS_PORT + rank, names.KV_EVENTS_PORT + ranks + rank
                self.publishers.append(Publisher(worker.host, ports=ports))
        await self.world.start(instances=tuple(instances), tokens=100_000)
        await until_metric(self.world, 'prfaas_gateway_kv_instances{state="followed"}', RANKS + 1)

    async def ask(self, prompt: list[int], number: int = 0) -> tuple[str, str | None]:
        """Return who served this prompt, and the rank that the request named."""
        told = {headers.REQUEST_ID: hashlib.sha256(bytes([number])).hexdigest()}
        got = await self.world.post(
            json.dumps({"model": "m", "prompt": prompt}).encode(), "/v1/completions", headers=told
        )
        assert got.status == 200
        name = got.headers[headers.DECODE_INSTANCE]
        return name, self.world.workers[name].seen[-1].headers.get(headers.DATA_RANK)


@pytest.fixture
async def ranked(world) -> AsyncIterator[Ranked]:
    made = Ranked(world)
    yield made
    for one in made.publishers:
        await asyncio.to_thread(one.close)


async def test_a_prompt_goes_to_the_rank_that_has_its_blocks(ranked):
    await ranked.start()
    engine = Vllm()
    for publisher, prompt in zip(ranked.publishers, PROMPTS, strict=False):
        publisher.publish(engine.batch(*engine.stored(prompt)))
    await until_metric(ranked.world, BATCHES, RANKS)
    for _ in range(2):
        for rank, prompt in enumerate(PROMPTS):
            assert await ranked.ask(prompt) == ("d0", str(rank))
    ranked.publishers[1].publish(engine.batch(CLEARED))
    await until_metric(ranked.world, BATCHES, RANKS + 1)
    found = {await ranked.ask(PROMPTS[1], number) for number in range(9)}
    assert {name for name, _ in found} == {"d0", "d1"}, "a rank that lost its cache draws nobody"


@pytest.mark.system
async def test_prompts_that_nobody_has_spread_over_the_ranks_of_an_idle_instance(ranked):
    await ranked.start()
    served = Counter([await ranked.ask([number] * 960, number) for number in range(40)])
    assert {rank for name, rank in served if name == "d0"} == {"0", "1", "2"}


async def test_a_hot_prefix_spreads_over_ranks_as_over_instances(ranked):
    await ranked.start()
    engine = Vllm()
    ranked.publishers[0].publish(engine.batch(*engine.stored(PROMPTS[0][:960])))
    await until_metric(ranked.world, BATCHES, 1)
    all_asked, served = asyncio.Event(), Counter[str | None]()

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        served[request.headers.get(headers.DATA_RANK)] += 1
        if served.total() == 16:
            all_asked.set()
        await all_asked.wait()
        return await answer(request, body)

    for one in ranked.world.workers.values():
        one.reply = slow
    await asyncio.gather(*(ranked.ask(PROMPTS[0][:960], number) for number in range(16)))
    assert set(served) == {"0", "1", "2", None}, "none is named to an instance of one rank"
    assert served["0"] >= max(served["1"], served["2"]) > 0
    assert not ranked.world.state._in_flight


def test_where_the_engine_chooses_the_rank_the_mean_of_its_ranks_counts():
    one = Instance(name="a", pool="p", cluster=HUB, role="decode", url="http://a", ranks=3, engine="sglang")
    assert manager._cached_on(one, (90, 0, 0)) == 30
    assert manager._cached_on(msgspec.structs.replace(one, engine="vllm-nixl"), (90, 0, 0)) == 90


def test_events_and_logs_of_the_most_ranks_end_before_the_handshakes():
    assert names.kv_log_port(MAX_RANKS) + MAX_RANKS <= names.SIDE_CHANNEL_PORT
