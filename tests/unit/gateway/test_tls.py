"""Proves that inside TLS the gateway speaks only with workers of the cluster that its routing table names."""

import datetime
import itertools
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web
from msgspec.structs import replace
from tests.clocks import Clock

from prfaas import identity
from prfaas.credentials import FILES
from prfaas.errors import ConfigError, UnreachableError
from prfaas.names import TLS_REVOKED
from prfaas.wire.routes import Instance
from prfaas_gateway.limits import Limits
from prfaas_gateway.upstream import GatewayCredentials, Upstream

NOW = datetime.datetime.now(datetime.UTC)
WEEK = identity.valid_for(NOW, 7)
ENDED = identity.Validity(NOW - datetime.timedelta(hours=1), NOW - datetime.timedelta(minutes=1))
FIRST, SECOND = (identity.make_authority(name, WEEK) for name in ("first", "second"))


def put(folder: Path, cluster: str, signer: identity.KeyPair, *trusted: identity.KeyPair, validity=WEEK) -> Path:
    """Write a directory of credentials, as a Secret is mounted."""
    folder.mkdir(exist_ok=True)
    pair = identity.issue(signer, cluster, validity)
    bundle = identity.bundle(*(one.certificate for one in trusted or (signer,)))
    for name, content in zip(FILES, (pair.certificate, pair.key, bundle), strict=True):
        fresh = folder / f".{name}"
        fresh.write_bytes(content)
        fresh.replace(folder / name)
    return folder


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable]:
    """Start workers of a cluster that answer with the number of their caller's certificate."""
    runners = []

    async def start(
        cluster: str, signer: identity.KeyPair, *trusted: identity.KeyPair, validity=WEEK, asks=ssl.CERT_REQUIRED
    ) -> Instance:
        folder = put(tmp_path / f"worker-{len(runners)}", cluster, signer, *trusted, validity=validity)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.load_verify_locations(folder / "ca.crt")
        context.verify_mode = asks

        async def answer(request: web.Request) -> web.Response:
            shown = request.get_extra_info("ssl_object").getpeercert() or {"serialNumber": "none"}
            return web.Response(text=shown["serialNumber"])

        app = web.Application()
        app.router.add_post("/x", answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        port = runner.addresses[0][1]
        return Instance(name="d", pool="p", cluster="eu", role="decode", url=f"https://127.0.0.1:{port}")

    yield start
    for runner in runners:
        await runner.cleanup()


async def ask(upstream: Upstream, worker: Instance) -> bytes:
    answer = await upstream.post(worker, "/x", {}, b"")
    assert answer.status == 200
    answer.close()
    return answer.body or b""


async def test_a_worker_of_the_named_cluster_sees_our_certificate(serve, tmp_path):
    worker = await serve("eu", FIRST)
    async with Upstream(Limits(), GatewayCredentials(put(tmp_path / "hub", "hub", FIRST))) as upstream:
        assert await ask(upstream, worker)


async def test_a_worker_of_another_cluster_gets_no_byte_of_a_request(serve, tmp_path):
    worker = await serve("us", FIRST)
    async with Upstream(Limits(), GatewayCredentials(put(tmp_path / "hub", "hub", FIRST))) as upstream:
        with pytest.raises(UnreachableError, match=r"of cluster 'us' and 'eu' was expected"):
            await ask(upstream, worker)


async def test_a_worker_of_a_foreign_authority_is_refused(serve, tmp_path):
    worker = await serve("eu", SECOND, FIRST, SECOND)
    async with Upstream(Limits(), GatewayCredentials(put(tmp_path / "hub", "hub", FIRST))) as upstream:
        with pytest.raises(UnreachableError, match=r"verify failed"):
            await ask(upstream, worker)


async def test_without_credentials_the_gateway_calls_no_worker_inside_tls(serve):
    worker = await serve("eu", FIRST)
    async with Upstream(Limits()) as upstream:
        with pytest.raises(UnreachableError, match="--tls-dir"):
            await ask(upstream, worker)


async def test_new_files_are_used_by_a_later_request_and_bad_ones_change_nothing(serve, tmp_path):
    worker = await serve("eu", FIRST, FIRST, SECOND)
    folder = put(tmp_path / "hub", "hub", FIRST)
    credentials = GatewayCredentials(folder, itertools.count().__next__)  # each look is a second later
    async with Upstream(Limits(), credentials) as upstream:
        first = await ask(upstream, worker)
        assert await ask(upstream, worker) == first
        put(folder, "hub", SECOND, FIRST, SECOND)
        second = await ask(upstream, worker)
        assert second != first
        (folder / "tls.key").write_bytes(b"not a key")
        assert await ask(upstream, worker) == second
        context = credentials.context("eu")
        assert credentials.context("eu") is context


def test_a_directory_that_cannot_be_used_at_the_start_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--tls-dir .*tls\.crt cannot be read"):
        GatewayCredentials(tmp_path)


async def test_a_gateway_sends_no_request_to_a_worker_whose_cluster_was_revoked(serve: Callable, tmp_path: Path):
    """Nor on a kept connection, a tenth of a second later, while its certificate is still valid. The controls are the
    requests before."""
    worker, folder, clock = await serve("eu", FIRST), put(tmp_path / "gateway", "hub", FIRST), Clock()
    async with Upstream(Limits(), GatewayCredentials(folder, clock)) as upstream:
        assert await ask(upstream, worker)
        (folder / TLS_REVOKED).write_bytes(identity.write_revoked({"eu": NOW}))
        clock.seconds = 0.09
        assert await ask(upstream, worker), "a request costs no look at the files"
        clock.seconds = 0.11
        with pytest.raises(UnreachableError, match="revoked"):
            await ask(upstream, worker)
        (folder / TLS_REVOKED).unlink()
        clock.seconds = 0.22
        assert await ask(upstream, worker)


async def test_a_gateway_whose_certificate_ran_out_goes_on_with_its_own_cluster_alone(serve: Callable, tmp_path: Path):
    """The control: with a good one it refuses the worker that has expired, and reaches the other cluster."""
    own = replace(await serve("hub", FIRST, validity=ENDED, asks=ssl.CERT_NONE), cluster="hub")
    eu = await serve("eu", FIRST, asks=ssl.CERT_NONE)
    ran_out = GatewayCredentials(put(tmp_path / "ended", "hub", FIRST, validity=ENDED))
    async with Upstream(Limits(), ran_out) as upstream:
        assert await ask(upstream, own)
        with pytest.raises(UnreachableError, match="nobody else is accepted while our own certificate has run out"):
            await ask(upstream, eu)
    good = GatewayCredentials(put(tmp_path / "good", "hub", FIRST))
    async with Upstream(Limits(), good) as upstream:
        with pytest.raises(UnreachableError, match="certificate has expired"):
            await ask(upstream, own)
        assert await ask(upstream, eu)
    assert (ran_out.ran_out, good.ran_out) == (True, False)
