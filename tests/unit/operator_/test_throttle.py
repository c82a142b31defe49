"""Proves that all calls respect an API server that asks for a pause, and that none is called too fast."""

import asyncio
import time
from collections.abc import Callable

import pytest
from aiohttp import web
from multidict import CIMultiDict
from tests.clocks import Clock
from tests.unit.operator_.conftest import reached

from prfaas_operator.clusters.client import TRIES
from prfaas_operator.clusters.kinds import SECRET
from prfaas_operator.clusters.throttle import (
    BURST_CALLS,
    CALLS_AT_ONCE,
    CALLS_PER_SECOND,
    LONGEST_REST_SECONDS,
    PATIENCE_SECONDS,
    Throttle,
    requested_pause_seconds,
)
from prfaas_operator.errors import ClusterUnreachableError

Answer = tuple[int, dict[str, str]]
BUSY: Answer = (429, {"Retry-After": "1"})


class Server:
    """An API server that answers every call by script, and well after it; it keeps when it was called."""

    def __init__(self, *script: Answer):
        self._script = list(script)
        self.called_at: list[float] = []
        self.refused_at: list[float] = []

    async def handle(self, _: web.Request) -> web.Response:
        self.called_at.append(time.monotonic())
        status, headers = self._script.pop(0) if self._script else (200, {})
        if status != 200:
            self.refused_at.append(self.called_at[-1])
        return web.json_response({"message": "not now"} if status != 200 else {}, status=status, headers=headers)


async def test_a_call_at_a_busy_time_is_made_again_after_the_requested_pause():
    server = Server(BUSY)
    async with reached(server.handle) as cluster:
        await cluster.get(SECRET, "s")
    first, second = server.called_at
    assert second - first >= 0.99


async def test_a_pause_that_one_call_gets_holds_for_all():
    server = Server(BUSY)
    async with reached(server.handle) as cluster:
        await cluster.get(SECRET, "s")
        refused = server.refused_at[0]
        await asyncio.gather(*(cluster.get(SECRET, str(number)) for number in range(5)))
    assert [at for at in server.called_at if 0 < at - refused < 0.99] == []
    assert len(server.called_at) == 7


async def test_a_server_that_stays_busy_is_reported_as_busy():
    server = Server(*[BUSY] * TRIES)
    async with reached(server.handle) as cluster:
        with pytest.raises(ClusterUnreachableError, match="too busy"):
            await cluster.get(SECRET, "s")
    assert len(server.called_at) == TRIES


async def test_a_server_that_asks_for_a_long_rest_is_not_called_and_its_objects_say_so():
    server = Server((503, {"Retry-After": "3600"}))
    async with reached(server.handle) as cluster:
        for _ in range(2):
            with pytest.raises(ClusterUnreachableError, match=r"asks for a pause of [56]\d s"):
                await cluster.get(SECRET, "s")
    assert len(server.called_at) == 1


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"Retry-After": "7"}, 7),
        (429, {"retry-after": "7"}, 7),
        (429, {}, 1),
        (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1),
        (503, {"Retry-After": "2"}, 2),
        (503, {}, None),
        (500, {"Retry-After": "2"}, None),
        (409, {"Retry-After": "2"}, None),
    ],
)
def test_reads_the_pause_that_an_answer_requests(status, headers, seconds):
    assert requested_pause_seconds(status, CIMultiDict(headers)) == seconds


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], None]:
    """Have sleep move a clock, so that no time passes."""

    def use(clock: Clock) -> None:
        async def sleep(seconds: float) -> None:
            clock.seconds += seconds

        monkeypatch.setattr(asyncio, "sleep", sleep)

    return use


async def test_many_calls_begin_at_once_and_continue_at_the_pace(slept):
    clock = Clock()
    slept(clock)
    throttle = Throttle("cluster eu", clock)
    for _ in range(BURST_CALLS):
        await throttle.turn()
    assert clock.seconds == 0
    for _ in range(int(CALLS_PER_SECOND)):
        await throttle.turn()
    assert clock.seconds == pytest.approx(1, abs=0.02)


async def test_waiting_calls_have_not_begun_and_a_probe_passes_them():
    throttle, gate, begun = Throttle("cluster eu"), asyncio.Event(), 0

    async def call() -> None:
        nonlocal begun
        async with throttle.under_way():
            begun += 1
            await gate.wait()

    calls = [asyncio.create_task(call()) for _ in range(CALLS_AT_ONCE + 5)]
    while begun < CALLS_AT_ONCE:  # noqa: ASYNC110  # a turn of the loop each
        await asyncio.sleep(0)
    async with throttle.under_way(at_once=True):
        assert begun == CALLS_AT_ONCE
    gate.set()
    await asyncio.gather(*calls)
    assert begun == len(calls)


async def test_a_turn_that_is_too_far_away_is_refused():
    clock = Clock()
    throttle = Throttle("cluster eu", clock)
    throttle.rest(10 * LONGEST_REST_SECONDS)
    with pytest.raises(ClusterUnreachableError, match=f"cluster eu asks for a pause of {LONGEST_REST_SECONDS:.0f} s"):
        await throttle.turn()
    clock.seconds = LONGEST_REST_SECONDS - PATIENCE_SECONDS - 1
    with pytest.raises(ClusterUnreachableError):
        await throttle.turn()
    clock.seconds = LONGEST_REST_SECONDS
    await throttle.turn()
