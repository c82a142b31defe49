"""Proves that what a request may say to a worker, and a worker to its client, needs nothing of the gateway."""

import json

import pytest
from aiohttp import web

CHUNKS = (
    b'data: {"choices":[{"index":0,"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-0.5]}}],"usage":null}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}\n\n',
    b"data: [DONE]\n\n",
)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": ["a", "b"], "n": 2, "best_of": 3},
        {"prompt": "a", "logprobs": 5, "echo": True},
        {"prompt": "a", "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "top_logprobs": 2, "tools": []},
        {"prompt": "a", "cache_salt": "tenant", "guided_regex": "a|b", "structured_outputs": {"choice": ["a"]}},
    ],
)
async def test_whatever_a_request_asks_for_reaches_the_worker_as_it_is(world, body):
    await world.start("d0")
    raw = json.dumps({"model": "m", **body}, indent=1).encode()
    assert (await world.post(raw, "/v1/completions")).status == 200
    assert world.workers["d0"].seen[0].body == raw


async def test_logprobs_and_usage_with_cached_tokens_reach_the_client_as_they_are(world):
    await world.start("d0")

    async def reply(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in CHUNKS:
            await response.write(chunk)
        return response

    world.workers["d0"].reply = reply
    asked = {"model": "m", "prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}}
    assert (await world.post(asked, "/v1/completions")).body == b"".join(CHUNKS)
