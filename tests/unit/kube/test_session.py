"""Proves that a call to an API server ends in time, under the present token, and that its errors tell causes apart."""

import asyncio
import gzip
import json
import subprocess
import sys
from contextlib import nullcontext
from datetime import UTC, datetime

import msgspec
import pytest
import yaml
from aiohttp import web
from tests.waiting import eventually_async

from prfaas import identity
from prfaas.errors import ConfigError, InternalError, ProtocolError, UnreachableError
from prfaas.kube import KubeSession, ObjectRef, StatusError
from prfaas.kube.session import CONFIG_MAP, CONNECTIONS, encode_body, token_of_file

REF = ObjectRef(CONFIG_MAP, "n", "p-routes")


async def test_errors_tell_how_a_call_failed(api, session):
    with pytest.raises(StatusError) as refusal:
        await session.call("GET", REF.path)
    assert (refusal.value.status, refusal.value.answer["reason"]) == (404, "NotFound")
    assert await session.find(REF.path) is None

    async def no_json(_request):
        return web.Response(text="<html>")

    api.misbehave.append(no_json)
    with pytest.raises(ProtocolError):
        await session.call("GET", REF.path)

    async def hang(_request):
        await asyncio.Event().wait()

    api.misbehave.append(hang)
    with pytest.raises(UnreachableError):
        await session.call("GET", REF.path, timeout_seconds=0.05)
    api.dead = True
    with pytest.raises(UnreachableError):
        await session.call("GET", REF.path)


async def test_a_server_cannot_send_a_call_elsewhere(api, session):
    async def elsewhere(_request):
        return web.Response(status=307, headers={"Location": f"{api.url}/latest/meta-data"})

    api.misbehave.append(elsewhere)

    async def read() -> None:
        async with session.stream("GET", REF.path, on_answer=lambda status, _: seen.append(status)):
            pass

    seen: list[int] = []
    with pytest.raises(StatusError) as refusal:
        await read()
    assert [refusal.value.status] == seen == [307]
    assert [path for _, path, _, _ in api.requests] == [REF.path]


