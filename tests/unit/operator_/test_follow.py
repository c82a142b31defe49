"""Proves that an API server's refusal ends kopf and not the operator, which begins anew once every kind is served."""

import asyncio
import contextlib
import logging
from typing import Any

import kopf
import pytest
from kopf._cogs.clients import api

from prfaas.errors import PeerError
from prfaas_operator import logs
from prfaas_operator.controller import handlers

REFUSAL = type("APINotFoundError", (Exception,), {"__module__": "kopf._cogs.clients.errors"})


@pytest.mark.parametrize(("error", "again"), [(None, False), (REFUSAL("404 page not found"), True)])
async def test_a_refusal_is_no_end(error: Exception | None, again: bool):
    async def operate(_: asyncio.Event) -> None:
        if error:
            raise error

    assert await handlers.follow(operate, asyncio.Event()) == again


async def test_a_bug_is_an_end():
    async def operate(_: asyncio.Event) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await handlers.follow(operate, asyncio.Event())


@pytest.mark.system
async def test_waits_until_every_kind_is_served_or_it_has_to_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handlers, "SERVED_POLL_SECONDS", 0.01)
    calls, term = 0, asyncio.Event()

    async def is_served() -> None:
        nonlocal calls
        calls += 1
        if calls < 3 or calls > 3:
            raise PeerError("not yet")

    await handlers.until_served(is_served, term)
    assert calls == 3
    waiting = asyncio.create_task(handlers.until_served(is_served, term))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    term.set()
    await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize("deaf", [False, True], ids=["obeys", "continues after a cancellation"])
async def test_kopf_ends_though_one_of_its_watches_takes_a_cancellation_for_a_pause(
    monkeypatch: pytest.MonkeyPatch, deaf: bool
):
    monkeypatch.setattr(handlers, "END_SECONDS", 0.1)
    monkeypatch.setattr(handlers, "CANCEL_AGAIN_SECONDS", 0.05)

    async def watch() -> None:
        if deaf:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def refused() -> None:
        watches.append(asyncio.create_task(watch()))
        await asyncio.sleep(0)
        raise REFUSAL("404 page not found")

    watches: list[asyncio.Task[None]] = []
    others = asyncio.all_tasks()
    with pytest.raises(REFUSAL):
        async with asyncio.timeout(60):
            await handlers.run_kopf([asyncio.create_task(refused())], others)
    assert watches[0].done()


async def test_a_watch_that_ends_before_it_began_is_no_traceback(monkeypatch: pytest.MonkeyPatch):
    """kopf's own code brings the error: when it no longer does, the operator need not know it."""

    async def unanswered(**_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(api, "request", unanswered)
    loop, reported = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: reported.put_nowait(context))
    stopper = loop.create_future()
    settings, logger = kopf.OperatorSettings(), logging.getLogger("kopf")
    watch = api.stream("/", settings=settings, stopper=stopper, logger=logger)
    watching = asyncio.create_task(anext(watch))
    await asyncio.sleep(0)
    stopper.set_result(None)
    context = await asyncio.wait_for(reported.get(), 10)
    watching.cancel()
    await asyncio.wait((watching,))
    loop.set_exception_handler(None)
    error = context["exception"]
    record = logging.LogRecord(
        "asyncio", logging.ERROR, "", 0, context["message"], (), (type(error), error, error.__traceback__)
    )
    assert logs.drop_traceback(record)
    assert record.exc_info is None


def test_what_an_api_server_refused_is_no_traceback():
    for error, stays in ((REFUSAL("deleted"), False), (ValueError("a bug"), True)):
        record = logging.LogRecord("kopf", logging.ERROR, "", 0, "failed", (), (type(error), error, None))
        assert logs.drop_traceback(record)
        assert bool(record.exc_info) == stays
