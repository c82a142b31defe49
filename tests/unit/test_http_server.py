"""What aiohttp's parser refuses is one quiet line in the log and an error in OpenAI's form; old connections do end."""

import asyncio
import gzip
import http.client
import json
import logging
import resource
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage
from tests.serving import send_bytes

from prfaas.errors import MAX_WORDS, RequestError
from prfaas.http_server import (
    DESCRIPTORS,
    MAX_HEADERS,
    UNREADABLE_BODY,
    ConnectionBounds,
    PublicRunner,
    client_of,
    error_body,
    unreadable_body,
)

pytestmark = pytest.mark.system

SECRET = "sk-0123456789abcdef"
BODY = b'{"model":"m"}'
FIRST = f"POST /v1/x?{SECRET} HTTP/1.1\r\nHost: g\r\nConnection: close\r\nAuthorization: Bearer {SECRET}\r\n"
Runner = Callable[[web.Application], web.AppRunner]


def public(app: web.Application) -> web.AppRunner:
    return PublicRunner(app, shutdown_timeout=0.1)


def plain(app: web.Application) -> web.AppRunner:
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)


def head(*headers: str, length: int | None = len(BODY)) -> bytes:
    sized = () if length is None else (f"Content-Length: {length}",)
    return (FIRST + "".join(f"{line}\r\n" for line in (*headers, *sized)) + "\r\n").encode()


