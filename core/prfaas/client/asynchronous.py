"""The client of asynchronous code. All that is not waiting stands in requests.py, answers.py and events.py."""

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Generic, Self, Unpack

import httpx

from prfaas.client.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Models,
    read_answer,
    read_decision,
    read_whole,
)
from prfaas.client.errors import BrokenStreamError, DeadlinePassedError
from prfaas.client.events import Chunk, Chunks
from prfaas.client.places import Places
from prfaas.client.requests import (
    ANYWHERE,
    CONNECT_SECONDS,
    GRACE_SECONDS,
    Attempt,
    Messages,
    Options,
    Parameters,
    Prompt,
    body_of,
    server_of,
)
from prfaas.errors import UnreachableError
from prfaas.wire.preferences import Offload


class AsyncStream(Generic[Chunk]):
    """Iterates over the pieces of an answer as they come. `decision` is known from the start.

    Leaving early (`break` inside an `async with` block, or close) aborts the request at the gateway and its workers.
    """

    def __init__(self, response: httpx.Response, kind: type[Chunk]):
        self.decision = read_decision(response.headers)
        self._response = response
        self._chunks = Chunks(kind)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            async for piece in self._response.aiter_bytes():
                for chunk in self._chunks.feed(piece):
                    yield chunk
            self._chunks.end()
        except httpx.TimeoutException as error:
            raise DeadlinePassedError("the stream fell silent beyond its deadline") from error
        except httpx.HTTPError as error:
            raise BrokenStreamError(f"the stream broke off: {error}") from error
        finally:
            await self.close()

    async def close(self) -> None:
        """End the request, be it whole or not."""
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncClient:
    """Asks a gateway; see `Client`, whose methods it has."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        datacenters: Places = ANYWHERE,
        offload: Offload = "auto",
        deadline: float | None = None,
    ):
        self._options = Options(api_key, datacenters, offload, deadline).checked()
        self._http = httpx.AsyncClient(base_url=server_of(base_url), timeout=CONNECT_SECONDS)

    def asking(self, **changes: Any) -> Self:
        """Return a client that shares this one's connections, with other options: asking(offload="never")."""
        made = object.__new__(type(self))
        made._http, made._options = self._http, self._options.changed(changes)
        return made

    async def complete(self, model: str, prompt: Prompt, **parameters: Unpack[Parameters]) -> Completion:
        """Continue a prompt, given as text or as token ids."""
        body = body_of({"model": model, "prompt": prompt}, parameters, stream=False)
        response = await self._ask("POST", "/v1/completions", body)
        return read_whole(await _whole(response), Completion, response.headers)

    async def chat(self, model: str, messages: Messages, **parameters: Unpack[Parameters]) -> ChatCompletion:
        """Answer a conversation."""
        body = body_of({"model": model, "messages": messages}, parameters, stream=False)
        response = await self._ask("POST", "/v1/chat/completions", body)
        return read_whole(await _whole(response), ChatCompletion, response.headers)

    async def stream_complete(
        self, model: str, prompt: Prompt, **parameters: Unpack[Parameters]
    ) -> AsyncStream[CompletionChunk]:
        """Continue a prompt, piece by piece."""
        body = body_of({"model": model, "prompt": prompt}, parameters, stream=True)
        return AsyncStream(await self._ask("POST", "/v1/completions", body), CompletionChunk)

    async def stream_chat(
        self, model: str, messages: Messages, **parameters: Unpack[Parameters]
    ) -> AsyncStream[ChatCompletionChunk]:
        """Answer a conversation, piece by piece."""
        body = body_of({"model": model, "messages": messages}, parameters, stream=True)
        return AsyncStream(await self._ask("POST", "/v1/chat/completions", body), ChatCompletionChunk)

    async def models(self) -> list[str]:
        """Return the names of the models that are served."""
        return [card.id for card in read_answer(await _whole(await self._ask("GET", "/v1/models")), Models).data]

    async def close(self) -> None:
        """Close the connections, those of `asking` too."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, method: str, path: str, body: bytes = b"") -> httpx.Response:
        """Send a request, again where that is safe, until its answer begins; its body is still to be read."""
        attempt = Attempt(self._options, time.monotonic())
        while True:
            try:
                response = await self._http.send(self._request(attempt, method, path, body), stream=True)
                if response.status_code < 400:
                    return response
                told = await _whole(response)
                pause = attempt.after_answer(response.status_code, response.headers, told, time.monotonic())
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                pause = attempt.after_no_connection(f"{self._http.base_url}: {error}", time.monotonic())
            except httpx.TimeoutException as error:
                raise DeadlinePassedError(f"no answer within {self._options.deadline} s") from error
            except httpx.HTTPError as error:
                raise UnreachableError(f"{self._http.base_url}: {error or type(error).__name__}") from error
            await asyncio.sleep(pause)

    def _request(self, attempt: Attempt, method: str, path: str, body: bytes) -> httpx.Request:
        now = time.monotonic()
        left = attempt.left_seconds(now)
        timeout = httpx.Timeout(None if left is None else left + GRACE_SECONDS, connect=CONNECT_SECONDS)
        headers = attempt.headers(now)
        return self._http.build_request(method, path, content=body, headers=headers, timeout=timeout)


async def _whole(response: httpx.Response) -> bytes:
    """Return an answer's body; raises DeadlinePassedError or UnreachableError when it does not come."""
    try:
        return await response.aread()
    except httpx.TimeoutException as error:
        raise DeadlinePassedError("the answer was not whole within its deadline") from error
    except httpx.HTTPError as error:
        raise UnreachableError(f"the answer broke off: {error or type(error).__name__}") from error
    finally:
        await response.aclose()
