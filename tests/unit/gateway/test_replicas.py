"""Proves how far replicas of a gateway agree: on the same events each places a prompt where the other does, and where
their own loads differ, what one misses is bounded by what the others have placed. And that a second instance gets a
prefix that more requests need than one instance can serve.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from tests.waiting import eventually_async

from prfaas.wire import headers

from .caches import CONTENT_TYPE, QUICK, body_of, hello, holding, leg_of, served, start, telling, until_metric
from .conftest import World, answer

pytestmark = pytest.mark.system

PAIRS = "prfaas_gateway_kv_byte_blocks"
FOLLOWED = 'prfaas_gateway_kv_instances{state="followed"}'


@pytest.fixture
async def replica(world, tmp_path) -> AsyncIterator[World]:
    """A second gateway before the workers of `world`, once `join` has started it."""
    directory = tmp_path / "replica"
    directory.mkdir()
    made = World(directory)
    async with made.stack:
        yield made
        made.running.state.check_integrity()


async def join(world: World, replica: World, pairs: int) -> None:
    """Start both before the same workers, and wait until they know the same."""
    replica.workers = world.workers
    await replica.start(tokens=5000)
    for one in (world, replica):
        await until_metric(one, FOLLOWED, len(world.workers))
        await until_metric(one, PAIRS, pairs)


async def placed(gateway: World, body: bytes, number: int) -> str:
    request_id = {headers.REQUEST_ID: hashlib.sha256(bytes([number])).hexdigest()}
    got = await gateway.post(body, "/v1/completions", headers=request_id)
    assert got.status == 200
    return got.headers[headers.DECODE_INSTANCE]


async def test_two_gateways_on_the_same_events_place_the_same_prompt_at_the_same_instance(world, replica):
    mine, theirs, both, new = (body_of(seed) for seed in ("mine", "theirs", "both", "new"))
    caches = {"d0": telling(holding(mine, both)), "d1": telling(holding(theirs)), "d2": telling(holding(both))}
    await start(world, caches, tokens=5000)
    await join(world, replica, 4 * 16)
    for body, places in ((mine, {"d0"}), (theirs, {"d1"}), (both, {"d0", "d2"}), (new, {"d0", "d1", "d2"})):
        found = [(await placed(world, body, n), await placed(replica, body, n)) for n in range(12)]
        assert all(one == other for one, other in found), "a retry at another replica finds the same instance"
        assert {one for one, _ in found} == places


async def test_what_one_gateway_has_placed_moves_only_its_own_choice_and_only_while_it_lasts(world, replica):
    mine, gate = body_of("mine"), asyncio.Event()
    await start(world, {"d0": telling(holding(mine)), "d1": telling(hello())}, tokens=5000)
    await join(world, replica, 16)

    async def held(request: web.Request, body: bytes) -> web.StreamResponse:
        await gate.wait()
        return await answer(request, body)

    workers = world.workers.values()
    for one in workers:
        one.reply = held
    asking = [asyncio.create_task(world.post(mine, "/v1/completions")) for _ in range(20)]
    try:
        await eventually_async(lambda: sum(len(one.seen) for one in workers) == 20, "20 requests arrive")
        assert {name for name in world.workers if world.state.load(name)} == {"d0", "d1"}
        assert replica.state.load("d0") == replica.state.load("d1") == 0, "it knows nothing of the other's"
        for one in workers:
            one.reply = answer
        assert {await placed(replica, mine, number) for number in range(6)} == {"d0"}
    finally:
        gate.set()
        assert {(await one).status for one in asking} == {200}
    assert [await placed(one, mine, 0) for one in (world, replica)] == ["d0", "d0"], "they agree again"


async def test_a_second_instance_gets_a_prefix_that_is_too_hot_for_one(world):
    """The stand-ins tell of what they computed or fetched, as our workers do. It takes no rule for hot prefixes: more
    waits at the first than the prefix saves, and the second learns where to fetch it."""
    hot, gate, arrived = body_of("hot"), asyncio.Event(), asyncio.Event()

    async def telling_later(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/profile":
            return await telling(b"", profile=QUICK)(request)
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await response.prepare(request)
        await response.write(hello())
        await arrived.wait()
        await response.write(holding(hot)[len(hello()) :])
        await asyncio.Event().wait()
        return response

    await start(world, {"d0": telling(holding(hot)), "d1": telling_later}, tokens=5000)
    await until_metric(world, PAIRS, 16)
    await until_metric(world, FOLLOWED, 2)
    first, second = world.workers["d0"], world.workers["d1"]

    async def held(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.url.port == second.port and leg_of(second.seen[-1]):
            arrived.set()
        await gate.wait()
        return await answer(request, body)

    first.reply = second.reply = held
    ending = json.loads(hot)["prompt"]
    bodies = [json.dumps({"model": "m", "prompt": ending + f" and {n}"}).encode() for n in range(20)]
    asking = [asyncio.create_task(world.post(one, "/v1/completions")) for one in bodies]
    try:
        await until_metric(world, PAIRS, 32)
        seen = len(served(first)), len(served(second))
        assert min(seen) > 0
        asking += [asyncio.create_task(world.post(one, "/v1/completions")) for one in bodies]
        await eventually_async(lambda: len(served(first, second)) == 40, "40 requests arrive")
    finally:
        gate.set()
        assert {(await one).status for one in asking} == {200}
    later = [*served(first)[seen[0] :], *served(second)[seen[1] :]]
    assert len(served(first)) > seen[0], "the first still serves it"
    assert len(served(second)) > seen[1], "and so does the second"
    assert not any(map(leg_of, later)), "no instance has to fetch it"
    idle = [await world.post(hot, "/v1/completions", headers={headers.REQUEST_ID: f"{n}" * 8}) for n in range(12)]
    assert {one.headers[headers.DECODE_INSTANCE] for one in idle} == {"d0", "d1"}
