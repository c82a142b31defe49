"""Pairs of our workers that hand requests over, and workers to be killed."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prfaas.cli.contract.calls import CheckedEngine

from ..unit.worker.conftest import Worker, _all_ready, launched
from .bench import Bench, Instance

FP32_NATS = 1e-4


def ready(*workers: Worker, tls_dir: Path | None = None) -> list[Instance]:
    """Wait until workers are ready. `tls_dir` has what to show to them."""
    asyncio.run(_all_ready(*workers))
    engines = [CheckedEngine(one.url, tls_dir=tls_dir) for one in workers]
    return [
        Instance(engine, (one.host, one.data_port), one.log, one.process.kill)
        for engine, one in zip(engines, workers, strict=True)
    ]


@contextmanager
def benches(folder: Path, *flags: str) -> Iterator[Bench]:
    """Run two workers with these flags. With steps of other lengths two answers may differ in the last bits."""
    flags, numbers = ("--step-tokens", "2048", *flags), itertools.count()
    with launched(folder) as launch:
        source, destination = ready(launch("source", "--role", "prefill", *flags), launch("destination", *flags))
        yield Bench(source, destination, lambda: ready(launch(f"victim-{next(numbers)}", *flags))[0], FP32_NATS)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with benches(tmp_path_factory.mktemp("contract")) as found:
        yield found
