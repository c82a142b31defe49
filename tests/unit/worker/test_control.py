"""Changing a worker while it serves: what is asked over HTTP is what the engine is told, and its answer comes back."""

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


async def test_a_reset_says_how_much_it_freed(client, loaded):
    asking = asyncio.create_task(client.session.post(f"{loaded.url}/v1/cache/reset").__aenter__())
    message = await loaded.hear()
    assert isinstance(message, ResetCache)
    await loaded.say(CacheReset(message.handle, 17))
    answer = await asking
    assert (answer.status, await answer.json()) == (200, {"freed_pages": 17})
    assert loaded.serving.engine.open_calls == 0


async def test_vllms_name_for_a_reset_works_too(client, loaded):
    asking = asyncio.create_task(client.session.post(f"{loaded.url}/reset_prefix_cache").__aenter__())
    message = await loaded.hear()
    assert isinstance(message, ResetCache)
    await loaded.say(CacheReset(message.handle, 0))
    answer = await asking
    assert (answer.status, await answer.read()) == (200, b"")


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
async def test_a_role_is_set_once_the_engine_says_so(client, loaded, role):
    asking = asyncio.create_task(client.session.put(f"{loaded.url}/v1/role", json={"role": role}).__aenter__())
    message = await loaded.hear()
    assert isinstance(message, SetRole)
    assert message.role == role
    assert not asking.done()
    await loaded.say(RoleSet(message.handle, role))
    answer = await asking
    assert (answer.status, await answer.json()) == (200, {"role": role})


async def test_the_role_in_force_is_the_engines(client, loaded):
    asking = asyncio.create_task(client.session.get(f"{loaded.url}/v1/role").__aenter__())
    message = await loaded.hear()
    assert isinstance(message, AskStats)
    await loaded.say(msgspec.structs.replace(STATS, handle=message.handle))
    answer = await asking
    assert (answer.status, await answer.json()) == (200, {"role": "prefill"})


@pytest.mark.parametrize("mbps", [1, 800, None])
async def test_an_egress_cap_is_set_once_the_engine_says_so(client, loaded, mbps):
    asking = asyncio.create_task(client.session.put(f"{loaded.url}/v1/egress", json={"mbps": mbps}).__aenter__())
    message = await loaded.hear()
    assert isinstance(message, SetEgress)
    assert message.mbps == mbps
    assert not asking.done()
    await loaded.say(EgressSet(message.handle, mbps))
    answer = await asking
    assert (answer.status, await answer.json()) == (200, {"mbps": mbps})


async def test_the_egress_cap_in_force_is_the_engines(client, loaded):
    asking = asyncio.create_task(client.session.get(f"{loaded.url}/v1/egress").__aenter__())
    message = await loaded.hear()
    await loaded.say(msgspec.structs.replace(STATS, handle=message.handle))
    answer = await asking
    assert (answer.status, await answer.json()) == (200, {"mbps": 800})


@pytest.mark.parametrize("body", [b"", b"{}", b'{"mbps":0}', b'{"mbps":-1}', b'{"mbps":"9"}', b'{"mbps":1.5}', b"\xff"])
async def test_what_is_no_egress_cap_is_refused_with_an_example(client, loaded, body):
    async with client.session.put(f"{loaded.url}/v1/egress", data=body) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "mbps")
        assert '{"mbps": 800}' in error["message"]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"role":"boss"}', b'{"role":1}', b"[]", b"\xff"])
async def test_what_is_no_role_is_refused_with_those_there_are(client, loaded, body):
    async with client.session.put(f"{loaded.url}/v1/role", data=body) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "role")
        assert '"mixed"' in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/cache/reset"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/v1/role"),
        ("PUT", "/v1/role"),
        ("PUT", "/v1/egress"),
    ],
)
async def test_before_the_model_is_loaded_there_is_nothing_to_change(client, front, method, path):
    async with client.session.request(method, f"{front.url}{path}", json={"role": "mixed"}) as answer:
        assert answer.status == 503
