"""Proves that a replica which cannot read its token for a moment continues, and ends no work before its Lease does."""

import asyncio

import pytest
from tests.waiting import PATIENCE_SECONDS, eventually_async

from prfaas.errors import ConfigError
from prfaas_operator import election

pytestmark = pytest.mark.system


class Session:
    """An API server with one Lease; `fails` is raised instead of every answer."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.failures = 0

    async def call(self, _method: str, _path: str, **_sent: object) -> dict:
        if self.fails:
            self.failures += 1
            raise self.fails
        return {}

    async def find(self, path: str, **sent: object) -> dict:
        await self.call("GET", path, **sent)
        return {"spec": {}}


@pytest.fixture
def session() -> Session:
    return Session()


async def test_a_token_that_cannot_be_read_for_a_moment_costs_no_lease(session, monkeypatch):
    monkeypatch.setattr(election, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(election, "STANDBY_SECONDS", 0.01)
    shutdown, ready = election.Shutdown(), asyncio.Event()
    led = asyncio.Event()

    async def work(term: asyncio.Event) -> None:
        session.fails = ConfigError("service account token /token cannot be read")
        await eventually_async(lambda: session.failures > 2, "the candidate tries to renew its lease")
        session.fails = None
        renewed_at = candidate._holder.renewed_at
        await eventually_async(lambda: candidate._holder.renewed_at > renewed_at, "the lease is renewed with the token")
        assert candidate.may_write()
        assert not term.is_set()
        led.set()

    candidate = election.Election(session, "ns", ready)  # pyright: ignore[reportArgumentType]
    await asyncio.wait_for(candidate.run(work, shutdown), PATIENCE_SECONDS)
    assert led.is_set()


async def test_a_candidate_without_a_token_stands_by(session, monkeypatch):
    monkeypatch.setattr(election, "STANDBY_SECONDS", 0.01)
    session.fails = ConfigError("service account token /token cannot be read")
    shutdown, ready = election.Shutdown(), asyncio.Event()

    async def work(_term: asyncio.Event) -> None:
        return

    running = asyncio.create_task(election.Election(session, "ns", ready).run(work, shutdown))  # pyright: ignore[reportArgumentType]
    await eventually_async(ready.is_set, "the candidate is ready")
    session.fails = None
    await asyncio.wait_for(running, PATIENCE_SECONDS)


async def test_a_missing_token_at_the_end_is_no_error(session):
    shutdown, ready = election.Shutdown(), asyncio.Event()

    async def work(_term: asyncio.Event) -> None:
        session.fails = ConfigError("service account token /token cannot be read")

    await asyncio.wait_for(election.Election(session, "ns", ready).run(work, shutdown), PATIENCE_SECONDS)  # pyright: ignore[reportArgumentType]
