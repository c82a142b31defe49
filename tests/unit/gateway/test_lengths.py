"""Proves that a prompt is measured by its prompt: what else a body holds moves no request, and no client's bodies move
another client's requests.
"""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from tests.clocks import Clock

from prfaas.routing.prompt_size import PromptSize, Unit
from prfaas.wire import headers
from prfaas_gateway.auth import ApiClient, Charge, Meters

from .conftest import Answered, World

LONG = 2000
SCHEMA = {"type": "object", "properties": {f"field_{n}": {"type": "string", "x": "y" * 60} for n in range(60)}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}


async def a_letter_a_token(_request: web.Request, body: bytes) -> web.StreamResponse:
    """Answer like the built-in model."""
    fields = json.loads(body)
    prompt = fields.get("prompt") or "".join(str(one["content"]) for one in fields["messages"])
    return web.json_response({}, headers={headers.PROMPT_TOKENS: str(len(prompt) + 1)})


@pytest.fixture
async def ask(world: World) -> Callable[..., Any]:
    await world.start("d0", "x0", tokens=300)
    for worker in world.workers.values():
        worker.reply = a_letter_a_token

    async def post(path: str = "/v1/completions", **body: Any) -> Answered:
        got = await world.post(io.BytesIO(json.dumps({"model": "m", **body}).encode()), path)
        assert got.status == 200
        return got

    return post


async def place(ask: Callable[..., Any], **body: Any) -> str:
    return (await ask(**body)).headers[headers.DECISION]


def text(number: int) -> str:
    return f"{number:x}".rjust(8, "a") + "b" * (LONG - 8)


@pytest.mark.parametrize(
    "odd",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"logit_bias": {str(token): -1 for token in range(200)}},
        {"metadata": {"t": "m" * 3000}},
        {"prompt": list(range(100_000, 100_200))},
        {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": [PICTURE]}]},
        {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "hi", "x": "y" * 3000}]},
    ],
)
async def test_a_short_prompt_in_a_long_body_stays_at_home(ask, odd):
    for number in range(3):
        assert await place(ask, prompt=text(number)) == "offload"
    assert await place(ask, **({"prompt": "hi"} | odd)) == "local"


async def test_a_long_prompt_is_offloaded_however_it_is_escaped(ask, world):
    chinese = "\u4e2d" * LONG
    for number in range(3):
        assert await place(ask, prompt=f"{number}{chinese}") == "offload"
    for ascii_only in (True, False):
        for length, expected in ((LONG, "offload"), (100, "local")):
            body = json.dumps({"model": "m", "prompt": chinese[:length]}, ensure_ascii=ascii_only, indent=80)
            got = await world.post(body.encode(), "/v1/completions")
            assert got.headers[headers.DECISION] == expected


@pytest.mark.parametrize("odd", [{"metadata": {"t": "m" * 2_000_000}}, {}])
async def test_one_body_moves_no_other_request(ask, odd):
    for number in range(3):
        assert await place(ask, prompt=text(number)) == "offload"
    await ask(prompt="hi", **odd)
    assert [await place(ask, prompt=text(100 + number)) for number in range(12)] == ["offload"] * 12


def test_ten_thousand_hostile_bodies_of_one_client_do_not_move_the_estimate_of_another():
    meters = Meters(Clock(0.0))
    hostile, other = meters.of(ApiClient("hostile")), meters.of(ApiClient("other"))
    usual = PromptSize(tuple(1000 * (unit != Unit.TOKEN) for unit in Unit))
    for meter in (hostile, other):
        Charge(meter, usual, meter.estimator.tokens(usual)).settle(20_000)
    before = hostile.estimator.tokens(usual), other.estimator.tokens(usual)
    for _ in range(10_000):
        Charge(hostile, PromptSize((10**7,) * len(Unit)), 0).settle(1)
    assert hostile.estimator.tokens(usual) < before[0] / 5, "such bodies move an estimate"
    assert other.estimator.tokens(usual) == before[1]
