"""Proves the API port inside TLS, on the event loop that workers run: who needs a certificate for what, that a change
of certificates and authorities holds from the next connection on and fails no request, and that strangers who never
finish a handshake are cut off.
"""

import asyncio
import datetime
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import uvloop
from aiohttp import web

import prfaas_worker.assets
from prfaas import credentials as credentials_module
from prfaas import identity
from prfaas.ports import free_ports
from prfaas.rights import RIGHTS, STEER, is_open
from prfaas.wire.engine import LENGTH, Announced, GiveCache, Started, decode_for_engine, encode_batch
from prfaas.wire.prefill import PrefillOffer, new_transfer
from prfaas_transfer.credentials import PeerCredentials
from prfaas_worker.front import auth
from prfaas_worker.front.auth import open_api_port
from prfaas_worker.front.engine_client import EngineClient
from prfaas_worker.front.server import build_app
from prfaas_worker.front.serving import FrontState, ServedModel
from prfaas_worker.options import parse
from prfaas_worker.tokenizer import load_tokenizer

from ...waiting import eventually
from .mounts import Mount

pytestmark = pytest.mark.system

SECONDS = 10.0
CREATED = datetime.datetime.now(datetime.UTC)
SERVED = ServedModel(model_name="tiny", fingerprint="", vocab_size=264, max_context=1000, max_choices=8)
LEG = {"role": "source", **new_transfer()}
PREFILL = ("POST", "/v1/prefills", {"request_id": "r", "model": "tiny", "token_ids": [1, 2, 3], "leg": LEG})


class Port(NamedTuple):
    """A running API port, and the requests that its engine got."""

    address: tuple[str, int]
    requests: list[GiveCache]
    app: web.Application


async def play_engine(sock: socket.socket, requests: list[GiveCache]) -> None:
    """Serve every prefill, until the front goes away."""
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    try:
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            for message in decode_for_engine(await reader.readexactly(length)):
                if isinstance(message, GiveCache):
                    requests.append(message)
                    started = Started(message.handle, 0, 0, 0.0, 0.0, 0.0)
                    writer.write(encode_batch([Announced(message.handle, 2), started]))
    except asyncio.IncompleteReadError:
        writer.close()


async def serve(directory: Path, started: Callable[[Port], None], stop: threading.Event) -> None:
    (port,) = free_ports(1)
    flags = ["--model-source", "x", "--model-name", "tiny", "--api-port", str(port), "--tls-dir", str(directory)]
    ours, theirs = socket.socketpair()
    requests: list[GiveCache] = []
    engine = asyncio.create_task(play_engine(theirs, requests))
    client = await EngineClient.connect(ours)
    reading = asyncio.create_task(client.run())
    credentials = PeerCredentials(directory)
    serving = FrontState(parse(flags), client, credentials=credentials)
    serving.loaded(SERVED, load_tokenizer(Path(prfaas_worker.assets.__file__).parent / "kimi-linear-tiny"))
    app = build_app(serving)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await open_api_port(runner, serving.options, credentials)
    started(Port(("127.0.0.1", port), requests, app))
    await asyncio.to_thread(stop.wait)
    await runner.cleanup()
    client.close()
    await asyncio.gather(engine, reading)


def run_port(directory: Path, loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> Iterator[Port]:
    found: list[Port] = []
    running, stop = threading.Event(), threading.Event()

    def started(port: Port) -> None:
        found.append(port)
        running.set()

    def run() -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(serve(directory, started, stop))

    thread = threading.Thread(target=run)
    thread.start()
    assert running.wait(SECONDS)
    yield found[0]
    stop.set()
    thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.fixture
def own_mount(mount):
    return mount("hub")


@pytest.fixture
def port(own_mount) -> Iterator[Port]:
    yield from run_port(own_mount.path)


class Calls:
    """HTTP calls to a port, each on a new connection unless one is kept."""

    def __init__(self, port: Port):
        self.port = port
        self.open: list[http.client.HTTPConnection] = []

    def connect(self, credentials: PeerCredentials | None) -> http.client.HTTPConnection:
        """Connect with a certificate, or as a client that has none."""
        sock = socket.create_connection(self.port.address, SECONDS)
        if credentials is not None:
            context = credentials.now().client
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPConnection(*self.port.address)
        connection.sock = context.wrap_socket(sock)
        self.open.append(connection)
        return connection

    def ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object = None
    ) -> tuple[int, bytes]:
        """Make one call and return status and body."""
        connection.request(method, path, msgspec.json.encode(body) if body is not None else None)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def once(
        self, credentials: PeerCredentials | None, method: str, path: str, body: object = None
    ) -> tuple[int, bytes]:
        """Make one call on a new connection."""
        connection = self.connect(credentials)
        try:
            return self.ask(connection, method, path, body)
        finally:
            connection.close()


