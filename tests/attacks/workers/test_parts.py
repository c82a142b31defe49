"""A buyer takes all that it can get of a worker: it has half, and the hub, which may be alone, has all."""

from collections.abc import Iterator
from typing import Final

import pytest

from prfaas.errors import CapacityError
from prfaas.schedule import slots_for
from prfaas_worker.engine import remote
from prfaas_worker.options import WAITING_PER_RUNNING

from ...unit.transfer.patience import start_patient_movers
from ...unit.worker.test_mover_of_a_worker import Engine

pytestmark = pytest.mark.system

PREFILLS: Final = slots_for(1) + WAITING_PER_RUNNING
"""That an engine with one running request offers at a time, whether they wait, are computed, or are not fetched."""
HUB: Final = ""
BUYER: Final = "buyer/shop"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    start_patient_movers(monkeypatch)
    made = Engine(is_staged=False)
    yield made
    made.close()


def offered(engine: Engine, caller: str, first: int) -> int:
    """Ask for prefills that nobody fetches, until one is refused; return how many are not."""
    for count in range(PREFILLS + 1):
        try:
            engine.announce(first + count, caller=caller)
        except CapacityError:
            return count
    raise AssertionError("no prefill is refused")


def test_a_buyer_has_half_of_the_prefills_and_the_hub_all_that_are_left(engine: Engine):
    assert offered(engine, BUYER, 1) == PREFILLS // 2
    assert offered(engine, HUB, 101) == PREFILLS - PREFILLS // 2


def test_control_a_buyer_that_may_have_all_keeps_the_hub_out(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "COUNTED_PART", 1)
    assert offered(engine, BUYER, 1) == PREFILLS
    assert offered(engine, HUB, 101) == 0
