"""A data port for tests of what links and peers do to transfers."""

from collections.abc import Iterator

import pytest

from ..unit.worker.transfer_bench import Port, be_patient


@pytest.fixture(scope="module")
def small_port() -> Port:
    return Port()


@pytest.fixture
def port(small_port: Port) -> Iterator[Port]:
    small_port.renew()
    yield small_port
    small_port.settle()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count connections that broke for what a test did to them alone."""
    be_patient(monkeypatch)
