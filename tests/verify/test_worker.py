"""`prfaas verify` proves a pair of our workers, and finds every fault that is planted into one of them."""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from prfaas.cli.contract import calls
from prfaas.cli.verify.record import VerifiedStep
from prfaas.measure.scores import LEAST_NATS

from .attentive import make_attentive_model
from .command import run_own_steps, verified
from .faulty_worker import FAULTS
from .pairs import StartedWorker, WorkerPair, starting, worker_pair

pytestmark = pytest.mark.system

MOST_TOKENS: Final = 600
AT_DESTINATION: Final = ("first-token-doubled", "hit-without-state", "dies")
RIGHT_ANSWERS: Final = {"lying-version": 1, "dies": 4}


class FoundError(Exception):
    """Ends a verification at its first step that does not hold."""


class Bench:
    """A clean pair, and a worker for each fault, which starts while the one before is verified."""

    def __init__(self, clean: WorkerPair, start: Any):
        self.clean, self._start = clean, start
        self._faulty: dict[str, StartedWorker] = {}

    def pair(self, fault: str) -> WorkerPair:
        place = FAULTS.index(fault)
        for former in self._faulty.keys() & set(FAULTS[:place]):
            self._faulty.pop(former).stop()
        for one in FAULTS[place : place + 2]:
            if one not in self._faulty:
                self._faulty[one] = self._start(one, one, after=RIGHT_ANSWERS.get(one, 1))
        role = "destination" if fault in AT_DESTINATION else "source"
        return self.clean._replace(**{role: self._faulty[fault].wait_ready()})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("verify")
    model = make_attentive_model(folder / "model")
    with worker_pair(folder, model) as clean, starting(folder, model) as start:
        yield Bench(clean, start)


def test_a_clean_pair_is_proven(bench: Bench):
    source, destination = bench.clean
    found = verified(source.url, destination.url, "--most-tokens", "1024", data_port=source.data_port)
    assert (found.exit_code, found.outcomes("fails", "proves little")) == (0, {})
    assert list(found.outcomes("left out")) == ["a cache of another prompt shows"]
    assert found.record["figures"]["cache_mbps"] > 0
    assert found.record["figures"]["limit_nats"] == LEAST_NATS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(bench: Bench, fault: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "NOT_IDLE_SECONDS", 3.0)

    def end(result: VerifiedStep) -> None:
        if result.outcome == "fails":
            raise FoundError(f"{fault}: {result.claim}: {result.seen}")

    with pytest.raises(FoundError) as found:
        run_own_steps(bench.pair(fault).engines, MOST_TOKENS, end, but=("measures",))
    print(found.value)
