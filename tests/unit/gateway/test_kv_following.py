"""Proves that the gateway learns over HTTP what instances have cached and routes by it, names where a prefix is worth
fetching from, and that no peer's stream, however broken, reaches further than what is believed of that peer.
"""

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from aiohttp import web
from tests.waiting import eventually_async

from prfaas.names import HUB
from prfaas.wire.kvevents import EventBatch, encode_events
from prfaas_gateway.request import place_salt

from .caches import (
    CONTENT_TYPE,
    QUICK,
    body_of,
    frame,
    hello,
    holding,
    leg_of,
    served,
    served_by,
    start,
    telling,
    until_metric,
)
from .publisher import Vllm

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("_quick_pauses")]


async def test_a_prompt_goes_where_its_beginning_is_cached_and_others_spread(world):
    mine, theirs, new = (body_of(seed) for seed in ("mine", "theirs", "new"))
    caches = {"d0": telling(holding(mine)), "d1": telling(holding(theirs)), "d2": telling(hello())}
    await start(world, caches, tokens=5000)
    await until_metric(world, "prfaas_gateway_kv_batches_total", 4)
    assert await world.metric("prfaas_gateway_kv_blocks") == 2 * 4096 // 64
    assert await world.metric("prfaas_gateway_kv_byte_blocks") == 2 * 4096 // 256
    assert await served_by(world, mine) == {"d0"}
    assert await served_by(world, theirs) == {"d1"}
    assert await served_by(world, new) == {"d0", "d1", "d2"}


async def test_vllm_with_a_mover_is_matched_by_token_ids_under_the_salt_of_its_places(world):
    engine, salts = Vllm(), [[place_salt({"eu"}, "")], *[None] * 59]
    mine, theirs = ([n * step % 50_000 for n in range(960)] for step in (7, 11))
    caches = {
        name: telling(hello() + frame("kv", 0, engine.batch(*engine.stored(tokens, extra_keys=salts))))
        for name, tokens in (("d0", mine), ("d1", theirs))
    }
    await start(world, caches, tokens=100_000, engine="vllm-prfaas")
    await until_metric(world, "prfaas_gateway_kv_batches_total", 2)
    for tokens, name in ((mine, "d0"), (theirs, "d1")):
        assert await served_by(world, json.dumps({"model": "m", "prompt": tokens}).encode()) == {name}


async def test_an_instance_that_leaves_is_forgotten_and_one_that_comes_is_followed(world):
    mine = body_of("mine")
    await start(world, {"d0": telling(holding(mine)), "d1": telling(hello())}, tokens=5000)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 16)
    remaining = [one for one in world.table.instances if one.name != "d0"]
    world.write_table(tokens=5000, instances=tuple(remaining), generation=2)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 0)
    await until_metric(world, 'prfaas_gateway_kv_instances{state="followed"}', 1)
    world.write_table(tokens=5000, generation=3)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 16)


async def test_a_lost_connection_is_made_again_and_continues_where_it_was(world):
    requests, mine = [], body_of("mine")

    async def cache(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/kv-events" and requests:
            return await telling(hello(), requests=requests)(request)
        if request.path == "/v1/profile":
            return web.Response(status=404)
        requests.append(request.query_string)
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await response.prepare(request)
        await response.write(holding(mine))
        return response

    await start(world, {"d0": cache, "d1": telling(hello())}, tokens=5000)
    await eventually_async(lambda: len(requests) > 1, "the gateway asks again")
    assert requests == ["", "from=2&epoch=e1"]
    assert await served_by(world, mine) == {"d0"}


def status(code: int) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=code)

    return answer


async def test_instances_that_tell_nothing_are_judged_by_what_was_sent_to_them(world):
    await start(world, {"d0": status(404), "d1": status(404)}, tokens=5000)
    await until_metric(world, 'prfaas_gateway_kv_instances{state="silent"}', 2)
    (first,) = await served_by(world, body_of("one"), 1)
    assert await served_by(world, body_of("one")) == {first}
    assert await served_by(world, body_of("one", 8000)) == {first}
    assert await world.metric("prfaas_gateway_kv_matched_tokens_total") > 0


