"""A stream that is cut at any permitted place, and resumed from what was sent until then, is the whole stream: text,
tokens and their places, reasons, usage, the head of every chunk. What cannot be resumed is refused, in a way that
makes the gateway ask another.
"""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from prfaas.wire import headers
from prfaas.wire.resume import CUT, DONE, ResumableHeader, Resume, SentChoice, encode_resume, read_comments

from ...waiting import NotInTime

pytestmark = pytest.mark.system

FIXED = {headers.RESUMABLE: ResumableHeader(77, 1_700_000_000).encode(), headers.REQUEST_ID: "r1"}
EARLIER = {"x-prfaas-resumable": FIXED[headers.RESUMABLE]}
"""The header of a gateway of an earlier version, which knows comments of another form."""
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


async def stream(client, worker, path: str, body: bytes, sent: dict[str, str]) -> tuple[dict[str, str], bytes]:
    async with client.session.post(f"{worker.url}{path}", data=body, headers=sent) as answer:
        data = await answer.read()
        assert answer.status == 200, data
        return {name.lower(): value for name, value in answer.headers.items()}, data


async def stream_with_cuts(client, worker, path: str, body: bytes, least: int) -> tuple[dict[str, str], bytes]:
    """Return a stream with so many places to cut it. A worker that is late names the tokens of many events at once."""
    for _ in range(20):
        head, data = await stream(client, worker, path, body, FIXED)
        if len(list(cuts(data))) >= least:
            return head, data
    raise NotInTime(f"a stream with {least} places to cut it")


def cuts(data: bytes) -> Iterator[int]:
    place = 0
    while (place := data.find(CUT, place) + len(CUT)) >= len(CUT):
        yield place


def document(head: dict[str, str], data: bytes) -> bytes:
    """Return what a gateway would make of a stream's beginning."""
    choices: dict[int, SentChoice] = {}
    for one in read_comments(data):
        before = choices[one.choice].token_ids if one.choice in choices else []
        choices[one.choice] = SentChoice([*before, *one.token_ids], one.characters, one.reason)
    return encode_resume(Resume(head[headers.RESUMABLE], int(head[headers.CACHED_TOKENS]), choices))


def read(data: bytes) -> dict[str, Any]:
    """Return what a client makes of a stream, however it was cut into chunks."""
    heads, found = set(), {}
    for line in data.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        heads.add((event["id"], event["created"], event["model"], event["object"]))
        found["usage"] = event.get("usage")
        for choice in event["choices"]:
            own = found.setdefault(choice["index"], {"text": "", "reason": None, "scores": []})
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


async def resume_everywhere(client, worker, path: str, fields: dict[str, Any], step: int) -> None:
    body = json.dumps({"model": "tiny", "stream": True, **fields}).encode()
    head, data = await stream_with_cuts(client, worker, path, body, least=3)
    assert data.endswith(DONE)
    whole, places = read(data), list(cuts(data))
    for cut in [*places[:-2:step], *places[-2:]]:
        before = document(head, data[:cut])
        resuming = FIXED | {headers.RESUME: str(len(before))}
        _, rest = await stream(client, worker, path, before + body, resuming)
        assert rest.endswith(DONE)
        assert_same(read(data[:cut] + rest), whole)


@pytest.mark.parametrize("kind", COMPLETIONS)
async def test_a_completion_continues_from_any_cut(client, pair, kind: str):
    fields = {"prompt": "def main("} | COMPLETIONS[kind]
    await resume_everywhere(client, pair[1], "/v1/completions", fields, step=3)


@pytest.mark.parametrize("kind", CHATS)
async def test_a_chat_continues_from_any_cut(client, pair, kind: str):
    await resume_everywhere(client, pair[1], "/v1/chat/completions", {"messages": HELLO} | CHATS[kind], step=5)


@pytest.mark.parametrize("sent", [{}, EARLIER])
async def test_a_stream_that_is_not_resumable_has_no_comments(client, pair, sent: dict[str, str]):
    body = json.dumps({"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 3}).encode()
    head, data = await stream(client, pair[1], "/v1/completions", body, sent)
    assert not any("resumable" in name for name in head)
    assert list(read_comments(data)) == []
    assert b"\n:" not in data


async def test_an_answer_continues_behind_a_prefill_elsewhere(client, pair):
    prefill, decode = pair
    body = json.dumps(
        {"model": "tiny", "prompt": "x" * 300, "stream": True, "max_tokens": 12, "temperature": 0, "cache_salt": "r"}
    ).encode()
    head, data = await stream_with_cuts(client, decode, "/v1/completions", body, least=6)
    cut = list(cuts(data))[5]
    before = document(head, data[:cut])
    resuming = FIXED | {headers.RESUME: str(len(before)), headers.PREFILL_URL: prefill.url}
    answered, rest = await stream(client, decode, "/v1/completions", before + body, resuming)
    assert answered[headers.TRANSFER_ID]
    assert_same(read(data[:cut] + rest), read(data))


def changed(resume: Resume, **fields: Any) -> bytes:
    return encode_resume(Resume(**{name: getattr(resume, name) for name in resume.__struct_fields__} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"fingerprint": "another"},
        {"choices": {0: SentChoice([97, 98], 7)}},
        {"choices": {5: SentChoice([97], 1)}},
        {"choices": {0: SentChoice([99_999], 1)}},
        {"choices": {0: SentChoice([97], 1, "because")}},
        {"choices": {0: SentChoice([97] * 20, 20)}},
        {"choices": {0: SentChoice([97] * 21, 21, "length")}},
        {"choices": {0: SentChoice([97, 10, 10], 3)}},
    ],
)
async def test_refuses_what_cannot_be_resumed(client, pair, fields: dict[str, Any]):
    body = json.dumps({"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 20, "stop": "\n\n"}).encode()
    head, _ = await stream(client, pair[1], "/v1/completions", body, FIXED)
    before = changed(Resume(head[headers.RESUMABLE], 0, {}), **fields)
    resuming = FIXED | {headers.RESUME: str(len(before))}
    async with client.session.post(f"{pair[1].url}/v1/completions", data=before + body, headers=resuming) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (409, headers.CODE_RESUME_REFUSED)


@pytest.mark.parametrize(
    "sent",
    [
        {headers.RESUME: "3"},
        EARLIER | {headers.RESUME: "3"},
        {headers.RESUMABLE: "1 2", headers.RESUME: "x"},
        {headers.RESUMABLE: "1 2", headers.RESUME: "999999999"},
        {headers.RESUMABLE: "1 2", headers.RESUME: "3"},
        {headers.RESUMABLE: "one two"},
        {headers.RESUMABLE: f"{1 << 63} 2"},
    ],
)
async def test_headers_out_of_order_are_refused(client, pair, sent: dict[str, str]):
    body = b"abc" + json.dumps({"model": "tiny", "prompt": "a", "stream": True}).encode()
    data = body if sent.get(headers.RESUME) == "3" else body[3:]
    async with client.session.post(f"{pair[1].url}/v1/completions", data=data, headers=sent) as answer:
        assert answer.status == 400, await answer.text()
        assert (await answer.json())["error"]["param"] in (headers.RESUME, headers.RESUMABLE)


async def test_openais_own_client_does_not_see_the_comments(pair):
    request: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{pair[1].url}/v1", api_key="none", max_retries=0) as official:
        whole = await official.chat.completions.create(**request)
        chunks = await official.chat.completions.create(**request, stream=True, extra_headers=FIXED)
        texts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) > 3
