"""Real processes that die or freeze in the middle of a transfer: the other side notices in seconds, frees what it held
for this one, and continues to serve.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from prfaas.errors import UnreachableError
from prfaas.wire.prefill import PrefillGrant
from prfaas_transfer import leases as leases_module
from prfaas_transfer.limits import EgressBucket

from ..unit.transfer.patience import be_patient
from ..unit.worker import transfer_bench as bench
from ..unit.worker.transfer_bench import LARGE, Port, Taking, assert_same_bits, compute, transfer_threads
from ..waiting import eventually, take_next
from .destination_process import manifest_of

ROOT = Path(__file__).parents[2]
SLOW_MBPS = 100
"""A transfer of 15 MiB takes more than a second."""


class Process:
    """A peer that speaks in lines."""

    def __init__(self, module: str, *arguments: str):
        command = [sys.executable, "-m", f"tests.faults.{module}", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, env=environment, **pipes)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def source() -> Iterator[Process]:
    process = Process("source_process", str(SLOW_MBPS))
    yield process
    process.end()


def take(source: Process, seed: int) -> Taking:
    source.say(str(seed))
    grant = msgspec.json.decode(source.hear(), type=PrefillGrant)
    there = SimpleNamespace(model=LARGE, layout=bench.layout_of(LARGE), address=("127.0.0.1", grant.data_port))
    taking = Taking(there, SimpleNamespace(manifest=manifest_of(grant)), grant)  # type: ignore[arg-type]
    eventually(lambda: len(taking.ledger.received) > 0, "the destination has a frame")
    return taking


def test_a_source_that_freezes_is_given_up_and_serves_again_when_it_thaws_and_one_that_is_killed_is_noticed_at_once(
    source: Process, monkeypatch: pytest.MonkeyPatch
):
    taking = take(source, 1)
    source.send(signal.SIGSTOP)
    monkeypatch.undo()  # our patience
    assert isinstance(taking.failure(), UnreachableError), "or it would wait for as long as that one is frozen"
    assert not taking.ledger.whole
    source.send(signal.SIGCONT)
    assert source.hear() == "ended 1"
    be_patient(monkeypatch.setattr)
    wanted = LARGE.reserved()
    bench.fill(wanted, 2)
    taking = take(source, 2)
    taking.whole()
    assert_same_bits(LARGE, taking.place, wanted)
    assert source.hear() == "ended 2"
    assert 1 <= taking.close() <= 4

    taking = take(source, 3)
    source.send(signal.SIGKILL)
    assert isinstance(taking.failure(), UnreachableError)
    assert not taking.ledger.whole
    eventually(lambda: "fetch-data" not in transfer_threads(), "no destination receives")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_destination_that_is_killed_or_freezes_costs_only_its_transfer(
    ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leases_module, "RESUME_SECONDS", 0.5)
    monkeypatch.setattr(leases_module, "LEASE_SECONDS", 10)
    monkeypatch.setattr(bench, "TRAFFIC", bench.TRAFFIC._replace(egress=EgressBucket(SLOW_MBPS)))
    port = Port(LARGE)
    victim = Process("destination_process", str(port.address[1]))
    try:
        assert victim.hear() == "ready"
        offer, grant = port.grant(1)
        cache = LARGE.filled()
        compute(LARGE, offer, cache, step=64)
        victim.say(msgspec.json.encode(grant).decode())
        assert victim.hear() == "begins"
        victim.send(ending)
        offer, grant = port.grant(2)
        compute(LARGE, offer, cache, step=64)
        taking = port.take(offer, grant)
        taking.whole()
        assert_same_bits(LARGE, taking.place, cache)
        assert {take_next(port.ended, "an offer ends") for _ in range(2)} == {1, 2}
        port.assert_ended_once(delivered=1, failed=1)
        port.settle()
    finally:
        victim.end()
    eventually(lambda: not transfer_threads(), "the threads of all transfers ended")
