"""A client wants to learn what another one sent: by what is cached of it, under the salt that the other's prompts have.

The engine here is a stand-in with a prefix cache: what it finds, it says, as our worker does. A real one says it by the
time to the first token, too.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.conftest import Answered, World
from tests.waiting import eventually_async

from prfaas.wire import headers
from prfaas_gateway.auth import ApiClient, KeyRing

ALICE, BOB = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef"
SECRET = "The merger with ACME is planned for May. " * 200
MATCHED = "prfaas_gateway_kv_matched_tokens_total"
CACHED = 384


class Cache:
    """An engine's prefix cache: the prompts that it has computed, by their salts."""

    def __init__(self) -> None:
        self.salts: list[str | None] = []
        self._known: set[tuple[str | None, str]] = set()

    async def reply(self, _request: web.Request, body: bytes) -> web.StreamResponse:
        assert body.count(b'"cache_salt"') <= 1, "engines differ in which of two they take"
        fields = json.loads(body)
        prompt = fields.get("cache_salt"), fields["prompt"]
        cached_tokens = CACHED if prompt in self._known else 0
        self._known.add(prompt)
        self.salts.append(prompt[0])
        return web.json_response({}, headers={headers.CACHED_TOKENS: str(cached_tokens), headers.PROMPT_TOKENS: "2000"})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "alice").write_text(ALICE)
    (folder / "bob").write_text(BOB)
    return folder


Ask = Callable[..., Any]


async def asking(world: World, keys: Path, **options: Any) -> tuple[Cache, Ask]:
    """Start a gateway before an engine with a cache; return both, the latter as a function that asks with a key."""
    await world.start("d0", keys_dir=keys, **options)
    cache = Cache()
    world.workers["d0"].reply = cache.reply

    async def ask(key: str, prompt: str = SECRET, **fields: Any) -> int:
        """Return the cached tokens that the engine found."""
        got = await post(world, key, {"model": "m", "prompt": prompt, **fields})
        assert got.status == 200, got.body
        return int(got.headers[headers.CACHED_TOKENS])

    return cache, ask


async def post(world: World, key: str, body: dict[str, Any] | bytes) -> Answered:
    return await world.post(body, "/v1/completions", headers={"Authorization": f"Bearer {key}"})


async def test_each_client_finds_its_own_prompts_and_no_others(world, keys):
    _, ask = await asking(world, keys)
    assert [await ask(ALICE) for _ in range(2)] == [0, CACHED]
    assert await ask(BOB) == 0
    assert await ask(ALICE) == CACHED


async def test_no_client_names_the_salt_of_another(world, keys):
    cache, ask = await asking(world, keys)
    await ask(ALICE)
    await ask(ALICE, cache_salt="of her tenant")
    known = [*cache.salts, "alice", "of her tenant", ALICE]
    assert [await ask(BOB, cache_salt=salt) for salt in known] == [0] * len(known)
    both = (
        json.dumps({"model": "m", "prompt": SECRET, "cache_salt": "x"})[:-1] + f', "cache_salt": "{cache.salts[0]}"}}'
    )
    assert (await post(world, BOB, both.encode())).status == 200
    assert not set(cache.salts[:2]) & set(cache.salts[2:])


async def test_a_clients_own_salts_divide_its_cache_further(world, keys):
    _, ask = await asking(world, keys)
    assert [await ask(ALICE, cache_salt=salt) for salt in ("a", "b", "a")] == [0, 0, CACHED]
    assert await ask(ALICE) == 0


async def test_control_without_the_isolation_bob_reads_what_alice_sent(world, keys):
    cache, ask = await asking(world, keys, shared_cache=True)
    assert (await ask(ALICE), await ask(BOB)) == (0, CACHED)
    await ask(ALICE, cache_salt="hers")
    assert await ask(BOB, cache_salt="hers") == CACHED
    assert cache.salts == [None, None, "hers", "hers"], "a policy that shares the cache leaves all as clients send it"


async def test_without_keys_salts_are_the_clients_own(world, keys):
    del keys
    await world.start("d0")
    cache = Cache()
    world.workers["d0"].reply = cache.reply
    await post(world, "none", {"model": "m", "prompt": SECRET, "cache_salt": "mine"})
    assert cache.salts == ["mine"]


@pytest.mark.parametrize("salt", ["", 7, ["a"]])
async def test_a_salt_that_is_none_is_refused(world, keys, salt):
    cache, _ = await asking(world, keys)
    got = await post(world, ALICE, {"model": "m", "prompt": SECRET, "cache_salt": salt})
    assert (got.status, got.json["error"]["param"], cache.salts) == (400, "cache_salt", [])


@pytest.mark.parametrize("shared", [False, True], ids=["isolated", "control: shared"])
async def test_the_gateways_index_has_the_same_salts(world, keys, shared):
    """With two engines the gateway knows by what it sent where a prompt is cached: of no other client's, though."""
    await world.start("d0", "d1", engine="vllm-nixl", keys_dir=keys, shared_cache=shared)

    async def matched(key: str) -> float:
        before = await world.metric(MATCHED)
        assert (await post(world, key, {"model": "m", "prompt": SECRET})).status == 200
        return await world.metric(MATCHED) - before

    async def is_matched() -> bool:
        return await matched(ALICE) > 0

    await eventually_async(is_matched, "the gateway knows what it sent for her")
    assert (await matched(BOB) > 0) is shared


# Of the salt itself


def salt_of(folder: Path, key: str, sent: str = "") -> str:
    client = KeyRing(folder).client(key.encode())
    assert client is not None
    return client.cache_salt(sent)


def test_all_gateways_make_the_same_salt_and_it_outlives_them(keys):
    before = salt_of(keys, ALICE, "s")
    assert salt_of(keys, ALICE, "s") == before, "another ring has another secret for its look-ups"
    (keys / "alice").write_text(f"{ALICE}\n{ALICE}-another\n")
    (keys / "carol").write_text("sk-carol-0123456789abcdef")
    assert salt_of(keys, ALICE, "s") == salt_of(keys, f"{ALICE}-another", "s") == before
    (keys / "alice").write_text(json.dumps({"keys": [ALICE], "maxInFlight": 3}))
    assert salt_of(keys, ALICE, "s") == before


def test_who_knows_all_but_the_key_does_not_know_the_salt(keys):
    before = salt_of(keys, ALICE, "s")
    (keys / "alice").write_text(f"{ALICE}-another")
    assert salt_of(keys, f"{ALICE}-another", "s") != before


_texts = st.text(max_size=8)


@given(_texts, _texts, _texts, _texts)
def test_no_two_pairs_of_client_and_salt_are_one(name, sent, other_name, other_sent):
    one, other = ApiClient(name, cache_secret=b"k"), ApiClient(other_name, cache_secret=b"k")
    assert (one.cache_salt(sent) == other.cache_salt(other_sent)) is ((name, sent) == (other_name, other_sent))


def test_control_without_lengths_a_name_and_a_salt_could_be_shifted():
    assert "team" + "1-secret" == "team1" + "-secret"
    assert ApiClient("team").cache_salt("1-secret") != ApiClient("team1").cache_salt("-secret")
