"""Proves that the Responses and Messages APIs reach engines that serve them, by the same rules as completions.

Other engines answer honestly, and errors have the form of their API.
"""

import json
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.waiting import eventually_async

from prfaas.wire import headers
from prfaas.wire.routes import EngineName

KEY = "sk-0123456789abcdef"
LONG = "x" * 8000
MESSAGES = {"model": "m", "messages": [{"role": "user", "content": LONG}], "max_tokens": 64, "system": "be brief"}
RESPONSE = {"model": "m", "input": LONG, "max_output_tokens": 64, "instructions": "be brief"}
BODIES = {"/v1/messages": MESSAGES, "/v1/responses": RESPONSE}
ANSWERED = {"id": "1", "object": "response", "usage": {"input_tokens": 2000}}
STREAM = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"a","content":[]}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"4"}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
)


async def start(world, engine: EngineName, *names: str, **more: Any) -> None:
    await world.start(*names, **more)
    world.change_instances(engine=engine)
    for worker in world.workers.values():
        worker.reply = _answer


async def _answer(request: web.Request, _body: bytes) -> web.StreamResponse:
    if request.path == "/query":
        return web.json_response({"0": {"engine_id": "e"}})
    return web.json_response(ANSWERED | {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "h"}})


@pytest.mark.parametrize("path", BODIES)
async def test_an_engine_that_serves_an_api_gets_its_requests_as_they_are(world, path):
    await start(world, "vllm-nixl", "d0", tokens=100_000, clusters=())
    raw = json.dumps(BODIES[path], indent=1).encode()
    got = await world.post(raw, path)
    assert (got.status, got.json["id"], got.headers[headers.DECISION]) == (200, "1", "local")
    assert [(one.path, one.body) for one in world.workers["d0"].seen] == [(path, raw)]


@pytest.mark.parametrize("engine", ["vllm-nixl", "vllm-prfaas"])
@pytest.mark.parametrize(("path", "limit"), [("/v1/messages", "max_tokens"), ("/v1/responses", "max_output_tokens")])
async def test_vllm_sends_caches_of_every_api(world, engine, path, limit):
    await start(world, engine, "d0", "x0")
    got = await world.post(BODIES[path] | {"stream": False}, path)
    assert (got.status, got.headers[headers.DECISION], got.headers[headers.OUTCOME]) == (200, "offload", "ok")
    (filled,), (decoded,) = ([json.loads(one.body) for one in world.workers[name].seen] for name in ("x0", "d0"))
    assert (filled.pop(limit), filled.pop("stream")) == (1, False)
    assert filled.pop("kv_transfer_params")["do_remote_decode"] is True, "vLLM checks no thinking budget then"
    assert decoded.pop("kv_transfer_params")
    assert decoded.pop("cache_salt") == filled.pop("cache_salt"), "of the places that may give caches"
    assert decoded == BODIES[path] | {"stream": False}
    assert filled == {name: value for name, value in BODIES[path].items() if name != limit}, (
        "and no field of another API"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]},
        {"tools": 7},
    ],
)
async def test_a_response_that_one_instance_has_to_see_whole_is_not_offloaded(world, more):
    await start(world, "vllm-nixl", "d0", "x0")
    got = await world.post(RESPONSE | more, "/v1/responses")
    assert (got.status, got.headers[headers.DECISION], world.workers["x0"].seen) == (200, "local", [])
    got = await world.post(RESPONSE | {"tools": [{"type": "function", "name": "f"}]}, "/v1/responses")
    assert got.headers[headers.DECISION] == "offload"


@pytest.mark.parametrize(
    ("engine", "path", "served"),
    [
        ("prfaas", "/v1/messages", "/v1/chat/completions, /v1/completions"),
        ("prfaas", "/v1/responses", "/v1/chat/completions, /v1/completions"),
        ("prfaas", "/v1/messages/count_tokens", "/v1/chat/completions, /v1/completions"),
        ("sglang", "/v1/messages", "/v1/messages/count_tokens"),
        ("sglang", "/v1/responses", "/v1/messages/count_tokens"),
    ],
)
async def test_an_engine_that_does_not_serve_an_api_answers_so(world, engine, path, served):
    await start(world, engine, "d0", "p0")
    got = await world.post(BODIES.get(path, MESSAGES), path)
    assert (got.status, got.json["error"]["code"]) == (404, "unknown_url")
    assert engine in got.json["error"]["message"]
    assert served in got.json["error"]["message"]
    assert [one.seen for one in world.workers.values()] == [[], []]


