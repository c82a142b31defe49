"""One real worker, from the request's field to what it does to the answer: parameters, structure and tools; also as
OpenAI's own client sees them.
"""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.system

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "maxProperties": 0}}}
HELLO = [{"role": "user", "content": "What is the weather?"}]
A, B, EOS = 97, 98, 257


async def complete(client, worker, **fields: Any) -> dict[str, Any]:
    async with client.open(worker, **fields) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def text(client, worker, **fields: Any) -> str:
    return (await complete(client, worker, **fields))["choices"][0]["text"]


@pytest.fixture
async def official(pair) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client."""
    async with openai.AsyncOpenAI(base_url=f"{pair[1].url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_bias_decides(client, pair):
    assert await text(client, pair[1], logit_bias={A: 100}) == "a" * 8
    assert "a" not in await text(client, pair[1], logit_bias={A: -100}, max_tokens=60)


async def test_penalties_end_repetition(client, pair):
    biased = {"logit_bias": {A: 90, B: 70}, "max_tokens": 20}
    assert await text(client, pair[1], **biased) == "a" * 20
    assert "b" in await text(client, pair[1], **biased, frequency_penalty=2)
    assert "b" in await text(client, pair[1], **biased, repetition_penalty=1.5)
    plain = await text(client, pair[1], max_tokens=60)
    assert await text(client, pair[1], max_tokens=60, presence_penalty=2) != plain


async def test_min_p_leaves_the_likeliest_alone(client, pair):
    greedy = await text(client, pair[1], max_tokens=20)
    assert await text(client, pair[1], max_tokens=20, temperature=1, seed=1, min_p=1.0) == greedy
    assert await text(client, pair[1], max_tokens=20, temperature=1, seed=1) != greedy


async def test_a_stop_token_ends_the_answer_and_does_not_show(client, pair):
    whole = await text(client, pair[1], max_tokens=20)
    answer = await complete(client, pair[1], max_tokens=20, stop_token_ids=[ord(whole[5])])
    assert answer["choices"][0]["text"] == whole[: whole.index(whole[5])]
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_the_end_can_be_put_off_or_ignored(client, pair):
    ending = {"logit_bias": {EOS: 100}}
    first = await complete(client, pair[1], **ending)
    assert (first["usage"]["completion_tokens"], first["choices"][0]["finish_reason"]) == (0, "stop")
    later = await complete(client, pair[1], **ending, min_tokens=5)
    assert (later["usage"]["completion_tokens"], later["choices"][0]["finish_reason"]) == (5, "stop")
    never = await complete(client, pair[1], **ending, ignore_eos=True)
    assert never["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes.", "no|"]}, r"yes\.|no\|"),
        ({"guided_regex": "[0-9]{3}-[a-c]"}, "[0-9]{3}-[a-c]"),
        ({"guided_grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{4}/'}, "<[a-z]{4}>"),
        ({"structured_outputs": {"json": CITY}}, r'\{\s*"city"\s*:\s*"(Oslo|Rome)"\s*,\s*"days"\s*:\s*[1-9]\s*\}'),
    ],
)
async def test_an_answer_has_the_structure_asked_for(client, pair, fields: dict[str, Any], pattern: str):
    for seed in range(3):
        found = await text(client, pair[1], **fields, temperature=1, seed=seed, max_tokens=300)
        assert re.fullmatch(pattern, found), found


async def test_a_chat_answers_in_json(official):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = await official.chat.completions.create(
        model="tiny", messages=HELLO, response_format=form, seed=1, max_tokens=300
    )
    assert json.loads(answer.choices[0].message.content)["city"] in ("Oslo", "Rome")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(3))
async def test_a_demanded_call_is_a_valid_call(official, seed: int):
    answer = await official.chat.completions.create(
        model="tiny", messages=HELLO, tools=[WEATHER, CLOCK], tool_choice="required", seed=seed, max_tokens=400
    )
    (choice,) = answer.choices
    assert choice.finish_reason in ("tool_calls", "length")
    assert choice.message.tool_calls
    for call in choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]:
        arguments = json.loads(call.function.arguments)
        assert call.function.name in ("weather", "clock")
        assert set(arguments) == ({"city", "days"} if call.function.name == "weather" else set())


async def test_a_named_call_streams_and_its_result_goes_back(official):
    named = {"type": "function", "function": {"name": "weather"}}
    asked = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "tool_choice": named, "seed": 3}
    whole = (await official.chat.completions.create(**asked)).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    chunks = [chunk async for chunk in await official.chat.completions.create(**asked, stream=True)]
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert {part.index for part in parts} == {0}
    assert (parts[0].function.name, parts[0].type) == ("weather", "function")
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*HELLO, whole.message.model_dump(exclude_none=True), result]
    after = await official.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER], max_tokens=5)
    assert after.choices[0].message.role == "assistant"


async def test_a_strict_function_is_called_soundly_if_at_all(official):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    bias = {"263": 100, str(EOS): 90}  # the mark of a call, then the end as soon as it may come
    answer = await official.chat.completions.create(
        model="tiny", messages=HELLO, tools=[strict], parallel_tool_calls=False, logit_bias=bias, max_tokens=200
    )
    (call,) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
