"""What a hostile API server answers, or a hostile Prometheus: packed texts, pages without end, the way elsewhere."""

import gzip
import zlib
from collections.abc import Callable

from aiohttp import web

Answer = Callable[[web.Request], web.StreamResponse]
MEBIBYTE = 1 << 20
PACKED = {"Content-Encoding": "gzip", "Content-Type": "application/json"}


def packed(document: bytes) -> web.Response:
    return web.Response(body=gzip.compress(document), headers=PACKED)


def same(answer: Answer) -> Answer:
    """Return an answer that is made once: a packed one takes seconds."""
    made = answer(None)  # pyright: ignore[reportArgumentType]  # it does not look at the request
    assert isinstance(made, web.Response)
    return lambda _: web.Response(body=made.body, headers=dict(made.headers))


def text(_request: web.Request) -> web.Response:
    """Answer with 400 MiB of text in 400 KiB."""
    packing = zlib.compressobj(wbits=31)
    pieces = (b'{"metadata":{},"items":[{"x":"', *[b"x" * MEBIBYTE] * 400, b'"}]}')
    return web.Response(body=b"".join([*map(packing.compress, pieces), packing.flush()]), headers=PACKED)


def page(*names: str, after: str = "") -> web.Response:
    items = [{"metadata": {"name": name, "resourceVersion": "1"}} for name in names]
    return web.json_response({"metadata": {"resourceVersion": "1", "continue": after}, "items": items})


def lists_for_ever(request: web.Request) -> web.Response:
    """Answer with another page, and another one."""
    number = request.query.get("continue") or "0"
    return page(*(f"pod-{number}-{one}" for one in range(500)), after=str(int(number) + 1))


def lists_empty_pages(_request: web.Request) -> web.Response:
    return page(after="more")


def redirected(url: str) -> Answer:
    return lambda _: web.Response(status=307, headers={"Location": url})
