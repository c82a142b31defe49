"""Proves that the legs to TensorRT-LLM are those of its own orchestrator, as its published source and tests have them.

The stand-in refuses what trtllm-serve refuses: fields that its API does not know, and params that do not match.
"""

import copy
import json

import pytest
from aiohttp import web

from prfaas.names import HUB
from prfaas.wire import headers
from prfaas_gateway.request import place_salt


def chat(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


REQUEST = {"model": "m", **chat("x" * 8000), "max_tokens": 64, "temperature": 0.25}
SALTED = REQUEST | {"cache_salt": place_salt({"eu"}, "")}
PARAMS = {
    "request_type",
    "first_gen_tokens",
    "ctx_request_id",
    "encoded_opaque_state",
    "draft_tokens",
    "disagg_request_id",
    "ctx_dp_rank",
    "ctx_info_endpoint",
    "schedule_style",
}
"""The fields of DisaggregatedParams in tensorrt_llm/serve/openai_protocol.py; newer versions have `ctx_usage` too."""
IDS = [11, 12, 13]
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
WHOLE = {"id": "cmpl-2", "choices": [{"index": 0, "text": "whole"}]}
REFUSAL = {"object": "error", "message": "extra inputs are not permitted"}


class Trtllm:
    """A prefill and a decode instance of one version."""

    def __init__(self, world, *, known: set[str], finish_reason: str = "length"):
        self.known, self.finish_reason = known, finish_reason
        self.held: dict[int, bytes] = {}
        """The caches that wait for their generation leg, by id."""
        self.requests: dict[str, list[dict]] = {"x0": [], "d0": []}
        for name in self.requests:
            world.workers[name].reply = self._replying(name)

    def _replying(self, name: str):
        async def reply(request: web.Request, body: bytes) -> web.Response:
            request_body = json.loads(body)
            self.requests[name].append(request_body)
            params = request_body.get("disaggregated_params")
            if "prompt" in request_body and "cache_salt" in request_body:
                return web.json_response(REFUSAL, status=400)
            if params is not None and not set(params) <= self.known:
                return web.json_response(REFUSAL, status=400)
            if params is None:
                return web.json_response(WHOLE)
            return self._context(request_body, params) if name == "x0" else self._generation(request_body, params)

        return reply

    def _context(self, request: dict, params: dict) -> web.Response:
        assert params["request_type"] == "context_only"
        assert request["stream"] is False
        assert "stream_options" not in request
        number = params["disagg_request_id"]
        assert 1 << 40 <= number < 1 << 63, "an id that no other request of the instance can have"
        self.held[number] = b"cache"
        cache_params = dict.fromkeys(self.known) | params | {"ctx_request_id": number, "first_gen_tokens": [7]}
        cache_params |= {"encoded_opaque_state": "b3BhcXVl"}
        choice = {"index": 0, "text": "a", "finish_reason": self.finish_reason, "disaggregated_params": cache_params}
        return web.json_response({"id": "cmpl-1", "choices": [choice], "usage": USAGE, "prompt_token_ids": IDS})

    def _generation(self, request: dict, params: dict) -> web.Response:
        assert params["request_type"] == "generation_only"
        assert (params["first_gen_tokens"], params["encoded_opaque_state"]) == ([7], "b3BhcXVl")
        assert params["ctx_request_id"] == params["disagg_request_id"]
        del self.held[params["disagg_request_id"]]
        assert request["prompt_token_ids"] == IDS
        return web.json_response(WHOLE)


@pytest.fixture
def start(world):
    async def started(*, known: set[str] = PARAMS, **more) -> Trtllm:
        await world.start("d0", "x0")
        world.change_instances(engine="tensorrt-llm")
        return Trtllm(world, known=set(known), **more)

    return started


async def post(world, **more):
    return await world.post(REQUEST | more)


async def test_the_context_leg_comes_first_and_the_generation_leg_takes_its_cache(world, start):
    engine = await start()
    got = await post(world)
    assert (got.status, got.json, got.headers[headers.DECISION]) == (200, WHOLE, "offload")
    assert engine.held == {}
    (context,), (generation,) = engine.requests["x0"], engine.requests["d0"]
    assert {**context, "disaggregated_params": 0, "stream": 0} == SALTED | {"disaggregated_params": 0, "stream": 0}
    assert {**generation, "disaggregated_params": 0} == SALTED | {"disaggregated_params": 0, "prompt_token_ids": IDS}
    assert "ctx_usage" not in generation["disaggregated_params"], "this version does not know it"


async def test_a_chat_keeps_its_messages_beside_the_ids(world, start):
    engine = await start()
    request = {"model": "m", "messages": [{"role": "user", "content": "x" * 8000}], "stream": True}
    request |= {"stream_options": {"include_usage": True}}
    assert (await world.post(request)).status == 200
    (generation,) = engine.requests["d0"]
    assert {name: generation[name] for name in request} == request
    assert generation["prompt_token_ids"] == IDS


async def test_a_version_that_counts_usage_of_both_legs_gets_the_first_ones(world, start):
    engine = await start(known={*PARAMS, "ctx_usage"})
    await post(world)
    assert engine.requests["d0"][0]["disaggregated_params"]["ctx_usage"] == USAGE


async def test_every_request_has_its_own_id(world, start):
    engine = await start()
    for letter in "abc":
        await post(world, **chat(letter * 8000))
    ids = [one["disaggregated_params"]["disagg_request_id"] for one in engine.requests["x0"]]
    assert len(set(ids)) == 3


async def test_an_answer_that_ends_with_its_first_token_needs_no_generation_leg(world, start):
    engine = await start(finish_reason="stop")
    got = await post(world)
    assert got.json == {"id": "cmpl-1", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": USAGE}
    assert engine.requests["d0"] == []


async def test_such_an_answer_as_a_stream_is_the_decode_instances_own(world, start):
    engine = await start(finish_reason="stop")
    assert (await post(world, stream=True)).json == WHOLE
    assert engine.requests["d0"] == [SALTED | {"stream": True}]


async def test_without_the_place_of_the_cache_the_prefill_has_failed(world, start):
    engine = await start()

    async def aggregated(_request: web.Request, _body: bytes) -> web.Response:
        return web.json_response({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]})

    world.workers["x0"].reply = aggregated
    got = await post(world)
    assert (got.status, got.headers[headers.OUTCOME], got.headers[headers.PREFILL_CLUSTER]) == (200, "fallback", HUB)
    assert engine.requests["d0"] == [SALTED]


async def test_an_answer_of_any_nesting_is_passed_on_or_has_failed(world, start):
    """What can just be decoded may be too deep to be encoded again."""
    await start()
    body = b'{"choices":[{"finish_reason":"length","disaggregated_params":{"a":1}}],"usage":%b,"prompt_token_ids":%b}'
    nested = b""

    async def prefilled(_request: web.Request, _body: bytes) -> web.Response:
        return web.Response(body=body % (nested, nested), content_type="application/json")

    async def decoded(_request: web.Request, _body: bytes) -> web.Response:
        return web.json_response(WHOLE)

    world.workers["x0"].reply, world.workers["d0"].reply = prefilled, decoded

    async def is_passed_on(levels: int) -> bool:
        nonlocal nested
        nested = b"[" * levels + b"]" * levels
        world.state.ejections.succeeded("x0")
        got = await post(world, **chat(f"{levels} " * 4000))
        assert got.status == 200
        return got.headers[headers.OUTCOME] == "ok"

    deepest, too_deep = 1, 1200
    while too_deep - deepest > 1:
        levels = (deepest + too_deep) // 2
        deepest, too_deep = (levels, too_deep) if await is_passed_on(levels) else (deepest, levels)
    assert 100 < deepest < 1100
    assert [await is_passed_on(deepest + more) for more in (-2, -1, 0, 1, 2)] == [True, True, True, False, False]


async def test_a_cache_that_does_not_arrive_falls_back_to_the_hub(world, start):
    engine = await start()
    serve = world.workers["d0"].reply

    async def fail(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=500) if b"generation_only" in body else await serve(request, body)

    world.workers["d0"].reply = fail
    got = await post(world)
    assert (got.status, got.json, got.headers[headers.OUTCOME]) == (200, WHOLE, "fallback")
    assert engine.requests["d0"] == [SALTED]


@pytest.mark.parametrize("more", [{"n": 2}, {"best_of": 2}, {"use_beam_search": True}])
async def test_its_orchestrator_splits_only_single_prompts_and_so_do_we(world, start, more):
    engine = await start()
    got = await post(world, **copy.deepcopy(more))
    assert (got.status, got.headers[headers.DECISION], engine.requests["x0"]) == (200, "local", [])


async def test_a_completion_has_no_salt_and_its_prompt_stays_in_the_hub(world, start):
    """Its type of a completion has no `cache_salt`, and refuses what it does not know."""
    engine = await start()
    completion = {"model": "m", "prompt": "x" * 8000}
    got = await world.post(completion, "/v1/completions")
    assert (got.status, got.json, got.headers[headers.DECISION]) == (200, WHOLE, "local")
    assert engine.requests == {"x0": [], "d0": [completion]}
    assert (await world.post(completion | {"cache_salt": "s"}, "/v1/completions")).status == 400, "control"
