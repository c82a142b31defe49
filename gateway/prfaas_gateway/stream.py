"""Streams the answer to one client: raw bytes of one worker, or of several that resume it one after the other.

An OpenAI client takes a stream that simply ends for a complete one. So a broken stream without another worker gets an
error event and no [DONE]. If the format has no error event, the connection is cut before its announced end. A ResumeLog
keeps what another worker needs to continue.
"""

import asyncio
from types import TracebackType
from typing import Final, NoReturn, Protocol, Self

import aiohttp
from aiohttp import web

from prfaas.engines import ResumedBy
from prfaas.errors import BadInputError
from prfaas.http_server import STREAM_HEADERS
from prfaas_gateway.limits import Limits
from prfaas_gateway.openai import DONE, UsedTokens, error_event, find_usage, read_usage, relayed_headers
from prfaas_gateway.upstream import Answer, is_lost

EVENT_STREAM: Final = "text/event-stream"
EVENT_END: Final = b"\n\n"
EVENT_BYTES: Final = 256
"""What an event counts besides its bytes, so that many small ones are bounded, too."""
CODE_BROKEN: Final = "stream_broken"
MAX_LINE_BYTES: Final = 4 << 20
"""The longest line that is kept for what it may say of the usage."""
END_SECONDS: Final = 60.0
"""How long a client may take to read the end of an answer."""
TAIL_BYTES: Final = 1024
"""The last event with the usage ends within the last so many bytes of a stream."""


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading."""


class BrokenOffError(Exception):
    """The worker died in the middle of its answer; the client has no error yet.

    `is_closed` is True if the worker ended it, False if it fell silent or wrote what nobody can read.
    `is_too_long` is True if the gateway cut it off: a request may have asked for what is not counted.
    """

    def __init__(self, message: str, *, is_closed: bool, is_too_long: bool = False):
        super().__init__(message)
        self.is_closed = is_closed
        self.is_too_long = is_too_long


class ResumeLog(Protocol):
    """What the client has of a stream, so that another instance can go on with it."""

    @property
    def resumed_by(self) -> ResumedBy:
        """What an engine must understand for that."""
        ...

    pieces: int
    """Pieces taken so far that name tokens."""
    error_event: bytes
    """The last error event that a worker ended with."""
    is_refused: bool
    """True if the last dead worker ended with an error that every worker would answer, or sent too much."""

    def take(self, piece: bytes) -> bytes:
        """Add a piece from the worker; return the events to send to the client now. Raises BadInputError."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the client has the whole answer."""
        ...

    @property
    def has_enough(self) -> bool:
        """Whether the answer is whole, and more of the worker is not wanted."""
        ...

    def worker_died(self) -> None:
        """Discard what the client does not have; keep the worker's error."""
        ...

    def ending(self) -> bytes:
        """Return the end of an answer that lacks nothing else."""
        ...

    @property
    def can_go_on(self) -> bool:
        """Whether another instance could."""
        ...

    @property
    def sent_tokens(self) -> int:
        """Tokens of the answer to compute again, as a prompt."""
        ...

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None: unknown."""
        ...

    @property
    def answer_tokens(self) -> int | None:
        """Tokens of all answers that the client has; None: unknown."""
        ...


class AnswerStream:
    """The answer to one client while it is streamed.

    `response` is prepared; `log` is None if no worker could resume the answer. All its workers together may send
    `most_bytes`.
    """

    def __init__(self, http: web.Request, response: web.StreamResponse, log: "ResumeLog | None", most_bytes: int):
        self.http = http
        self.response = response
        self.log = log
        self._tail = AnswerTail()
        self._events = 0
        self._left_bytes = most_bytes

    @property
    def usage(self) -> UsedTokens:
        """What the request has used: by the ids of its tokens, else by the usage at the end of its answer. Of a stream
        without either each event counts as one token of the answer: engines put one or more into it.
        """
        is_stream = self.response.content_type == EVENT_STREAM
        named = (find_usage if is_stream else read_usage)(self.http.path, self._tail.read())
        logged = UsedTokens(self.log.prompt_tokens, self.log.answer_tokens) if self.log else UsedTokens()
        events = self._events if is_stream else None
        return logged.or_else(named).or_else(UsedTokens(answer_tokens=events))

    @property
    def has_ended(self) -> bool:
        """Whether its last event was sent. Some clients leave then, and do not wait for the end of the connection."""
        return self._tail.read().endswith(DONE)

    async def relay(self, answer: Answer, limits: Limits) -> None:
        """Relay a worker's answer to its end, and end the client's answer.

        Raises BrokenOffError if the worker dies or falls silent, ClientGoneError if the client left.
        """
        try:
            await self._pump(answer, limits)
        except (OSError, aiohttp.ClientError) as error:
            raise self._gone(error) from error
        await self.end(b"")

    async def end(self, rest: bytes) -> None:
        """End an answer that lacks only `rest`; raises ClientGoneError if the client left, or does not read it."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await self.response.write(rest)
                await self.response.write_eof()
        except (OSError, aiohttp.ClientError) as error:  # TimeoutError is an OSError
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> ClientGoneError:
        """Return the error for a client that is lost. Its connection goes with what it did not read."""
        if self.http.transport is not None:
            self.http.transport.abort()
        return ClientGoneError(str(error))

    async def break_off(self, reason: str) -> None:
        """End the answer with an error: the worker's if there is one. Raises ClientGoneError if the client left."""
        event = self.log.error_event if self.log is not None else b""
        await self.end_in_error(event or error_event(self.http.path, reason, CODE_BROKEN))

    async def end_in_error(self, event: bytes) -> None:
        """End the answer with an error event, or by cutting the connection if its format has none.

        Raises ClientGoneError if the client left.
        """
        if self.response.content_type != EVENT_STREAM:
            self.response.force_close()
            if self.http.transport is not None:
                self.http.transport.close()
            return
        # An event that was cut in the middle gets its end. More line ends would be an empty event to some readers.
        missing = len(self._tail.read()[-2:].rstrip(b"\n"))
        await self.end(missing * b"\n" + event)

    async def _pump(self, answer: Answer, limits: Limits) -> None:
        """Relay pieces until the answer ends. One timer watches both sides."""
        log, write, read = self.log, self.response.write, answer.read
        stall_seconds = limits.idle_seconds if log is None else limits.stall_seconds
        awaiting_worker = True
        try:
            async with StallTimer(stall_seconds) as timer:
                while piece := await read():
                    self._left_bytes -= len(piece) + EVENT_BYTES * piece.count(EVENT_END)
                    if self._left_bytes < 0:
                        self._refuse_more()
                    if log is not None and not (piece := log.take(piece)):
                        timer.moved(stall_seconds)
                        continue
                    awaiting_worker = False
                    timer.moved(limits.idle_seconds)
                    # Before the write: a deadline may end it when the bytes are under way already.
                    self._tail.add(piece)
                    self._events += piece.count(EVENT_END)
                    await write(piece)
                    awaiting_worker = True
                    timer.limit_seconds = stall_seconds
                    if log is not None and log.has_enough:
                        return
        except (OSError, aiohttp.ClientError, BadInputError) as error:  # TimeoutError is an OSError
            # The client's side failed; `relay` says so.
            if not awaiting_worker:
                raise
            if log is None or not log.is_whole:
                reason = f"the worker's stream broke off: {type(error).__name__} {error}".rstrip()
                is_closed = is_lost(error) and not isinstance(error, BadInputError)
                raise BrokenOffError(reason, is_closed=is_closed, is_too_long=self._left_bytes < 0) from error
        if log is not None and not log.is_whole:
            # Also by the error of a front whose engine died.
            raise BrokenOffError("the worker's stream ended before the answer was whole", is_closed=True)

    def _refuse_more(self) -> NoReturn:
        """Raise BadInputError for a worker that does not end. No other one continues what is too long already."""
        if self.log is not None:
            self.log.is_refused = True
        raise BadInputError("the answer is several times longer than what was asked for")


