"""Proves that either client sends what it should, reads answers and decisions, and repeats only what no server has
begun to serve.
"""

import asyncio
import json
import socket

import pytest
from aiohttp import web

from prfaas.client import AsyncClient, BrokenStreamError, BusyError, Client, DeadlinePassedError, Forbid, Prefer
from prfaas.errors import BadInputError, PeerError, ProtocolError, RequestError, UnreachableError
from prfaas.wire import headers

MESSAGES = [{"role": "user", "content": "hi"}]
DECIDED = {
    headers.DECISION: "offload",
    headers.OUTCOME: "ok",
    headers.PREFILL_CLUSTER: "eu",
    headers.CACHED_TOKENS: "64",
    headers.PREFILL_SECONDS: "0.25",
    headers.REQUEST_ID: "r1",
}


def answer_with(body, status: int = 200, **more: str):
    async def reply(_request) -> web.Response:
        return web.json_response(body, status=status, headers={**DECIDED, **more})

    return reply


def refuse_with(status: int, code: str, **more: str):
    return answer_with({"error": {"message": "no", "type": "t", "param": "model", "code": code}}, status, **more)


def streaming(*events: str, gate: asyncio.Event | None = None):
    async def reply(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **DECIDED})
        await response.prepare(request)
        for event in events:
            await response.write(event.encode())
        if gate is not None:
            await gate.wait()
        return response

    return reply


def chat_chunk(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"


CHAT = {"choices": [{"message": {"role": "assistant", "content": "hello"}}], "usage": {"total_tokens": 3}, "new": 1}
ANSWERED = answer_with(CHAT)


async def test_an_answer_comes_with_its_decision(server, either):
    server.script = [ANSWERED]
    answer = await either().call("chat", "m", MESSAGES, max_tokens=5, temperature=0.5)
    assert (answer.text, answer.usage.total_tokens) == ("hello", 3)
    decision = answer.decision
    assert (decision.kind, decision.prefill_cluster, decision.cached_tokens) == ("offload", "eu", 64)
    assert (decision.prefill_seconds, decision.threshold_tokens, decision.request_id) == (0.25, None, "r1")
    assert server.seen[0].path == "/v1/chat/completions"
    assert server.seen[0].json == {"model": "m", "messages": MESSAGES, "max_tokens": 5, "temperature": 0.5}


async def test_prompts_may_be_text_or_token_ids(server, either):
    server.script = [answer_with({"choices": [{"text": "b", "logprobs": {"tokens": ["b"]}}]})]
    client = either()
    for prompt in ("a", [1, 2, 3]):
        answer = await client.call("complete", "m", prompt, logprobs=1)
        assert (answer.text, answer.choices[0].logprobs) == ("b", {"tokens": ["b"]})
    assert [seen.json["prompt"] for seen in server.seen] == ["a", [1, 2, 3]]


async def test_models_are_listed(server, either):
    server.script = [answer_with({"data": [{"id": "m", "object": "model"}]})]
    assert await either().call("models") == ["m"]


async def test_a_stream_yields_its_pieces_and_knows_its_decision(server, either):
    server.script = [streaming(": hi\n\n", chat_chunk("he"), chat_chunk("llo"), "data: [DONE]\n\n")]
    texts: list[str] = []
    stream = await either().texts("stream_chat", "m", MESSAGES, into=texts)
    assert (texts, stream.decision.kind) == (["he", "llo"], "offload")
    assert server.seen[0].json["stream"] is True


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        ("", BrokenStreamError),
        ('data: {"error": {"message": "broken", "code": "stream_broken"}}\n\n', BrokenStreamError),
        ('data: {"error": {"message": "late", "code": "deadline_exceeded"}}\n\n', DeadlinePassedError),
        ("data: {not json\n\n", ProtocolError),
    ],
)
async def test_a_stream_that_is_not_whole_says_so_after_what_came(server, either, ending, kind):
    server.script = [streaming(chat_chunk("he"), ending)]
    texts: list[str] = []
    with pytest.raises(kind):
        await either().texts("stream_chat", "m", MESSAGES, into=texts)
    assert texts == ["he"]


async def test_preferences_and_key_travel_as_headers(server, either):
    server.script = [ANSWERED]
    client = either(api_key="k", datacenters=Prefer("eu-west", "eu").forbid("us"), offload="never", deadline=60)
    await client.call("chat", "m", MESSAGES)
    sent = server.seen[0].headers
    assert (sent["authorization"], sent[headers.OFFLOAD]) == ("Bearer k", "never")
    assert sent[headers.DATACENTERS] == "prefer eu-west, eu; forbid us"
    assert 50 < float(sent[headers.DEADLINE_SECONDS]) <= 60


