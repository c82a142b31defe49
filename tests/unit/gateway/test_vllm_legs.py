"""Proves how both legs through our connector in vLLM begin, and that its decode instance outlives a dead source."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace
from tests.waiting import eventually_async

from prfaas.names import HUB
from prfaas.routing.decide import decide
from prfaas.routing.facts import Decision, Refusal, Route, RoutingFacts
from prfaas.wire import headers
from prfaas.wire.routes import EngineName
from prfaas_gateway import attempts
from prfaas_gateway.request import place_salt

from .conftest import QUICK, answer

pytestmark = pytest.mark.system

REQUEST = {"model": "m", "prompt": "x" * 8000, "max_tokens": 64, "min_tokens": 2, "temperature": 0.25}
PATH = "/v1/completions"


async def start(world, engine: EngineName = "vllm-prfaas", *, names=("d0", "x0"), **more) -> None:
    await world.start(*names, **more)
    world.change_instances(engine=engine, data_port=9123)


def params(world, name: str) -> list[dict]:
    """Return the transfers that an instance got."""
    bodies = [json.loads(one.body) for one in world.workers[name].seen]
    return [body["kv_transfer_params"]["prfaas"] for body in bodies if "kv_transfer_params" in body]


async def post(world, **more):
    return await world.post(REQUEST | more, PATH)


async def test_both_legs_name_one_transfer_and_the_destination_learns_the_place_of_the_source(world):
    await start(world)
    assert (await post(world)).status == 200
    (source,), (destination,) = params(world, "x0"), params(world, "d0")
    transfer = {name: source[name] for name in ("transfer_id", "epoch", "token")}
    assert source == {"role": "source", **transfer}
    place = {"host": "127.0.0.1", "port": 9123, "cluster": "eu"}
    assert destination == {"role": "destination", **transfer, **place}
    assert re.fullmatch("[0-9a-f]{32}", transfer["transfer_id"])
    assert 0 <= transfer["epoch"] < 1 << 48
    assert len(transfer["token"]) >= 32


async def test_the_place_of_a_source_is_that_of_its_data_parallel_rank(world):
    await start(world)
    world.change_instances(ranks=4, rank_ports=2)
    for number in range(8):
        await world.post(REQUEST | {"max_tokens": 64 + number}, PATH, headers={headers.REQUEST_ID: f"{number}"})
    ranks = [int(one.headers[headers.DATA_RANK]) for one in world.workers["x0"].seen]
    assert [one["port"] for one in params(world, "d0")] == [9123 + 2 * rank for rank in ranks]
    assert len(set(ranks)) > 1


async def test_both_legs_learn_how_many_tensor_parallel_ranks_the_other_has_where_these_differ(world):
    await world.start("d0", "x0")
    own = {"engine": "vllm-prfaas", "data_port": 9123}
    instances = [
        msgspec.structs.replace(one, rank_ports=4 if one.name == "d0" else 2, **own) for one in world.table.instances
    ]
    world.state.set_table(world.write_table(instances=tuple(instances)))
    assert (await post(world)).status == 200
    assert params(world, "x0")[0]["ranks"] == 4
    assert params(world, "d0")[0]["ranks"] == 2


async def test_the_destination_learns_the_place_of_the_source_if_it_is_not_the_clusters_name(world):
    await world.start("d0", "x0")
    admitted = tuple(msgspec.structs.replace(one, place="eu@1") for one in world.table.clusters)
    world.change_instances(engine="prfaas")
    assert (await post(world)).status == 200
    assert "place" not in params(world, "d0")[0]
    world.state.set_table(world.write_table(instances=world.state.table.instances, clusters=admitted))
    assert (await post(world)).status == 200
    assert [(one["cluster"], one.get("place")) for one in params(world, "d0")] == [("eu", None), ("eu", "eu@1")]
    assert world.workers["d0"].seen[1].headers[headers.PLACES] == "* eu@1"


@pytest.fixture
def prefix_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have every route decode at d0, and name an instance that has a prefix of 4096 tokens."""

    def name(instance: str) -> None:
        def with_prefix(facts: RoutingFacts) -> Decision:
            found = decide(facts)
            named = {one.name: one for one in facts.table.instances}
            assert not isinstance(found, Refusal)
            return replace(found, decode=named["d0"], prefix=named[instance], prefix_tokens=4096)

        monkeypatch.setattr(attempts, "decide", with_prefix)

    return name


