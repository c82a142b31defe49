"""The front's end of the unix socket: sends messages to the engine and routes its answers to their calls."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from prfaas.errors import InternalError
from prfaas.wire.engine import (
    LENGTH,
    Announced,
    AskStats,
    CacheReset,
    Cancel,
    EgressSet,
    Failed,
    Measured,
    Ready,
    RoleSet,
    Started,
    StartFailed,
    Stats,
    ToEngine,
    ToFront,
    Tokens,
    TransferEnded,
    decode_for_front,
    encode_batch,
)

EngineAnswer = Announced | Started | Tokens | Failed | Stats | CacheReset | RoleSet | EgressSet
Reply = TypeVar("Reply")


class EngineError(Exception):
    """The engine ended a call: carries the HTTP status, code and message of its `Failed`."""

    def __init__(self, failed: Failed):
        super().__init__(failed.message)
        self.status = failed.status
        self.code = failed.code
        self.param: str | None = None


class Listener(Protocol):
    """Sees every message between the front and its engine. It must be quick: it runs for every token."""

    def on_sent(self, message: ToEngine) -> None: ...

    def on_received(self, message: ToFront) -> None: ...


class EngineCall:
    """The engine's answers to one HTTP request. At the end of its context the engine cancels what is left."""

    def __init__(self, client: "EngineClient", handles: range):
        self.handles = handles
        self._client = client
        self._answers: deque[EngineAnswer] = deque()
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Future[None] | None = None
        self._open = set(handles)

    @property
    def handle(self) -> int:
        return self.handles[0]

    def __enter__(self) -> "EngineCall":
        return self

    def __exit__(self, *_exception: object) -> None:
        for handle in self.handles:
            self._client.forget(handle)
        for handle in self._open:
            self._client.send(Cancel(handle))

    def finish(self, handle: int | None = None) -> None:
        """Note that a handle (default: all) has ended in the engine, or has another owner."""
        if handle is None:
            self._open.clear()
        else:
            self._open.discard(handle)

    def put(self, answer: EngineAnswer) -> None:
        self._answers.append(answer)
        if self._arrived is not None:
            if not self._arrived.done():
                self._arrived.set_result(None)
            self._arrived = None

    async def next(self) -> EngineAnswer:
        """Wait for the next answer. Raises EngineError if the engine cannot serve the call."""
        while not self._answers:
            self._arrived = self._loop.create_future()
            await self._arrived
        answer = self._answers.popleft()
        if isinstance(answer, Failed):
            self.finish(answer.handle)
            raise EngineError(answer)
        return answer

    async def expect(self, kind: type[Reply]) -> Reply:
        """Wait for the next answer, which must be of this kind. Raises EngineError as `next`."""
        answer = await self.next()
        if not isinstance(answer, kind):
            raise InternalError(f"the engine answered {type(answer).__name__} where {kind.__name__} was due")
        return answer

    async def next_all(self) -> list[EngineAnswer]:
        """Wait for answers, and take all: a slow reader sends them together. Raises EngineError as `next`, but only
        after earlier answers were taken."""
        taken = [await self.next()]
        while self._answers and type(self._answers[0]) is not Failed:
            taken.append(self._answers.popleft())
        return taken


class EngineClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, EngineCall] = {}
        self._last_handle = 0
        self.listeners: list[Listener] = []
        self.ready: asyncio.Future[Ready | StartFailed] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, sock: socket.socket) -> "EngineClient":
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def call(self, width: int = 1) -> EngineCall:
        handles = range(self._last_handle + 1, self._last_handle + 1 + width)
        self._last_handle += width
        call = EngineCall(self, handles)
        self._calls.update(dict.fromkeys(handles, call))
        return call

    def forget(self, handle: int) -> None:
        self._calls.pop(handle, None)

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    def send(self, message: ToEngine) -> None:
        """Queue a message. The engine's reading thread always reads the local socket, so nothing piles up."""
        for listener in self.listeners:
            listener.on_sent(message)
        self._writer.write(encode_batch([message]))

    async def stats(self) -> Stats:
        return await self.ask(AskStats, Stats)

    async def ask(self, question: Callable[[int], ToEngine], kind: type[Reply]) -> Reply:
        """Send the question that is made for a call's handle, and return its one answer of this kind."""
        with self.call() as call:
            self.send(question(call.handle))
            answer = await call.expect(kind)
            call.finish()
        return answer

    async def run(self) -> None:
        """Route answers until the engine closes its end; then fail every open call."""
        try:
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                for message in decode_for_front(await self._reader.readexactly(length)):
                    self._take(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.fail_calls(500, "engine_failed", "the engine process ended; this instance restarts")

    def fail_calls(self, status: int, code: str, message: str) -> None:
        """End every open call with an HTTP status, code and message, after the queued answers."""
        for handle, call in self._calls.items():
            call.put(Failed(handle, status, code, message))

    def close(self) -> None:
        self._writer.close()

    def _take(self, message: ToFront) -> None:
        for listener in self.listeners:
            listener.on_received(message)
        if isinstance(message, (Measured, TransferEnded)):  # of no call: listeners have them
            return
        if isinstance(message, (Ready, StartFailed)):
            self.ready.set_result(message)
            return
        call = self._calls.get(message.handle)
        if call is not None:  # its client may have gone
            call.put(message)
