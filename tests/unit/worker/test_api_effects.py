"""One real worker, from the request's field to what it does to the answer."""

from typing import Any

import pytest

pytestmark = pytest.mark.system

A, B, EOS = 97, 98, 257


async def complete(client, worker, **fields: Any) -> dict[str, Any]:
    async with client.open(worker, **fields) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def text(client, worker, **fields: Any) -> str:
    return (await complete(client, worker, **fields))["choices"][0]["text"]


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


async def test_min_p_keeps_only_the_likeliest(client, pair):
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
