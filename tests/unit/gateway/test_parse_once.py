"""Proves that the gateway parses a request's JSON once: one pass over the body, and no part of it decoded twice."""

import json
import sys

import msgspec
import pytest
from aiohttp import web

from prfaas_gateway.api import API_ROUTES
from prfaas_gateway.request import _PROMPT_FIELDS

from .caches import body_of, hello, holding, start, telling, until_metric


def test_the_one_pass_finds_every_field_that_canonical_bytes_depend_on():
    assert {"model", *_PROMPT_FIELDS} == set().union(*(one.fields for one in API_ROUTES.values()))


class Counting:
    """A decoder that keeps what it was given."""

    def __init__(self, decode, decoded: list[bytes]):
        self._decode = decode
        self._decoded = decoded

    def __call__(self, data, *args, **options):
        self._decoded.append(bytes(data) if not isinstance(data, str) else data.encode())
        return self._decode(data, *args, **options)

    decode = __call__


@pytest.fixture
def decoded(monkeypatch) -> list[bytes]:
    """All that this process decodes from JSON, by a decoder that one of our modules has or that a function makes."""
    found: list[bytes] = []
    real = msgspec.json.Decoder
    for module in [module for name, module in sys.modules.items() if name.startswith("prfaas")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, real):
                monkeypatch.setattr(module, name, Counting(value.decode, found))
    monkeypatch.setattr(msgspec.json, "Decoder", lambda *args, **kwargs: Counting(real(*args, **kwargs).decode, found))
    monkeypatch.setattr(msgspec.json, "decode", Counting(msgspec.json.decode, found))
    monkeypatch.setattr(json, "loads", Counting(json.loads, found))
    return found


def check_once(decoded: list[bytes], body: bytes) -> None:
    parts = [one for one in decoded if one in body and len(one) > len('"m"')]
    assert parts.count(body) == 1, "one pass over the whole"
    parts.remove(body)
    assert len(set(parts)) == len(parts), "no part twice"
    assert sum(map(len, parts)) < len(body), "and parts of it at most once"


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x" * 4096}], "tools": [{"type": "function"}], "n": 1}


@pytest.mark.system
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", body_of("one")), ("/v1/chat/completions", json.dumps(CHAT).encode())]
)
async def test_a_prompt_that_is_looked_up_is_parsed_once_also_when_its_first_leg_fails(world, decoded, path, body):
    await start(world, {"d0": telling(holding(body_of("one"))), "d1": telling(hello())}, tokens=5000)
    await until_metric(world, "prfaas_gateway_kv_byte_blocks", 16)
    served = []

    async def fails_once(_request: web.Request, _body: bytes) -> web.StreamResponse:
        served.append(_body)
        return web.Response(status=503) if len(served) == 1 else web.json_response({})

    for worker in world.workers.values():
        worker.reply = fails_once
    decoded.clear()
    assert (await world.post(body, path)).status == 200
    assert served == [body, body]
    check_once(decoded, body)
    if "completions" in path:
        assert any(len(one) > 4000 for one in decoded if one != body), "the prompt was looked up"


async def test_a_body_that_is_rewritten_for_another_engine_is_parsed_once(world, decoded):
    await world.start("d0", "x0", tokens=10)
    world.change_instances(engine="vllm-nixl")

    async def prefilled(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.json_response({"kv_transfer_params": {"remote_engine_id": "e"}})

    world.workers["x0"].reply = prefilled
    body = json.dumps(CHAT).encode()
    decoded.clear()
    assert (await world.post(body)).status == 200
    assert len(world.workers["x0"].seen) == 1
    check_once(decoded, body)
