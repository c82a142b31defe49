"""Relay one answer to the client: raw bytes, each piece as it comes, from one worker or from several after another.

An OpenAI client takes a stream that simply ends for a complete one. So a stream that breaks off, and that no other
worker goes on with, gets an error event and no [DONE]; where the format has no room for one, the connection is cut
short of what it announced.
"""

import aiohttp
from aiohttp import web

from prfaas.errors import BadInputError
from prfaas.wire import headers
from prfaas_gateway.journal import Journal
from prfaas_gateway.limits import Limits
from prfaas_gateway.openai import error_body, relayed_headers
from prfaas_gateway.upstream import Answer
from prfaas_gateway.watch import Watch

EVENT_STREAM = "text/event-stream"
CODE_BROKEN = "stream_broken"
STARTED = web.RequestKey("started", web.StreamResponse)
"""The streamed answer of a request, once its headers are on their way."""


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading."""


class BrokenOffError(Exception):
    """The worker died in the middle of its answer. The client has heard nothing of it."""


class Stream:
    """The answer to one client while it is streamed: from one worker, or when that one dies, from one after another.

    Args:
        request: what is answered.
        response: the client's, prepared.
        journal: what the client has, where another worker could go on; None where none could.

    """

    def __init__(self, request: web.Request, response: web.StreamResponse, journal: Journal | None):
        self.response = response
        self.journal = journal
        self._request = request
        self._tail = b""

    async def take(self, answer: Answer, limits: Limits) -> None:
        """Pass on a worker's answer to its end, which is that of the client's too.

        Raises:
            BrokenOffError: the worker died, or fell silent.
            ClientGoneError: nobody is there to read.

        """
        try:
            await self._pump(answer, limits)
            await self.response.write_eof()
        except (OSError, aiohttp.ClientError) as error:
            raise ClientGoneError(str(error)) from error

    async def break_off(self, reason: str, event: bytes = b"") -> None:
        """Tell the client, in the answer's own format, that it is not whole; in a worker's words if it said any.

        Raises:
            ClientGoneError: nobody is there to read.

        """
        end_of_event = b"" if self._tail in (b"", b"\n\n") else b"\n\n"
        try:
            if event:
                self.response.force_close()
                await self.response.write(end_of_event + event)
                await self.response.write_eof()
            else:
                await end_in_error(self._request, self.response, reason, CODE_BROKEN, end_of_event)
        except (OSError, aiohttp.ClientError) as error:
            raise ClientGoneError(str(error)) from error

    async def _pump(self, answer: Answer, limits: Limits) -> None:
        """Pass pieces on until the answer ends. One timer watches both sides."""
        journal, write, read = self.journal, self.response.write, answer.content.readany
        stall_seconds = limits.idle_seconds if journal is None else limits.stall_seconds
        awaiting_worker = True
        try:
            async with Watch(stall_seconds) as watch:
                while piece := await read():
                    if journal is not None and not (piece := journal.take(piece)):
                        watch.moved(stall_seconds)
                        continue
                    awaiting_worker = False
                    watch.moved(limits.idle_seconds)
                    await write(piece)
                    awaiting_worker = True
                    self._tail = piece[-2:]
                    watch.limit_seconds = stall_seconds
        except (OSError, aiohttp.ClientError, BadInputError) as error:  # TimeoutError is an OSError
            if not awaiting_worker:
                raise
            if journal is None or not journal.is_whole:
                reason = f"the worker's stream broke off: {type(error).__name__} {error}".rstrip()
                raise BrokenOffError(reason) from error
        if journal is not None and not journal.is_whole:
            raise BrokenOffError("the worker's stream ended before the answer was whole")


async def begin(request: web.Request, answer: Answer, added: dict[str, str]) -> Stream | web.Response:
    """Begin to send an answer with our own headers `added` (lower-case names); one that is there whole is returned.

    Raises:
        ClientGoneError: nobody is there to read.

    """
    kept = relayed_headers(answer.headers, added)
    if answer.body is not None:
        return web.Response(status=answer.status, headers=kept, body=answer.body)
    response = web.StreamResponse(status=answer.status, headers=kept)
    if length := answer.headers.get("Content-Length"):
        response.content_length = int(length)
    request[STARTED] = response
    try:
        await response.prepare(request)
    except (OSError, aiohttp.ClientError) as error:
        raise ClientGoneError(str(error)) from error
    return Stream(request, response, _journal(answer))


def _journal(answer: Answer) -> Journal | None:
    """Return the journal of an answer that another worker could go on with."""
    fingerprint = answer.headers.get(headers.RESUMABLE)
    cached_tokens = answer.headers.get(headers.CACHED_TOKENS, "")
    if answer.status != 200 or fingerprint is None or not (cached_tokens.isdecimal() and cached_tokens.isascii()):
        return None
    return Journal(fingerprint, int(cached_tokens))


async def end_in_error(
    request: web.Request, response: web.StreamResponse, reason: str, code: str, end_of_event: bytes = b"\n\n"
) -> None:
    """End an answer that has begun: with an error event, or where its format has none, by cutting the connection.

    Args:
        request: what is answered.
        response: its answer so far.
        reason: a sentence for the client.
        code: OpenAI-style error code.
        end_of_event: ends an event that was cut in the middle; after a whole one it is harmless.

    """
    response.force_close()
    if response.content_type != EVENT_STREAM:
        if request.transport is not None:
            request.transport.close()
        return
    event = b"data: " + error_body(reason, "server_error", code) + b"\n\n"
    await response.write(end_of_event + event)
    await response.write_eof()
