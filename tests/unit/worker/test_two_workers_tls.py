"""Two real workers inside TLS, of clusters hub and eu: requests are served while certificates and authorities are
replaced, and a peer of another cluster than was named gives nothing.
"""

import asyncio
import datetime
import itertools
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import aiohttp
import pytest

from prfaas import identity
from prfaas.identity import KeyPair
from prfaas.wire.prefill import new_transfer
from prfaas_transfer.credentials import PeerCredentials

from ...waiting import eventually_async
from ..tls.mounts import Mount
from .conftest import Client, Worker
from .prompts import IDLE, choices, text_of
from .transfer_bench import descriptors

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


class Gateway(Client):
    """Calls with the present certificate of the hub."""

    def __init__(self, session: aiohttp.ClientSession, credentials: PeerCredentials):
        super().__init__(session)
        self._credentials = credentials

    def _post(self, url: str, fields: dict[str, Any]) -> Any:
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "logprobs": 3} | fields
        return self.session.post(f"{url}/v1/completions", json=body, ssl=self._credentials.now().client)


@pytest.fixture
async def client(secure) -> AsyncIterator[Gateway]:
    before = descriptors()
    connector = aiohttp.TCPConnector(ssl=False, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield Gateway(session, PeerCredentials(secure[1].mount.path))
    # The session does not wait until a worker has answered the end of TLS.
    await eventually_async(lambda: descriptors() <= before, "the session's connections are closed")


async def logprobs(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    return (await choices(answer))[0]["logprobs"]


async def test_certificates_and_their_authority_are_replaced_under_load_and_no_request_fails(client, secure):
    eu, hub = secure
    # Not 0: that text lies where two experts are about as likely, and another batch may choose the other one.
    prompts = [text_of(700, seed=seed) for seed in (1, 2, 3)]
    wanted = [await logprobs(await client.complete(hub.worker, prompt=prompt)) for prompt in prompts]
    before, served, stop = (await client.metrics(eu.worker)).get(SENT, 0.0), itertools.count(), asyncio.Event()
    done = [0]

    async def ask_on() -> None:
        while not stop.is_set():
            number = next(served)
            # Salted, since the decode instance would not ask for rows that it has.
            fields = {"prompt": prompts[number % len(prompts)], "cache_salt": f"rotation {number}"}
            answer = await client.complete(hub.worker, eu.worker, eu.cluster, **fields)
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
        with pytest.raises(OSError):  # noqa: PT011  # of TLS, or of a connection that was reset
            call(PeerCredentials(old.path), one.worker.host)


def call(credentials: PeerCredentials, host: str) -> bytes:
    connected = socket.create_connection((host, 8000), 10)
    with connected as sock, credentials.now().client.wrap_socket(sock) as tls:
        tls.sendall(b"GET /v1/role HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return tls.recv(12)


async def test_an_instance_of_another_cluster_than_was_named_gives_nothing(client, secure):
    eu, hub = secure
    answer = await client.complete(hub.worker, eu.worker, "us", prompt=text_of(300, seed=4))
    assert (answer.status, answer.headers["x-prfaas-kv-bytes"]) == (200, "0")
    assert "'us' was expected" in hub.worker.log.read_text()
    await client.eventually(hub.worker, **IDLE)


async def test_a_leg_of_a_caller_that_may_not_steer_is_refused(client, secure):
    eu, _ = secure
    own = PeerCredentials(eu.mount.path).now().client
    params = {"prfaas": {"role": "source", **new_transfer()}}
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
    async with client.session.post(f"{eu.worker.url}/v1/completions", json=body, ssl=own) as answer:
        found = (await answer.json())["error"]
    assert (answer.status, found["code"], found["param"]) == (403, "not_allowed", "kv_transfer_params")
