"""What our HTTP servers have in common beside their routes: OpenAI's forms, and requests that cannot be read as HTTP.

aiohttp answers such a request with plain text, and logs a traceback that quotes it: a key too, if a header was too
long. Here the answer has OpenAI's form, and the log gets one line without anything that the client sent. This happens
before any route and any key, in gateway and worker alike.

Connections are bounded, too: their number in all and by client, the time and size of a head, and the time without a
request. aiohttp closes what is idle for long; the rest is here, since it knows neither a deadline of a head nor a
number. Where there are too many, the one without a whole request for longest makes room for one that may have it.
"""

import asyncio
import logging
import resource
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, NamedTuple, cast

import msgspec
from aiohttp import EMPTY_PAYLOAD, HttpVersion11, StreamReader, web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from prfaas.errors import ConfigError, RequestError
from prfaas.telemetry.logs import line
from prfaas.util import network_of

log = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 33 << 10
"""The longest request line or header: a value of 32 KiB, such as a token with many claims, and its name."""
MAX_HEADERS: Final = 64
MAX_HEAD_BYTES: Final = 64 << 10
"""Of a request's first line and headers together, which aiohttp holds twice."""
READ_BYTES: Final = 64 << 10
"""Of a body that wait to be read, at least; some three times as many at most, or that are unpacked at once."""
DESCRIPTORS: Final = 3
"""That a connection may need: its own, and those to the two instances that serve its request."""
STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Of an event stream: proxies pass each event on at once."""
# Decoded by aiohttp, or refused by its parser where the library for it is missing.
_DECODED: Final = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})

UNREADABLE_BODY: Final = (web.RequestPayloadError, HttpProcessingError)
"""What aiohttp raises to the reader of a body; `unreadable_body` makes an answer of it."""

_Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Unserved = Callable[[web.BaseRequest, web.HTTPException], web.StreamResponse]
"""Answers a request that no route serves, by aiohttp's error."""


def error_body(
    message: str, *, status: int = 400, code: str, param: str | None = None, kind: str = ""
) -> dict[str, Any]:
    """Return an error in OpenAI's form; without `kind` the status decides whose fault it is."""
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_card(model: str, max_model_len: int | None) -> dict[str, Any]:
    """Return an entry of a model list, with the longest context if it is known."""
    card = {"id": model, "object": "model", "created": 0, "owned_by": "prfaas"}
    return card if max_model_len is None else card | {"max_model_len": max_model_len}


def unreadable_body(error: Exception) -> RequestError:
    """Return the answer to a body that is broken, whether compressed or in chunks."""
    return RequestError(f"the body does not match the encoding or length in its headers: {error}")


class ConnectionBounds(NamedTuple):
    """What a port keeps of strangers' connections."""

    most: int = 10_000
    """In all, or fewer where the process may open fewer files; one client may have half of them. Many clients may
    have the address of one proxy. Beyond that the one that has had no whole request for longest is closed."""
    spared_seconds: float = 1.0
    """It is not closed before so long: since its last answer, its start, or the first byte of a head."""
    head_seconds: float = 10.0
    """From a connection's start, or from the first byte of a later head, to the end of the head."""
    idle_seconds: float = 650.0
    """Longer than proxies keep a connection, which would send a request into a closing one: Google's keep it 600 s."""
    lingering_seconds: float = 10.0
    """For the rest of a body that nobody reads, after its answer."""


DEFAULT_BOUNDS: Final = ConnectionBounds()
PROBED_BOUNDS: Final = ConnectionBounds(most=100, spared_seconds=0.0, lingering_seconds=0.0)
"""Of a port for probes and metrics alone: who takes all its connections with requests that do not end keeps no probe
out."""


