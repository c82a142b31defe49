"""A stream that is cut behind any event, and continues from what was sent until then, is the whole stream: text, tokens
and their places, reasons, usage, the head of every chunk. What cannot continue is refused, in a way that makes the
gateway ask another.
"""

import copy
import json
from typing import Any

import openai
import pytest

from prfaas.wire import headers
from prfaas.wire.streams import STREAM_FIELD

pytestmark = pytest.mark.system

FIXED: dict[str, Any] = {"seed": 77, "created": 1_795_425_279}
HELLO = [{"role": "user", "content": "What is the weather?"}]
ONLY_AB = {"logit_bias": {"97": 100, "98": 100}}
STOPS = ["abbabaab", "babbabba"]
HALF_CHARACTERS = {"logit_bias": {str(byte): 100 for byte in "é日".encode()}}

COMPLETIONS = {
    "greedy, with usage": {"temperature": 0, "max_tokens": 24, "stream_options": {"include_usage": True}},
    "usage all along": {"temperature": 0, "max_tokens": 6, "stream_options": {"continuous_usage_stats": True}},
    "drawn with the gateway's seed": {"max_tokens": 24},
    "choices of several prompts": {"prompt": ["def main(", "def main(", "class A"], "n": 2, "max_tokens": 5},
    "log probabilities": {"seed": 3, "n": 2, "logprobs": 2, "max_tokens": 8, "stop": ["e", "1"]},
    "characters of several bytes": HALF_CHARACTERS | {"seed": 6, "max_tokens": 40, "logprobs": 0},
    "a stop string of several tokens": ONLY_AB | {"stop": STOPS, "seed": 2, "max_tokens": 60, "echo": True},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 1, "repetition_penalty": 1.3, "max_tokens": 24},
    "no end before so many tokens": {"min_tokens": 12, "logit_bias": {"257": 30}, "max_tokens": 20},
}
CHATS = {
    "a plain answer": {"max_tokens": 12, "seed": 1},
    "log probabilities": {"max_tokens": 6, "seed": 4, "logprobs": True, "top_logprobs": 2},
}


