"""Changing a worker while it serves: a request over HTTP becomes a message to the engine, whose answer comes back."""

import asyncio

import msgspec
import pytest

from prfaas.wire.engine import AskStats, CacheReset, EgressSet, ResetCache, RoleSet, SetEgress, SetRole, Stats
from prfaas_worker.front.serving import ServedModel

pytestmark = pytest.mark.system

STATS = Stats(0, 0, 0, 0, 0, [], 0, 0, 0, 0, role="prefill", egress_mbps=800)


@pytest.fixture
def loaded(front):
    """The same front with a model."""
    served = ServedModel(model_name="tiny", fingerprint="", vocab_size=256, max_context=100, max_choices=1)
    front.serving.loaded(served, tokenizer=None)
    return front


async def test_a_reset_reports_how_much_it_freed(client, loaded):
    asking = asyncio.create_task(client.session.post(f"{loaded.url}/v1/cache/reset").__aenter__())
    message = await loaded.hear()
    assert isinstance(message, ResetCache)
    await loaded.say(CacheReset(message.handle, 17))
    answer = await asking
    assert (answer.status, await answer.read()) == (200, b'{"freed_pages": 17}')
    assert loaded.serving.engine.open_calls == 0


@pytest.mark.parametrize(
    ("name", "value", "command", "reply"),
    [
        *[("role", role, SetRole, RoleSet) for role in ("prefill", "decode", "mixed")],
        *[("egress", mbps, SetEgress, EgressSet) for mbps in (1, 800, None)],
    ],
)
async def test_a_setting_is_changed_once_the_engine_says_so(client, loaded, name, value, command, reply):
    body = {"role" if name == "role" else "mbps": value}
    asking = asyncio.create_task(client.session.put(f"{loaded.url}/v1/{name}", json=body).__aenter__())
    message = await loaded.hear()
    assert message == command(message.handle, value)
    assert not asking.done()
    await loaded.say(reply(message.handle, value))
    answer = await asking
    assert (answer.status, await answer.json()) == (200, body)


@pytest.mark.parametrize(("name", "body"), [("role", {"role": "prefill"}), ("egress", {"mbps": 800})])
async def test_the_setting_in_force_is_the_engines(client, loaded, name, body):
    asking = asyncio.create_task(client.session.get(f"{loaded.url}/v1/{name}").__aenter__())
    message = await loaded.hear()
    assert isinstance(message, AskStats)
    await loaded.say(msgspec.structs.replace(STATS, handle=message.handle))
    answer = await asking
    assert (answer.status, await answer.json()) == (200, body)


@pytest.mark.parametrize(
    ("path", "param", "example", "body"),
    [
        *[("/v1/egress", "mbps", '{"mbps": 800}', body) for body in (b"", b"{}", b'{"mbps":0}', b'{"mbps":1.5}')],
        *[("/v1/role", "role", '"mixed"', body) for body in (b"", b"{}", b'{"role":"boss"}', b"[]", b"\xff")],
    ],
)
async def test_what_is_no_setting_is_refused_with_an_example(client, loaded, path, param, example, body):
    async with client.session.put(f"{loaded.url}{path}", data=body) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, param)
        assert example in error["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/cache/reset"), ("GET", "/v1/role"), ("PUT", "/v1/role"), ("PUT", "/v1/egress")]
)
async def test_before_the_model_is_loaded_there_is_nothing_to_change(client, front, method, path):
    async with client.session.request(method, f"{front.url}{path}", json={"role": "mixed"}) as answer:
        assert answer.status == 503
