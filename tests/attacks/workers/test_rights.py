"""Every identity tries every endpoint of real workers inside TLS: what the table refuses is refused, and nothing else.

The control for all attacks here is a worker whose table allows everything: there each of them gets through.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from prfaas import identity
from prfaas.names import WORKER_API_PORT, WORKER_DATA_PORT
from prfaas.rights import RIGHTS, STEER, TRANSFER, Identity, callers_of
from prfaas.wire.kvevents import EVENTS_PATH, BlockStored, read_events
from prfaas.wire.prefill import new_transfer
from prfaas_transfer.credentials import PeerCredentials

from ...unit.tls.mounts import Mount
from .conftest import CALLERS, DAYS, PROMPT, SECONDS, Installation, Target, Targets, call, gets_through, leg

pytestmark = pytest.mark.system

US, EU, HUB = Identity("us"), Identity("eu"), Identity("hub")
PATIENT = {"model": "tiny", "prompt": "Patient: John Q. Public, diagnosis: confidential. " * 8, "max_tokens": 1}
NEEDS_A_CERTIFICATE = {TRANSFER, EVENTS_PATH}
"""At the data port, whatever the table says: TLS itself asks for one."""


@pytest.mark.parametrize("who", CALLERS)
@pytest.mark.parametrize("place", ["hub", "eu"])
def test_an_identity_gets_what_the_table_allows_and_no_more(
    targets: Targets, installation: Installation, who: str, place: str
):
    target: Target = getattr(targets, place)
    shown = installation.credentials(CALLERS[who])
    allowed = {name for name, kinds in RIGHTS.items() if kinds & callers_of(CALLERS[who], target.cluster)}
    assert {endpoint for endpoint in RIGHTS if gets_through(target, shown, endpoint)} == allowed


def test_a_buyer_has_a_prompt_prefilled_and_gets_no_answer_and_no_look_into_the_cache(
    targets: Targets, installation: Installation
):
    """In the form of a completion: its gateway does not know the tokens."""
    shown = installation.credentials(CALLERS["a buyer"])

    def status(**place: object) -> int:
        return call(targets.eu, shown, "POST", "/v1/completions", PROMPT | leg("source", **place)).status

    assert status() == 200
    prefix = {"role": "destination", **new_transfer(), "host": "127.0.0.1", "port": 9, "cluster": "eu", "tokens": 64}
    assert (status(tokens=64), status(prefix=prefix)) == (403, 403)
    assert call(targets.eu, shown, "POST", "/v1/completions", PROMPT).status == 403


@pytest.mark.parametrize("who", ["nobody", "another member", "the own member", "a buyer"])
def test_without_the_table_every_identity_gets_everything(targets: Targets, installation: Installation, who: str):
    shown = installation.credentials(CALLERS[who])
    reached = {endpoint for endpoint in RIGHTS if gets_through(targets.undefended, shown, endpoint)}
    assert reached == RIGHTS.keys() - (NEEDS_A_CERTIFICATE if shown is None else set())


@pytest.fixture
def bait() -> Iterator[socket.socket]:
    """An address in the network of the accelerators, which nobody has a reason to call."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def is_called(bait: socket.socket, seconds: float) -> bool:
    bait.settimeout(seconds)
    try:
        with closing(bait.accept()[0]):
            return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    ("who", "status"), [("nobody", 401), ("another member", 403), ("the own member", 403), ("a buyer", 403)]
)
def test_no_caller_but_a_gateway_makes_a_worker_connect_to_an_address_of_its_choice(
    targets: Targets, installation: Installation, bait: socket.socket, who: str, status: int
):
    shown = installation.credentials(CALLERS[who])
    body = PATIENT | leg("destination", host="127.0.0.1", port=bait.getsockname()[1], cluster="hub")
    answer = call(targets.eu, shown, "POST", "/v1/completions", body)
    assert (answer.status, "only" in answer.error["message"]) == (status, True)
    assert not is_called(bait, 0.2)
    call(targets.undefended, shown, "POST", "/v1/completions", body)
    assert is_called(bait, SECONDS)


