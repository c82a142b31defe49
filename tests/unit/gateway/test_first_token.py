"""Proves that the parts of a request's time to its first token are in its answer, its log line and the live page."""

import asyncio
import logging
import re

import pytest
from aiohttp import web

from prfaas.wire import headers
from prfaas.wire.trace import PARTS, UNKNOWN, read_parts, write_parts

from .conftest import World, answer

pytestmark = pytest.mark.system

WORKERS = dict.fromkeys(PARTS, 0.0) | {"prefill": 0.03, "first_step": 0.01}
TAKES_SECONDS = 0.05
LEAST_SECONDS = 0.04
"""Less than that by all that timers may round."""
BODY = {"model": "m", "prompt": "x"}


def streams(parts: str):
    """Return the reply of a worker that reports these parts and takes TAKES_SECONDS to its first token."""

    async def reply(request: web.Request, _body: bytes) -> web.StreamResponse:
        await asyncio.sleep(TAKES_SECONDS)
        added = {headers.TTFT_SECONDS: parts} if parts else {}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **added})
        await response.prepare(request)
        await response.write(b"data: [DONE]\n\n")
        return response

    return reply


async def parts_of(world: World, body: dict = BODY) -> dict[str, float]:
    return read_parts((await world.post(body, "/v1/completions")).headers[headers.TTFT_SECONDS])


async def test_the_gateway_adds_its_queue_and_the_way_to_the_worker(world, caplog):
    caplog.set_level(logging.INFO, "prfaas_gateway")
    await world.start("d0")
    world.workers["d0"].reply = streams(write_parts(WORKERS))
    found = await parts_of(world)
    (placed,) = (await world.get_admin("/ui/state")).json["placed"]
    assert found.keys() == set(PARTS)
    assert found["prefill"] == WORKERS["prefill"]
    assert found["gateway_queue"] > 0
    assert found["first_step"] >= LEAST_SECONDS - WORKERS["prefill"]
    assert sum(found.values()) == pytest.approx(placed["first_token_seconds"], abs=1e-5)
    assert placed["parts"] == pytest.approx(found, abs=1e-6)
    (line,) = (one.message for one in caplog.records if one.message.startswith("request "))
    logged = {name: float(seconds) for name, seconds in re.findall(r" ([a-z_]+)_seconds=([0-9.]+)", line)}
    assert {part: logged[part] for part in PARTS} == pytest.approx(found, abs=1e-4)
    assert logged["first_token"] == pytest.approx(sum(found.values()), abs=1e-4)


@pytest.mark.parametrize("wrong", ["", "prefill=soon", "prefill=0.030000, sleep=1.000000", "prefill=99.000000"])
async def test_a_worker_that_reports_nothing_sensible_leaves_the_time_unknown(world, wrong):
    await world.start("d0")
    world.workers["d0"].reply = streams(wrong)
    found = await parts_of(world)
    assert found.keys() == {"gateway_queue", UNKNOWN}
    assert found[UNKNOWN] >= LEAST_SECONDS


async def test_of_vllm_the_leg_of_the_source_is_the_prefill(world):
    await world.start("d0", "x0", engine="vllm-prfaas")
    arrived = asyncio.Event()

    async def prefills(request: web.Request, body: bytes) -> web.StreamResponse:
        await asyncio.sleep(TAKES_SECONDS)
        arrived.set()
        return await answer(request, body)

    async def decodes(request: web.Request, body: bytes) -> web.StreamResponse:
        await arrived.wait()
        return await streams("")(request, body)

    world.workers["x0"].reply, world.workers["d0"].reply = prefills, decodes
    found = await parts_of(world, BODY | {"prompt": "x" * 8000})
    assert found.keys() == {"gateway_queue", "prefill", UNKNOWN}
    assert found["prefill"] >= LEAST_SECONDS
    assert found[UNKNOWN] > 0


async def test_a_whole_answer_has_no_first_token_but_what_its_worker_reports(world):
    await world.start("d0")
    assert headers.TTFT_SECONDS not in (await world.post({"model": "m", "prompt": "x"}, "/v1/completions")).headers

    async def whole(_request: web.Request, _body: bytes) -> web.StreamResponse:
        await asyncio.sleep(TAKES_SECONDS)
        return web.json_response({}, headers={headers.TTFT_SECONDS: write_parts(WORKERS)})

    world.workers["d0"].reply = whole
    found = await parts_of(world)
    assert found == pytest.approx(WORKERS | {"gateway_queue": found["gateway_queue"]}), "the answer took longer"
