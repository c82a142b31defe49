"""Proves that no bytes from a client make the gateway itself answer 5xx, hang, or stop serving others.

The worker behind it serves whatever comes, so that only the gateway can cause a 5xx.
"""

import asyncio
import contextlib
import copy
import gzip
import json
import multiprocessing
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.documented import keeps_its_word
from tests.serving import serving as serve_http
from tests.tables import make_instance, make_table

from prfaas.wire import headers, openapi
from prfaas.wire.routes import encode
from prfaas_gateway.limits import Limits
from prfaas_gateway.options import GatewayOptions
from prfaas_gateway.server import serving

pytestmark = pytest.mark.system

GOOD = b'{"model":"m","prompt":"x"}'
PATHS = ["/v1/completions", "/v1/chat/completions"]
LIMITS = Limits(request_bytes=50_000, idle_seconds=2.0, drain_lead_seconds=0.0)


class Got(NamedTuple):
    """The status that came, 0 where the connection was closed without one, and the body."""

    status: int
    body: bytes


async def serve(folder: Path, pipe: Connection) -> None:
    """Serve at the port that is sent through the pipe, until its other end closes."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"object": "text_completion"})

    routes = folder / "routes.json"
    options = GatewayOptions("127.0.0.1", 0, 0, routes_file=routes, limits=LIMITS, drain_seconds=1)
    async with serve_http(answer) as url:
        routes.write_bytes(encode(make_table(make_instance("d0", url=url), mode="Fixed", tokens=100)))
        async with serving(options) as running:
            pipe.send(running.port)
            with contextlib.suppress(EOFError):
                await asyncio.to_thread(pipe.recv)
            running.state.check_integrity()


def run_gateway(folder: Path, pipe: Connection) -> None:
    asyncio.run(serve(folder, pipe))


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[int]:
    """The port of a gateway in a process of its own.

    Hypothesis fails a test when `random` advances while it draws, and the gateway draws jitter at any time.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run_gateway, args=(tmp_path_factory.mktemp("fuzz"), theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60)
    yield ours.recv()
    ours.close()
    process.join(60)
    assert process.exitcode == 0


def send(port: int, raw: bytes, *, leave: bool) -> Got:
    """Send bytes, and then wait for an answer, or `leave` at once, by ending this side of the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(raw)
        if leave:
            connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65_536):
            received += piece
    if not received:
        return Got(0, b"")
    head, _, body = received.partition(b"\r\n\r\n")
    return Got(int(head.split(b" ", 2)[1]), body)


def post(port: int, body: bytes, path: str = PATHS[0], **sent: str) -> Got:
    """Send one well-framed request."""
    lines = [f"POST {path} HTTP/1.1", "Host: g", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in sent.items()]
    return send(port, "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body, leave=False)


def judge(port: int, got: Got) -> None:
    is_late = got.status == 504 and b"deadline_exceeded" in got.body  # as short a deadline as the request set
    assert got.status < 500 or is_late, got
    if got.body and got.status >= 400:
        assert set(json.loads(got.body)["error"]) == {"message", "type", "param", "code"}
    assert post(port, GOOD).status == 200


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner), max_leaves=12
)
# Printable latin-1 and tabs: what else a header may hold, HTTP refuses by itself.
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=60)


@settings(max_examples=60)
@given(body=st.binary(max_size=300), path=st.sampled_from(PATHS))
@example(b"\xef\xbb\xbf" + GOOD, PATHS[0])
@example(b'{"model":"\\ud800"}', PATHS[0])
@example(b'{"model":"m","x":' + b"9" * 5000 + b"}", PATHS[0])
@example(b'{"model":"m","x":1e99999,"y":-0,"z":1e-99999}', PATHS[0])
@example(b'{"model":"m","model":"n"}', PATHS[1])
@example(b'{"model":"m","x":' + b"[" * 20_000, PATHS[1])
@example(b"x" * 60_000, PATHS[1])
def test_any_body_is_answered(port, body, path):
    judge(port, post(port, body, path))


@settings(max_examples=60)
@given(document=st.dictionaries(st.text(max_size=9), DOCUMENTS, max_size=4), model=SCALARS | st.just("m"))
def test_any_json_is_answered(port, document, model):
    judge(port, post(port, json.dumps({**document, "model": model}).encode()))


@settings(max_examples=60)
@given(
    name=st.sampled_from(
        [
            headers.DATACENTERS,
            headers.OFFLOAD,
            headers.DEADLINE_SECONDS,
            headers.REQUEST_ID,
            "authorization",
            "traceparent",
            "tracestate",
            "content-type",
            "accept",
            "content-encoding",
            "transfer-encoding",
            "expect",
            "x",
        ]
    ),
    value=VALUES,
)
@example("content-encoding", "gzip")
@example("content-encoding", "br")
@example("content-encoding", "deflate, gzip")
@example("content-type", "application/json; charset=nonsense")
@example(headers.DEADLINE_SECONDS, "0.000001")
@example(headers.DATACENTERS, "forbid " + ",".join("abcdefgh"))
@example("x", "y" * 20_000)
def test_any_header_is_answered(port, name, value):
    judge(port, post(port, GOOD, **{name: value}))


@settings(max_examples=40)
@given(cut=st.integers(0, 60), garbage=st.binary(max_size=60))
def test_any_packed_body_is_answered(port, cut, garbage):
    packed = gzip.compress(GOOD)
    judge(port, post(port, packed[:cut] + garbage, **{"Content-Encoding": "gzip"}))


def test_the_openapi_document_is_kept(port, tmp_path):
    document = copy.deepcopy(openapi.gateway())
    for operation in ("/v1/chat/completions", "/v1/completions"):
        asking = document["paths"][operation]["post"]
        asking["requestBody"]["content"]["application/json"]["schema"]["properties"]["model"] = {"const": "m"}
        preferences = {one["name"]: one["schema"] for one in asking["parameters"]}
        preferences[headers.DATACENTERS]["enum"] = ["prefer a", "forbid b, c", "prefer a; forbid b"]
        preferences[headers.DEADLINE_SECONDS]["minimum"] = 60  # 504 is right for a thousandth of a second
    # A body's fields are the worker's to judge, and the one behind this gateway takes all.
    keeps_its_word(document, f"http://127.0.0.1:{port}", tmp_path, without=("negative_data_rejection",))


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\n"


@settings(max_examples=60)
@given(raw=st.binary(max_size=200) | st.binary(max_size=60).map(HEAD.__add__))
@example(HEAD + b"Content-Length: 999\r\n\r\n" + GOOD)
@example(HEAD + b"Content-Length: -1\r\n\r\n" + GOOD)
@example(HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + GOOD)
@example(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + GOOD)
@example(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
@example(HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx")
@example(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab")
@example(HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
@example(HEAD + b"Expect: nonsense\r\nContent-Length: 2\r\n\r\n{}")
@example(HEAD + b"".join(b"h%d: x\r\n" % number for number in range(5000)) + b"\r\n")
@example(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n")
@example(b"GET /v1/models/%ff%00 HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
@example(b"GET http://[::1 HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
@example(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
def test_any_bytes_are_answered_or_cut_off(port, raw):
    judge(port, send(port, raw, leave=True))
