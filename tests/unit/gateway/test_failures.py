"""Proves that no failure before the first byte reaches a client while another instance can serve."""

import asyncio
from itertools import islice

import pytest
from aiohttp import web

from prfaas.wire import headers

from .conftest import QUICK


async def prefill_failed(_request, _body):
    body = {
        "error": {"message": "no prefill", "type": "server_error", "param": None, "code": headers.CODE_PREFILL_FAILED}
    }
    return web.json_response(body, status=502)


def without_remote_prefill(reply):
    """Fail requests that name a prefill instance, serve the others."""

    async def either(request, body):
        if headers.PREFILL_URL in request.headers:
            return await prefill_failed(request, body)
        return await reply(request, body)

    return either


async def test_a_failed_offload_falls_back_to_the_hub(world, long):
    await world.start("d0", "x0")
    worker = world.workers["d0"]
    worker.reply = without_remote_prefill(worker.reply)
    got = await world.post(long)
    assert (got.status, got.headers[headers.OUTCOME], got.headers[headers.DECISION]) == (200, "fallback", "offload")
    assert (got.headers[headers.PREFILL_CLUSTER], got.headers[headers.PREFILL_INSTANCE]) == ("hub", "d0")
    assert [one.headers.get(headers.PREFILL_URL) for one in worker.seen] == [world.workers["x0"].url, None]
    assert [one.body for one in worker.seen] == [long, long]
    assert (world.state.counters.offloaded, world.state.counters.failed_offloads, world.state.counters.local) == (
        1,
        1,
        0,
    )
    assert await world.metric('prfaas_gateway_requests_total{decision="offload",outcome="fallback"}') == 1


async def test_a_failed_offload_uses_a_local_prefill_instance_where_there_is_one(world, long):
    await world.start("d0", "p0", "x0")
    worker = world.workers["d0"]
    serve = worker.reply

    async def reply(request, body):
        remote = request.headers.get(headers.PREFILL_URL) == world.workers["x0"].url
        return await (prefill_failed if remote else serve)(request, body)

    worker.reply = reply
    got = await world.post(long)
    assert (got.status, got.headers[headers.PREFILL_INSTANCE], got.headers[headers.OUTCOME]) == (200, "p0", "fallback")


async def test_a_policy_that_rejects_failed_offloads_forwards_the_failure(world, long):
    await world.start("d0", "x0", on_offload_failure="Reject")
    world.workers["d0"].reply = prefill_failed
    got = await world.post(long)
    assert (got.status, got.json["error"]["code"]) == (502, headers.CODE_PREFILL_FAILED)
    assert headers.OUTCOME not in got.headers
    assert len(world.workers["d0"].seen) == 1
    assert await world.metric('prfaas_gateway_requests_total{decision="offload",outcome="rejected"}') == 1


async def test_a_failed_local_prefill_instance_is_not_a_fallback(world, short):
    await world.start("d0", "p0")
    worker = world.workers["d0"]
    worker.reply = without_remote_prefill(worker.reply)
    got = await world.post(short)
    assert (got.status, got.headers[headers.OUTCOME], got.headers[headers.PREFILL_INSTANCE]) == (200, "ok", "d0")


async def test_a_prefill_instance_that_failed_gets_no_request_for_a_while(world, long):
    await world.start("d0", "x0")
    worker = world.workers["d0"]
    worker.reply = without_remote_prefill(worker.reply)
    await world.post(long)
    got = await world.post(long)  # at once: no second attempt over the link
    assert (got.status, got.headers[headers.DECISION], len(worker.seen)) == (200, "local", 3)


@pytest.mark.parametrize("death", ["refuses", "resets", "hangs up"])
async def test_a_dead_decode_worker_costs_no_request(world, short, death):
    await world.start("d0", "d1")

    async def die(request, _body):
        if death == "resets":
            request.transport.abort()
        else:
            request.transport.close()
        await asyncio.Event().wait()

    world.workers["d0"].reply = die
    if death == "refuses":
        await world.workers["d0"].stop()
    answers = await asyncio.gather(*(world.post(short) for _ in range(12)))
    assert [one.status for one in answers] == [200] * 12
    assert {one.headers[headers.DECODE_INSTANCE] for one in answers} == {"d1"}
    assert {one.headers[headers.OUTCOME] for one in answers} == {"ok"}


async def test_a_decode_worker_that_dies_in_an_answer_of_known_length_costs_no_request(world, short):
    await world.start("d0", "d1")

    async def half(request, _body):
        response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"half')
        request.transport.abort()
        return response

    world.workers["d0"].reply = half
    answers = [await world.post(short) for _ in range(4)]
    assert [(one.status, one.json) for one in answers] == [(200, {"object": "chat.completion"})] * 4


async def test_when_all_are_dead_the_client_gets_503_with_a_time_to_retry(world, short):
    await world.start("d0")
    await world.workers["d0"].stop()
    got = await world.post(short)
    assert (got.status, got.json["error"]["code"], got.headers["retry-after"]) == (503, headers.CODE_OVERLOADED, "1")