async def test_an_instance_of_which_events_were_lost_is_judged_by_what_was_sent_to_it_too(world):
    mine = body_of("mine")
    lost = frame("prfaas.snapshot", 0, msgspec.msgpack.encode({"seq": 7, "batches": 0, "is_whole": False}))
    await start(world, {"d0": telling(hello() + lost), "d1": telling(hello() + lost)}, tokens=5000)
    await until_metric(world, 'prfaas_gateway_kv_instances{state="followed"}', 2)
    (first,) = await served_by(world, mine, 1)
    assert await served_by(world, mine) == {first}


async def test_instances_that_cannot_tell_now_are_not_judged(world):
    await start(world, {"d0": status(503), "d1": status(503)}, tokens=5000)
    await until_metric(world, 'prfaas_gateway_kv_instances{state="lost"}', 2)
    assert await served_by(world, body_of("one")) == {"d0", "d1"}


@pytest.mark.parametrize("profile", [QUICK, None])
async def test_a_prefill_learns_of_an_instance_that_has_more_where_that_is_known_to_pay(world, profile):
    mine, gate = body_of("mine"), asyncio.Event()
    await start(world, {"d0": telling(holding(mine)), "d1": telling(hello(), profile=profile)}, tokens=5000)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 16)
    await until_metric(world, 'prfaas_gateway_kv_instances{state="followed"}', 2)
    owner, other = (world.workers[name] for name in ("d0", "d1"))
    quick = owner.reply

    async def held(request: web.Request, body: bytes) -> web.StreamResponse:
        await gate.wait()
        return await quick(request, body)

    owner.reply = other.reply = held
    asking = [asyncio.create_task(world.post(mine, "/v1/completions")) for _ in range(20)]
    await eventually_async(lambda: len(served(owner, other)) == 20, "20 requests arrive")
    if profile:
        await eventually_async(lambda: len(owner.seen) == 20, "a prefix is asked for by each of the other's requests")
    gate.set()
    assert {(await one).status for one in asking} == {200}
    assert owner.seen, "the first ones went where the prompt is"
    given, fetched = ([leg for one in seen if (leg := leg_of(one))] for seen in (owner.seen, other.seen))
    assert other.seen
    assert len(fetched) == (len(other.seen) if profile else 0)
    assert {leg["transfer_id"] for leg in fetched} == {leg["transfer_id"] for leg in given}
    assert {(leg["role"], leg["tokens"]) for leg in given} == ({("source", 4096)} if profile else set())
    assert {(leg["role"], leg["tokens"], leg["cluster"]) for leg in fetched} <= {("destination", 4096, HUB)}
    assert await world.metric("prfaas_gateway_kv_prefixes_total") == len(fetched)


HOSTILE = {
    "an endless frame": struct.pack("!I", 0xFFFFFFFF) + b"x" * 100_000,
    "a frame of nonsense": struct.pack("!I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
    "no greeting": frame("kv", 0, b""),
    "a gap": hello() + frame("kv", 77, encode_events(EventBatch(0.0, []))),
    "half a frame": hello() + struct.pack("!I", 100) + b"x",
    "deep nesting": hello() + frame("kv", 0, b"\x91" * 100_000),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_broken_stream_harms_no_other_instance(world, what):
    mine, requests = body_of("mine"), []

    async def cache(request: web.Request) -> web.StreamResponse:
        requests.append(request.path)
        response = web.StreamResponse(headers={"content-type": CONTENT_TYPE})
        await response.prepare(request)
        await response.write(HOSTILE[what])
        return response

    await start(world, {"d0": cache, "d1": telling(holding(mine))}, tokens=5000)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 16)
    await eventually_async(lambda: requests.count("/v1/kv-events") >= 3, "the gateway asks three times")
    assert await served_by(world, mine) == {"d1"}
