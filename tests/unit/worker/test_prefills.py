"""Prefill as a Service: a buyer names a transfer, hears at once where the cache is, and computes on with it elsewhere;
whoever leaves or asks wrongly costs nothing.
"""

import asyncio
from typing import Any

import aiohttp
import pytest

from prfaas.wire.engine import Announced, Failed, GiveCache
from prfaas.wire.prefill import new_transfer
from prfaas_worker.assets import model_directory
from prfaas_worker.front.serving import ServedModel
from prfaas_worker.tokenizer import load_tokenizer

from .prompts import IDLE, choices, text_of

pytestmark = pytest.mark.system


def wanted(token_ids: list[int], transfer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"request_id": "r", "model": "tiny", "token_ids": token_ids, "leg": {"role": "source", **transfer}} | fields


async def ids_of(client, worker, text: str) -> list[int]:
    async with client.session.post(f"{worker.url}/tokenize", json={"model": "tiny", "prompt": text}) as answer:
        return (await answer.json())["tokens"]


async def test_a_bought_cache_gives_the_answer_of_one_instance_and_its_place_is_said_before_it_is_there(client, pair):
    service, ours = pair
    transfer, ids = new_transfer(), await ids_of(client, ours, text_of(20_000, seed="bought"))
    ask = {"prompt": ids, "max_tokens": 8, "logprobs": 1}
    alone = await choices(await client.complete(ours, **ask, cache_salt="alone"))
    async with client.session.post(f"{service.url}/v1/prefills", json=wanted(ids, transfer)) as answer:
        offer = await answer.content.readany()
        assert (answer.status, offer) == (201, b'{"data_port":8001,"end_token":%d}' % (len(ids) - 1))
        await client.eventually(service, prfaas_prefills_running=1)
        place = {"host": service.host, "port": 8001}
        params = {"prfaas": {"role": "destination", **transfer, **place}}
        bought = await client.complete(ours, **ask, kv_transfer_params=params)
        assert await answer.content.read() == b"", "it ends when all is computed"
    assert int(bought.headers["x-prfaas-kv-bytes"]) > 64 * len(ids)
    (found,), (expected,) = await choices(bought), alone
    assert found["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-4)
    await client.eventually(service, **IDLE)


async def test_a_buyer_that_closes_its_connection_cancels_the_prefill(client, pair):
    service, _ = pair
    ids = await ids_of(client, service, text_of(30_000, seed="closed"))
    before = (await client.metrics(service))["prfaas_prompt_tokens_total"]
    async with client.session.post(f"{service.url}/v1/prefills", json=wanted(ids, new_transfer())) as answer:
        await answer.content.readany()
        await client.eventually(service, prfaas_prefills_running=1)
        answer.close()
    await client.eventually(service, **IDLE)
    assert (await client.metrics(service))["prfaas_prompt_tokens_total"] - before < len(ids) - 1


async def test_a_name_that_is_in_use_is_refused(client, pair):
    service, ours = pair
    transfer, ids = new_transfer(), [1, 2, 3]
    for status in (201, 409):
        async with client.session.post(f"{service.url}/v1/prefills", json=wanted(ids, transfer)) as answer:
            assert answer.status == status, await answer.text()
            found = await answer.json()
    assert found["error"]["code"] == "transfer_open"
    params = {"prfaas": {"role": "destination", **transfer, "host": service.host, "port": 8001}}
    assert (await client.complete(ours, prompt=ids, kv_transfer_params=params)).headers["x-prfaas-kv-bytes"] != "0"
    await client.eventually(service, **IDLE)


PREFIX = {"role": "destination", **new_transfer(), "tokens": 1, "host": "127.0.0.1", "port": 9}
"""No buyer has an instance connect anywhere."""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [264, 1]}, "prompt"),
        ({"token_ids": [1] * 140_000}, "prompt"),
        ({"token_ids": [1]}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"request_id": 5}, "request_id"),
        ({"leg": {"role": "source"}}, "leg"),
        ({"leg": {"role": "destination", **new_transfer()}}, "leg.role"),
        ({"leg": {"role": "source", **new_transfer(), "epoch": -1}}, "leg"),
        ({"leg": {"role": "source", **new_transfer(), "tokens": 1}}, "leg"),
        ({"leg": {"role": "source", **new_transfer(), "prefix": PREFIX}}, "leg"),
    ],
)
async def test_a_wrong_request_is_refused_by_field(client, pair, fields: dict[str, Any], param: str):
    ask = wanted([1, 2, 3], new_transfer()) | fields
    async with client.session.post(f"{pair[0].url}/v1/prefills", json=ask) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)


async def test_a_prefill_that_fails_after_its_offer_breaks_the_answer_off(front, client):
    served = ServedModel(model_name="tiny", fingerprint="f", vocab_size=264, max_context=100, max_choices=1)
    front.serving.loaded(served, load_tokenizer(model_directory("builtin:kimi-linear-tiny")))
    asking = client.session.post(f"{front.url}/v1/prefills", json=wanted([1, 2, 3], new_transfer()))

    async def play() -> None:
        message = await front.hear()
        assert isinstance(message, GiveCache)
        await front.say(Announced(message.handle, 2))
        await front.say(Failed(message.handle, 503, "overloaded", "no memory left"))

    playing = asyncio.create_task(play())
    async with asking as answer:
        assert answer.status == 201
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    await playing
