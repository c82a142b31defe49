"""Proves that a gateway with an SLO refuses at once what could not begin in time, says when to come again, and takes
the next one as soon as there is room.
"""

import asyncio

import pytest
from aiohttp import web
from tests.waiting import eventually_async

from prfaas.names import HUB
from prfaas.wire import headers
from prfaas.wire.control import ThresholdUpdate
from prfaas.wire.profile import PoolProfile, Profile
from prfaas_scheduler.gateway import GatewayClient

from .caches import QUICK, hello, start, telling, until_metric
from .conftest import answer, prompt

pytestmark = pytest.mark.system

FOLLOWED = 'prfaas_gateway_kv_instances{state="followed"}'


SECONDS_A_TOKEN = Profile(state_bytes=1, token_bytes=1, token_seconds=0.01, samples=3, max_tokens=1 << 20)


@pytest.mark.parametrize("by", ["the table", "the scheduler"])
async def test_instances_that_show_no_profile_are_known_by_what_their_pool_says_or_was_measured_at(world, by):
    """vLLM answers no /v1/profile: its pool's profile tells how long a request waits there."""
    known = (PoolProfile(cluster=HUB, pool="decode", profile=SECONDS_A_TOKEN),)
    await world.start("d0", tokens=5000, ttft_slo_millis=30_000, profiles=known if by == "the table" else ())
    if by == "the scheduler":
        update = ThresholdUpdate(
            tokens=5000, bandwidth="Scarce", offload_clusters=(), expires_seconds=60, reason="", profiles=known
        )
        async with GatewayClient(world.control_socket) as control:
            await control.put_threshold(update)
    freed = asyncio.Event()

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        await freed.wait()
        return await answer(request, body)

    world.workers["d0"].reply = slow
    first = asyncio.create_task(world.post(prompt(40_000)))
    try:
        await eventually_async(lambda: world.workers["d0"].seen, "the first request arrives")
        refused = await world.post(prompt(400))
        assert (refused.status, refused.json["error"]["code"]) == (429, "slo_exceeded")
    finally:
        freed.set()
        assert (await first).status == 200


@pytest.mark.parametrize("slo", [30_000, None])
async def test_what_could_not_begin_in_time_is_refused_until_there_is_room(world, slo):
    """A token takes 10 ms to prefill here: 10,000 of them are 100 s."""
    freed = asyncio.Event()

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        await freed.wait()
        return await answer(request, body)

    profile = QUICK | {"max_tokens": 1 << 20}
    await start(world, {"d0": telling(hello(), profile=profile)}, tokens=5000, ttft_slo_millis=slo)
    await until_metric(world, FOLLOWED, 1)
    world.workers["d0"].reply = slow
    first = asyncio.create_task(world.post(prompt(40_000)))
    try:
        await eventually_async(lambda: world.workers["d0"].seen, "the first request arrives")
        if slo is None:
            second = asyncio.create_task(world.post(prompt(400)))
            await eventually_async(lambda: len(world.workers["d0"].seen) == 2, "the second request arrives")
            freed.set()
            assert (await second).status == 200
            return
        refused = await world.post(prompt(400))
        assert (refused.status, refused.json["error"]["code"]) == (429, "slo_exceeded")
        assert 0 < int(refused.headers["retry-after"]) <= 70
        assert "slo.ttftMillis is 30000" in refused.json["error"]["message"]
        assert headers.DECODE_INSTANCE not in refused.headers
        assert len(world.workers["d0"].seen) == 1, "the worker was not bothered"
    finally:
        freed.set()
        assert (await first).status == 200
    assert (await world.post(prompt(400))).status == 200
    assert (await world.post(prompt(400_000))).status == 200, "an idle system takes any length"
    assert await world.metric("prfaas_gateway_slo_refusals_total") == 1
    assert await world.metric('prfaas_gateway_requests_total{decision="none",outcome="rejected"}') == 1
