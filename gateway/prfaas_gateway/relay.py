"""Relay one answer to the client: raw bytes, each piece as it comes, and an honest end when the worker dies in between.

An OpenAI client takes a stream that simply ends for a complete one. So a stream that breaks off gets an error event and
no [DONE]; where the format has no room for one, the connection is cut short of what it announced.
"""

import asyncio

import aiohttp
from aiohttp import web

from prfaas_gateway.openai import error_body, relayed_headers
from prfaas_gateway.upstream import Answer

EVENT_STREAM = "text/event-stream"


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading."""


class BrokenOffError(Exception):
    """The worker died in the middle of its answer; the client has been told. `response` ends the exchange."""

    def __init__(self, message: str, response: web.StreamResponse):
        super().__init__(message)
        self.response = response


async def relay(request: web.Request, answer: Answer, added: dict[str, str], idle_seconds: float) -> web.StreamResponse:
    """Send an answer with our own headers `added` (lower-case names), and return the finished response.

    Raises:
        BrokenOffError: the worker died after its first byte.
        ClientGoneError: nobody is there to read.

    """
    kept = relayed_headers(answer.headers, added)
    if answer.body is not None:
        return web.Response(status=answer.status, headers=kept, body=answer.body)
    response = web.StreamResponse(status=answer.status, headers=kept)
    if length := answer.headers.get("Content-Length"):
        response.content_length = int(length)
    try:
        await response.prepare(request)
        await _pump(request, answer, response, idle_seconds)
        await response.write_eof()
    except (OSError, aiohttp.ClientError) as error:
        raise ClientGoneError(str(error)) from error
    return response


async def _pump(request: web.Request, answer: Answer, response: web.StreamResponse, idle_seconds: float) -> None:
    """Pass pieces on until the answer ends; tell the client if the worker ends first.

    One timer that moves with every piece watches both sides; a timer a piece would cost as much as the piece.
    """
    loop = asyncio.get_running_loop()
    tail = b""
    awaiting_worker = True
    try:
        async with asyncio.timeout(idle_seconds) as idle:
            while chunk := await answer.content.readany():
                awaiting_worker = False
                await response.write(chunk)
                awaiting_worker = True
                tail = chunk[-2:]
                idle.reschedule(loop.time() + idle_seconds)
    except (OSError, aiohttp.ClientError) as error:  # TimeoutError is an OSError
        if not awaiting_worker:
            raise
        reason = f"the worker's stream broke off: {type(error).__name__} {error}".rstrip()
        await _break_off(request, response, tail, reason)
        raise BrokenOffError(reason, response) from error


async def _break_off(request: web.Request, response: web.StreamResponse, tail: bytes, reason: str) -> None:
    """Tell the client, in the answer's own format, that the answer is not complete."""
    response.force_close()
    if response.content_type != EVENT_STREAM:
        if request.transport is not None:
            request.transport.close()
        return
    end_of_event = b"" if tail in (b"", b"\n\n") else b"\n\n"
    event = b"data: " + error_body(reason, "server_error", "stream_broken") + b"\n\n"
    await response.write(end_of_event + event)
    await response.write_eof()
