"""A caller names an address in a request, so that a real worker connects there, in its network and by its identity.

The control is a worker whose table allows everybody to steer: it connects.
"""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from prfaas.rights import STEER, Identity
from prfaas.wire.prefill import new_transfer

from .conftest import CALLERS, PATIENT, PROMPT, SECONDS, Answer, Installation, Target, Targets, call, leg

pytestmark = pytest.mark.system


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


def steer(target: Target, installation: Installation, who: str, bait: socket.socket) -> Answer:
    """Have a worker take a cache from the address."""
    body = PATIENT | leg("destination", host="127.0.0.1", port=bait.getsockname()[1], cluster="hub")
    return call(target, installation.credentials(CALLERS[who]), "POST", "/v1/completions", body)


@pytest.mark.parametrize(
    ("who", "status"), [("nobody", 401), ("another member", 403), ("the own member", 403), ("a buyer", 403)]
)
def test_no_caller_but_a_gateway_makes_a_worker_connect_to_an_address_of_its_choice(
    targets: Targets, installation: Installation, bait: socket.socket, who: str, status: int
):
    answer = steer(targets.eu, installation, who, bait)
    assert (answer.status, "only" in answer.error["message"]) == (status, True)
    assert not is_called(bait, 0.2)


def test_control_without_the_table_even_nobody_makes_it_connect(
    targets: Targets, installation: Installation, bait: socket.socket
):
    """One caller, because the worker waits for a handshake; that each of them may steer is tested with the table."""
    steer(targets.undefended, installation, "nobody", bait)
    assert is_called(bait, SECONDS)


def test_a_steered_request_of_a_caller_that_may_complete_names_the_field(targets: Targets, installation: Installation):
    shown = installation.credentials(Identity("eu"))
    assert call(targets.eu, shown, "POST", "/v1/completions", PROMPT).status == 200
    error = call(targets.eu, shown, "POST", "/v1/completions", PROMPT | leg("source")).error
    assert (error["param"], error["code"]) == (STEER, "not_allowed")


def test_a_cache_of_whoever_answers_is_not_fetched(targets: Targets, installation: Installation, bait: socket.socket):
    """A leg without a cluster would take it from any holder of a certificate."""
    shown = installation.credentials(CALLERS["a gateway of the hub"])
    place = {"host": "127.0.0.1", "port": bait.getsockname()[1]}
    unnamed = {"role": "destination", **new_transfer(), **place, "tokens": 64}
    for body in (leg("destination", **place), leg("source", prefix=unnamed)):
        refused = call(targets.eu, shown, "POST", "/v1/completions", PATIENT | body)
        assert (refused.status, refused.error["param"]) == (400, STEER)
    assert not is_called(bait, 0.2)


def test_control_a_gateway_that_names_the_cluster_makes_it_connect(
    targets: Targets, installation: Installation, bait: socket.socket
):
    assert steer(targets.eu, installation, "a gateway of the hub", bait).status == 200
    assert is_called(bait, SECONDS)
