"""Real workers inside TLS, emulated ones, and what attackers do to them: each attack returns whether it got through."""

import asyncio
import http.client
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import msgspec
import pytest

from prfaas import identity
from prfaas.credentials import utc_now
from prfaas.errors import PeerError
from prfaas.identity import KeyPair
from prfaas.names import WORKER_API_PORT, WORKER_DATA_PORT
from prfaas.rights import STEER, TRANSFER, Identity
from prfaas.wire.frames import Address, Kind
from prfaas.wire.kvevents import EVENTS_PATH
from prfaas.wire.prefill import new_transfer
from prfaas.wire.transfer import Abort, Hello, decode_message, message_frame
from prfaas_transfer.credentials import PeerCredentials
from prfaas_transfer.send import receive_message
from prfaas_transfer.tls import connect_tls

from ...unit.tls.mounts import Mount
from ...unit.worker.conftest import Worker, front, launched

__all__ = ["front"]

SECONDS: Final = 20.0
DAYS: Final = identity.valid_for(utc_now(), 30)
FLAGS: Final = ("--emulate", "qwen3.5-397b-fp8-8xh200", "--cache-scale", "256", "--cache-mib", "64")
CALLERS: Final = {
    "nobody": None,
    "another member": Identity("us"),
    "the own member": Identity("eu"),
    "a buyer": Identity("buyer/eu"),
    "a worker of the hub": Identity("hub", "worker"),
    "a gateway of the hub": Identity("hub", "gateway"),
    "the whole hub": Identity("hub"),
}
OPEN_TO_ALL: Final = """
from prfaas import rights
rights.RIGHTS.update(dict.fromkeys(rights.RIGHTS, frozenset(rights.CallerKind)))
"""
"""Takes the table away from a worker and its mover."""
CREDULOUS: Final = """
from prfaas import identity
from prfaas_worker.cache.blocks import Blocks
identity.read_revoked = lambda _: {}
match = Blocks.match
Blocks.match = lambda self, chain, max_blocks, places=None: match(self, chain, max_blocks)
"""
"""Takes away the list of revoked clusters, and the look at the places that a request allows."""


class Installation:
    """An authority with a trust domain of its own, and the credentials that it issued."""

    def __init__(self, folder: Path, name: str):
        self.authority = identity.make_authority(name, DAYS, f"{name}.prfaas.io")
        self._folder = folder / name
        self._made: dict[Identity, PeerCredentials] = {}

    def mount(self, who: Identity, *trusted: KeyPair) -> Mount:
        pair = identity.issue(self.authority, who.cluster, DAYS, who.part)
        name = f"{who.cluster.replace('/', '-')}-{who.part}-{len(trusted)}"
        return Mount(self._folder / name).put(pair, self.authority, *trusted)

    def credentials(self, who: Identity | None) -> PeerCredentials | None:
        if who is None:
            return None
        if who not in self._made:
            self._made[who] = PeerCredentials(self.mount(who).path)
        return self._made[who]


class Target(NamedTuple):
    worker: Worker
    cluster: str
    mount: Mount


class Targets(NamedTuple):
    """Workers of the hub and of the member eu, and one of each without a defence: that of the hub asks the table
    nothing, and that of eu is CREDULOUS."""

    hub: Target
    eu: Target
    undefended: Target
    credulous: Target


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Another installation, whose clusters have the same names."""
    return Installation(tmp_path_factory.mktemp("certificates"), "theirs")


def run_at_start(code: str, folder: Path) -> dict[str, str]:
    """Return the environment in which each process of Python runs this code first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory, installation: Installation) -> Iterator[Targets]:
    folder = tmp_path_factory.mktemp("targets")
    with launched(folder) as launch:

        def start(name: str, cluster: str) -> Target:
            mount = Mount(folder / name).put(
                identity.issue(installation.authority, cluster, DAYS), installation.authority
            )
            flags = ("--cluster", cluster, "--tls-dir", str(mount.path), *FLAGS)
            return Target(launch(name, *flags), cluster, mount)

        defended = start("hub", "hub"), start("eu", "eu")
        with mock.patch.dict(os.environ, run_at_start(OPEN_TO_ALL, folder / "open")):
            undefended = start("undefended", "hub")
        with mock.patch.dict(os.environ, run_at_start(CREDULOUS, folder / "believing")):
            found = Targets(*defended, undefended, start("credulous", "eu"))
        asyncio.run(_all_ready(found))
        yield found