def test_a_refusal_of_any_nesting_has_words():
    nested = [b"[" * levels + b"]" * levels for levels in range(1, 1200)]
    said = {StatusError("GET /x", 400, b'{"message":%b}' % one, {}).message[:13] for one in nested}
    assert said == {'{"message":[]', '{"message":[['}
    assert StatusError("GET /x", 400, b'{"message":"no"}', {}).message == "no"


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_an_end_fills_no_memory(api, session, status, monkeypatch):
    monkeypatch.setattr("prfaas.kube.session.MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr("prfaas.kube.session.MAX_REFUSAL_BYTES", 1 << 16)
    sent = 0

    async def flood(request):
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while sent < 1 << 26:
            await response.write(b" " * (1 << 16))
            sent += 1 << 16
        return response

    api.misbehave.append(flood)
    with pytest.raises(ProtocolError if status == 200 else StatusError):
        await session.call("GET", REF.path)
    assert sent < 1 << 25


async def test_an_answer_that_unpacks_to_too_much_is_refused(api, session, monkeypatch):
    monkeypatch.setattr("prfaas.kube.session.MAX_ANSWER_BYTES", 1 << 20)

    async def bomb(_request):
        packed = gzip.compress(b" " * (1 << 24))
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    api.misbehave.append(bomb)
    with pytest.raises(ProtocolError):
        await session.call("GET", REF.path)


async def test_gzip_alone_is_asked_for_and_another_packing_is_refused(api, session):
    async def brotli(_request):
        return web.Response(body=b"\x0b\x01\x80{}\x03", headers={"Content-Encoding": "br"})

    api.misbehave.append(brotli)
    with pytest.raises(ProtocolError, match="is packed by 'br', but only gzip was asked for"):
        await session.call("GET", REF.path)
    assert [headers["Accept-Encoding"] for _, _, headers, _ in api.requests] == ["gzip"]


async def test_a_refusal_that_is_packed_is_read(api, session):
    async def refuse(_request):
        packed = gzip.compress(b'{"kind":"Status","message":"not you"}')
        return web.Response(status=403, body=packed, headers={"Content-Encoding": "gzip"})

    api.misbehave.append(refuse)
    with pytest.raises(StatusError, match="403 not you"):
        await session.call("GET", REF.path)


@pytest.mark.system
@pytest.mark.parametrize("long_bytes", [1000, 1 << 20], ids=["long", "control: not long"])
async def test_long_answers_are_read_one_after_the_other_and_the_wait_counts(api, session, monkeypatch, long_bytes):
    monkeypatch.setattr("prfaas.kube.session.LONG_ANSWER_BYTES", long_bytes)
    goes_on = asyncio.Event()
    is_long = long_bytes < 2000

    async def slow(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"value":"' + b"x" * 2000)
        await goes_on.wait()
        await response.write(b'"}')
        return response

    async def quick(_request):
        return web.json_response({"value": "y" * 2000})

    api.misbehave += [slow, quick]
    first = asyncio.create_task(session.call("GET", REF.path))
    await eventually_async(lambda: api.requests and session._reads_long.locked() is is_long, "the first one is read")
    with pytest.raises(UnreachableError, match="TimeoutError") if is_long else nullcontext():
        assert (await session.call("GET", REF.path, timeout_seconds=0.3))["value"] == "y" * 2000
    api.put(REF, value=1)
    assert (await session.call("GET", REF.path))["value"] == 1, "a short one waits for nobody"
    goes_on.set()
    assert (await first)["value"] == "x" * 2000


async def test_a_long_text_of_the_server_is_not_sent_back(api, session):
    with pytest.raises(ProtocolError, match="continue is longer than"):
        await session.call("GET", REF.path, query={"continue": "x" * (1 << 20)})
    assert api.requests == []


async def test_the_token_is_read_again_for_every_call(api, tmp_path):
    token = tmp_path / "token"
    api.put(REF, value=1)
    async with KubeSession(api.url, authorization=token_of_file(token)) as session:
        for text in ("first", "second\n"):
            token.write_text(text)
            await session.call("GET", REF.path)
        assert [headers["Authorization"] for _, _, headers, _ in api.requests] == ["Bearer first", "Bearer second"]
        for damaged in (b"two\nlines", b"a\0b", b"\xff"):
            token.write_bytes(damaged)
            with pytest.raises(ConfigError):
                await session.call("GET", REF.path)
        token.unlink()
        with pytest.raises(ConfigError):
            await session.call("GET", REF.path)


async def test_a_session_after_its_end_is_a_bug(api):
    api.put(REF)
    async with KubeSession(api.url) as session:
        await session.call("GET", REF.path)
    with pytest.raises(InternalError):
        await session.call("GET", REF.path)


async def test_a_session_opens_so_many_connections_and_no_more(api, session):
    waiting = 0
    all_wait = asyncio.Event()

    async def hold(_request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == CONNECTIONS:
            all_wait.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits until its client leaves")

    api.misbehave += [hold] * (CONNECTIONS + 1)
    calls = [asyncio.create_task(session.call("GET", REF.path)) for _ in range(CONNECTIONS + 1)]
    await all_wait.wait()
    await asyncio.sleep(0)
    assert waiting == CONNECTIONS
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_session_that_ended_before_its_first_call_makes_none(api, session):
    await session.close()
    with pytest.raises(InternalError):
        await session.call("GET", REF.path)
    assert api.requests == []


async def test_a_pod_with_a_read_only_root_has_a_session(tmp_path, monkeypatch):
    """Like the pod of `helm test`, which has no volume to write to."""
    authority = identity.make_authority("ca", identity.valid_for(datetime.now(UTC), 1))
    (tmp_path / "ca.crt").write_bytes(authority.certificate)

    def refuse(*_: object, **__: object):
        raise OSError("read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    monkeypatch.setattr("prfaas.kube.session.SERVICE_ACCOUNT_DIR", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    async with KubeSession.in_cluster() as session:
        assert session.configuration.host == "https://127.0.0.1:1"


def test_outside_a_pod_there_is_no_session(tmp_path, monkeypatch):
    monkeypatch.setattr("prfaas.kube.session.SERVICE_ACCOUNT_DIR", tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        KubeSession.in_cluster()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(ConfigError, match=r"ca\.crt"):
        KubeSession.in_cluster()


async def test_a_body_is_sent_as_its_type_demands(api, session):
    body = {"data": {"face": "\U0001f600", "delete": "\x7f"}}
    for sent in (encode_body(body), body):
        await session.call("PATCH", REF.path, query={"force": "true", "dryRun": "", "limit": None}, body=sent)
    (_, path, applied_headers, applied), (_, _, merged_headers, merged) = api.requests
    assert path == f"{REF.path}?force=true"
    assert applied_headers["Content-Type"].startswith("application/apply-patch+yaml")
    assert merged_headers["Content-Type"] == "application/merge-patch+json"
    assert yaml.safe_load(applied.decode()) == json.loads(merged) == body


async def test_proxies_and_passwords_of_the_environment_are_for_no_api_server(api, session, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    api.put(REF)
    await session.call("GET", REF.path)
    assert "Authorization" not in api.requests[0][2]


@pytest.mark.system
def test_a_process_loads_one_client_of_the_package_and_another_library_gets_all_of_it():
    absent = {"kubernetes", "requests", "oauthlib", "urllib3"}
    loaded = f"import sys, prfaas.kube; assert not {absent} & sys.modules.keys()"
    whole = "import kubernetes.aio.client, kubernetes.config; kubernetes.aio.client.CoreV1Api, kubernetes.client.V1Pod"
    subprocess.run([sys.executable, "-c", f"{loaded}; {whole}"], check=True)


def test_a_body_reads_the_same_as_json_and_as_yaml():
    texts = ["\x7f", "\x85", "\u2028\u2029", "\ufeff", "\ufffe\uffff", "\U0001f600", "ü", "\x00\n", '"\\']
    raw = encode_body({"texts": texts})
    assert json.loads(raw) == {"texts": texts}
    assert yaml.safe_load(raw.decode()) == {"texts": texts}
    with pytest.raises(yaml.reader.ReaderError):
        yaml.safe_load(msgspec.json.encode(texts).decode())