def bounds_within(heads_bytes: int) -> ConnectionBounds:
    """Return the bounds of a port whose connections may hold so many bytes of heads, each of them twice."""
    return DEFAULT_BOUNDS._replace(most=min(DEFAULT_BOUNDS.most, heads_bytes // (2 * MAX_HEAD_BYTES)))


class PublicRunner(web.AppRunner):
    """Runs an application at a port that strangers reach.

    `unserved` is no middleware: that would cost every request, 4 % of a short one in our gateway.
    """

    def __init__(
        self,
        app: web.Application,
        *,
        shutdown_timeout: float,
        unserved: Unserved | None = None,
        bounds: ConnectionBounds = DEFAULT_BOUNDS,
    ):
        self._unserved = unserved
        self._bounds = bounds
        # A cancelled handler aborts the work for a client that leaves.
        super().__init__(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout)
        app.on_response_prepare.append(_close_old_connections)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            _checked(made.request_handler, self._unserved),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            bounds=self._bounds._replace(most=min(self._bounds.most, _open_files() // DESCRIPTORS)),
        )


@asynccontextmanager
async def serving_probes(app: web.Application, host: str, port: int) -> AsyncGenerator[None]:
    """Serve probes or metrics while the block runs. Raises ConfigError if the port is not available."""
    runner = PublicRunner(app, shutdown_timeout=1.0, bounds=PROBED_BOUNDS)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            message = f"the port for probes or metrics cannot listen on {host}:{port}: {error}"
            raise ConfigError(message) from error
        yield
    finally:
        await runner.cleanup()


def _open_files() -> int:
    """Return how many files the process may open, after raising that to what the system allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most if most != resource.RLIM_INFINITY else 1 << 30


def close_after(response: web.StreamResponse) -> None:
    """Close the connection after a response whose headers are not sent yet."""
    response.headers["Connection"] = "close"
    response.force_close()


async def _close_old_connections(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connections of HTTP/1.0 and the like: only its end shows such a client where a stream ends."""
    if request.version != HttpVersion11:
        close_after(response)


class _Server(web.Server):
    def __init__(self, *args: Any, bounds: ConnectionBounds, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bounds = bounds
        self.open: _Waiting = OrderedDict()
        """All connections, and since when each may have had no whole request, the longest first."""
        self.by_client: defaultdict[str, _Waiting] = defaultdict(OrderedDict)
        """The same ones by client."""
        self.is_full = False

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, asyncio.get_running_loop())

    def has_room(self, client: str) -> bool:
        """Return whether another connection of a client may be kept, in place of one without a whole request; log when
        the first one may not."""
        most, count = self.bounds.most, len(self.open)
        of_client = self.by_client.get(client, _NONE)
        is_share_full = len(of_client) >= max(1, most // 2)
        if not is_share_full and count < most:
            self.is_full = self.is_full and count > most // 2
            return True
        if self._close_one(of_client if is_share_full else self.open):
            return True
        if not self.is_full:
            self.is_full = True
            log.warning(line("connections are refused", open=count, of_this_client=len(of_client)))
        return False

    def _close_one(self, held: "_Waiting") -> bool:
        """Close the connection that has had no whole request for longest; return whether there was one.

        One that has a request goes behind all others, so that each is looked at once in `spared_seconds`.
        """
        latest_seconds = asyncio.get_running_loop().time() - self.bounds.spared_seconds
        for _ in range(len(held)):
            connection, since_seconds = next(iter(held.items()))
            if since_seconds > latest_seconds:
                return False
            if connection.close_if_waiting():
                return True
        return False


def client_of(transport: asyncio.BaseTransport) -> str:
    """Return the address that a connection comes from, as `network_of`; empty if it has none."""
    name = transport.get_extra_info("peername")
    return network_of(cast(tuple[str, ...], name)[0]) if isinstance(name, tuple) else ""


class _Connection(web.RequestHandler):
    """One client's connection. A request that cannot be read on is its last one, and the client gets the answer."""

    __slots__ = ("_body", "_client", "_head_bytes", "_head_timer", "_places")

    def __init__(self, server: _Server, loop: asyncio.AbstractEventLoop):
        self._places = server
        self._client: str | None = None
        self._head_bytes = 0
        """Of a head that has not ended."""
        self._head_timer: asyncio.TimerHandle | None = None
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=server.bounds.idle_seconds,
            lingering_time=server.bounds.lingering_seconds,
            read_bufsize=READ_BYTES,
            access_log=None,  # pyright: ignore[reportArgumentType]
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._body: StreamReader = EMPTY_PAYLOAD  # of the last request whose head has arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        client = client_of(transport)
        if not self._places.has_room(client):
            self._force_close = True
            _turn_away(cast(asyncio.Transport, transport), _FULL)
            return
        self._client = client
        self._note_waiting()
        super().connection_made(transport)
        self._head_timer = self._loop.call_later(self._places.bounds.head_seconds, self._give_up_head)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._leave_place()
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def close_if_waiting(self) -> bool:
        """Close a connection that has no whole request now; return whether it was so."""
        if not self._awaits_head:
            self._note_waiting()  # not now: others are looked at first
            return False
        self._leave_place()  # not when the loop hears that it is closed: its place is taken at once
        self.force_close()
        return True

    def _leave_place(self) -> None:
        if self._client is None:
            return
        del self._places.open[self]
        del self._places.by_client[self._client][self]
        if not self._places.by_client[self._client]:
            del self._places.by_client[self._client]
        self._client = None

    def _note_waiting(self) -> None:
        """Put the connection behind all others: it may wait for a request from now on."""
        if self._client is not None:
            for held in (self._places.open, self._places.by_client[self._client]):
                held[self] = self._loop.time()
                held.move_to_end(self)

    def data_received(self, data: bytes) -> None:
        if _is_broken(self._body):
            return  # to nowhere: it cannot be read
        was_waiting = self._awaits_head
        super().data_received(data)
        self._note_last()
        if was_waiting:
            self._note_head(len(data))

    @property
    def _awaits_head(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _note_head(self, size_bytes: int) -> None:
        """Bound the head that these bytes were a part of, if it has not ended."""
        if not self._awaits_head:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
            self._head_bytes = 0
            return
        if not self._head_bytes:
            self._note_waiting()  # a head that has just begun is not closed for how long it was idle before
        self._head_bytes += size_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head(_TOO_LONG)
        elif self._head_timer is None:
            self._head_timer = self._loop.call_later(self._places.bounds.head_seconds, self._give_up_head)

    def _give_up_head(self) -> None:
        """Close a connection whose head is late; not one that waits for another request."""
        self._head_timer = None
        if self._awaits_head and (self._head_bytes or not self._request_count):
            self._refuse_head(_LATE)

    def _refuse_head(self, refusal: "_Refusal") -> None:
        if self.transport is not None:
            if self._head_bytes:
                _log_refusal(self._client, refusal)
            _turn_away(self.transport, refusal)
        self.force_close()

    def _note_last(self) -> None:
        """Keep the body of the last request that was parsed; let the reader of a broken one know."""
        if not self._messages:
            return
        message, body = self._messages[-1]
        if not hasattr(message, "exc"):
            self._body = body
            return
        # aiohttp queues an error. The reader of a body that it broke would wait for ever; that of a head has no body.
        if self._body.is_eof():
            self._body = StreamReader(self, 0, loop=self._loop)
            self._messages[-1] = message, self._body
        self._body.set_exception(web.RequestPayloadError("it cannot be read on"))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; if its request is broken, or packed and not read on, give the client time to read it."""
        finished = await super().finish_response(request, resp, start_time)
        if not request.content.is_eof() and request.headers.get("Content-Encoding"):
            # aiohttp would read it to its end, and unpack 16 MiB for a client that sent 16 KiB and was refused.
            request.content.set_exception(web.RequestPayloadError("nobody reads it on"))
        self._note_waiting()
        self._note_last()  # it parses what came behind a declined upgrade
        transport = self.transport
        if _is_broken(request.content) and transport is not None and not transport.is_closing():
            # A close with unread bytes is a reset, which takes the answer from a client that still sends.
            if transport.can_write_eof():
                transport.write_eof()
            self.resume_reading()
            await asyncio.sleep(self._lingering_time)  # until the client closes, which cancels this
        return finished

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        return _refuse(request, _refusal_of(exc))

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an error of aiohttp, but not of a body that nobody reads on: its request has been answered."""
        if not isinstance(kw.get("exc_info"), UNREADABLE_BODY):
            super().log_exception(*args, **kw)


_Waiting = OrderedDict[_Connection, float]
_NONE: Final[_Waiting] = OrderedDict()


def _is_broken(body: StreamReader) -> bool:
    return isinstance(body.exception(), UNREADABLE_BODY)


class _Refusal(NamedTuple):
    status: int
    code: str
    message: str


_UNKNOWN_ENCODING: Final = _Refusal(
    415, "unsupported_encoding", "the body's Content-Encoding is not served: send it as it is, or as gzip or deflate"
)
_UNKNOWN_EXPECTATION: Final = _Refusal(417, "expectation_failed", "of Expect only 100-continue is served: leave it out")
_TOO_LONG: Final = _Refusal(
    431,
    "header_too_large",
    f"the request line or a header has more than {MAX_HEADER_BYTES} bytes, or all together more than "
    f"{MAX_HEAD_BYTES}: send less",
)
_LATE: Final = _Refusal(408, "request_timeout", "the request's headers did not arrive in time: send them at once")
_FULL: Final = _Refusal(
    503, "too_many_connections", "too many connections are open, in all or from this address: use those, or wait"
)
_UNREADABLE: Final = _Refusal(
    400,
    "invalid_http",
    f"this is no request of HTTP/1.1: check its first line, its headers (at most {MAX_HEADERS}) and its one length",
)


def _refusal_of(error: HttpProcessingError) -> _Refusal:
    """Return our words for an error of the parser: its own quote the client."""
    # Else it is a body of a known encoding, which breaks off.
    if isinstance(error, ContentEncodingError) and "install" in error.message:
        return _UNKNOWN_ENCODING
    return _TOO_LONG if isinstance(error, LineTooLong) else _UNREADABLE


def _checked(serve: _Serve, unserved: Unserved | None) -> _Serve:
    """Return a handler that refuses what aiohttp passes on undecoded, or answers before any route.

    Before any route aiohttp also writes "100 Continue"; a client that has left by then is no error of ours.
    """

    async def checked(request: web.BaseRequest) -> web.StreamResponse:
        encodings = request.headers.getall("Content-Encoding", ())
        if encodings and ", ".join(encodings).lower() not in _DECODED:
            return _refuse(request, _UNKNOWN_ENCODING)
        try:
            return await serve(request)
        except web.HTTPExpectationFailed:
            return _refuse(request, _UNKNOWN_EXPECTATION)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            if unserved is None:
                raise
            return unserved(request, error)
        except ConnectionResetError as error:
            if request.transport is not None and not request.transport.is_closing():
                raise  # another connection was reset
            raise asyncio.CancelledError from error  # aiohttp takes a cancelled handler for one without a client

    return checked


def _refuse(request: web.BaseRequest, refusal: _Refusal) -> web.Response:
    _log_refusal(request.remote, refusal)
    response = web.Response(status=refusal.status, body=_body_of(refusal), content_type="application/json")
    response.force_close()
    return response


def _log_refusal(peer: str | None, refusal: _Refusal) -> None:
    log.warning(line("a request is refused unread", peer=peer, status=refusal.status, code=refusal.code))


def _body_of(refusal: _Refusal) -> bytes:
    return msgspec.json.encode(error_body(refusal.message, status=refusal.status, code=refusal.code))


def _turn_away(transport: asyncio.Transport, refusal: _Refusal) -> None:
    """Answer a connection that has no request, and close it."""
    body = _body_of(refusal)
    head = (
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"
    )
    transport.write(head.encode() + body)
    transport.close()
