"""Two real workers on loopback: what D answers with a prompt that P prefilled is what it answers alone, by logits; and
whatever breaks on the way is an error in time, after which both hold nothing.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterable
from typing import Any

import aiohttp
import pytest

from ...waiting import assert_prompt
from .relays import relayed

pytestmark = pytest.mark.system
IDLE = dict.fromkeys(
    ["prfaas_requests_running", "prfaas_requests_waiting", "prfaas_prefills_running", "prfaas_prefills_waiting"], 0.0
)

LINK_SENT = "prfaas_link_sent_bytes_total{"


def text_of(length: int, seed: int | str = 0) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz (),.\n", k=length))


async def choices(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    assert answer.status == 200, await answer.text()
    return (await answer.json())["choices"]


async def texts(answers: Iterable[aiohttp.ClientResponse]) -> list[str]:
    return [(await choices(answer))[0]["text"] for answer in answers]


@pytest.mark.parametrize("length", [1, 511, 512, 513, 1500])
async def test_a_remote_prefill_gives_the_tokens_and_logprobs_of_a_local_one(client, pair, length: int):
    prefill, decode = pair
    ask = {"prompt": text_of(length, seed=length), "max_tokens": 24, "logprobs": 5}
    local = await client.complete(decode, **ask)
    # Salted, since the decode instance would not ask for rows that it has.
    remote = await client.complete(decode, prefill, **ask, cache_salt="remote")
    mine, theirs = (await choices(local))[0]["logprobs"], (await choices(remote))[0]["logprobs"]
    assert theirs["tokens"] == mine["tokens"]
    assert len(theirs["tokens"]) >= 1
    assert theirs["token_logprobs"] == pytest.approx(mine["token_logprobs"], abs=1e-4)
    for found, wanted in zip(theirs["top_logprobs"], mine["top_logprobs"], strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    assert int(local.headers["x-prfaas-kv-bytes"]) == 0
    assert int(remote.headers["x-prfaas-kv-bytes"]) > 64 * length


async def test_sampled_text_depends_on_the_seed_and_not_on_where_the_prompt_was_prefilled(client, pair):
    prefill, decode = pair
    ask = {"temperature": 1.0, "seed": 11, "n": 3, "max_tokens": 20, "top_p": 0.95}
    local, remote = await client.complete(decode, **ask), await client.complete(decode, prefill, **ask)
    other = await client.complete(decode, **ask | {"seed": 12})
    mine, theirs, others = [[entry["text"] for entry in await choices(answer)] for answer in (local, remote, other)]
    assert theirs == mine
    assert len(set(mine)) == 3
    assert others != mine


async def test_the_first_cache_byte_leaves_long_before_the_prefill_ends(client, pair):
    prefill, decode = pair
    answer = await client.complete(decode, prefill, prompt=text_of(16_000), max_tokens=1, cache_salt="first byte")
    assert answer.status == 200, await answer.text()
    seconds = {
        name: float(answer.headers[f"x-prfaas-{name}-seconds"]) for name in ("first-byte", "prefill", "transfer")
    }
    assert 0 < seconds["first-byte"] < seconds["prefill"]
    assert answer.headers["x-prfaas-prompt-tokens"] == "16001"
    assert answer.headers["x-prfaas-cached-tokens"] == "0"


async def test_both_sides_hold_nothing_and_count_the_transfer_afterwards(client, pair):
    prefill, decode = pair
    await client.eventually(prefill, **IDLE)  # else the end of an earlier transfer counts here
    before = [await client.metrics(worker) for worker in pair]
    answer = await client.complete(decode, prefill, prompt=text_of(1000), max_tokens=2)
    kv_bytes = int(answer.headers["x-prfaas-kv-bytes"])
    await client.eventually(decode, **IDLE)
    await client.eventually(prefill, **IDLE, prfaas_transfer_unsent_bytes=0)
    after = [await client.metrics(worker) for worker in pair]
    sent, received = "prfaas_transfer_sent_bytes_total", "prfaas_transfer_received_bytes_total"
    assert kv_bytes <= after[0][sent] - before[0][sent] < 1.05 * kv_bytes + 5000
    assert kv_bytes <= after[1][received] - before[1][received] < 1.05 * kv_bytes + 5000
    links = [
        sum(value for name, value in found.items() if name.startswith(LINK_SENT)) for found in (before[0], after[0])
    ]
    assert kv_bytes <= links[1] - links[0] < 1.05 * kv_bytes + 5000, "the kernel of P counts the same, by peer"
    for at, direction in enumerate(["send", "receive"]):
        name = f'prfaas_transfers_total{{direction="{direction}",outcome="delivered"}}'
        assert after[at][name] - before[at].get(name, 0) == 1
    assert after[0]["prfaas_prompt_tokens_total"] - before[0]["prfaas_prompt_tokens_total"] == 1001
    assert after[1]["prfaas_prompt_tokens_total"] == before[1]["prfaas_prompt_tokens_total"]
    assert after[1]["prfaas_generation_tokens_total"] - before[1]["prfaas_generation_tokens_total"] == 2


async def test_a_prefill_instance_that_does_not_listen_is_an_error(client, pair):
    answer = await client.complete(pair[1], "http://127.0.0.1:9")
    body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (502, "prefill_failed")
    assert "127.0.0.1:9" in body["error"]["message"]
    await client.eventually(pair[1], **IDLE)


async def test_a_prefill_instance_that_refuses_is_quoted(client, pair):
    prefill, decode = pair
    url = f"{prefill.url}/v1/prefills"
    async with client.session.post(url, json={"request_id": "x", "model": "gpt", "token_ids": [1]}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")
    answer = await client.complete(decode, "http://[::1]:1/")
    assert answer.status == 502
    for url in ["ftp://127.0.0.1:80", "http://127.0.0.1", "http://127.0.0.1:x", "nonsense", "http://127.0.0.1:80/path"]:
        answer = await client.complete(decode, url)
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "x-prfaas-prefill-url")


@pytest.mark.parametrize("via_prefill", [True, False])
async def test_a_client_that_leaves_frees_everything_on_both_sides(client, pair, via_prefill: bool):
    prefill, decode = pair
    via = prefill if via_prefill else None
    busy = prefill if via_prefill else decode
    running = "prfaas_prefills_running" if via_prefill else "prfaas_requests_running"
    request = asyncio.ensure_future(client.complete(decode, via, prompt=text_of(30_000), max_tokens=1))
    await client.eventually(busy, **{running: 1})
    request.cancel()
    await client.eventually(decode, **IDLE)
    await client.eventually(prefill, **IDLE)


async def test_a_client_that_leaves_a_stream_frees_everything(client, pair):
    async with client.open(pair[1], max_tokens=20_000, stream=True, n=8, temperature=2) as answer:
        await anext(client.events(answer))
        await client.eventually(pair[1], prfaas_requests_running=1)
        answer.close()
    await client.eventually(pair[1], **IDLE)


async def test_a_link_that_damages_everything_is_an_error_and_nothing_is_held(client, pair):
    prefill, decode = pair
    async with relayed(prefill, damage=0x10) as url:
        answer = await client.complete(decode, url, prompt=text_of(700), cache_salt="damaged")
    body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (502, "prefill_failed")
    await client.eventually(decode, **IDLE)
    await client.eventually(prefill, **IDLE)


@pytest.mark.quiet
async def test_a_silent_link_is_noticed_within_seconds(client, pair):
    prefill, decode = pair
    async with relayed(prefill, stall_after=10_000) as url:
        started = time.monotonic()
        answer = await client.complete(decode, url, prompt=text_of(3000))
        seconds = time.monotonic() - started
        await client.eventually(prefill, **IDLE)  # a request over HTTP ends it
    body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (502, "prefill_failed")
    assert "sent no answer for " in body["error"]["message"]
    assert seconds >= 1.0
    assert_prompt(seconds, 3.5, "a second of silence, and another until a new connection proves it")
    await client.eventually(decode, **IDLE)


async def test_twenty_requests_at_once_get_the_answers_they_get_alone(client, pair):
    prefill, decode = pair
    asks = [{"prompt": text_of(20 + 60 * n, seed=n), "max_tokens": 5 + n} for n in range(10)]
    alone = [await client.complete(decode, **ask) for ask in asks]
    together = await asyncio.gather(
        *(client.complete(decode, prefill if n % 2 else None, **ask) for n, ask in enumerate([*asks, *asks]))
    )
    assert await texts(together) == 2 * await texts(alone)
    await client.eventually(decode, **IDLE)
    await client.eventually(prefill, **IDLE)


async def test_a_prefill_without_a_fetch_can_be_inspected_and_deleted(client, pair):
    url = f"{pair[0].url}/v1/prefills"
    ask = {"request_id": "r1", "model": "tiny", "token_ids": [1, 2, 3], "start_token": 1}
    async with client.session.post(url, json=ask) as answer:
        assert answer.status == 201
        grant = await answer.json()
    assert grant["data_port"] == 8001
    status_url = f"{url}/{grant['transfer_id']}"
    async with client.session.get(status_url) as answer:
        status = await answer.json()
    assert (status["request_id"], status["prompt_tokens"], status["connected"]) == ("r1", 3, False)
    assert "token" not in status
    for _ in range(2):
        async with client.session.delete(status_url) as answer:
            assert answer.status == 204
    async with client.session.get(status_url) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "prefill_not_found")
    await client.eventually(pair[0], **IDLE)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [264]}, "prompt"),
        ({"token_ids": [1] * 140_000}, "prompt"),
        ({"start_token": 3}, "start_token"),
        ({"start_token": -1}, "start_token"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"request_id": 5}, "request_id"),
    ],
)
async def test_a_wrong_prefill_request_is_refused_by_field(client, pair, fields: dict[str, Any], param: str):
    ask = {"request_id": "r", "model": "tiny", "token_ids": [1, 2, 3]} | fields
    async with client.session.post(f"{pair[0].url}/v1/prefills", json=ask) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)


async def test_a_prefill_worker_whose_engine_is_killed_mid_transfer_costs_one_error_and_restarts(client, pair, launch):
    victim = await launch("victim", "--role", "prefill").ready()
    request = asyncio.ensure_future(client.complete(pair[1], victim, prompt=text_of(30_000), max_tokens=1))
    await client.eventually(victim, prfaas_prefills_running=1)
    os.kill(victim.engine_pid, signal.SIGKILL)
    answer = await request
    assert (answer.status, (await answer.json())["error"]["code"]) == (502, "prefill_failed")
    await client.eventually(pair[1], **IDLE)
    assert await victim.exit_code() == 1, "the front ends too, so that the kubelet starts the pod's container again"


async def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(client, pair, launch):
    worker = await launch("drained").ready()
    async with client.open(worker, max_tokens=300, stream=True, n=8, temperature=2) as answer:
        events = client.events(answer)
        await anext(events)
        worker.process.send_signal(signal.SIGTERM)
        await client.until_status(worker, "/readyz", 503)
        assert await client.status(worker, "/healthz") == 200
        refused = await client.complete(worker)
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "overloaded")
        last = [event async for event in events][-2:]
    assert last[1] == "[DONE]"
    assert last[0]["choices"][0]["finish_reason"] in ("length", "stop")
    assert await worker.exit_code() == 0
