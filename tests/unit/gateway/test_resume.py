"""Proves that a stream continues without a seam wherever its worker dies, on whichever instance can, and that it ends
honestly, soon and at little cost where none can.
"""

import asyncio
import json

import msgspec
import pytest
from aiohttp import web

from prfaas.wire import headers
from prfaas_gateway import attempts, state
from prfaas_gateway.openai import DONE

from .conftest import QUICK
from .speaker import AFTER_AN_EVENT, BODY, FINGERPRINT, LENGTH, TOKENS, WHOLE, Speaker, read, stream_of

PATIENT = QUICK._replace(recover_seconds=20)
"""For streams that continue: a machine that stands still for a moment breaks none."""
SOON = QUICK._replace(recover_seconds=0.3)
"""For those that cannot."""


@pytest.fixture
def served_for_long(monkeypatch) -> None:
    """Each worker served its streams for long before it died: none of them is taken for the cause."""
    monkeypatch.setattr(attempts, "PROBATION_SECONDS", 0.0)


async def begun_on(world, first: str, *others: str, limits=PATIENT) -> None:
    """Start a world whose next request begins at `first`."""
    await world.start(first, *others, limits=limits)
    only(world, first)


def only(world, name: str) -> None:
    """Leave one worker to choose."""
    instances = tuple(one for one in world.table.instances if one.name == name)
    world.state.set_table(msgspec.structs.replace(world.table, instances=instances))


class Dying(Speaker):
    """A worker after whose beginning any may be chosen."""

    def __init__(self, world, *args, **options):
        super().__init__(*args, **options)
        self._world = world

    async def __call__(self, request, body):
        self._world.state.set_table(self._world.table)
        return await super().__call__(request, body)


def broken(body: bytes) -> dict:
    """Return the error that a broken stream ends with."""
    assert DONE not in body
    return json.loads(body.removesuffix(b"\n\n").split(b"\n\n")[-1].removeprefix(b"data: "))["error"]


@pytest.mark.parametrize("how", ["resets", "ends"])
async def test_a_stream_continues_without_a_seam_wherever_its_worker_dies(world, how):
    await begun_on(world, "d0", "d1")
    second = world.workers["d1"].reply = Speaker()
    for place in [*range(0, LENGTH, 23), LENGTH - 1]:
        only(world, "d0")
        world.state.ejections.succeeded("d0")
        world.workers["d0"].reply = Dying(world, place, how)
        got = await world.post(BODY)
        assert (got.status, read(got.body)) == (200, WHOLE), f"died after byte {place}: {got.body!r}"
    assert len(second.streams) == len(world.workers["d0"].seen) - 2, "two lacked [DONE] alone"


