"""The client that waits and the client of asynchronous code: thin shells around httpx with the same methods.

requests.py decides what is sent, when and how often; answers.py reads what comes back.
"""

import asyncio
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Generic, Self, TypeVar, Unpack

import httpx

from prfaas.client.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    ChunkReader,
    ChunkT,
    Completion,
    CompletionChunk,
    Models,
    Whole,
    read_answer,
    read_decision,
    read_whole,
)
from prfaas.client.errors import BrokenStreamError
from prfaas.client.requests import (
    ANYWHERE,
    CONNECT_SECONDS,
    LIST_MODELS,
    ClientOptions,
    GatewayCall,
    Messages,
    Parameters,
    Places,
    Prompt,
    RequestAttempt,
    call_chat,
    call_completions,
    reading,
    server_of,
)
from prfaas.errors import UnreachableError
from prfaas.wire.preferences import Offload

Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)


class _Closing(ABC):
    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _AsyncClosing(ABC):
    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _BaseStream(Generic[ChunkT]):
    def __init__(self, response: httpx.Response, kind: type[ChunkT]):
        self.decision = read_decision(response.headers)
        self._response = response
        self._chunks = ChunkReader(kind)


class Stream(_BaseStream[ChunkT], _Closing):
    """Iterates over the chunks of an answer as they come. `decision` is known from the start.

    Leaving early (`break` inside a `with` block, or close) aborts the request at the gateway and its workers.
    """

    def __iter__(self) -> Iterator[ChunkT]:
        try:
            with _reading_stream():
                for piece in self._response.iter_bytes():
                    yield from self._chunks.feed(piece)
                self._chunks.end()
        finally:
            self.close()

    def close(self) -> None:
        """End the request, whether or not its answer is whole."""
        self._response.close()


class AsyncStream(_BaseStream[ChunkT], _AsyncClosing):
    """`Stream` for asynchronous code; leaving early in an `async with` block aborts the request, too."""

    async def __aiter__(self) -> AsyncIterator[ChunkT]:
        try:
            with _reading_stream():
                async for piece in self._response.aiter_bytes():
                    for chunk in self._chunks.feed(piece):
                        yield chunk
                self._chunks.end()
        finally:
            await self.close()

    async def close(self) -> None:
        await self._response.aclose()


class _BaseClient(Generic[Http]):
    _connect: Callable[..., Http]

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        datacenters: Places = ANYWHERE,
        offload: Offload = "auto",
        deadline: float | None = None,
    ):
        self._options = ClientOptions(api_key, datacenters, offload, deadline).checked()
        self._http = self._connect(base_url=server_of(base_url), timeout=CONNECT_SECONDS)

    def asking(self, **changes: Any) -> Self:
        """Return a client that shares this one's connections, with other options: asking(offload="never")."""
        made = copy.copy(self)
        made._options = self._options.changed(changes)
        return made


class Client(_BaseClient[httpx.Client], _Closing):
    """Asks a gateway, and waits for its answers. Several threads may use one client.

    Args:
        base_url: the gateway's address, with or without /v1 at its end.
        api_key: where the gateway asks for one.
        datacenters: where prompts may travel, such as `Prefer("eu-west").forbid("us")`.
        offload: `auto`, `never` or `always`.
        deadline: seconds from asking to the last byte of the answer, retries included.

    """

    _connect = httpx.Client

    def complete(self, model: str, prompt: Prompt, **parameters: Unpack[Parameters]) -> Completion:
        """Continue a prompt, given as text or as token ids."""
        return self._answer(call_completions(model, prompt, parameters), Completion)

    def chat(self, model: str, messages: Messages, **parameters: Unpack[Parameters]) -> ChatCompletion:
        """Answer a conversation."""
        return self._answer(call_chat(model, messages, parameters), ChatCompletion)

    def stream_complete(self, model: str, prompt: Prompt, **parameters: Unpack[Parameters]) -> Stream[CompletionChunk]:
        """Continue a prompt, chunk by chunk."""
        return Stream(self._ask(call_completions(model, prompt, parameters, stream=True)), CompletionChunk)

    def stream_chat(
        self, model: str, messages: Messages, **parameters: Unpack[Parameters]
    ) -> Stream[ChatCompletionChunk]:
        """Answer a conversation, chunk by chunk."""
        return Stream(self._ask(call_chat(model, messages, parameters, stream=True)), ChatCompletionChunk)

    def models(self) -> list[str]:
        """Return the names of the models that are served."""
        return [card.id for card in read_answer(_read(self._ask(LIST_MODELS)), Models).data]

    def close(self) -> None:
        """Close the connections, also for clients made by `asking`."""
        self._http.close()

    def _answer(self, call: GatewayCall, kind: type[Whole]) -> Whole:
        response = self._ask(call)
        return read_whole(_read(response), kind, response.headers)

    def _ask(self, call: GatewayCall) -> httpx.Response:
        """Send a request, again where that is safe, until its answer begins; its body is still to be read."""
        attempt = RequestAttempt(call, self._options, self._http)
        while True:
            with attempt.sending():
                response = self._http.send(attempt.request(), stream=True)
                if response.status_code < 400:
                    return response
                attempt.refused(response, _read(response))
            time.sleep(attempt.pause_seconds)


class AsyncClient(_BaseClient[httpx.AsyncClient], _AsyncClosing):
    """Asks a gateway; see `Client`, whose methods it has."""

    _connect = httpx.AsyncClient

    async def complete(self, model: str, prompt: Prompt, **parameters: Unpack[Parameters]) -> Completion:
        return await self._answer(call_completions(model, prompt, parameters), Completion)

    async def chat(self, model: str, messages: Messages, **parameters: Unpack[Parameters]) -> ChatCompletion:
        return await self._answer(call_chat(model, messages, parameters), ChatCompletion)

    async def stream_complete(
        self, model: str, prompt: Prompt, **parameters: Unpack[Parameters]
    ) -> AsyncStream[CompletionChunk]:
        return AsyncStream(await self._ask(call_completions(model, prompt, parameters, stream=True)), CompletionChunk)

    async def stream_chat(
        self, model: str, messages: Messages, **parameters: Unpack[Parameters]
    ) -> AsyncStream[ChatCompletionChunk]:
        return AsyncStream(await self._ask(call_chat(model, messages, parameters, stream=True)), ChatCompletionChunk)

    async def models(self) -> list[str]:
        return [card.id for card in read_answer(await _aread(await self._ask(LIST_MODELS)), Models).data]

    async def close(self) -> None:
        await self._http.aclose()

    async def _answer(self, call: GatewayCall, kind: type[Whole]) -> Whole:
        response = await self._ask(call)
        return read_whole(await _aread(response), kind, response.headers)

    async def _ask(self, call: GatewayCall) -> httpx.Response:
        attempt = RequestAttempt(call, self._options, self._http)
        while True:
            with attempt.sending():
                response = await self._http.send(attempt.request(), stream=True)
                if response.status_code < 400:
                    return response
                attempt.refused(response, await _aread(response))
            await asyncio.sleep(attempt.pause_seconds)


def _read(response: httpx.Response) -> bytes:
    try:
        with _reading_answer():
            return response.read()
    finally:
        response.close()


async def _aread(response: httpx.Response) -> bytes:
    try:
        with _reading_answer():
            return await response.aread()
    finally:
        await response.aclose()


_reading_answer = partial(reading, "the answer was not whole within its deadline", UnreachableError, "the answer")
_reading_stream = partial(reading, "the stream fell silent beyond its deadline", BrokenStreamError, "the stream")