@pytest.mark.parametrize("engine", ["prfaas", "vllm-prfaas"])
async def test_a_prefix_is_a_transfer_of_its_own_with_its_goal(world, prefix_at, engine: EngineName):
    await start(world, engine, names=("d0", "d1"))
    prefix_at("d1")
    assert (await post(world, stream=True)).status == 200
    (source,), (destination,) = params(world, "d1"), params(world, "d0")
    transfer = {name: source[name] for name in ("transfer_id", "epoch", "token")} | {"tokens": 4096}
    assert source == {"role": "source", **transfer}
    assert destination == {"role": "destination", **transfer, "host": "127.0.0.1", "port": 9123, "cluster": HUB}
    (sent,) = (json.loads(one.body) for one in world.workers["d1"].seen)
    assert (sent["max_tokens"], sent["stream"], sent["prompt"]) == (1, False, REQUEST["prompt"])


@pytest.mark.parametrize("engine", ["prfaas", "vllm-prfaas"])
async def test_the_prefill_instance_of_an_offload_learns_both_transfers(world, prefix_at, engine: EngineName):
    await start(world, engine)
    prefix_at("d0")  # the decode instance itself may have it
    assert (await post(world)).status == 200
    given, destination = sorted(params(world, "d0"), key=lambda leg: leg["role"], reverse=True)
    (computed,) = params(world, "x0")
    prefix = computed.pop("prefix")
    assert (prefix["role"], prefix["transfer_id"], prefix["tokens"]) == ("destination", given["transfer_id"], 4096)
    assert (computed["role"], computed["transfer_id"]) == ("source", destination["transfer_id"])
    assert given["transfer_id"] != destination["transfer_id"]
    assert "tokens" not in computed | destination


@pytest.mark.parametrize("gives", [True, False])
async def test_a_decode_instance_that_gives_a_prefix_decodes_on_the_rank_that_has_it(world, gives: bool):
    await start(world)
    world.change_instances(ranks=2)
    named = {one.name: one for one in world.state.table.instances}
    route = Route(
        kind="offload",
        reason="AboveThreshold",
        incremental_tokens=9000,
        decode=named["d0"],
        prefill=named["x0"],
        prefix=named["d0"] if gives else None,
        prefix_tokens=512,
    )
    chosen = set()
    with ExitStack() as busy:
        for number in range(8):  # rank 1 soon has more to do than the prefix saves
            load = busy.enter_context(world.state.occupied(route, {"d0": (0, 512)}, f"{number}"))
            chosen.add(load.ranks["d0"])
    assert chosen == ({1} if gives else {0, 1})


@pytest.mark.parametrize("how", ["refuses", "fails", "is gone", "says nothing"])
async def test_a_source_of_a_prefix_that_gives_none_costs_the_answer_nothing(world, prefix_at, caplog, how: str):
    caplog.set_level("INFO")
    await start(world, names=("d0", "d1"))
    prefix_at("d1")

    async def gives_none(_request: web.Request, _body: bytes) -> web.StreamResponse:
        if how == "says nothing":
            await asyncio.Event().wait()
        return web.json_response({}, status=404 if how == "refuses" else 500)

    def has_failed() -> bool:
        return "d1 gives no prefix" in caplog.text or (how == "says nothing" and bool(world.workers["d1"].seen))

    async def later(request: web.Request, body: bytes) -> web.StreamResponse:
        await eventually_async(has_failed, "the source gives none")
        return await answer(request, body)

    world.workers["d0"].reply, world.workers["d1"].reply = later, gives_none
    if how == "is gone":
        await world.workers["d1"].stop()
    got = await post(world)
    assert (got.status, got.headers[headers.OUTCOME]) == (200, "ok")
    assert not world.state.is_ejected("d1")
    if how == "says nothing":
        await world.workers["d1"].wait_aborted()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_instance_beside_a_prefix_is_its_own(world, prefix_at, stream: bool):
    await start(world, names=("d0", "d1"), limits=QUICK._replace(eject_seconds=60, eject_max_seconds=60))
    prefix_at("d1")

    async def fails(request: web.Request, _body: bytes) -> web.StreamResponse:
        if not stream:
            return web.json_response({}, status=500)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"error": {"message": "broken", "code": 500}}\n\ndata: [DONE]\n\n')
        return response

    world.workers["d0"].reply = fails
    assert (await post(world, stream=stream)).status == (200 if stream else 500), "served elsewhere, and as it is"
    assert (world.state.is_ejected("d0"), len(world.workers["d0"].seen)) == (stream, 1)


