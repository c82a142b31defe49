"""Serves the live page: three files that ship with the package, and the document that they ask for every second.

The page holds nothing secret, so everybody may load it. What it shows is for those who may use the gateway: with API
keys on, the document is given for a key, which the page asks its reader for and keeps for the tab.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Final

import msgspec
from aiohttp import web

from prfaas.errors import RequestError
from prfaas_gateway.dashboard.record import MOMENT_SECONDS, Record
from prfaas_gateway.dashboard.view import view
from prfaas_gateway.openai import error_response
from prfaas_gateway.state import GatewayState

FILES: Final = {
    "": ("index.html", "text/html"),
    "app.js": ("app.js", "text/javascript"),
    "app.css": ("app.css", "text/css"),
}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """The page of one gateway."""

    def __init__(self, state: GatewayState, record: Record):
        self._state = state
        self._record = record
        self._static = {path: (_read(name), kind) for path, (name, kind) in FILES.items()}

    def add_to(self, app: web.Application, for_clients: Callable[[Handler], Handler]) -> None:
        """Add the page's routes; `for_clients` guards what only clients may see."""
        app.router.add_get("/ui", self._redirect)
        app.router.add_get("/ui/state", for_clients(self._show_state))
        for path in self._static:
            app.router.add_get(f"/ui/{path}", self._file)

    async def watch(self) -> None:
        """Keep the record of every second, until cancelled."""
        while True:
            self._record.look(self._state)
            await asyncio.sleep(MOMENT_SECONDS)

    async def _redirect(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=308, headers={"Location": "/ui/"})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        body, kind = self._static[request.path.removeprefix("/ui/")]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    async def _show_state(self, request: web.Request) -> web.StreamResponse:
        try:
            after_number, after_moment = int(_number(request, "number")), _number(request, "moment")
        except RequestError as error:
            return error_response(error)
        document = view(self._state, self._record, after_number, after_moment)
        return web.Response(body=msgspec.json.encode(document), content_type="application/json", headers=HEADERS)


def _number(request: web.Request, name: str) -> float:
    """Return a number of the query, 0 where there is none.

    Raises:
        RequestError: it is no number.

    """
    given = request.query.get(name, "0")
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not 0 <= found < 1e15:
        raise RequestError(f"{name} must be a number of zero or more, not {given[:40]!r}", param=name)
    return found


def _read(name: str) -> bytes:
    return (files("prfaas_gateway.dashboard") / "static" / name).read_bytes()