async def _all_ready(targets: Targets) -> None:
    await asyncio.gather(*(one.worker.ready() for one in targets))


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str] = {}

    @property
    def error(self) -> dict[str, Any]:
        return msgspec.json.decode(self.body)["error"]


def leg(role: str, **place: Any) -> dict[str, Any]:
    return {STEER: {"prfaas": {"role": role, **new_transfer(), **place}}}


PROMPT: Final = {"model": "tiny", "prompt": "Patient: John", "max_tokens": 1}
PATIENT: Final = PROMPT | {"prompt": "Patient: John Q. Public, diagnosis: confidential. " * 8}
REQUESTS: Final[dict[str, Callable[[], tuple[str, str, Any]]]] = {
    "/v1/completions": lambda: ("POST", "/v1/completions", PROMPT),
    "/v1/chat/completions": lambda: (
        "POST",
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ),
    "/tokenize": lambda: ("POST", "/tokenize", {"model": "tiny", "prompt": "x"}),
    "/detokenize": lambda: ("POST", "/detokenize", {"model": "tiny", "tokens": [1]}),
    "/v1/prefills": lambda: (
        "POST",
        "/v1/prefills",
        {"request_id": "r", "model": "tiny", "token_ids": [1, 2, 3], "leg": {"role": "source", **new_transfer()}},
    ),
    "/v1/role": lambda: ("PUT", "/v1/role", {"role": "mixed"}),
    "/v1/egress": lambda: ("PUT", "/v1/egress", {"mbps": None}),
    "/v1/cache/reset": lambda: ("POST", "/v1/cache/reset", None),
    STEER: lambda: ("POST", "/v1/completions", PROMPT | leg("destination", host="127.0.0.1", port=9, cluster="hub")),
}
"""How an endpoint is called; one that is not here by GET."""


def call(
    target: Target,
    shown: PeerCredentials | None,
    method: str,
    path: str,
    body: Any = None,
    *,
    port: int = WORKER_API_PORT,
    headers: Mapping[str, str] = {},
) -> Answer:
    """Make one request inside TLS; status 0 if the handshake, or what follows it, is refused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if shown is None else shown.now().client
    if shown is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPConnection(target.worker.host, port, timeout=SECONDS)
    try:
        connection.connect()
        connection.sock = context.wrap_socket(connection.sock)
        connection.request(method, path, None if body is None else msgspec.json.encode(body), dict(headers))
        answer = connection.getresponse()
        # Events have no end.
        content = b"" if port != WORKER_API_PORT and answer.status == 200 else answer.read()
        return Answer(answer.status, content, answer.headers)
    except (ssl.SSLError, ConnectionError):
        return Answer(0, b"")
    finally:
        connection.close()


def fetches(target: Target, shown: PeerCredentials | None) -> bool:
    """Ask for a cache that nobody offered, as a destination; return whether the answer is about the cache."""
    # TLS has no handshake for who has no certificate.
    return shown is not None and fetches_at((target.worker.host, WORKER_DATA_PORT), shown)


def fetches_at(port: tuple[str, int], shown: PeerCredentials) -> bool:
    connected = socket.create_connection(port, SECONDS)
    try:
        stream = connect_tls(connected, shown, SECONDS, "")
    except PeerError:
        return False
    try:
        wish = Hello(token="guessed", declines=True)
        stream.send([message_frame(Kind.HELLO, Address("a" * 32, 1), wish)])
        reason = decode_message(*receive_message(stream), Abort).message
    except PeerError:
        return False
    finally:
        with suppress(OSError):
            stream.close()
    return not reason.startswith(TRANSFER)


def gets_through(target: Target, shown: PeerCredentials | None, endpoint: str) -> bool:
    """Use an endpoint as this caller; return whether it is served, and not refused."""
    if endpoint == TRANSFER:
        return fetches(target, shown)
    if endpoint == EVENTS_PATH:
        answer = call(target, shown, "GET", EVENTS_PATH, port=WORKER_DATA_PORT)
    else:
        method, path, body = REQUESTS[endpoint]() if endpoint in REQUESTS else ("GET", endpoint, None)
        answer = call(target, shown, method, path, body)
    if endpoint == EVENTS_PATH and shown is None:
        assert answer.status == 0
    else:
        assert answer.status in {200, 201, 401, 403}, (endpoint, answer)
        assert (answer.status == 401) <= (shown is None), (endpoint, answer)
    return answer.status in {200, 201}
