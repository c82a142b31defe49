"""A request that kills whichever engine gets it wants to kill them all, by the gateway's own retries."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from prfaas.routing.quarantine import QUARANTINE_SECONDS
from prfaas_gateway import attempts

ENGINES = ("d0", "d1", "d2", "d3")
MARK = "deadly"


def body(word: str, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": word}], **fields}).encode()


async def start(world, dies) -> list[str]:
    """Start engines that die of a request with the mark, and start again; return the list of their deaths."""
    await world.start(*ENGINES)
    deaths: list[str] = []
    for name in ENGINES:
        healthy = world.workers[name].reply

        async def reply(request: web.Request, sent: bytes, name: str = name, healthy: Any = healthy):
            if MARK.encode() not in sent:
                return await healthy(request, sent)
            deaths.append(name)
            return await dies(request)

        world.workers[name].reply = reply
    return deaths


async def at_once(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError


async def after_its_head(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"half')
    return await at_once(request)


@pytest.mark.parametrize("dies", [at_once, after_its_head])
async def test_it_kills_two_and_no_third_one(world, dies):
    deaths = await start(world, dies)
    got = await world.post(body(MARK))
    assert (got.status, got.json["error"]["code"], len(deaths)) == (503, "request_quarantined", 2)
    assert 0 < int(got.headers["retry-after"]) <= QUARANTINE_SECONDS
    assert "2 engines were lost" in got.json["error"]["message"]
    again = await world.post(body(MARK))
    assert (again.status, again.json["error"]["code"], len(deaths)) == (503, "request_quarantined", 2)
    assert (await world.post(body("harmless"))).status == 200


async def test_it_may_come_back_after_a_minute(world):
    deaths = await start(world, at_once)
    await world.post(body(MARK))
    clock = world.state.clock
    world.state.clock = lambda: clock() + QUARANTINE_SECONDS + 1
    await world.post(body(MARK))
    assert len(deaths) == 4


async def test_an_engine_that_refuses_connections_is_no_loss(world):
    await start(world, at_once)
    for name in ENGINES[:3]:
        await world.workers[name].stop()
    assert (await world.post(body("harmless"))).status == 200


async def test_control_without_the_quarantine_it_kills_them_all(world, monkeypatch):
    monkeypatch.setattr(attempts, "LOSSES", 1000)
    deaths = await start(world, at_once)
    await world.post(body(MARK))
    assert set(deaths) == set(ENGINES)
