"""Engines with patient movers, which end with their test."""

from collections.abc import Callable, Iterator

import pytest

from .engines import Engine
from .patience import start_patient_movers


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    start_patient_movers(monkeypatch)


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(**options: object) -> Engine:
        engines.append(Engine(**options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.mover.close()


@pytest.fixture
def pair(start_engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    return start_engine(), start_engine()