async def test_the_next_worker_gets_the_same_request_and_what_the_client_has(world):
    await begun_on(world, "d0", "d1")
    world.workers["d0"].reply = Dying(world, LENGTH // 2)
    world.workers["d1"].reply = Speaker()
    await world.post(BODY)
    (first,), (then,) = world.workers["d0"].seen, world.workers["d1"].seen
    assert then.path == first.path
    assert then.headers[headers.REQUEST_ID] == first.headers[headers.REQUEST_ID]
    asked, began, stream = json.loads(then.body), stream_of(first.body), stream_of(then.body)
    assert {name: asked[name] for name in json.loads(BODY)} == json.loads(BODY)
    assert (stream.seed, stream.created, stream.model) == (began.seed, began.created, FINGERPRINT)
    assert not began.continues
    assert 2 < len(stream.drawn[0]) < TOKENS
    for choice, token_ids in stream.drawn.items():
        assert token_ids == [100 * choice + number for number in range(len(token_ids))]


async def test_a_choice_that_has_ended_is_not_asked_for(world):
    await begun_on(world, "d0", "d1")
    world.workers["d0"].reply = Dying(world, LENGTH - len(DONE) - 5)
    second = world.workers["d1"].reply = Speaker()
    assert read((await world.post(BODY)).body) == WHOLE
    assert second.streams[0].ended == (0,)


async def test_a_resumed_request_is_counted_as_one(world):
    await begun_on(world, "d0", "d1")
    world.workers["d0"].reply = Dying(world, LENGTH // 2)
    second = world.workers["d1"].reply = Speaker()
    await world.post(BODY)
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="resumed"}') == 1
    assert await world.metric("prfaas_gateway_resumes_total") == 1
    drawn = sum(map(len, second.streams[0].drawn.values()))
    assert await world.metric("prfaas_gateway_resumed_tokens_total") == drawn > 0
    assert "d0" in world.state.ejections.until_seconds
    assert world.state.in_flight == 0


async def test_an_engine_of_others_gets_no_resume(world):
    await begun_on(world, "d0", "d1", limits=SOON)
    instances = [world.table.instances[0], msgspec.structs.replace(world.table.instances[1], engine="vllm-nixl")]
    world.table = msgspec.structs.replace(world.table, instances=tuple(instances))
    world.workers["d0"].reply = Dying(world, LENGTH // 2)
    world.workers["d1"].reply = Speaker()
    got = await world.post(BODY)
    assert DONE not in got.body or read(got.body) == WHOLE, "it breaks off, or continues where it began"
    assert not world.workers["d1"].seen


async def test_a_worker_that_names_no_tokens_ends_with_an_error(world):
    await begun_on(world, "d0", "d1")
    for dies_at in (None, LENGTH // 3):
        only(world, "d0")
        world.workers["d0"].reply = Dying(world, dies_at)
        world.workers["d0"].reply.with_ids = False
        got = await world.post(BODY)
        if dies_at is None:
            assert read(got.body) == WHOLE
    assert broken(got.body)["code"] == "stream_broken"
    assert not world.workers["d1"].seen


@pytest.mark.system
async def test_a_worker_that_falls_silent_is_left_for_another(world):
    await begun_on(world, "d0", "d1", limits=PATIENT._replace(stall_seconds=0.2))
    world.workers["d0"].reply = Dying(world, LENGTH // 2, "stalls")
    world.workers["d1"].reply = Speaker()
    assert read((await world.post(BODY)).body) == WHOLE
    await world.workers["d0"].wait_aborted()


@pytest.mark.usefixtures("served_for_long")
async def test_a_stream_continues_when_the_second_worker_dies_too_and_the_first_is_back(world):
    await begun_on(world, "d0", "d1")
    second = Speaker(LENGTH // 3)

    class Twice(Dying):
        async def __call__(self, request, body):
            self.dies_at = None if stream_of(body).continues else LENGTH // 2
            return await super().__call__(request, body)

    world.workers["d0"].reply = Twice(world)
    world.workers["d1"].reply = second
    assert read((await world.post(BODY)).body) == WHOLE
    legs = len(world.workers["d0"].seen) + len(world.workers["d1"].seen)
    assert await world.metric("prfaas_gateway_resumes_total") == legs - 1 >= 2


@pytest.mark.system
@pytest.mark.usefixtures("served_for_long")
async def test_a_stream_waits_for_an_instance_that_comes_back(world):
    await begun_on(world, "d0")
    worker, port = world.workers["d0"], world.workers["d0"].port
    died = asyncio.Event()

    class Once(Speaker):
        async def __call__(self, request, body):
            self.dies_at = None if stream_of(body).continues else LENGTH // 2
            response = await super().__call__(request, body)
            died.set()
            return response

    worker.reply = Once()
    answering = asyncio.create_task(world.post(BODY))
    await died.wait()
    await worker.stop()
    await asyncio.sleep(0.05)
    await worker.start(port)
    assert read((await answering).body) == WHOLE


async def test_where_no_worker_can_resume_the_client_gets_an_error_in_time(world):
    await begun_on(world, "d0", limits=SOON)
    seen = world.workers["d0"].seen

    async def first_only(request, body):
        if stream_of(body).continues:
            return web.json_response({"error": {"message": "full", "code": headers.CODE_OVERLOADED}}, status=503)
        return await Speaker(LENGTH // 2, "ends")(request, body)

    world.workers["d0"].reply = first_only
    got = await world.post(BODY)
    assert broken(got.body)["code"] == "stream_broken"
    assert len(seen) > 1, "the gateway tried again"
    assert await world.metric('prfaas_gateway_requests_total{decision="local",outcome="failed"}') == 1


async def test_a_broken_stream_tries_no_ejected_worker(world):
    await world.start("d0", "d1", limits=SOON._replace(eject_seconds=60, eject_max_seconds=60))
    world.state.ejections.failed("d1", world.state.clock())
    world.workers["d0"].reply = Speaker(LENGTH // 2)
    world.workers["d1"].reply = Speaker()
    assert broken((await world.post(BODY)).body)["code"] == "stream_broken"
    assert not world.workers["d1"].seen


async def test_an_instance_that_refuses_is_not_tried_again_and_another_resumes(world):
    await begun_on(world, "d0", "d1", "d2")
    world.workers["d0"].reply = Dying(world, LENGTH // 2)

    async def refuse(_request, _body):
        return web.json_response({"error": {"message": "another model", "code": "stream_refused"}}, status=409)

    resumes = []

    async def first_refuses(request, body):
        resumes.append(request)
        return await (refuse if len(resumes) == 1 else Speaker())(request, body)

    world.workers["d1"].reply = world.workers["d2"].reply = first_refuses
    assert read((await world.post(BODY)).body) == WHOLE
    assert {len(world.workers[name].seen) for name in ("d1", "d2")} == {1}
    assert set(world.state.ejections.until_seconds) == {"d0"}


def dying_words(kind: str) -> bytes:
    error = {"message": "it cannot go on", "type": kind, "param": None, "code": "why"}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


@pytest.mark.parametrize("kind", ["server_error", "invalid_request_error"])
async def test_the_client_sees_an_error_only_if_every_worker_would_have_it(world, kind):
    await begun_on(world, "d0", "d1")
    world.workers["d0"].reply = Dying(world, AFTER_AN_EVENT, "ends", dying_words(kind))
    world.workers["d1"].reply = Speaker()
    got = await world.post(BODY)
    if kind == "server_error":
        assert read(got.body) == WHOLE
    else:
        assert broken(got.body)["code"] == "why"
        assert not world.workers["d1"].seen


@pytest.mark.usefixtures("served_for_long")
async def test_a_collapse_costs_no_more_retries_than_the_budget_has(world, monkeypatch):
    monkeypatch.setattr(state, "SAVED_RETRIES", 1.0)
    monkeypatch.setattr(state, "RETRIES_PER_SECOND", 0.0)
    await begun_on(world, "d0", limits=PATIENT._replace(eject_seconds=0.01, eject_max_seconds=0.01))
    world.workers["d0"].reply = Speaker(LENGTH // 2, "ends")
    assert broken((await world.post(BODY)).body)["code"] == "stream_broken"
    assert len(world.workers["d0"].seen) == 2
    assert await world.metric("prfaas_gateway_retries_refused_total") == 1


@pytest.mark.system
async def test_a_client_that_leaves_aborts_the_worker_that_took_over(world):
    await begun_on(world, "d0", "d1")
    world.workers["d0"].reply = Dying(world, LENGTH // 3)
    going_on = world.workers["d1"].reply = Speaker(LENGTH // 3, "stalls")
    response = await world.client.post(world.url + "/v1/chat/completions", data=BODY)
    while not going_on.streams:
        await response.content.readany()
    response.close()
    await world.workers["d1"].wait_aborted()


async def test_a_deadline_ends_a_stream_that_looks_for_a_worker(world):
    await begun_on(world, "d0", limits=PATIENT._replace(recover_seconds=60))
    worker = world.workers["d0"]

    async def last(request, body):
        await worker.runner.sites.copy().pop().stop()
        return await Speaker(LENGTH // 2, "ends")(request, body)

    worker.reply = last
    got = await world.post(BODY, headers={headers.DEADLINE_SECONDS: "1"})
    assert broken(got.body)["code"] == "deadline_exceeded"