async def test_without_preferences_no_header_of_ours_is_sent(server, either):
    server.script = [ANSWERED]
    await either().call("chat", "m", MESSAGES)
    assert not [name for name in server.seen[0].headers if name.startswith("x-prfaas") or name == "authorization"]


async def test_asking_changes_options_and_leaves_the_client_as_it_was(server, either):
    server.script = [ANSWERED]
    client = either(offload="never", api_key="k")
    changed = type(client)(client.client.asking(offload="always", datacenters=Forbid("us")))
    for one in (changed, client):
        await one.call("chat", "m", MESSAGES)
    assert [seen.headers[headers.OFFLOAD] for seen in server.seen] == ["always", "never"]
    assert [headers.DATACENTERS in seen.headers for seen in server.seen] == [True, False]
    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer k"}


@pytest.mark.parametrize("status", [429, 503])
async def test_repeats_a_request_that_no_server_began(server, either, status):
    server.script = [refuse_with(status, "saturated", **{"Retry-After": "0"}), ANSWERED]
    assert (await either().call("chat", "m", MESSAGES)).text == "hello"
    assert len(server.seen) == 2


async def test_does_not_repeat_a_request_for_ever(server, either):
    server.script = [refuse_with(429, "saturated", **{"Retry-After": "0"})]
    with pytest.raises(BusyError) as busy:
        await either().call("chat", "m", MESSAGES)
    assert (busy.value.code, len(server.seen)) == ("saturated", 3)


async def test_waits_for_nothing_beyond_the_deadline(server, either):
    server.script = [refuse_with(429, "rate_limit_exceeded", **{"Retry-After": "3600"})]
    with pytest.raises(BusyError) as busy:
        await either(deadline=30).call("chat", "m", MESSAGES)
    assert (busy.value.retry_after_seconds, len(server.seen)) == (3600, 1)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_header", RequestError),
        (401, "invalid_api_key", RequestError),
        (404, "model_not_found", RequestError),
        (500, "internal_error", PeerError),
        (502, "engine_failed", PeerError),
        (504, "deadline_exceeded", DeadlinePassedError),
    ],
)
async def test_sends_a_request_that_may_have_been_served_once_and_names_it(server, either, status, code, kind):
    server.script = [refuse_with(status, code)]
    with pytest.raises(kind, match="no") as refused:
        await either().call("chat", "m", MESSAGES)
    assert len(server.seen) == 1
    if isinstance(refused.value, RequestError):
        assert (refused.value.status, refused.value.code, refused.value.param) == (status, code, "model")


async def test_does_not_repeat_a_request_whose_answer_was_cut_off(server, either):
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"{")
        request.transport.close()
        return response

    server.script = [cut]
    with pytest.raises(UnreachableError):
        await either().call("chat", "m", MESSAGES)
    assert len(server.seen) == 1


@pytest.mark.parametrize("body", ["text", ["a"], {"choices": 3}])
async def test_an_answer_of_another_server_is_a_breach_of_protocol(server, either, body):
    server.script = [answer_with(body)]
    with pytest.raises(ProtocolError, match="is the address a gateway's"):
        await either().call("chat", "m", MESSAGES)


@pytest.mark.system
async def test_an_absent_server_is_an_error_of_the_tree():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with Client(f"http://127.0.0.1:{taken.getsockname()[1]}") as client, pytest.raises(UnreachableError):
            client.models()


async def test_leaving_a_stream_aborts_the_request(server):
    server.script = [streaming(chat_chunk("he"), gate=asyncio.Event())]
    async with AsyncClient(server.url) as client, await client.stream_chat("m", MESSAGES) as stream:
        async for chunk in stream:
            assert chunk.text == "he"
            break
    await asyncio.wait_for(server.aborted.wait(), 60)


@pytest.mark.parametrize("options", [{"offload": "Always"}, {"deadline": 0}, {"deadline": 1e9}, {"api_key": "k\n"}])
def test_options_that_no_request_could_carry_are_refused_at_once(options):
    with pytest.raises(BadInputError):
        Client("http://gateway", **options)
    with Client("http://gateway") as client, pytest.raises(BadInputError):
        client.asking(**options)


@pytest.mark.parametrize("url", ["", "gateway:8080", "ftp://gateway", "http://", "http://[::1", "http://gate way\n"])
def test_refuses_an_invalid_address(url):
    with pytest.raises(BadInputError, match="base_url"):
        Client(url)


def test_checks_places_when_they_are_named():
    assert str(Prefer("eu-west").forbid("us").prefer("eu")) == "prefer eu-west, eu; forbid us"
    for make in (lambda: Prefer("eu west"), lambda: Forbid(""), lambda: Prefer("us").forbid("us")):
        with pytest.raises(RequestError):
            make()


async def test_what_json_cannot_say_is_refused():
    with Client("http://gateway") as client, pytest.raises(BadInputError, match="JSON"):
        client.chat("m", [{"role": "user", "content": object()}])