async def test_every_attempt_is_a_new_transfer(world):
    await start(world, names=("d0", "d1", "x0"))
    seen: list[bytes] = []

    async def full_once(request: web.Request, body: bytes) -> web.StreamResponse:
        seen.append(body)
        return web.Response(status=503) if len(seen) == 1 else await answer(request, body)

    for name in ("d0", "d1"):
        world.workers[name].reply = full_once
    assert (await post(world)).status == 200
    first, second = (json.loads(body)["kv_transfer_params"]["prfaas"] for body in seen)
    for name in ("transfer_id", "epoch", "token"):
        assert first[name] != second[name]
    assert first["transfer_id"] == params(world, "x0")[0]["transfer_id"]


async def test_both_legs_are_under_way_at_once(world):
    await start(world)
    began = {name: asyncio.Event() for name in ("d0", "x0")}

    def meeting(name: str, other: str):
        async def reply(request: web.Request, body: bytes) -> web.StreamResponse:
            began[name].set()
            await asyncio.wait_for(began[other].wait(), 10)
            return await answer(request, body)

        return reply

    world.workers["d0"].reply, world.workers["x0"].reply = meeting("d0", "x0"), meeting("x0", "d0")
    got = await post(world)
    assert (got.status, got.headers[headers.OUTCOME]) == (200, "ok")


async def recomputing(request: web.Request, body: bytes) -> web.StreamResponse:
    """Answer as a destination whose source died: later, and whole."""
    await asyncio.sleep(0.3)
    return await answer(request, body)


async def test_a_source_that_dies_costs_the_answer_nothing_and_counts_as_a_failed_offload(world):
    await start(world)
    world.workers["d0"].reply = recomputing
    await world.workers["x0"].stop()
    got = await post(world)
    assert (got.status, got.headers[headers.OUTCOME]) == (200, "fallback")
    assert len(world.workers["d0"].seen) == 1, "the destination continued by itself"
    assert world.state.counters.failed_offloads == 1
    assert "x0" in world.state.ejections.until_seconds
    assert await world.metric('prfaas_gateway_requests_total{decision="offload",outcome="fallback"}') == 1


