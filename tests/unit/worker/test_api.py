"""One real worker's HTTP face: streams say what whole answers say, and every error is an OpenAI-style body."""

import asyncio
import copy
import json

import pytest
from tests.documented import keeps_its_word
from tests.serving import send_bytes
from yarl import URL

from prfaas.wire import openapi

from .test_api_prompts import post, stream

pytestmark = pytest.mark.system

SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 40}
WITH_USAGE = {"stream_options": {"include_usage": True}}


async def test_a_stream_is_the_whole_answer_in_pieces(client, pair):
    body = SAMPLED | {"prompt": ["def f(", "import "], "n": 2, "logprobs": 1}
    *chunks, usage, done = await stream(client, pair[1], "/v1/completions", body | WITH_USAGE)
    expected = await post(client, pair[1], "/v1/completions", body)
    assert len(expected["choices"]) == 4
    for choice in expected["choices"]:
        mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
        logprobs = [value for part in mine if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (usage["choices"], usage["usage"]) == ([], expected["usage"])
    assert done == "[DONE]"


async def test_a_chat_stream_names_the_role_once(client, pair):
    body = SAMPLED | {"messages": [{"role": "user", "content": "Hello"}]}
    *chunks, usage, done = await stream(client, pair[1], "/v1/chat/completions", body | WITH_USAGE)
    expected = await post(client, pair[1], "/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.get("content", "") for delta in deltas) == expected["choices"][0]["message"]["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert usage["usage"] == expected["usage"]
    assert expected["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert done == "[DONE]"


async def test_a_stop_string_ends_the_answer_before_it_and_the_engine_stops_too(client, pair):
    body = SAMPLED | {"prompt": "def f("}
    text = (await post(client, pair[1], "/v1/completions", body))["choices"][0]["text"]
    stop = text[8:10]
    cut = await post(client, pair[1], "/v1/completions", body | {"stop": stop, "max_tokens": 20_000})
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] <= 40
    await client.eventually(pair[1], prfaas_requests_running=0)


async def test_every_token_of_a_chat_can_have_logprobs(client, pair):
    body = SAMPLED | {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "top_logprobs": 3}
    answer = await post(client, pair[1], "/v1/chat/completions", body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    for entry in content:
        ranked = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(ranked) == 3
        assert ranked == sorted(ranked, reverse=True)
        assert entry["logprob"] <= ranked[0] + 1e-6
    text = bytes(byte for entry in content for byte in entry["bytes"])
    assert text.decode("utf-8", "replace") == answer["choices"][0]["message"]["content"]


async def test_the_request_id_of_the_caller_comes_back(client, pair):
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    headers = {"x-request-id": "mine-1"}
    async with client.session.post(f"{pair[1].url}/v1/completions", json=ask, headers=headers) as answer:
        assert answer.headers["x-request-id"] == "mine-1"
        assert (await answer.json())["id"] == "cmpl-mine-1"


async def test_a_request_id_that_is_no_text_is_replaced(client, pair):
    # As bytes on a socket of our own: no client library would send this.
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'
    lines = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: \xfc\r\n"
    reader, writer = await asyncio.open_connection(pair[1].host, 8000)
    writer.write(lines + b"content-length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"\xfc" not in answer


TOO_LONG = b'{"model": "tiny", "prompt": "' + b"x" * 140_000 + b'"}'

DEEP = b'{"a": ' * 5000 + b"1" + b"}" * 5000
DEEP_ARGUMENTS = b'{"model": "tiny", "messages": [], "chat_template_kwargs": ' + DEEP + b"}"


@pytest.mark.parametrize(
    ("method", "path", "body", "wanted"),
    [
        ("POST", "/v1/completions", b"{", (400, "invalid_json")),
        ("POST", "/v1/completions", b'{"model": "gpt", "prompt": "x"}', (404, "model_not_found")),
        ("POST", "/v1/chat/completions", b'{"model": "tiny", "messages": []}', (400, "invalid_request")),
        ("POST", "/v1/completions", TOO_LONG, (400, "context_length_exceeded")),
        ("POST", "/v1/chat/completions", DEEP_ARGUMENTS, (400, "invalid_json")),
        ("POST", "/v1/prefills", DEEP, (400, "invalid_json")),
        ("POST", "/tokenize", b'{"messages": [], "tools": [{}]}', (400, "unsupported_parameter")),
        ("GET", "/v1/completions", b"", (405, "invalid_request")),
        ("GET", "/v1/nothing", b"", (404, "invalid_request")),
    ],
)
async def test_every_error_has_an_openai_body(
    client, pair, method: str, path: str, body: bytes, wanted: tuple[int, str]
):
    async with client.session.request(method, f"{pair[1].url}{path}", data=body) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == wanted
        assert error["type"] == "invalid_request_error"
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("Content-Length: 1", (400, "invalid_http")),
        (f"X-Long: {'y' * 40_000}", (431, "header_too_large")),
        ("Content-Encoding: zstd", (415, "unsupported_encoding")),
        ("Content-Encoding: gzip", (400, "invalid_request")),
        (f"X-Long: {'y' * (32 << 10)}", (404, "model_not_found")),
    ],
)
async def test_what_is_no_http_is_answered_likewise(pair, line: str, wanted: tuple[int, str]):
    body = b'{"model":"none","prompt":"x"}'
    lines = ("POST /v1/completions HTTP/1.1", "Host: w", "Connection: close", line, f"Content-Length: {len(body)}")
    raw = "\r\n".join((*lines, "", "")).encode() + body
    url = URL(pair[1].url)
    head, _, answer = (await send_bytes(url.port, raw, host=url.host)).partition(b"\r\n\r\n")
    assert (int(head.split(b" ")[1]), json.loads(answer)["error"]["code"]) == wanted


async def test_a_stream_asks_proxies_not_to_hold_it_back(client, pair):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "stream": True}
    async with client.session.post(f"{pair[1].url}/v1/completions", json=body) as answer:
        assert answer.headers["X-Accel-Buffering"] == "no"


async def test_the_model_list_shows_the_context(client, pair):
    async with client.session.get(f"{pair[1].url}/v1/models") as answer:
        (model,) = (await answer.json())["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 131072)


async def test_describes_how_to_request_prefills(client, pair):
    async with client.session.get(f"{pair[1].url}/openapi.json") as answer:
        assert await answer.json() == openapi.prefill()


async def test_the_openapi_document_is_kept(pair, tmp_path):
    document = copy.deepcopy(openapi.prefill())
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "minItems": 2, "maxItems": 9}
    schemas = document["components"]["schemas"]
    schemas["PrefillRequest"]["properties"] |= {"model": {"const": "tiny"}, "token_ids": tokens}
    schemas["LegParams"]["properties"] |= {"role": {"const": "source"}, "prefix": {"type": "null"}}
    # The model knows more tokens than these; and 7.0, an integer to JSON Schema, is none here.
    without = ("negative_data_rejection", "positive_data_acceptance")
    await asyncio.to_thread(keeps_its_word, document, pair[0].url, tmp_path, without=without)
