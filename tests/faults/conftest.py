"""A data port for tests of what links and peers do to transfers."""

from collections.abc import Iterator

import pytest

from prfaas_transfer import pull, receive

from ..unit.transfer.patience import be_patient
from ..unit.worker.transfer_bench import Port


@pytest.fixture(scope="module")
def small_port() -> Port:
    return Port()


@pytest.fixture
def port(small_port: Port) -> Iterator[Port]:
    small_port.renew()
    yield small_port
    small_port.settle()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count connections that broke only for what a test did to them: a busy machine breaks none."""
    be_patient(monkeypatch.setattr)


@pytest.fixture
def wary(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a connection that is silent for a second, as prfaas does; the transfer survives any number of seconds."""
    for module in (pull, receive):
        monkeypatch.setattr(module, "NO_PROGRESS_SECONDS", 1.0)
