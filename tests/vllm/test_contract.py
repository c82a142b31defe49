"""vLLM with our connector keeps the same contract as our worker (tests/contract), alone and in pairs, whatever breaks.

What each of its pages and states brings, to the last bit, is the claim of test_connector.py.
"""

import json

import pytest

from prfaas.cli.contract.calls import CheckedEngine
from prfaas.cli.contract.checks import ALONE, PAIR
from prfaas.ports import free_ports

from ..contract.bench import Bench, Instance
from ..contract.failures import FAILURES
from ..verify.command import run_own_steps
from .connected import CONNECTOR
from .servers import StartServer, VllmServer

BF16_NATS = 1.5


def begun(start_server: StartServer) -> tuple[VllmServer, int]:
    """Start a server with our connector; it need not be ready."""
    (port,) = free_ports(1)
    config = json.dumps(CONNECTOR | {"kv_port": port})
    return start_server("--kv-transfer-config", config, "--enable-prompt-tokens-details"), port


def instance(server: VllmServer, port: int) -> Instance:
    server.wait_ready()
    return Instance(CheckedEngine(server.url), ("127.0.0.1", port), server.log, server.stop)


@pytest.fixture(scope="module")
def bench(start_server: StartServer) -> Bench:
    servers = [begun(start_server) for _ in range(2)]
    source, destination = (instance(*each) for each in servers)
    return Bench(source, destination, lambda: instance(*begun(start_server)), BF16_NATS)


@pytest.mark.parametrize("claim", ALONE)
def test_a_server_keeps_what_is_asked_of_an_engine(bench: Bench, claim: str):
    assert ALONE[claim](bench.destination.engine)


@pytest.mark.parametrize("claim", PAIR)
def test_two_servers_keep_what_is_asked_of_a_pair(bench: Bench, claim: str):
    assert PAIR[claim](bench.pair())


def test_verify_finds_nothing_wrong_with_two_servers(bench: Bench):
    """All that `prfaas verify` does beyond the claims above. A random model's answers may prove little, by chance."""
    found = run_own_steps(bench.pair(), 2048)
    assert not [one for one in found if one.outcome == "fails"]
    assert "refuses a state of zeros" in {one.claim for one in found if one.outcome == "holds"}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: one.__name__)
def test_servers_survive(bench: Bench, failure):
    failure(bench)