@pytest.fixture
def calls(port: Port) -> Iterator[Calls]:
    calls = Calls(port)
    yield calls
    for connection in calls.open:
        connection.close()


def test_a_caller_with_a_certificate_of_the_hub_may_buy_a_prefill(calls: Calls, hub: PeerCredentials):
    status, body = calls.once(hub, *PREFILL)
    offer = PrefillOffer(data_port=8001, end_token=2)
    assert (status, msgspec.json.decode(body, type=PrefillOffer)) == (201, offer)
    assert [message.leg.token for message in calls.port.requests] == [LEG["token"]]


def test_the_engine_knows_which_buyer_asks_and_takes_the_hub_for_nobody(calls: Calls, mount, hub: PeerCredentials):
    buyer = PeerCredentials(mount("buyer/shop").path)
    in_a_body = ("POST", "/v1/completions", {"model": "tiny", "prompt": "Patient: John", STEER: {"prfaas": LEG}})
    asked = [calls.once(who, *prefill)[0] for who in (buyer, hub) for prefill in (PREFILL, in_a_body)]
    assert asked == [201, 200, 201, 200]
    assert [message.caller for message in calls.port.requests] == ["buyer/shop", "buyer/shop", "", ""]


def test_a_member_may_buy_none_and_hears_who_may(calls: Calls, eu: PeerCredentials):
    status, body = calls.once(eu, *PREFILL)
    error = msgspec.json.decode(body)["error"]
    assert (status, error["code"]) == (403, "not_allowed")
    assert error["message"] == (
        "POST /v1/prefills: only buyers of prefills, workers of the hub, gateways of the hub may use this, "
        "and the caller's certificate is of cluster 'eu'"
    )
    assert not calls.port.requests


def test_probes_need_no_certificate(calls: Calls):
    assert calls.once(None, "GET", "/healthz") == (200, b"ok\n")
    assert calls.once(None, "GET", "/readyz") == (200, b"ok\n")
    assert calls.once(None, "GET", "/health") == (200, b"ok\n")


def test_every_path_has_its_rights(calls: Calls):
    assert {route.resource.canonical for route in calls.port.app.router.routes()} <= RIGHTS.keys()


def test_all_that_is_not_open_wants_a_certificate(calls: Calls):
    routes = {(route.method, route.resource.canonical) for route in calls.port.app.router.routes()}
    closed = {(method, path) for method, path in routes if not is_open(path)} | {("GET", "/v1/unknown")}
    wanted = {("POST", "/v1/completions"), ("POST", "/v1/prefills"), ("PUT", "/v1/role"), ("POST", "/v1/cache/reset")}
    assert wanted < closed
    for method, path in sorted(closed):
        status, body = calls.once(None, method, path, {})
        code = msgspec.json.decode(body)["error"]["code"] if method != "HEAD" else "client_certificate_required"
        assert (status, code) == (401, "client_certificate_required"), path
    assert not calls.port.requests


def test_a_stranger_is_refused_even_where_no_certificate_is_needed(calls: Calls, mount, authority, other):
    stranger = PeerCredentials(mount("eu", signer=other, trusts=(other, authority)).path)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        calls.once(stranger, "GET", "/healthz")


