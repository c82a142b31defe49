"""Every identity tries every endpoint of real workers inside TLS: what the table refuses is refused, and nothing else.

The control is a worker whose table allows everything: there each of them gets through.
"""

import socket
import struct

import msgspec
import pytest

from prfaas.names import WORKER_DATA_PORT
from prfaas.rights import RIGHTS, TRANSFER, Identity, callers_of
from prfaas.wire.kvevents import EVENTS_PATH, BlockStored, read_events
from prfaas.wire.prefill import new_transfer

from .conftest import CALLERS, PATIENT, PROMPT, SECONDS, Installation, Target, Targets, call, gets_through, leg

pytestmark = pytest.mark.system

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
def test_control_without_the_table_every_identity_gets_everything(
    targets: Targets, installation: Installation, who: str
):
    shown = installation.credentials(CALLERS[who])
    reached = {endpoint for endpoint in RIGHTS if gets_through(targets.undefended, shown, endpoint)}
    assert reached == RIGHTS.keys() - (NEEDS_A_CERTIFICATE if shown is None else set())


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