async def test_a_worker_that_comes_back_is_used_again(world, short, monkeypatch):
    await world.start("d0", "d1", limits=QUICK._replace(eject_seconds=30, eject_max_seconds=30))
    worker, port = world.workers["d0"], world.workers["d0"].port
    await worker.stop()
    for _ in range(8):
        await world.post(short)
    assert "d0" in world.state.ejections.until_seconds
    await worker.start(port)
    clock = world.state.clock
    monkeypatch.setattr(world.state, "clock", lambda: clock() + 30)  # the ejection ends
    for _ in range(8):
        assert (await world.post(short)).status == 200
    assert worker.seen
    assert not world.state.ejections.until_seconds


async def test_an_instance_that_returns_under_a_new_address_starts_afresh(world, short):
    await world.start("d0")
    worker = world.workers["d0"]
    await worker.stop()
    assert (await world.post(short)).status == 503
    await worker.start()
    world.state.set_table(world.write_table())
    assert (await world.post(short)).status == 200


async def test_a_worker_that_hangs_is_ejected_and_another_one_serves(world, short):
    # An ejection of 30 s, so that no request tries d0 once more. A second is enough for d1, which lives.
    limits = QUICK._replace(eject_seconds=30, eject_max_seconds=30)
    await world.start("d0", "d1", limits=limits._replace(liveness_interval_seconds=0.05, liveness_timeout_seconds=1))

    async def hang(_request, _body):
        await asyncio.Event().wait()

    world.workers["d0"].reply = hang
    answers = await asyncio.gather(*(world.post(short) for _ in range(6)))
    assert {(one.status, one.headers[headers.DECODE_INSTANCE]) for one in answers} == {(200, "d1")}
    paths = [one.path for one in world.workers["d0"].seen]
    assert paths.count("/v1/chat/completions") > 1
    assert paths.count("/v1/role") == 2, "once for all that wait, and once more"
    assert set(world.state.ejections.until_seconds) == {"d0"}


async def test_waits_for_a_slow_worker_that_lives(world, short):
    await world.start("d0", limits=QUICK._replace(liveness_interval_seconds=0.02, liveness_timeout_seconds=30))

    alive = asyncio.Event()

    async def reply(request, body):
        if request.path == "/v1/role":
            if len(world.workers["d0"].seen) > 3:
                alive.set()
            return web.json_response({"role": "decode"})
        await alive.wait()
        return web.json_response({"model": "m"})

    world.workers["d0"].reply = reply
    assert (await world.post(short)).status == 200
    paths = [one.path for one in world.workers["d0"].seen]
    assert paths.count("/v1/chat/completions") == 1
    assert paths.count("/v1/role") > 1


async def test_of_many_requests_one_tries_an_instance_whose_ejection_has_ended(world, short):
    await world.start("d0", "d1", limits=QUICK._replace(eject_seconds=30, eject_max_seconds=30))
    gate = asyncio.Event()

    async def when_open(_request, _body):
        await gate.wait()
        return web.json_response({"model": "m"})

    world.workers["d0"].reply = when_open
    world.state.ejections.failed("d0", world.state.clock() - 100)  # ended long ago, and not tried yet
    answers = [asyncio.create_task(world.post(short)) for _ in range(12)]
    for done in islice(asyncio.as_completed(answers), 11):
        await done
    assert len([one for one in world.workers["d0"].seen if one.path == "/v1/chat/completions"]) == 1
    gate.set()
    assert {(await task).status for task in answers} == {200}


@pytest.mark.system
async def test_the_only_worker_that_breaks_long_after_its_request_is_waited_for(world, short):
    await world.start("d0", limits=QUICK._replace(hold_seconds=1.0))
    worker = world.workers["d0"]
    serve = worker.reply

    async def breaks_once(request, body):
        if len(worker.seen) == 1:
            await asyncio.sleep(1.2)  # longer than a request waits for an ejected instance
            request.transport.abort()
        return await serve(request, body)

    worker.reply = breaks_once
    assert (await world.post(short)).status == 200
    assert len(worker.seen) == 2


async def test_after_its_last_attempt_a_request_waits_for_no_instance(world, short):
    await world.start("d0", limits=QUICK._replace(attempts=1, hold_seconds=60, eject_seconds=60, eject_max_seconds=60))
    await world.workers["d0"].stop()
    async with asyncio.timeout(30):
        assert (await world.post(short)).status == 503


@pytest.mark.system
async def test_all_failures_of_a_request_share_the_time_that_it_waits_for_an_instance(world, short):
    await world.start("d0", limits=QUICK._replace(hold_seconds=1.3, eject_seconds=1.0, eject_max_seconds=1.0))
    worker = world.workers["d0"]

    async def breaks(request, _body):
        request.transport.abort()
        return web.Response()

    worker.reply = breaks
    assert (await world.post(short)).status == 503
    assert len(worker.seen) == 2, "the second wait was too short for the ejection to end"
