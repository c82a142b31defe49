"""Clients and workers that the tests of this folder share."""

import asyncio
from collections.abc import Iterator

import pytest

from ..unit.worker.conftest import Worker
from .programs import Clients, client_programs


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    with client_programs(tmp_path_factory.mktemp("clients")) as started:
        yield started


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """A decode worker to be lost, one that stays, and a prefill instance. Their steps are equally long: measured ones
    may differ, and then two answers differ in the last bits."""
    folder = tmp_path_factory.mktemp("workers")
    roles = {"d0": "decode", "d1": "decode", "x0": "prefill"}
    started: dict[str, Worker] = {}

    async def all_ready() -> None:
        await asyncio.gather(*(worker.ready() for worker in started.values()))

    try:
        for name, role in roles.items():
            started[name] = Worker(folder / f"{name}.log", "--role", role, "--step-tokens", "2048")
        asyncio.run(all_ready())
        yield started
    finally:
        for worker in started.values():
            worker.stop()
