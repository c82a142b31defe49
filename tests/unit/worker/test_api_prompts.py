"""One real worker's HTTP face, beyond single prompts: several at once, echoes, usage all along, token counts."""

from typing import Any

import pytest

pytestmark = pytest.mark.system

SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
PROMPTS = ["def f(", "import ", "class A"]


async def post(client, worker, path: str, body: dict[str, Any], wanted: int = 200) -> dict[str, Any]:
    async with client.session.post(f"{worker.url}{path}", json={"model": "tiny"} | body) as answer:
        assert answer.status == wanted, await answer.text()
        return await answer.json()


async def stream(client, worker, path: str, body: dict[str, Any]) -> list[Any]:
    async with client.session.post(f"{worker.url}{path}", json={"model": "tiny", "stream": True} | body) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        assert int(answer.headers["x-prfaas-prompt-tokens"]) > 0
        return [event async for event in client.events(answer)]


async def test_several_prompts_are_answered_as_each_alone_numbered_across(client, pair):
    answer = await post(client, pair[1], "/v1/completions", SAMPLED | {"prompt": PROMPTS, "n": 2})
    singles = [await post(client, pair[1], "/v1/completions", SAMPLED | {"prompt": one, "n": 2}) for one in PROMPTS]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [c["text"] for one in singles for c in one["choices"]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in singles)


async def test_an_echo_stands_before_the_answer(client, pair):
    body = SAMPLED | {"prompt": "def f(", "n": 2}
    plain = await post(client, pair[1], "/v1/completions", body)
    echoed = await post(client, pair[1], "/v1/completions", body | {"echo": True})
    assert [c["text"] for c in echoed["choices"]] == ["def f(" + c["text"] for c in plain["choices"]]
    *chunks, _ = await stream(client, pair[1], "/v1/completions", body | {"echo": True, "n": 1})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echoed["choices"][0]["text"]


async def test_usage_can_grow_with_the_stream(client, pair):
    body = SAMPLED | {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    *chunks, usage, _ = await stream(client, pair[1], "/v1/chat/completions", body)
    grown = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert grown == sorted(grown)
    assert grown[0] >= 1
    assert chunks[-1]["usage"] == usage["usage"]


async def test_reports_the_parts_of_the_first_tokens_time(client, pair):
    async with client.open(pair[1]) as answer:
        seconds = {name: float(answer.headers[f"x-prfaas-{name}-seconds"]) for name in ("queue", "prefill", "transfer")}
    assert seconds["prefill"] > 0
    assert seconds["queue"] >= 0
    assert seconds["transfer"] == 0


async def test_tokens_and_back(client, pair):
    text = "def f(é):"
    answer = await post(client, pair[1], "/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["tokens"] == [256, *text.encode()]
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 131072)
    assert answer["token_strs"][:3] == ["<|bos|>", "d", "e"]
    bare = await post(client, pair[1], "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert bare["tokens"] == [*text.encode()]
    back = await post(client, pair[1], "/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "<|bos|>" + text}


async def test_a_conversation_counts_what_its_answer_is_charged(client, pair):
    messages = [{"role": "user", "content": "Hi"}]
    counted = await post(client, pair[1], "/tokenize", {"messages": messages})
    assert counted["tokens"] == [256, 259, *b"Hi", 262, 260]
    answer = await post(client, pair[1], "/v1/chat/completions", SAMPLED | {"messages": messages})
    assert answer["usage"]["prompt_tokens"] == counted["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [264]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_wrong_questions_about_tokens_are_named(client, pair, path: str, body: dict[str, Any], param: str):
    error = (await post(client, pair[1], path, body, 400))["error"]
    assert error["param"] == param