STARTED: Final = web.RequestKey("started", AnswerStream)
"""The streamed answer of a request, after its headers were sent."""


async def begin_answer(
    http: web.Request, answer: Answer, added: dict[str, str], log: ResumeLog | None, most_bytes: int
) -> AnswerStream | web.Response:
    """Start the client's answer with our headers `added` (lower-case names); return an answer that is already complete.

    `log` is that of a stream that could continue, `most_bytes` bounds one that is not complete. Raises ClientGoneError
    if the client left.
    """
    kept = relayed_headers(answer.headers, added)
    if answer.body is not None:
        return web.Response(status=answer.status, headers=kept, body=answer.body)
    response = web.StreamResponse(status=answer.status, headers=kept)
    streams = is_stream(answer)
    if streams:
        response.headers.update(STREAM_HEADERS)
    # So a client sees that an answer was cut: of an announced length, fewer bytes are an error.
    if length := answer.headers.get("Content-Length"):
        response.content_length = int(length)
    stream = http[STARTED] = AnswerStream(http, response, log if streams else None, most_bytes)
    try:
        await response.prepare(http)
    except (OSError, aiohttp.ClientError) as error:
        raise ClientGoneError(str(error)) from error
    return stream


def is_stream(answer: Answer) -> bool:
    """Whether an answer comes token by token, and not as a whole."""
    kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return answer.status == 200 and answer.body is None and kind == EVENT_STREAM


class AnswerTail:
    """The end of an answer: at least its last TAIL_BYTES, and the whole line that they begin in.

    A line of more than MAX_LINE_BYTES is not kept. Pieces are joined some at a time: there is one for every event.
    """

    def __init__(self):
        # At first as at the end of an event.
        self._pieces = [b"\n\n"]
        self._pieces_bytes = 0
        self._joined = bytearray()

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._pieces_bytes += len(piece)
        if self._pieces_bytes > 2 * TAIL_BYTES:
            self._join()

    def read(self) -> bytes:
        self._join()
        return bytes(self._joined)

    def _join(self) -> None:
        kept, added = self._joined, b"".join(self._pieces)
        self._pieces.clear()
        self._pieces_bytes = 0
        kept += added
        if len(kept) > 2 * TAIL_BYTES and b"\n" in added:
            del kept[: kept.rfind(b"\n", 0, -TAIL_BYTES) + 1]
        if len(kept) > MAX_LINE_BYTES:
            # What follows is the rest of a line, and must not pass for a whole one.
            kept[:-2] = b"?"


class StallTimer:
    """Ends a block with TimeoutError after too long without progress. Use as an async context manager.

    It checks at intervals. A timer reset for every piece would cost about as much as the piece, and leave a cancelled
    timer each time. `limit_seconds` may change within the block.
    """

    def __init__(self, limit_seconds: float):
        self.limit_seconds = limit_seconds
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._moved_seconds = self._now()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    def moved(self, limit_seconds: float) -> None:
        self._moved_seconds = self._now()
        self.limit_seconds = limit_seconds

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._timer is not None:
            self._timer.cancel()
        return await self._timeout.__aexit__(kind, error, trace)

    def _look(self) -> None:
        due_seconds = self._moved_seconds + self.limit_seconds
        if self._now() >= due_seconds:
            self._timeout.reschedule(self._now())
        else:
            # A limit that becomes shorter meanwhile takes effect late, by its old length at most.
            self._timer = self._loop.call_at(due_seconds, self._look)
