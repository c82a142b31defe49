"""The front's calls of its engine: answers reach the request they belong to, in order, and whatever ends a request
leaves nothing of it in the engine; long bodies are read beside the event loop.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prfaas.wire.engine import LENGTH, Cancel, Failed, ToEngine, Tokens, decode_for_engine, encode_batch
from prfaas_worker.front.engine_client import EngineClient, EngineError
from prfaas_worker.front.serving import INLINE_BYTES, FrontState, in_thread

from ...waiting import PATIENCE_SECONDS, eventually_async

pytestmark = pytest.mark.system


class Engine:
    """The other end of the socket, run by the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    def say(self, *messages: Any) -> None:
        self._writer.write(encode_batch(messages))

    async def hear(self, count: int) -> list[ToEngine]:
        heard: list[ToEngine] = []
        while len(heard) < count:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            heard += decode_for_engine(await self._reader.readexactly(length))
        return heard

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[EngineClient, Engine]]:
    ours, theirs = socket.socketpair()
    client = await EngineClient.connect(ours)
    engine = Engine(*await asyncio.open_unix_connection(sock=theirs))
    running = asyncio.create_task(client.run())
    yield client, engine
    running.cancel()
    client.close()
    engine.close()


def token(handle: int, number: int) -> Tokens:
    return Tokens(handle, 0, [number], [], None)


async def test_answers_that_wait_are_taken_together_in_order(ends):
    client, engine = ends
    with client.call() as call, client.call() as other:
        engine.say(token(call.handle, 1), token(other.handle, 9), token(call.handle, 2))
        assert await call.next_all() == [token(call.handle, 1), token(call.handle, 2)]
        assert await other.next() == token(other.handle, 9)


async def test_what_came_before_a_failure_is_not_lost(ends):
    client, engine = ends
    with client.call() as call:
        engine.say(token(call.handle, 1), Failed(call.handle, 500, "broken", "it broke"), token(call.handle, 2))
        assert await call.next_all() == [token(call.handle, 1)]
        with pytest.raises(EngineError, match="it broke"):
            await call.next_all()


async def test_a_request_that_ends_early_cancels_the_handles_that_still_run(ends):
    client, engine = ends
    with client.call(3) as call:
        first, second, third = call.handles
        call.finish(second)
    assert await engine.hear(2) == [Cancel(first), Cancel(third)]
    assert client.open_calls == 0


async def test_a_request_that_is_cancelled_while_it_waits_cancels_too(ends):
    client, engine = ends

    async def request() -> None:
        with client.call() as call:
            await call.next_all()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await engine.hear(1) == [Cancel(1)]


async def test_late_answers_go_nowhere(ends):
    client, engine = ends
    with client.call() as ended:
        ended.finish()
    with client.call() as call:
        engine.say(token(ended.handle, 1), token(call.handle, 2))
        assert await call.next() == token(call.handle, 2)


async def test_an_engine_that_ends_fails_every_call(ends):
    client, engine = ends
    with client.call(2) as call:
        engine.close()
        for _ in call.handles:
            with pytest.raises(EngineError, match="the engine process ended"):
                await call.next()


@pytest.mark.parametrize(("body", "beside"), [(b"x" * INLINE_BYTES, False), (b"x" * (INLINE_BYTES + 1), True)])
async def test_what_takes_long_to_read_is_read_beside_the_event_loop(body: bytes, beside: bool):
    with ThreadPoolExecutor(1) as readers:
        serving = cast(FrontState, SimpleNamespace(served=None, tokenizer=None, reader=lambda _: readers))
        thread = await in_thread(serving, lambda *_: threading.get_ident(), body)
    assert (thread != threading.get_ident()) == beside


class Reading:
    """A body that a caller has sent, and is read until the test lets it end; `handed_on` is set with what follows."""

    def __init__(self, readers: ThreadPoolExecutor):
        self.begun, self.may_end, self.handed_on = threading.Event(), threading.Event(), False
        self._serving = cast(FrontState, SimpleNamespace(served=None, tokenizer=None, reader=lambda _: readers))
        self.handling = asyncio.create_task(self._handle())

    async def _handle(self) -> None:
        await in_thread(self._serving, self._read, b"x" * (INLINE_BYTES + 1))
        self.handed_on = True
        await asyncio.Event().wait()

    def _read(self, *_: object) -> None:
        self.begun.set()
        self.may_end.wait(PATIENCE_SECONDS)

    async def leave(self) -> None:
        """Have its caller leave."""
        await asyncio.sleep(0)
        self.handling.cancel()
        await asyncio.sleep(0)
        self.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await self.handling


async def test_a_caller_that_leaves_while_its_request_is_read_leaves_the_engine_which_has_it_then():
    """Its leg's source would hear nothing otherwise. The control has not had its turn, and none is given to it."""
    with ThreadPoolExecutor(1) as readers:
        first, waiting = Reading(readers), Reading(readers)
        await eventually_async(first.begun.is_set, "it is read")
        await waiting.leave()
        await first.leave()
    assert (first.handed_on, waiting.handed_on, waiting.begun.is_set()) == (True, False, False)