async def test_of_two_engines_only_the_one_that_serves_an_api_gets_its_requests(world):
    await world.start("d0", "d1")
    engines = {"d0": "prfaas", "d1": "vllm-nixl"}
    instances = tuple(msgspec.structs.replace(one, engine=engines[one.name]) for one in world.table.instances)
    world.state.set_table(world.write_table(instances=instances))
    for _ in range(6):
        assert (await world.post(MESSAGES, "/v1/messages")).headers[headers.DECODE_INSTANCE] == "d1"


@pytest.mark.parametrize("engine", ["vllm-nixl", "sglang"])
async def test_tokens_are_counted_by_a_decode_instance_and_are_no_demand(world, engine):
    await start(world, engine, "d0", "p0", "x0")
    counted = {name: value for name, value in MESSAGES.items() if name != "max_tokens"}
    got = await world.post(counted, "/v1/messages/count_tokens")
    assert (got.status, got.headers[headers.DECISION]) == (200, "local")
    assert [one.path for one in world.workers["d0"].seen] == ["/v1/messages/count_tokens"]
    assert json.loads(world.workers["d0"].seen[0].body) == counted
    assert world.workers["p0"].seen == world.workers["x0"].seen == []
    assert sum(world.state.counters.lengths) == 0
    assert await world.metric('prfaas_gateway_time_to_first_token_seconds_count{decision="local"}') == 0


async def test_named_events_are_relayed_as_they_are(world):
    await start(world, "vllm-nixl", "d0")

    async def reply(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in STREAM:
            await response.write(event)
        return response

    world.workers["d0"].reply = reply
    got = await world.post(MESSAGES | {"stream": True}, "/v1/messages")
    assert (got.body, got.headers["content-type"]) == (b"".join(STREAM), "text/event-stream")


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_breaks_ends_with_an_error_event_of_its_api(world, path):
    await start(world, "vllm-nixl", "d0")

    async def dying(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STREAM[0])
        request.transport.close()
        return response

    world.workers["d0"].reply = dying
    got = await world.post(BODIES[path] | {"stream": True}, path)
    *_, last = got.body.removesuffix(b"\n\n").split(b"\n\n")
    name, data = last.split(b"\n")
    assert name == b"event: error"
    event = json.loads(data.removeprefix(b"data: "))
    assert event["type"] == "error"
    if path == "/v1/messages":
        assert (event["error"]["type"], event["error"]["code"]) == ("api_error", "stream_broken")
    else:
        assert event["code"] == "stream_broken"


async def test_errors_of_the_messages_api_have_anthropics_form_and_openais_fields(world, tmp_path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "a").write_text(KEY)
    await start(world, "vllm-nixl", "d0", keys_dir=tmp_path / "keys")
    key = {"x-api-key": KEY}
    for got, status, kind in (
        (await world.post(MESSAGES, "/v1/messages"), 401, "authentication_error"),
        (await world.post(b"{", "/v1/messages", headers=key), 400, "invalid_request_error"),
        (await world.post(MESSAGES | {"model": "x"}, "/v1/messages", headers=key), 404, "not_found_error"),
    ):
        assert (got.status, got.json["type"], got.json["error"]["type"]) == (status, "error", kind)
        assert {"message", "type", "code", "param"} <= set(got.json["error"])
    assert (await world.post(MESSAGES, "/v1/messages", headers=key)).status == 200
    assert (await world.post(RESPONSE, "/v1/responses", headers=key)).status == 200
    wrong = await world.post(RESPONSE, "/v1/responses", headers={"x-api-key": KEY[:-1] + "0"})
    assert (wrong.status, wrong.json["error"]["code"]) == (401, "invalid_api_key")


async def test_other_methods_and_paths_of_these_apis_are_refused_as_an_engine_would(world):
    await start(world, "vllm-nixl", "d0")
    got = await world.get("/v1/messages")
    assert (got.status, got.headers["allow"], got.json["type"]) == (405, "POST", "error")
    got = await world.get("/v1/responses/resp_1")
    assert (got.status, got.json["error"]["code"]) == (404, "unknown_url")


@pytest.mark.system
@pytest.mark.parametrize("path", BODIES)
async def test_a_conversation_goes_where_its_last_turn_went(world, path):
    await start(world, "vllm-nixl", "d0", "d1", tokens=100_000)
    body = BODIES[path]
    sent = world.running.parts.kv._sent
    await eventually_async(lambda: sent.keys() == {"d0", "d1"}, "the gateway keeps a record of both instances")
    first = (await world.post(body, path)).headers[headers.DECODE_INSTANCE]
    turns = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "?"}]
    longer = body | ({"messages": turns} if path == "/v1/messages" else {"input": [turns[0]["content"], *turns[1:]]})
    served = {
        (await world.post(longer, path, headers={headers.REQUEST_ID: f"{n}"})).headers[headers.DECODE_INSTANCE]
        for n in range(8)
    }
    assert served == {first}
