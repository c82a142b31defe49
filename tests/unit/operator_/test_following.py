"""Proves that kopf begins anew when a watch has failed and the API server serves all kinds again, and only then."""

import asyncio
import logging

import pytest

from prfaas.errors import PeerError
from prfaas_operator import following, logs


class Kopf:
    """What is seen of kopf: tasks that follow kinds, and a run that ends with the event, or by itself."""

    def __init__(self) -> None:
        self.watches: list[asyncio.Task[None]] = []
        self.fails, self.ends = asyncio.Event(), asyncio.Event()

    async def operate(self, stop: asyncio.Event) -> None:
        self.watches = [asyncio.create_task(self._watch(kind), name=f"watcher for {kind}") for kind in "ab"]
        waiting = [asyncio.create_task(event.wait()) for event in (stop, self.ends)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in (*waiting, *self.watches):
            task.cancel()
        await asyncio.gather(*waiting, *self.watches, return_exceptions=True)

    async def _watch(self, kind: str) -> None:
        await (self.fails if kind == "b" else asyncio.Event()).wait()
        raise RuntimeError("not served")


class Server:
    """Serves every kind, or not."""

    serves = False
    asked = 0

    async def check(self) -> None:
        self.asked += 1
        if not self.serves:
            raise PeerError("not yet")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)


async def test_a_watch_that_failed_is_begun_anew_once_every_kind_is_served(caplog: pytest.LogCaptureFixture):
    kopf, server = Kopf(), Server()
    run = asyncio.create_task(following.follow(kopf.operate, server.check, asyncio.Event()))
    await until(lambda: kopf.watches)
    await asyncio.sleep(0.05)
    assert not server.asked, "nobody is asked while all goes well"
    kopf.fails.set()
    await until(lambda: server.asked > 2)
    assert not run.done(), "the other kind is followed meanwhile"
    server.serves = True
    assert await run
    assert sum("not followed any more" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("how", ["term", "by itself"])
async def test_an_end_that_was_asked_for_is_no_failure(how: str):
    kopf, server, term = Kopf(), Server(), asyncio.Event()
    server.serves = True
    run = asyncio.create_task(following.follow(kopf.operate, server.check, term))
    await until(lambda: kopf.watches)
    await asyncio.sleep(0.05)
    (term if how == "term" else kopf.ends).set()
    assert not await run


def test_what_an_api_server_refused_is_no_traceback():
    refused = type("APINotFoundError", (Exception,), {"__module__": "kopf._cogs.clients.errors"})("gone")
    for error, stays in ((refused, False), (ValueError("a bug"), True)):
        record = logging.LogRecord("kopf", logging.ERROR, "", 0, "failed", (), (type(error), error, None))
        assert logs.drop_traceback(record)
        assert bool(record.exc_info) == stays
