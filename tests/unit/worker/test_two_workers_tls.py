"""Two real workers inside TLS, of clusters hub and eu: requests are served while certificates and authorities are
replaced, and a peer of another cluster than was named gives nothing.
"""

import asyncio
import datetime
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import aiohttp
import pytest

from prfaas import identity
from prfaas.errors import PeerError
from prfaas.identity import KeyPair
from prfaas_transfer.credentials import PeerCredentials
from prfaas_transfer.fetch import SourceApi
from prfaas_transfer.tls import TlsAuth

from ..tls.mounts import Mount
from .conftest import Client, Worker
from .test_prefixes import difference, fetches
from .test_two_workers import IDLE, choices, text_of

pytestmark = pytest.mark.system

NOW = datetime.datetime.now(datetime.UTC)
EXPIRES = "prfaas_certificate_expires_timestamp_seconds"
SENT = 'prfaas_transfers_total{direction="send",outcome="delivered"}'
FIRST, SECOND = (identity.make_authority(name, identity.valid_for(NOW, 400)) for name in ("first", "second"))
_days = itertools.count(1)


class Secure(NamedTuple):
    """A worker of a cluster, and its credentials."""

    worker: Worker
    cluster: str
    mount: Mount

    async def renew(self, client: Client, signer: KeyPair, *trusted: KeyPair) -> None:
        """Replace its files, and wait until its metrics tell the new certificate's end."""
        until = identity.valid_for(NOW, next(_days))
        self.mount.put(identity.issue(signer, self.cluster, until), *trusted)
        await client.eventually(self.worker, **{EXPIRES: until.not_after.timestamp()})


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Secure, Secure]]:
    """A prefill worker of cluster eu and a decode worker of the hub."""
    directory, made = tmp_path_factory.mktemp("tls"), []
    try:
        for cluster, role in (("eu", "prefill"), ("hub", "decode")):
            until = identity.valid_for(NOW, next(_days))
            mount = Mount(directory / cluster).put(identity.issue(FIRST, cluster, until), FIRST)
            flags = ["--role", role, "--cluster", cluster, "--tls-dir", str(mount.path)]
            made.append(Secure(Worker(directory / f"{cluster}.log", *flags), cluster, mount))
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


async def test_certificates_and_their_authority_are_replaced_under_load_and_no_request_fails(client, secure):
    eu, hub = secure
    # Not 0: that text lies where two experts are about as likely, and another batch may choose the other one.
    prompts = [text_of(700, seed=seed) for seed in (1, 2, 3)]
    wanted = [await logprobs(await ask(client, hub.worker, {}, prompt=prompt)) for prompt in prompts]
    before, served, stop = (await client.metrics(eu.worker)).get(SENT, 0.0), itertools.count(), asyncio.Event()
    done = [0]

    async def ask_on() -> None:
        while not stop.is_set():
            number = next(served)
            # Salted, since the decode instance would not ask for rows that it has.
            fields = {"prompt": prompts[number % len(prompts)], "cache_salt": f"rotation {number}"}
            answer = await ask(client, hub.worker, prefilled_by(eu), **fields)
            assert answer.status == 200, await answer.text()
            found = await logprobs(answer)
            assert found["tokens"] == wanted[number % len(prompts)]["tokens"]
            assert found["token_logprobs"] == pytest.approx(wanted[number % len(prompts)]["token_logprobs"], abs=1e-4)
            done[0] += 1

    async def serve_some() -> None:
        """Let requests begin and end with what is in force."""
        enough = done[0] + 4
        while done[0] < enough:
            failed = [task for task in asking if task.done()]
            if failed:
                await failed[0]
            await asyncio.sleep(0.01)

    asking = [asyncio.create_task(ask_on()) for _ in range(2)]
    both = FIRST, SECOND
    # A renewal, and the three steps of docs/operate/tls.md; each reaches one instance after the other.
    steps: list[tuple[KeyPair, tuple[KeyPair, ...]]] = [
        (FIRST, (FIRST,)),
        (FIRST, both),
        (SECOND, both),
        (SECOND, (SECOND,)),
    ]
    try:
        await serve_some()
        for signer, trusted in steps:
            for one in secure:
                await one.renew(client, signer, *trusted)
                await serve_some()
    finally:
        stop.set()
        await asyncio.gather(*asking)
    await client.eventually(hub.worker, **IDLE)
    await client.eventually(eu.worker, **IDLE)
    assert (await client.metrics(eu.worker))[SENT] - before == done[0] > 32
    assert_refused_with(FIRST, eu, hub)


def assert_refused_with(former: KeyPair, eu: Secure, hub: Secure) -> None:
    """The control: the authority that was replaced is not trusted."""
    for one in (eu, hub):
        path = one.mount.path.parent / f"{one.cluster}-of-old"
        old = Mount(path).put(identity.issue(former, "hub", identity.valid_for(NOW, 5)), FIRST, SECOND)
        with pytest.raises(PeerError):
            call(PeerCredentials(old.path), one.worker.url)


def call(credentials: PeerCredentials, url: str) -> int:
    return SourceApi(url, "", TlsAuth(credentials)).call("GET", "/v1/role", b"", lambda _sock: None)[0]


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
