"""Two real workers inside TLS, of clusters hub and eu: a peer of another cluster than was named gives nothing."""

import asyncio
import datetime
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import aiohttp
import pytest

from prfaas import identity

from ..tls.mounts import Mount
from .conftest import Client, Worker
from .test_prefixes import difference, fetches
from .test_two_workers import IDLE, choices, text_of

pytestmark = pytest.mark.system

NOW = datetime.datetime.now(datetime.UTC)
EXPIRES = "prfaas_certificate_expires_timestamp_seconds"
AUTHORITY = identity.make_authority("first", identity.valid_for(NOW, 400))


class Secure(NamedTuple):
    """A worker of a cluster."""

    worker: Worker
    cluster: str
    until: datetime.datetime
    """The end of its certificate."""


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Secure, Secure]]:
    """A prefill worker of cluster eu and a decode worker of the hub."""
    directory, made = tmp_path_factory.mktemp("tls"), []
    try:
        for days, (cluster, role) in enumerate((("eu", "prefill"), ("hub", "decode")), 1):
            valid = identity.valid_for(NOW, days)
            mount = Mount(directory / cluster).put(identity.issue(AUTHORITY, cluster, valid), AUTHORITY)
            flags = ["--role", role, "--cluster", cluster, "--tls-dir", str(mount.path)]
            made.append(Secure(Worker(directory / f"{cluster}.log", *flags), cluster, valid.not_after))
        asyncio.run(_all_ready(made))
        yield made[0], made[1]
    finally:
        for one in made:
            one.worker.stop()


async def _all_ready(made: list[Secure]) -> None:
    await asyncio.gather(*(one.worker.ready() for one in made))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A user: has no certificate, and checks none."""
    connector = aiohttp.TCPConnector(ssl=False)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield Client(session)


async def ask(client: Client, worker: Worker, headers: dict[str, str], **fields: Any) -> aiohttp.ClientResponse:
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "logprobs": 3} | fields
    async with client.session.post(f"{worker.url}/v1/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer


async def logprobs(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    return (await choices(answer))[0]["logprobs"]


def prefilled_by(one: Secure) -> dict[str, str]:
    return {"x-prfaas-prefill-url": one.worker.url, "x-prfaas-prefill-cluster": one.cluster}


async def test_its_metrics_tell_when_a_certificate_ends(client, secure):
    for one in secure:
        assert (await client.metrics(one.worker))[EXPIRES] == one.until.timestamp()


def by_prefix(one: Secure, cluster: str) -> dict[str, str]:
    return {"x-prfaas-prefix-url": one.worker.url, "x-prfaas-prefix-cluster": cluster}


@pytest.mark.parametrize(("cluster", "cached"), [("eu", 1024), ("", 1024), ("hub", 0), ("elsewhere", 0)])
async def test_a_prefix_comes_from_the_cluster_that_was_named_or_is_computed(client, secure, cluster: str, cached: int):
    eu, hub = secure
    prompt, salt = text_of(1050, seed=31), f"from {cluster}"
    wanted = await logprobs(await ask(client, eu.worker, {}, prompt=prompt, cache_salt=salt))
    before = await client.metrics(hub.worker)
    answer = await ask(client, hub.worker, by_prefix(eu, cluster), prompt=prompt, cache_salt=salt)
    assert (await logprobs(answer))["tokens"] == wanted["tokens"]
    assert int(answer.headers["x-prfaas-cached-tokens"]) == cached
    assert await difference(client, hub.worker, before, fetches("fetched" if cached else "failed")) == 1


@pytest.mark.parametrize(("cluster", "outcome"), [("hub", "fetched"), ("eu", "failed")])
async def test_an_instance_that_prefills_holds_its_source_of_prefixes_to_the_same(
    client, secure, cluster: str, outcome: str
):
    eu, hub = secure
    # The source is the asking instance itself: it need not be a third.
    prompt, salt = text_of(1050, seed=32), f"held to {cluster}"
    wanted = await logprobs(await ask(client, hub.worker, {}, prompt=prompt, cache_salt=salt))
    before = await client.metrics(eu.worker)
    headers = prefilled_by(eu) | by_prefix(hub, cluster)
    answer = await ask(client, hub.worker, headers, prompt=prompt + "?", cache_salt=salt)
    assert len((await logprobs(answer))["tokens"]) == len(wanted["tokens"])
    assert await difference(client, eu.worker, before, fetches(outcome)) == 1


async def test_an_instance_that_prefills_must_be_of_the_cluster_that_was_named(client, secure):
    eu, hub = secure
    answer = await ask(client, hub.worker, prefilled_by(eu) | {"x-prfaas-prefill-cluster": "us"}, prompt="def f(")
    body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (502, "prefill_failed")
    assert "'us' was expected" in body["error"]["message"]
    await client.eventually(hub.worker, **IDLE)
    await client.eventually(eu.worker, **IDLE)
