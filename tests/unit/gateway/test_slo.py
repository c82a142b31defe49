"""Proves that a gateway with an SLO refuses at once what could not begin in time, says when to come again, and takes
the next one as soon as there is room.
"""

import asyncio

import pytest
from aiohttp import web

from prfaas.wire import headers

from .caches import QUICK, hello, start, telling, until, until_metric
from .conftest import answer, prompt

FOLLOWED = 'prfaas_gateway_kv_instances{state="followed"}'


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
        await until(lambda: asyncio.sleep(0, bool(world.workers["d0"].seen)))
        if slo is None:
            second = asyncio.create_task(world.post(prompt(400)))
            await until(lambda: asyncio.sleep(0, len(world.workers["d0"].seen) == 2))
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
