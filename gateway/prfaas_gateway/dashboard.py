"""The live page at /ui: three static files, and a document of the gateway's state that the page polls every second.

The document holds what all clients ask for, though no prompt, key or answer: so the page is at a port of its own, which
no client reaches. Two bounded rings keep the history.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from importlib.resources import files
from itertools import islice
from typing import Any, Final

import msgspec
from aiohttp import web

from prfaas.errors import RequestError
from prfaas.names import HUB
from prfaas.wire.routes import RoutingTable
from prfaas_gateway.openai import error_response
from prfaas_gateway.request import Progress
from prfaas_gateway.state import GatewayState

REQUESTS: Final = 200
SAMPLES: Final = 600
SAMPLE_SECONDS: Final = 1.0
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
PagePart = dict[str, Any]
"""A part of the document. Times are seconds since 1970 and durations in seconds."""


class Dashboard:
    def __init__(self, state: GatewayState, history: "RequestHistory"):
        self._state = state
        self._history = history
        self._static = {path: (_read(name), kind) for path, (name, kind) in FILES.items()}

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/ui", self._redirect)
        app.router.add_get("/ui/state", self._show_state)
        for path in self._static:
            app.router.add_get(f"/ui/{path}", self._file)

    async def _redirect(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=308, headers={"Location": "/ui/"})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        body, kind = self._static[request.path.removeprefix("/ui/")]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    async def _show_state(self, request: web.Request) -> web.StreamResponse:
        try:
            after_number, sampled_after = int(_number(request, "number")), _number(request, "moment")
        except RequestError as error:
            return error_response(error)
        document = _document(self._state, self._history, after_number, sampled_after)
        return web.Response(body=msgspec.json.encode(document), content_type="application/json", headers=HEADERS)


class RequestHistory:
    """The last requests, and threshold, load and links of every past second."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self.now = clock
        self._placed: deque[PagePart] = deque(maxlen=REQUESTS)
        self._samples: deque[PagePart] = deque(maxlen=SAMPLES)
        self.count = 0
        self.started = clock()

    def add(self, progress: Progress) -> None:
        route, start = progress.route, progress.answer_start
        prefilled_by = (route.prefill or route.decode) if route else None
        self.count += 1
        self._placed.append(
            {
                "number": self.count,  # since the start
                "at": self.now(),
                "request_id": progress.request_id,
                "decision": progress.decision,
                "why": route.reason if route else "",
                "outcome": progress.outcome,
                "status": progress.status,
                "tokens": start.prompt_tokens or progress.prompt.total_tokens,
                "cached_tokens": start.cached_tokens,
                "cluster": prefilled_by.cluster if prefilled_by else "",
                "prefill": prefilled_by.name if prefilled_by else "",
                "decode": route.decode.name if route else "",
                "first_token_seconds": start.seconds,
                "parts": start.parts,  # of that time
                "seconds": progress.seconds,
                "reason": progress.reason,
            }
        )

    async def watch(self, state: GatewayState) -> None:
        """Record the gateway's state every second, until cancelled."""
        while True:
            self.add_sample(state)
            await asyncio.sleep(SAMPLE_SECONDS)

    def add_sample(self, state: GatewayState) -> None:
        self._samples.append({"at": self.now(), **_load(state), "links": state.links})

    def placed_after(self, number: int) -> list[PagePart]:
        """Return the requests with a greater number, oldest first."""
        known = len(self._placed) - (self.count - number) if number <= self.count else 0
        return list(islice(self._placed, max(0, known), None))

    def samples_after(self, at: float) -> list[PagePart]:
        """Return the later samples, oldest first."""
        return [sample for sample in self._samples if sample["at"] > at]


def _document(state: GatewayState, history: RequestHistory, after_number: int, sampled_after: float) -> PagePart:
    """Return everything that the page draws; `placed` and `moments` hold only entries newer than the request's."""
    table = state.table
    return {
        "policy": table.policy if table else "",
        "model": table.model if table else "",
        "now": history.now(),
        "started": history.started,  # a new gateway numbers requests from 1 again
        "draining": state.draining,
        "mode": table.threshold.mode if table else None,
        **_load(state),
        "reason": state.reason,
        "failed_offloads": state.counters.failed_offloads,
        "clusters": _clusters(state),
        "placed": history.placed_after(after_number),
        "moments": history.samples_after(sampled_after),
    }


def _load(state: GatewayState) -> PagePart:
    """Return the threshold in force, None before the first table, and the requests so far."""
    rule, counters = state.rule(), state.counters
    return {
        "threshold_tokens": rule.threshold_tokens if rule else None,
        "bandwidth": rule.bandwidth if rule else None,
        "in_flight": state.in_flight,
        "offloaded": counters.offloaded,
        "local": counters.local,
    }


def _clusters(state: GatewayState) -> list[PagePart]:
    """Return each cluster with its instances; the hub has no link of its own."""
    rule, table = state.rule(), state.table
    if table is None or rule is None:
        return []
    links, permitted = {link.cluster: link for link in state.links}, table.permitted_clusters
    hub = {"name": HUB, "datacenter": "", "reachable": True, "in_use": True, "capacity_mbps": 0, "link": None}
    members = (
        {
            "name": cluster.name,
            "datacenter": cluster.datacenter,
            "reachable": cluster.reachable,
            "in_use": cluster.name in rule.offload_clusters and cluster in permitted,
            "capacity_mbps": cluster.capacity_mbps,
            "link": links.get(cluster.name),
        }
        for cluster in table.clusters
    )
    return [{**one, "instances": _instances(state, table, one["name"])} for one in (hub, *members)]


def _instances(state: GatewayState, table: RoutingTable, cluster: str) -> list[PagePart]:
    now_seconds, until = state.clock(), state.ejections.until_seconds
    return [
        {
            "name": one.name,
            "pool": one.pool,
            "role": one.role,
            "state": one.state,
            "in_flight": state.load(one.name),
            "ejected_seconds": round(max(0.0, until.get(one.name, 0.0) - now_seconds), 1),  # what is left of it
        }
        for one in sorted(table.instances, key=lambda one: (one.role, one.name))
        if one.cluster == cluster
    ]


def _number(request: web.Request, name: str) -> float:
    """Return a number of the query, 0 if it is missing. Raises RequestError for other texts."""
    text = request.query.get(name, "0")
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < 1e15:
        raise RequestError(f"{name} must be a number of zero or more, not {text[:40]!r}", param=name)
    return found


def _read(name: str) -> bytes:
    return (files("prfaas_gateway") / "static" / name).read_bytes()