def test_a_call_of_another_scheme_is_no_answer(calls: Calls):
    connection = http.client.HTTPConnection(*calls.port.address, timeout=SECONDS)
    calls.open.append(connection)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        calls.ask(connection, "GET", "/healthz")


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_an_authority_is_replaced_while_requests_run_and_none_fails(mount, authority, other, loop):
    """The steps of docs/operate/tls.md: trust both, issue anew, trust only the new one."""
    year = identity.valid_for(CREATED, 300)
    server_mount, client_mount = mount("hub"), mount("hub")
    client = PeerCredentials(client_mount.path)
    old = PeerCredentials(mount("old", trusts=(authority, other)).path)
    port = next(running := run_port(server_mount.path, loop))
    calls = Calls(port)
    served: list[int] = []
    stop = threading.Event()

    def ask_on() -> None:
        while not stop.is_set():
            served.append(calls.once(client, *PREFILL)[0])

    threads = [threading.Thread(target=ask_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        steps = [
            (server_mount, identity.issue(authority, "hub", year), (authority, other)),
            (client_mount, identity.issue(authority, "hub", year), (authority, other)),
            (server_mount, identity.issue(other, "hub", year), (authority, other)),
            (client_mount, identity.issue(other, "hub", year), (authority, other)),
            (server_mount, identity.issue(other, "hub", year), (other,)),
            (client_mount, identity.issue(other, "hub", year), (other,)),
        ]
        for changed, pair, trusted in steps:
            changed.put(pair, *trusted)
            after = len(served)

            def are_served(after: int = after) -> bool:
                assert all(thread.is_alive() for thread in threads)
                return len(served) >= after + 10

            eventually(are_served, "ten more calls", poll=0.001)
        with pytest.raises(ssl.SSLError, match="unknown ca"):
            calls.once(old, *PREFILL)
    finally:
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
        next(running, None)
    assert set(served) == {201}


def test_a_kept_connection_is_checked_by_the_authorities_of_the_moment(calls: Calls, own_mount, hub, authority, other):
    kept = calls.connect(hub)
    assert calls.ask(kept, *PREFILL)[0] == 201
    own_mount.put(identity.issue(other, "hub", identity.valid_for(CREATED, 30)), authority, other)
    assert calls.ask(kept, *PREFILL)[0] == 201, "its authority is one of two now"
    own_mount.put(identity.issue(other, "hub", identity.valid_for(CREATED, 30)), other)
    kept.request("POST", "/v1/prefills", msgspec.json.encode(PREFILL[2]))
    answer = kept.getresponse()
    assert (answer.status, answer.getheader("connection")) == (401, "close")
    assert b"not trusted" in answer.read()


def test_a_caller_that_never_finishes_its_handshake_is_cut_off(own_mount, monkeypatch):
    monkeypatch.setattr(auth, "HANDSHAKE_SECONDS", 0.2)
    port = next(running := run_port(own_mount.path))
    try:
        with (
            socket.create_connection(port.address, SECONDS) as silent,
            socket.create_connection(port.address, SECONDS) as slow,
        ):
            slow.send(b"\x16\x03\x01\x02")
            assert (silent.recv(1), slow.recv(1)) == (b"", b"")
    finally:
        next(running, None)


@pytest.mark.parametrize("settle_seconds", [0.0, 60.0])
def test_a_hub_whose_certificates_expired_serves_its_gateways_and_no_other_cluster(
    mount, authority, monkeypatch, settle_seconds: float
):
    """Also while its own is renewed and the gateway's is not yet. The control: without that patience it refuses."""
    monkeypatch.setattr(credentials_module, "SETTLE_SECONDS", settle_seconds)
    ended = identity.Validity(CREATED - datetime.timedelta(hours=1), CREATED - datetime.timedelta(minutes=1))

    def put(cluster: str, part: str) -> Mount:
        return mount(cluster).put(identity.issue(authority, cluster, ended, part), authority)

    own = put("hub", "worker")
    gateway, eu = PeerCredentials(put("hub", "gateway").path), PeerCredentials(put("eu", "").path)
    calls = Calls(next(running := run_port(own.path)))
    try:
        assert calls.once(gateway, *PREFILL)[0] == 201
        status, body = calls.once(eu, *PREFILL)
        assert (status, b"nobody else is accepted" in body) == (401, True)
        assert calls.once(None, "GET", "/readyz") == (200, b"ok\n")
        own.put(identity.issue(authority, "hub", identity.valid_for(CREATED, 1), "worker"), authority)
        calls.once(None, "GET", "/readyz")  # it has read them
        if settle_seconds:
            assert calls.once(gateway, *PREFILL)[0] == 201
        else:
            with pytest.raises(ssl.SSLError, match="certificate expired"):
                calls.once(gateway, *PREFILL)
    finally:
        next(running, None)


def test_a_member_whose_certificate_expired_is_not_ready_and_says_why(mount, authority):
    ended = identity.Validity(CREATED - datetime.timedelta(hours=1), CREATED - datetime.timedelta(minutes=1))
    place = mount("eu").put(identity.issue(authority, "eu", ended), authority)
    calls = Calls(next(running := run_port(place.path)))
    try:
        status, body = calls.once(None, "GET", "/readyz")
        assert (status, b"only cluster 'eu' takes it; renew it" in body) == (503, True)
        place.put(identity.issue(authority, "eu", identity.valid_for(CREATED, 1)), authority)
        assert b"was renewed late" in calls.once(None, "GET", "/readyz")[1]
    finally:
        next(running, None)
