"""Proves that a session and its API server check each other's certificates, and that no key stays on the disk."""

import ssl
import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from prfaas import identity
from prfaas.errors import UnreachableError
from prfaas.kube import KubeSession

YEAR = identity.valid_for(datetime.now(UTC), 365)
AUTHORITY, OTHER = (identity.make_authority(name, YEAR) for name in ("first", "second"))
CLIENT = identity.issue_client(AUTHORITY, "operator", ["system:masters"], YEAR)
SERVER = identity.issue_server(AUTHORITY, "api", ["kubernetes"], YEAR)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """Serve the name of each caller, whose certificate must be of the first authority."""
    pem = tmp_path / "server.pem"
    pem.write_bytes(SERVER.certificate + SERVER.key)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=AUTHORITY.certificate.decode())
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(pem)

    async def handle(request: web.Request) -> web.Response:
        subject = dict(one for part in request.get_extra_info("peercert")["subject"] for one in part)
        return web.json_response({"caller": subject["commonName"]})

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def session(
    url: str, authority: identity.KeyPair = AUTHORITY, client: identity.KeyPair = CLIENT, **more
) -> KubeSession:
    certificate, key = client.certificate.decode(), client.key.decode()
    return KubeSession(url, certificate=certificate, key=key, ca_cert_data=authority.certificate.decode(), **more)


async def test_both_ends_prove_themselves_and_the_servers_name_may_differ_from_its_address(url, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with session(url, tls_server_name="kubernetes") as made:
        assert list(tmp_path.glob("prfaas-*")) == []
        assert await made.call("GET", "/") == {"caller": "operator"}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"tls_server_name": "another"},
        {"tls_server_name": "kubernetes", "authority": OTHER},
        {"tls_server_name": "kubernetes", "client": identity.issue_client(OTHER, "operator", [], YEAR)},
    ],
)
async def test_a_wrong_name_authority_or_client_is_no_session(url, wrong):
    async with session(url, **wrong) as made:
        with pytest.raises(UnreachableError, match=r"is the API server reachable\?"):
            await made.call("GET", "/")


@pytest.mark.parametrize("text", ["", "no PEM"])
def test_texts_that_tls_cannot_load_are_an_error_at_once(text):
    with pytest.raises(ssl.SSLError):
        KubeSession("https://127.0.0.1:1", certificate=text or CLIENT.certificate.decode(), key=text)