async def stream(client, worker, path: str, fields: dict[str, Any], **said: Any) -> list[dict[str, Any]]:
    """Return the events of a stream with its ids; `said` is what the gateway says of it besides."""
    body = {"model": "tiny", "stream": True, "return_token_ids": True, STREAM_FIELD: FIXED | said} | fields
    async with client.session.post(f"{worker.url}{path}", json=body, headers={headers.REQUEST_ID: "r1"}) as answer:
        data = await answer.read()
        assert answer.status == 200, data
    *events, end, rest = data.split(b"\n\n")
    assert (end, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def had(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a gateway says of a client that has these events."""
    drawn: dict[int, list[int]] = {}
    ended: list[int] = []
    for choice in (choice for event in events for choice in event["choices"]):
        drawn.setdefault(choice["index"], []).extend(choice["token_ids"])
        ended += [choice["index"]] if choice["finish_reason"] else []
    return {"model": events[0]["system_fingerprint"], "drawn": drawn, "ended": ended}


def read(events: list[dict[str, Any]]) -> dict[Any, Any]:
    """Return what a client makes of a stream, however it was cut into chunks."""
    heads, found = set(), {}
    for event in events:
        heads.add((event["id"], event["created"], event["model"], event["object"]))
        found["usage"] = event.get("usage")
        if found["usage"]:  # the cached tokens are those of the worker that ended it
            details = found["usage"].pop("prompt_tokens_details")
            assert details["cached_tokens"] <= found["usage"]["prompt_tokens"]
        for choice in event["choices"]:
            own = found.setdefault(choice["index"], {"text": "", "reason": None, "scores": [], "ids": []})
            own["ids"] += choice["token_ids"]
            delta = choice.get("delta", {})
            own["text"] += choice.get("text") or delta.get("content") or ""
            own["role"] = own.get("role", "") + delta.get("role", "")
            own["reason"] = choice["finish_reason"] or own["reason"]
            scores = choice["logprobs"] or {}
            own["scores"] += zip(scores.get("tokens", ()), scores.get("text_offset", ()), strict=True)
            own["scores"] += [entry["token"] for entry in scores.get("content", ())]
            values = found.setdefault("values", [])
            values += scores.get("token_logprobs", ())
            values += [entry["logprob"] for entry in scores.get("content", ())]
    return found | {"heads": heads, "values": sorted(found["values"])}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    # Computed in chunks or one by one, and beside others: log probabilities are equal up to rounding.
    assert found == wanted | {"values": pytest.approx(wanted["values"], abs=1e-3)}


async def continue_everywhere(client, worker, path: str, fields: dict[str, Any], step: int) -> None:
    events = await stream(client, worker, path, fields)
    whole = read(copy.deepcopy(events))
    places = range(1, len(events))
    assert len(places) > 3
    for cut in {*places[::step], *places[-2:]}:
        before = copy.deepcopy(events[:cut])
        rest = await stream(client, worker, path, fields, **had(before))
        assert_same(read(before + rest), whole)


@pytest.mark.parametrize("kind", COMPLETIONS)
async def test_a_completion_continues_from_any_cut(client, pair, kind: str):
    fields = {"prompt": "def main("} | COMPLETIONS[kind]
    await continue_everywhere(client, pair[1], "/v1/completions", fields, step=3)


@pytest.mark.parametrize("kind", CHATS)
async def test_a_chat_continues_from_any_cut(client, pair, kind: str):
    await continue_everywhere(client, pair[1], "/v1/chat/completions", {"messages": HELLO} | CHATS[kind], step=5)


async def test_drawn_tokens_of_another_kind_make_another_answer(client, pair):
    fields = {"prompt": "def main(", "max_tokens": 24}
    events = await stream(client, pair[1], "/v1/completions", fields)
    said = had(events[:12])
    ids = said["drawn"][0]
    wrong = await stream(client, pair[1], "/v1/completions", fields, **said | {"drawn": {0: [*ids[:-1], ids[-1] ^ 1]}})
    other = await stream(client, pair[1], "/v1/completions", fields, **said | {"seed": 78})
    assert read(wrong)[0]["ids"] != read(other)[0]["ids"] != read(events[12:])[0]["ids"] != read(wrong)[0]["ids"]


@pytest.mark.parametrize(
    "said",
    [
        {"model": "another"},
        {"drawn": {5: [97]}},
        {"ended": [1]},
        {"drawn": {0: [99_999]}},
        {"drawn": {0: [97] * 20}},
        {"drawn": {0: [97] * 21}, "ended": [0]},
        {"drawn": {0: [97, 10, 10]}},
    ],
)
async def test_refuses_what_cannot_continue(client, pair, said: dict[str, Any]):
    fields = {"prompt": "a", "max_tokens": 20, "stop": "\n\n"}
    events = await stream(client, pair[1], "/v1/completions", fields)
    said = FIXED | {"model": events[0]["system_fingerprint"], "drawn": {0: [97]}} | said
    body = {"model": "tiny", "stream": True, STREAM_FIELD: said} | fields
    async with client.session.post(f"{pair[1].url}/v1/completions", json=body) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (409, "stream_refused")


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": 1 << 63}, {"created": "now"}, {"drawn": {0: [-1]}}, {"x": 1}])
async def test_a_stream_that_cannot_be_read_is_refused_by_its_field(client, pair, wrong: dict[str, Any]):
    body = {"model": "tiny", "prompt": "a", "stream": True, STREAM_FIELD: FIXED | wrong}
    async with client.session.post(f"{pair[1].url}/v1/completions", json=body) as answer:
        assert answer.status == 400
        assert STREAM_FIELD in (await answer.json())["error"]["message"]


async def test_openais_own_client_reads_a_stream_with_its_ids(pair):
    request: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{pair[1].url}/v1", api_key="none", max_retries=0) as official:
        whole = await official.chat.completions.create(**request)
        chunks = await official.chat.completions.create(**request, stream=True, extra_body={"return_token_ids": True})
        texts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) > 3