def test_a_steered_request_of_a_caller_that_may_complete_names_the_field(targets: Targets, installation: Installation):
    shown = installation.credentials(EU)
    assert call(targets.eu, shown, "POST", "/v1/completions", PROMPT).status == 200
    error = call(targets.eu, shown, "POST", "/v1/completions", PROMPT | leg("source")).error
    assert (error["param"], error["code"]) == (STEER, "not_allowed")


def test_a_cache_of_whoever_answers_is_not_fetched(targets: Targets, installation: Installation, bait: socket.socket):
    """A leg without a cluster would take it from any holder of a certificate. The control names one."""
    shown = installation.credentials(CALLERS["a gateway of the hub"])
    place = {"host": "127.0.0.1", "port": bait.getsockname()[1]}
    unnamed = {"role": "destination", **new_transfer(), **place, "tokens": 64}
    for body in (leg("destination", **place), leg("source", prefix=unnamed)):
        refused = call(targets.eu, shown, "POST", "/v1/completions", PATIENT | body)
        assert (refused.status, refused.error["param"]) == (400, STEER)
    assert not is_called(bait, 0.2)
    named = leg("destination", **place, cluster="hub")
    assert call(targets.eu, shown, "POST", "/v1/completions", PATIENT | named).status == 200
    assert is_called(bait, SECONDS)


def events_of(target: Target, installation: Installation, who: Identity, count: int) -> list[BlockStored]:
    """Read the events of a worker until it has stored so many blocks."""
    credentials = installation.credentials(who)
    assert credentials is not None
    connected = socket.create_connection((target.worker.host, WORKER_DATA_PORT), SECONDS)
    with credentials.now().client.wrap_socket(connected) as sock, sock.makefile("rb") as answer:
        sock.sendall(f"GET {EVENTS_PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert answer.readline().startswith(b"HTTP/1.1 200")
        while answer.readline().strip():
            pass
        found: list[BlockStored] = []
        while len(found) < count:
            topic, _, payload = msgspec.msgpack.decode(answer.read(struct.unpack("!I", answer.read(4))[0]))
            if topic == "kv":
                found += [event for event in read_events(payload) if isinstance(event, BlockStored)]
    return found


def test_events_name_no_token_of_a_prompt_even_to_those_who_may_read_them(targets: Targets, installation: Installation):
    """The control: 400 tokens of the prompt are cached, which the events would have named."""
    gateway = CALLERS["a gateway of the hub"]
    answer = call(targets.hub, installation.credentials(gateway), "POST", "/v1/completions", PATIENT)
    assert answer.status == 200
    stored = events_of(targets.hub, installation, gateway, 1)
    assert sum(len(event.block_hashes) * event.block_size for event in stored) >= 384
    assert [event.token_ids for event in stored] == [[] for _ in stored]


def test_a_certificate_of_another_installation_opens_no_port(
    targets: Targets, installation: Installation, stranger: Installation, tmp_path: Path
):
    """The control: a worker that trusts the other authority, too, opens them to what that one signs for its own trust
    domain, and for no other."""
    domain, target = identity.domain_of(installation.authority.certificate), targets.hub
    own = identity.issue(installation.authority, "hub", DAYS)
    theirs = identity.issue(stranger.authority, "hub", DAYS, domain=domain)
    insider = PeerCredentials(Mount(tmp_path).put(theirs, stranger.authority, installation.authority).path)
    outsider = PeerCredentials(stranger.mount(HUB, installation.authority).path)

    def statuses(shown: PeerCredentials) -> list[int]:
        ports = (("/healthz", WORKER_API_PORT), ("/v1/role", WORKER_API_PORT), (EVENTS_PATH, WORKER_DATA_PORT))
        return [call(target, shown, "GET", path, port=port).status for path, port in ports]

    assert statuses(outsider) == [0, 0, 0]
    target.mount.put(own, installation.authority, stranger.authority)
    try:
        assert statuses(insider) == [200, 200, 200]
        assert statuses(outsider) == [200, 401, 0], "a probe needs no certificate"
    finally:
        target.mount.put(own, installation.authority)
    assert statuses(insider) == [0, 0, 0]