async def streaming(request: web.Request, begun: asyncio.Event, resume: asyncio.Event) -> web.StreamResponse:
    """Answer with one event, and go on later."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"choices": []}\n\n')
    begun.set()
    await resume.wait()
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_a_source_that_dies_after_the_stream_began_does_not_cut_it_off(world):
    await start(world)
    begun, died = asyncio.Event(), asyncio.Event()

    async def decode(request: web.Request, _body: bytes) -> web.StreamResponse:
        return await streaming(request, begun, died)

    async def die(request: web.Request, _body: bytes) -> web.StreamResponse:
        await begun.wait()
        request.transport.close()
        asyncio.get_running_loop().call_later(0.2, died.set)
        return web.Response()

    world.workers["d0"].reply, world.workers["x0"].reply = decode, die
    got = await asyncio.wait_for(post(world, stream=True), 30)
    assert got.body.endswith(b"data: [DONE]\n\n")
    assert b"error" not in got.body
    assert world.state.counters.failed_offloads == 1


async def waiting(_request: web.Request, body: bytes) -> web.StreamResponse:
    """Wait for a cache that never comes; answer at once where none is to come."""
    if b"kv_transfer_params" in body:
        await asyncio.Event().wait()
    return web.json_response({})


async def test_headers_of_a_stream_are_no_answer_yet(world):
    """vLLM sends them before the first token: a failure until then is still retried."""
    await start(world)
    prepared = asyncio.Event()

    async def decode(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"kv_transfer_params" not in body:
            return await answer(request, body)
        # aiohttp itself keeps headers until the first piece.
        request.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        prepared.set()
        return await waiting(request, body)

    async def fail(_request: web.Request, _body: bytes) -> web.Response:
        await prepared.wait()
        await asyncio.sleep(0.2)  # the gateway reads those headers
        return web.Response(status=500)

    world.workers["d0"].reply, world.workers["x0"].reply = decode, fail
    got = await asyncio.wait_for(post(world, stream=True), 30)
    assert (got.status, got.headers[headers.OUTCOME]) == (200, "fallback")


async def test_a_source_that_refuses_ends_the_destinations_wait_and_the_hub_prefills(world):
    await start(world)

    async def refuse(_request: web.Request, _body: bytes) -> web.Response:
        return web.Response(status=503)

    world.workers["d0"].reply, world.workers["x0"].reply = waiting, refuse
    got = await asyncio.wait_for(post(world), 30)
    assert (got.status, got.headers[headers.OUTCOME], got.headers[headers.PREFILL_CLUSTER]) == (200, "fallback", HUB)
    await world.workers["d0"].wait_aborted()


async def test_with_reject_a_failed_offload_is_refused_although_the_destination_could_continue(world):
    await start(world, on_offload_failure="Reject")
    world.workers["d0"].reply = waiting
    await world.workers["x0"].stop()
    got = await asyncio.wait_for(post(world), 30)
    assert got.status == 503
    await world.workers["d0"].wait_aborted()


async def test_a_destination_that_may_not_recompute_blames_the_hand_off(world):
    await start(world)

    async def fail(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=500) if b"kv_transfer_params" in body else await answer(request, body)

    world.workers["d0"].reply = fail
    got = await post(world)
    assert (got.status, got.headers[headers.OUTCOME]) == (200, "fallback")
    assert world.state.counters.failed_offloads == 1


async def test_a_destination_that_fails_aborts_the_source(world):
    await start(world)
    prefilling = asyncio.Event()

    async def prefill(request: web.Request, body: bytes) -> web.StreamResponse:
        prefilling.set()
        return await waiting(request, body)

    async def die(request: web.Request, _body: bytes) -> web.StreamResponse:
        await prefilling.wait()
        request.transport.close()
        return web.Response()

    world.workers["x0"].reply, world.workers["d0"].reply = prefill, die
    await asyncio.wait_for(post(world), 30)
    await world.workers["x0"].wait_aborted()


async def test_the_log_names_the_transfer_of_a_client_that_left(world, caplog):
    caplog.set_level("INFO")
    await start(world)
    world.workers["x0"].reply = world.workers["d0"].reply = waiting
    asking = asyncio.create_task(post(world))
    await eventually_async(lambda: world.workers["d0"].seen, "the destination gets its leg")
    asking.cancel()
    (destination,) = params(world, "d0")
    left = f"transfer_id={destination['transfer_id']} decision=offload outcome=aborted"
    await eventually_async(lambda: left in caplog.text, "the log tells of the request")


async def test_a_source_that_still_computes_when_the_answer_has_ended_is_aborted(world):
    """The destination did without it."""
    await start(world)
    prefilling = asyncio.Event()

    async def prefill(request: web.Request, body: bytes) -> web.StreamResponse:
        prefilling.set()
        return await waiting(request, body)

    async def decode(request: web.Request, body: bytes) -> web.StreamResponse:
        await prefilling.wait()
        return await answer(request, body)

    world.workers["x0"].reply, world.workers["d0"].reply = prefill, decode
    assert (await asyncio.wait_for(post(world), 30)).status == 200
    await world.workers["x0"].wait_aborted()


@pytest.mark.parametrize("engine", ["vllm-prfaas", "vllm-nixl", "vllm-mooncake"])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["x" * 8000, "y"]},
        {"prompt": [[1] * 4000, [2]]},
        {"n": 2},
        {"use_beam_search": True},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 1},
    ],
)
async def test_what_one_transfer_cannot_carry_is_prefilled_where_it_is_decoded(world, caplog, engine, fields):
    caplog.set_level("INFO")
    await start(world, engine)
    got = await post(world, **fields)
    assert (got.status, got.headers[headers.DECISION], world.workers["x0"].seen) == (200, "local", [])
    salt = {"cache_salt": place_salt({"eu"}, "")}
    assert json.loads(world.workers["d0"].seen[0].body) == REQUEST | fields | salt
    assert "why=NoHandOff" in caplog.text


@pytest.mark.parametrize(
    "fields", [{"n": 1}, {"n": None}, {"prompt": [5] * 4000}, {"echo": True}, {"use_beam_search": False}]
)
async def test_one_prompt_with_one_answer_is_offloaded(world, fields):
    await start(world)
    got = await post(world, **fields)
    assert (got.status, got.headers[headers.DECISION]) == (200, "offload")


async def test_a_batch_still_goes_to_engines_that_can_split_it(world):
    await start(world, "sglang")
    got = await post(world, prompt=["x" * 8000, "y"])
    assert (got.status, got.headers[headers.DECISION]) == (200, "offload")


ONE_PROMPT = [
    ({"prompt": ["x" * 8000, "y"]}, "local"),
    ({"prompt": ["x" * 8000]}, "offload"),
    ({"prompt": [[7] * 8000]}, "offload"),
    ({"n": 3, "logprobs": 2}, "offload"),
]


@pytest.mark.parametrize(("more", "decision"), ONE_PROMPT)
async def test_our_worker_hands_over_one_prompt_with_any_number_of_answers(world, more, decision):
    await start(world, "prfaas")
    got = await post(world, **more)
    assert (got.status, got.headers[headers.DECISION]) == (200, decision)
    sent = [json.loads(one.body) for name in world.workers if name != "d0" for one in world.workers[name].seen]
    assert not any({"n", "logprobs"} & set(one) for one in sent), "a source would check them, and answers nothing"
