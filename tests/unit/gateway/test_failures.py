"""Proves that no failure before the first byte reaches a client while another instance can serve."""

import asyncio
import json
from itertools import count, islice

import pytest
from aiohttp import web

from prfaas.wire import headers
from prfaas_gateway import attempts

from .conftest import QUICK, answer

PATIENT = QUICK._replace(eject_seconds=60, eject_max_seconds=60)
"""What failed stays away for as long as a test lasts, on whatever machine."""


async def fails(_request, _body):
    return web.json_response({"error": {"message": "broken", "code": "engine_failed"}}, status=500)


async def waits_for_its_cache(request, body):
    """Serve what is prefilled here; a destination's cache does not come."""
    if b"kv_transfer_params" in body:
        await asyncio.Event().wait()
    return await answer(request, body)


def loses_its_cache(lost: str):
    """Make an instance that computes what should have come from another one."""

    async def reply(request, body):
        got = await answer(request, body)
        if b"kv_transfer_params" in body:
            got.headers[headers.LOST_TRANSFER] = lost
        return got

    return reply


async def start_with_broken_source(world, source: str, **table):
    await world.start("d0", source, **table)
    world.workers["d0"].reply, world.workers[source].reply = waits_for_its_cache, fails


async def test_a_failed_offload_falls_back_to_the_hub(world, long):
    await start_with_broken_source(world, "x0")
    got = await world.post(long)
    assert (got.status, got.headers[headers.OUTCOME], got.headers[headers.DECISION]) == (200, "fallback", "offload")
    assert (got.headers[headers.PREFILL_CLUSTER], got.headers[headers.PREFILL_INSTANCE]) == ("hub", "d0")
    assert world.workers["d0"].seen[-1].body == long
    assert (world.state.counters.offloaded, world.state.counters.failed_offloads, world.state.counters.local) == (
        1,
        1,
        0,
    )
    assert await world.metric('prfaas_gateway_requests_total{decision="offload",outcome="fallback"}') == 1


async def test_a_failed_offload_uses_a_local_prefill_instance_where_there_is_one(world, long):
    await world.start("d0", "p0", "x0")

    async def reply(request, body):
        params = json.loads(body).get("kv_transfer_params", {}).get("prfaas", {})
        return await (waits_for_its_cache if params.get("cluster") == "eu" else answer)(request, body)

    world.workers["d0"].reply, world.workers["x0"].reply = reply, fails
    got = await world.post(long)
    assert (got.status, got.headers[headers.PREFILL_INSTANCE], got.headers[headers.OUTCOME]) == (200, "p0", "fallback")


async def test_a_policy_that_rejects_failed_offloads_forwards_the_failure(world, long):
    await start_with_broken_source(world, "x0", on_offload_failure="Reject")
    got = await world.post(long)
    assert (got.status, got.json["error"]["code"]) == (500, "engine_failed")
    assert headers.OUTCOME not in got.headers
    assert await world.metric('prfaas_gateway_requests_total{decision="offload",outcome="rejected"}') == 1


@pytest.mark.parametrize(
    ("lost", "then"), [(f"{'0' * 32} {headers.UNREACHABLE}", ("local", 1)), ("0" * 32, ("offload", 2))]
)
async def test_a_cache_that_does_not_come_is_a_failed_offload_of_a_request_that_is_served(world, long, lost, then):
    await world.start("d0", "x0", limits=PATIENT)
    world.workers["d0"].reply = loses_its_cache(lost)
    got = await world.post(long)
    assert (got.status, got.headers[headers.OUTCOME], got.headers[headers.PREFILL_INSTANCE]) == (200, "fallback", "d0")
    assert (len(world.workers["d0"].seen), world.state.counters.failed_offloads) == (1, 1)
    again = await world.post(long)  # at once: no second attempt over a link that died
    assert (again.headers[headers.DECISION], len(world.workers["x0"].seen)) == then


