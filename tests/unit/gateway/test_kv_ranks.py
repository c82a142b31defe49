"""Proves that every data-parallel rank of an engine counts as a separate cache, and that a request names its rank."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from prfaas import names
from prfaas.names import HUB
from prfaas.wire import headers
from prfaas.wire.routes import MAX_RANKS, Instance
from prfaas_gateway.kv import manager

from .conftest import answer
from .fleet import Fleet
from .publisher import CLEARED, Vllm

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("_quick_pauses")]

RANKS = 3
BATCHES = "prfaas_gateway_kv_batches_total"
PROMPTS = [[(n * (7 + seed) + seed) % 50_000 for n in range(9600)] for seed in range(RANKS)]


@pytest.fixture
async def ranked(world) -> AsyncIterator[Fleet]:
    """Instance d0 of three ranks beside d1 of one."""
    made = Fleet(world, d0=RANKS, d1=1)
    await made.start()
    await made.until('prfaas_gateway_kv_instances{state="followed"}', RANKS + 1)
    yield made
    for one in made.publishers.values():
        await asyncio.to_thread(one.close)


async def ask(ranked: Fleet, prompt: list[int], number: int = 0) -> tuple[str, str | None]:
    """Return who served this prompt, and the rank that the request named."""
    name = await ranked.ask(prompt, number)
    return name, ranked.world.workers[name].seen[-1].headers.get(headers.DATA_RANK)


async def test_a_prompt_goes_to_the_rank_that_has_its_blocks(ranked):
    engine = Vllm()
    for publisher, prompt in zip(ranked.publishers.values(), PROMPTS, strict=False):
        publisher.publish(engine.batch(*engine.stored(prompt)))
    await ranked.until(BATCHES, RANKS)
    for _ in range(2):
        for rank, prompt in enumerate(PROMPTS):
            assert await ask(ranked, prompt) == ("d0", str(rank))
    ranked.publishers["d0/1"].publish(engine.batch(CLEARED))
    await ranked.until(BATCHES, RANKS + 1)
    found = {await ask(ranked, PROMPTS[1], number) for number in range(9)}
    assert {name for name, _ in found} == {"d0", "d1"}, "a rank that lost its cache draws no request"


async def test_new_prompts_spread_across_the_ranks_of_an_idle_instance(ranked):
    served = Counter([await ask(ranked, [number] * 960, number) for number in range(40)])
    assert {rank for name, rank in served if name == "d0"} == {"0", "1", "2"}


async def test_a_hot_prefix_spreads_across_ranks_as_across_instances(ranked):
    engine = Vllm()
    ranked.publishers["d0"].publish(engine.batch(*engine.stored(PROMPTS[0][:960])))
    await ranked.until(BATCHES, 1)
    all_here, served = asyncio.Event(), Counter[str | None]()

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        served[request.headers.get(headers.DATA_RANK)] += 1
        if served.total() == 16:
            all_here.set()
        await all_here.wait()
        return await answer(request, body)

    for one in ranked.world.workers.values():
        one.reply = slow
    await asyncio.gather(*(ask(ranked, PROMPTS[0][:960], number) for number in range(16)))
    assert set(served) == {"0", "1", "2", None}, "none is named to an instance of one rank"
    assert served["0"] >= max(served["1"], served["2"]) > 0
    assert not ranked.world.state._in_flight


def test_where_the_engine_chooses_the_rank_the_mean_of_its_ranks_counts():
    one = Instance(name="a", pool="p", cluster=HUB, role="decode", url="http://a", ranks=3, engine="sglang")
    assert manager._cached_on(one, (90, 0, 0)) == 30
    assert manager._cached_on(msgspec.structs.replace(one, engine="vllm-nixl"), (90, 0, 0)) == 90


def test_events_and_logs_of_the_most_ranks_end_before_the_handshakes():
    assert names.kv_log_port(MAX_RANKS) + MAX_RANKS <= names.SIDE_CHANNEL_PORT
