"""Prefixes between real workers: what comes from another is what would have been computed, only the rest is
computed, and whatever a source does wrong costs no more than about two seconds.
"""

import time
from typing import Any

import pytest

from ...waiting import assert_prompt
from .relays import relayed
from .test_two_workers import IDLE, choices, text_of

pytestmark = pytest.mark.system
PROMPT_TOKENS = "prfaas_prompt_tokens_total"


def fetches(outcome: str) -> str:
    return f'prfaas_prefix_fetches_total{{outcome="{outcome}"}}'


async def ask(client: Any, worker: Any, prefix: Any = None, **fields: Any) -> Any:
    """Ask a worker, which may ask `prefix` for what it has cached."""
    url = prefix if isinstance(prefix, str) or prefix is None else prefix.url
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "logprobs": 5} | fields
    headers = {"x-prfaas-prefix-url": url} if url else {}
    async with client.session.post(f"{worker.url}/v1/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer


async def difference(client: Any, worker: Any, before: dict[str, float], name: str) -> float:
    return (await client.metrics(worker)).get(name, 0.0) - before.get(name, 0.0)


async def test_a_prefix_from_another_worker_gives_the_logprobs_of_a_local_prefill(client, pair):
    source, destination = pair
    # What a server says first to everyone, and two questions.
    system, one, other = text_of(1000, seed=5), text_of(100, seed=6), text_of(90, seed=7)
    local = await ask(client, source, prompt=system + one, cache_salt="given")
    before = await client.metrics(destination)
    fetched = await ask(client, destination, source, prompt=system + one + "?", cache_salt="given")
    mine = await ask(client, source, prompt=system + one + "?", cache_salt="alone")
    assert (await choices(fetched))[0]["logprobs"] == (await choices(mine))[0]["logprobs"]
    assert (await choices(local))[0]["text"]
    cached = int(fetched.headers["x-prfaas-cached-tokens"])
    assert cached == 1088, "the last block of the prompt that was known there"
    assert int(fetched.headers["x-prfaas-kv-bytes"]) > 1000
    assert await difference(client, destination, before, PROMPT_TOKENS) == len(system + one + "?") + 1 - cached
    assert await difference(client, destination, before, fetches("fetched")) == 1
    assert await difference(client, destination, before, "prfaas_prefix_fetched_tokens_total") == cached
    # The second time it is here.
    again = await ask(client, destination, source, prompt=system + one + other, cache_salt="given")
    assert int(again.headers["x-prfaas-cached-tokens"]) >= 1024
    assert int(again.headers["x-prfaas-kv-bytes"]) == 0
    await client.eventually(source, **IDLE)
    await client.eventually(destination, **IDLE)


@pytest.mark.quiet
@pytest.mark.parametrize("change", [{}, {"stall_after": 3000}, {"damage": 0x10}], ids=["absent", "silent", "damaged"])
async def test_a_source_that_fails_costs_two_seconds_at_most(client, pair, change: dict[str, int]):
    source, destination = pair
    salt, prompt = f"fails {change}", text_of(1000, seed=9)
    await ask(client, source, prompt=prompt, cache_salt=salt)
    began = time.monotonic()
    wanted = await ask(client, source, prompt=prompt + "?", cache_salt=f"none of it {change}")
    undisturbed_seconds = time.monotonic() - began
    before = await client.metrics(destination)
    async with relayed(source, **change) as url:
        began = time.monotonic()
        answer = await ask(
            client, destination, url if change else "http://127.0.0.1:9", prompt=prompt + "?", cache_salt=salt
        )
        seconds = time.monotonic() - began
    assert_prompt(seconds, 4 + undisturbed_seconds, "two seconds of silence, and the computation")
    assert (await choices(answer))[0]["logprobs"] == (await choices(wanted))[0]["logprobs"]
    assert answer.headers["x-prfaas-cached-tokens"] == "0"
    assert await difference(client, destination, before, fetches("failed")) == 1
    await client.eventually(destination, **IDLE)
    await client.eventually(source, **IDLE)


async def test_a_source_that_has_nothing_longer_says_so(client, pair):
    source, destination = pair
    before = await client.metrics(destination)
    answer = await ask(client, destination, source, prompt=text_of(300, seed=10), cache_salt="nothing")
    assert answer.status == 200
    assert await difference(client, destination, before, fetches("absent")) == 1
    body = {"request_id": "r", "model": "tiny", "token_ids": [1] * 200}
    async with client.session.post(f"{source.url}/v1/prefixes", json=body) as refused:
        assert (refused.status, (await refused.json())["error"]["code"]) == (404, "prefix_not_found")
    for fields, param in (({"token_ids": [9999]}, "prompt"), ({"start_token": 200}, "start_token")):
        async with client.session.post(f"{source.url}/v1/prefixes", json=body | fields) as refused:
            assert (refused.status, (await refused.json())["error"]["param"]) == (400, param)


async def test_addresses_and_lengths_are_checked(client, pair):
    source, destination = pair
    for url in ["ftp://127.0.0.1:80", "http://127.0.0.1", "nonsense"]:
        answer = await ask(client, destination, url, prompt="x")
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "x-prfaas-prefix-url")
    body = {"request_id": "r", "model": "tiny", "token_ids": [1, 2, 3]}
    async with client.session.post(f"{source.url}/v1/prefills", json=body | {"prefix_url": "nonsense"}) as refused:
        assert (refused.status, (await refused.json())["error"]["param"]) == (400, "prefix_url")