async def test_a_policy_that_rejects_failed_offloads_refuses_a_cache_that_does_not_come(world, long):
    await world.start("d0", "x0", on_offload_failure="Reject")
    world.workers["d0"].reply = loses_its_cache("0" * 32)
    got = await world.post(long)
    assert (got.status, got.json["error"]["code"], len(world.workers["d0"].seen)) == (503, "overloaded", 1)


async def test_a_failed_local_prefill_instance_is_not_a_fallback(world, short):
    await start_with_broken_source(world, "p0")
    got = await world.post(short)
    assert (got.status, got.headers[headers.OUTCOME], got.headers[headers.PREFILL_INSTANCE]) == (200, "ok", "d0")


async def test_a_prefill_instance_that_failed_gets_no_request_for_a_while(world, long):
    await start_with_broken_source(world, "x0", limits=PATIENT)
    await world.post(long)
    got = await world.post(long)  # at once: no second attempt over the link
    assert (got.status, got.headers[headers.DECISION], len(world.workers["x0"].seen)) == (200, "local", 1)


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


async def breaks(request, _body):
    request.transport.abort()
    return web.Response()


def eject(world, *names):
    for name in names:
        world.state.ejections.failed(name, world.state.clock())


async def test_a_worker_that_is_back_before_its_ejection_ends_serves_where_there_is_no_other(world, short):
    await world.start("d0", limits=PATIENT)
    eject(world, "d0")
    assert (await world.post(short)).status == 200
    assert not world.state.ejections.until_seconds


async def test_a_request_that_failed_tries_an_ejected_worker_rather_than_the_one_that_it_failed_at(world, short):
    await world.start("d0", "d1", limits=PATIENT)
    world.workers["d0"].reply = breaks
    for number in range(6):
        world.state.ejections.succeeded("d0")
        eject(world, "d1")
        got = await world.post(short, headers={headers.REQUEST_ID: f"request-{number}"})
        assert (got.status, got.headers.get(headers.DECODE_INSTANCE)) == (200, "d1")
    assert len(world.workers["d0"].seen) == 6


async def test_a_request_tries_only_one_ejected_worker_before_it_is_refused(world, short):
    await world.start("d0", "d1", "d2", limits=PATIENT)
    for worker in world.workers.values():
        worker.reply = breaks
    eject(world, *world.workers)
    for number in (1, 2):
        assert (await world.post(short)).status == 503
        assert sum(len(worker.seen) for worker in world.workers.values()) == number


async def test_after_its_last_resort_a_request_waits_no_second_time(world, short):
    limits = QUICK._replace(hold_seconds=80, poll_seconds=0.001, eject_seconds=120, eject_max_seconds=120)
    await world.start("d0", limits=limits)
    world.workers["d0"].reply = breaks
    ticks = count()
    world.state.clock = lambda: float(next(ticks))  # a second passes with every look at it
    eject(world, "d0")
    assert (await world.post(short)).status == 503
    assert len(world.workers["d0"].seen) == 1, "it waited until the ejection had ended"


async def test_after_its_last_attempt_a_request_waits_for_no_instance(world, short):
    await world.start("d0", limits=QUICK._replace(attempts=1, hold_seconds=60, eject_seconds=60, eject_max_seconds=60))
    await world.workers["d0"].stop()
    async with asyncio.timeout(30):
        assert (await world.post(short)).status == 503


async def test_all_failures_of_a_request_share_the_time_that_it_waits_for_an_instance(world, short, monkeypatch):
    monkeypatch.setattr(attempts, "LOSSES", 9)
    limits = QUICK._replace(hold_seconds=1300, poll_seconds=0.001, eject_seconds=1000, eject_max_seconds=1000)
    await world.start("d0", limits=limits)
    ticks = count()
    world.state.clock = lambda: float(next(ticks))  # a second passes with every look at it
    worker = world.workers["d0"]
    worker.reply = breaks
    assert (await world.post(short)).status == 503
    assert len(worker.seen) == 3, "the second wait was too short for the ejection to end, and its last resort failed"