@asynccontextmanager
async def listening(runner: Runner = public) -> AsyncIterator[int]:
    """Serve a route that reads its body, one that streams, one that is slow and two that fail; give the port."""

    async def read(request: web.Request) -> web.Response:
        try:
            return web.json_response({"size": len(await request.read())})
        except UNREADABLE_BODY as error:
            refused = unreadable_body(error)
            return web.json_response(error_body(str(refused), status=refused.status, code=refused.code), status=400)

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        return response

    async def wait(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.Response()

    async def fail(request: web.Request) -> web.StreamResponse:
        await stream(request)
        raise BadHttpMessage("what it read was none")

    async def reset(_request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("an engine's")

    app = web.Application()
    app.router.add_post("/v1/x", read)
    app.router.add_get("/resets", reset)
    app.router.add_get("/stream", stream)
    app.router.add_get("/slow", wait)
    app.router.add_get("/fails", fail)
    made = runner(app)
    await made.setup()
    try:
        await web.TCPSite(made, "127.0.0.1", 0).start()
        yield made.addresses[0][1]
    finally:
        await made.cleanup()


LONG = head(f"X-Long: {'y' * 40_000}")
CUT_OFF = zlib.compress(BODY)[:6]
UNREADABLE = {
    "a long header": ((LONG + BODY,), 431, "header_too_large"),
    "a long path": ((b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\nHost: g\r\n\r\n",), 431, "header_too_large"),
    "many headers": ((head(*(f"X-{number}: y" for number in range(200))),), 400, "invalid_http"),
    "two lengths": ((head("Content-Length: 9") + BODY,), 400, "invalid_http"),
    "a length and chunks": ((head("Transfer-Encoding: chunked") + BODY,), 400, "invalid_http"),
    "no length": ((head("Content-Length: -1", length=None) + BODY,), 400, "invalid_http"),
    "a header without a name": ((head(f": {SECRET}") + BODY,), 400, "invalid_http"),
    "h2c": ((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",), 400, "invalid_http"),
    "TLS": ((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",), 400, "invalid_http"),
    "another version": ((b"GET / HTTP/7.3\r\n\r\n",), 400, "invalid_http"),
    "zstd": ((head("Content-Encoding: zstd") + BODY,), 415, "unsupported_encoding"),
    "br": ((head("Content-Encoding: br") + BODY,), 415, "unsupported_encoding"),
    "an unknown encoding": ((head("Content-Encoding: rot13") + BODY,), 415, "unsupported_encoding"),
    "two encodings": ((head("Content-Encoding: gzip, gzip") + BODY,), 415, "unsupported_encoding"),
    "two such headers": ((head("Content-Encoding: br", "Content-Encoding: gzip") + BODY,), 415, "unsupported_encoding"),
    "an expectation": ((head("Expect: nonsense") + BODY,), 417, "expectation_failed"),
    "a broken gzip": ((head("Content-Encoding: gzip") + BODY,), 400, "invalid_request"),
    "a deflate that is too short": ((head("Content-Encoding: deflate", length=6) + CUT_OFF,), 400, "invalid_http"),
    "a gzip that breaks later": (
        (
            head("Content-Encoding: gzip", "Transfer-Encoding: chunked", length=None),
            b"a\r\n" + gzip.compress(BODY)[:10] + b"\r\n",
            b"2\r\n\xff\xff\r\n",
        ),
        400,
        "invalid_request",
    ),
    "a broken chunk": (
        (head("Transfer-Encoding: chunked", length=None), b"3\r\nabc\r\n", SECRET.encode() + b"\r\n"),
        400,
        "invalid_request",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
async def test_what_cannot_be_read_is_an_openai_error_and_one_line_without_it(name, caplog):
    pieces, status, code = UNREADABLE[name]
    caplog.set_level(logging.DEBUG)
    async with listening() as port:
        answer = await send_bytes(port, *pieces)
        assert SECRET.encode() not in answer
    top, _, body = answer.partition(b"\r\n\r\n")
    assert top.split(b" ")[1] == str(status).encode()
    assert b"application/json" in top
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    lines = [one for one in caplog.records if one.levelno > logging.DEBUG]
    # A body that breaks is the application's to answer and to log, as any other that is wrong.
    assert [(one.levelname, one.exc_info) for one in lines] == [("WARNING", None)] * (code != "invalid_request")
    assert SECRET not in caplog.text
    assert "yyyy" not in caplog.text


CHUNKS = head("Transfer-Encoding: chunked", length=None)


@pytest.mark.parametrize("turns", range(6))
async def test_a_body_that_breaks_right_behind_its_head_is_answered(turns):
    """Wherever the server is: aiohttp calls the handler some turns of the loop after the head has arrived."""
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKS)
        for _ in range(turns):
            await asyncio.sleep(0)
        writer.write(b"ZZZ\r\n")
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    assert answer.split(b" ")[1] == b"400"


async def test_a_body_that_breaks_behind_another_request_is_answered_after_that():
    before = b"GET /slow HTTP/1.1\r\nHost: g\r\n\r\n"
    async with listening() as port:
        answer = await send_bytes(port, before + CHUNKS, b"3\r\nabc\r\n", b"ZZZ\r\n")
    assert [one.split(b" ")[0] for one in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]


async def test_a_body_that_breaks_behind_a_declined_upgrade_is_answered():
    before = b"GET /stream HTTP/1.1\r\nHost: g\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with listening() as port:
        answer = await send_bytes(port, before + CHUNKS, b"ZZZ\r\n")
    assert [one.split(b" ")[0] for one in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]


BROKEN = {
    "a long header": ({"X-Long": "y" * 40_000}, 431),
    "two lengths": ({"Content-Length": "9", "content-length": "8"}, 400),
    "zstd": ({"Content-Encoding": "zstd"}, 415),
    "an unknown encoding": ({"Content-Encoding": "rot13"}, 415),
    "a broken gzip": ({"Content-Encoding": "gzip"}, 400),
    "a broken chunk": ({"Transfer-Encoding": "chunked"}, 400),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_client_that_sends_all_before_it_reads_gets_its_refusal(name):
    sent, status = BROKEN[name]

    def ask(port: int) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("POST", "/v1/x", bytes(8 << 20), sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    async with listening() as port:
        got, document = await asyncio.to_thread(ask, port)
    assert (got, set(document)) == (status, {"error"})


BOMB_BYTES = 64 << 20


async def unpacked_bytes(runner: Runner) -> int:
    """Return how much is unpacked of a bomb whose request is refused unread."""
    bodies: list[StreamReader] = []

    async def refuse(request: web.Request) -> web.Response:
        bodies.append(request.content)
        return web.Response(status=413)

    app, bomb = web.Application(), gzip.compress(bytes(BOMB_BYTES))
    app.router.add_post("/v1/x", refuse)
    made = runner(app)
    await made.setup()
    try:
        await web.TCPSite(made, "127.0.0.1", 0).start()
        answer = await send_bytes(made.addresses[0][1], head("Content-Encoding: gzip", length=len(bomb)) + bomb)
    finally:
        await made.cleanup()
    assert answer.startswith(b"HTTP/1.1 413 ")
    return bodies[0].total_bytes


async def test_a_packed_body_that_is_refused_unread_is_not_unpacked():
    assert await unpacked_bytes(public) < BOMB_BYTES / 16


async def test_control_aiohttp_unpacks_it_to_its_end():
    assert await unpacked_bytes(plain) == BOMB_BYTES


async def test_an_answer_that_has_begun_is_not_followed_by_another():
    async with listening() as port:
        answer = await send_bytes(port, b"GET /fails HTTP/1.1\r\nHost: g\r\n\r\n")
    assert answer.count(b"HTTP/1.") == 1
    assert b"error" not in answer


async def test_a_request_has_no_more_than_so_many_headers_and_the_refusal_names_their_number():
    others = head().count(b"\r\n") - 2
    allowed, refused = ([f"X-{number}: y" for number in range(MAX_HEADERS - others + more)] for more in (0, 1))
    async with listening() as port:
        served = await send_bytes(port, head(*allowed) + BODY)
        answer = await send_bytes(port, head(*refused) + BODY)
    assert b" 200 OK\r\n" in served
    assert f"at most {MAX_HEADERS}" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("name", ["a long header", "two lengths", "zstd", "a broken gzip"])
async def test_without_it_the_log_has_a_traceback(name, caplog):
    """The control: what the test above looks for does show with aiohttp's own runner."""
    async with listening(plain) as port:
        await send_bytes(port, *UNREADABLE[name][0])
    assert any(one.exc_info for one in caplog.records), caplog.text
    if name == "two lengths":
        assert "Content-Length" in caplog.text


@pytest.mark.parametrize(
    "pieces",
    [
        (head(f"X-Long: {'y' * (32 << 10)}") + BODY,),
        (head("Content-Encoding: gzip", length=len(gzip.compress(BODY))) + gzip.compress(BODY),),
        (head("Content-Encoding: identity") + BODY,),
        (head("Transfer-Encoding: chunked", length=None), b"d\r\n", BODY + b"\r\n0\r\n\r\n"),
        (head("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__") + BODY,),
        (head("Expect: 100-continue"), BODY),
    ],
)
async def test_what_can_be_read_is_served_without_a_line(pieces, caplog):
    caplog.set_level(logging.INFO)
    async with listening() as port:
        answer = await send_bytes(port, *pieces)
    assert b" 200 OK\r\n" in answer
    assert b'{"size": 13}' in answer
    assert caplog.text == ""


@pytest.mark.parametrize(("runner", "is_quiet"), [(public, True), (plain, False)])
async def test_a_client_that_left_before_it_was_told_to_continue_is_no_error(runner, is_quiet, caplog):
    """Its end arrives with its head: nothing can be written any more when the handler begins."""
    async with listening(runner) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("Expect: 100-continue"))
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
    assert any(one.exc_info for one in caplog.records) is not is_quiet, caplog.text


async def test_another_connection_that_was_reset_is_still_an_error(caplog):
    async with listening() as port:
        answer = await send_bytes(port, b"GET /resets HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
    assert b" 500 " in answer
    assert any(one.exc_info for one in caplog.records)


@pytest.mark.parametrize("version", ["1.0", "0.9"])
async def test_the_end_of_an_old_connection_ends_its_stream_even_if_it_asks_to_be_kept(version):
    asking = f"GET /stream HTTP/{version}\r\nConnection: keep-alive\r\n\r\n".encode()
    async with listening() as port:
        top, _, body = (await send_bytes(port, asking)).partition(b"\r\n\r\n")  # it waits for the connection's end
    assert body == b"data: 1\n\n"
    assert b"keep-alive" not in top.lower()


def test_an_error_repeats_no_more_than_the_beginning_of_what_it_is_about():
    assert str(RequestError("short")) == "short"
    assert len(str(RequestError("x" * 1_000_000))) < MAX_WORDS + 10


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (("192.0.2.7", 4711), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 4711, 0, 0), "2001:0db8:0001:0002"),
        (("2001:db8:1:2::9", 4712, 0, 0), "2001:0db8:0001:0002"),
        (("2001:db8:1:3::9", 4712, 0, 0), "2001:0db8:0001:0003"),
        (("fe80::1%eth0", 4711, 0, 2), "fe80:0000:0000:0000"),
        (("::ffff:192.0.2.7", 4711, 0, 0), "::ffff:192.0.2.7"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_client_is_an_address_and_of_ipv6_a_network(peer, client):
    transport = asyncio.Transport({"peername": peer})
    assert client_of(transport) == client


@pytest.mark.parametrize(("hard", "most"), [(4096, 4096), (resource.RLIM_INFINITY, 1 << 30)])
def test_connections_take_what_the_system_allows_the_process(hard, most, monkeypatch):
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    runner = PublicRunner(web.Application(), shutdown_timeout=0.1, bounds=ConnectionBounds(most=1 << 40))
    server = asyncio.run(runner._make_server())
    assert server.bounds.most == most // DESCRIPTORS
    assert set_to == [(hard, hard)]
