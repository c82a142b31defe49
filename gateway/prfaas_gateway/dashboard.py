"""The live page at /ui: three static files, and a document of the gateway's state that the page polls every second.

The page holds no secret, so its files need no key. With API keys on, its document needs one; the page asks its reader
for the key and keeps it for the tab. Two bounded rings keep the history. The document holds no prompt, key or answer.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from importlib.resources import files
from itertools import islice
from typing import Final

import msgspec
from aiohttp import web

from prfaas.errors import RequestError
from prfaas.names import HUB
from prfaas.wire.control import Bandwidth, LinkReport
from prfaas.wire.routes import InstanceState, Role, ThresholdMode
from prfaas_gateway.metrics import Outcome
from prfaas_gateway.openai import error_response
from prfaas_gateway.request import GatewayRequest
from prfaas_gateway.state import GatewayState

REQUESTS: Final = 200
MOMENTS: Final = 600
MOMENT_SECONDS: Final = 1.0
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
    def __init__(self, state: GatewayState, history: "RequestHistory"):
        self._state = state
        self._history = history
        self._static = {path: (_read(name), kind) for path, (name, kind) in FILES.items()}

    def add_to(self, app: web.Application, for_clients: Callable[[Handler], Handler]) -> None:
        """Add the page's routes; `for_clients` guards the document."""
        app.router.add_get("/ui", self._redirect)
        app.router.add_get("/ui/state", for_clients(self._show_state))
        for path in self._static:
            app.router.add_get(f"/ui/{path}", self._file)

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
        document = _document(self._state, self._history, after_number, after_moment)
        return web.Response(body=msgspec.json.encode(document), content_type="application/json", headers=HEADERS)


class PlacedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended. `number` counts requests since the start; times are seconds since 1970 and durations."""

    number: int
    at: float
    request_id: str
    decision: str
    why: str
    outcome: Outcome
    status: int | None
    tokens: int
    cached_tokens: int
    cluster: str
    prefill: str
    decode: str
    first_token_seconds: float | None
    seconds: float
    reason: str


class DashboardMoment(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway at one second. `threshold_tokens` is None before the first table."""

    at: float
    threshold_tokens: int | None
    bandwidth: Bandwidth | None
    in_flight: int
    offloaded: int
    local: int
    links: tuple[LinkReport, ...]


class RequestHistory:
    """The last requests, and threshold, load and links of every past second."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._placed: deque[PlacedRequest] = deque(maxlen=REQUESTS)
        self._moments: deque[DashboardMoment] = deque(maxlen=MOMENTS)
        self.count = 0
        self.started = clock()

    def now(self) -> float:
        return self._clock()

    def add(self, request: GatewayRequest) -> None:
        route = request.route
        prefilled_by = (route.prefill or route.decode) if route else None
        self.count += 1
        self._placed.append(
            PlacedRequest(
                number=self.count,
                at=self._clock(),
                request_id=request.request_id,
                decision=request.decision,
                why=route.reason if route else "",
                outcome=request.outcome,
                status=request.status,
                tokens=request.prompt_tokens or request.total_tokens,
                cached_tokens=request.cached_tokens,
                cluster=prefilled_by.cluster if prefilled_by else "",
                prefill=prefilled_by.name if prefilled_by else "",
                decode=route.decode.name if route else "",
                first_token_seconds=request.first_token_seconds,
                seconds=request.seconds,
                reason=request.reason,
            )
        )

    async def watch(self, state: GatewayState) -> None:
        """Record the gateway's state every second, until cancelled."""
        while True:
            self.add_moment(state)
            await asyncio.sleep(MOMENT_SECONDS)

    def add_moment(self, state: GatewayState) -> None:
        rule, counters = state.rule(), state.counters
        self._moments.append(
            DashboardMoment(
                at=self._clock(),
                threshold_tokens=rule.threshold_tokens if rule else None,
                bandwidth=rule.bandwidth if rule else None,
                in_flight=state.in_flight,
                offloaded=counters.offloaded,
                local=counters.local,
                links=state.links,
            )
        )

    def placed_after(self, number: int) -> list[PlacedRequest]:
        """Return the requests with a greater number, oldest first."""
        known = len(self._placed) - (self.count - number) if number <= self.count else 0
        return list(islice(self._placed, max(0, known), None))

    def moments_after(self, at: float) -> list[DashboardMoment]:
        """Return the later moments, oldest first."""
        return [moment for moment in self._moments if moment.at > at]


class DashboardInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. `ejected_seconds` is the rest of its ejection; 0: none."""

    name: str
    pool: str
    role: Role
    state: InstanceState
    in_flight: int
    ejected_seconds: float


class DashboardCluster(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster with its instances; the hub has no link of its own."""

    name: str
    datacenter: str = ""
    reachable: bool = True
    in_use: bool = True
    capacity_mbps: int = 0
    link: LinkReport | None = None
    instances: tuple[DashboardInstance, ...] = ()


class DashboardDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page draws. `placed` and `moments` hold only entries newer than the request's."""

    policy: str
    model: str
    now: float
    started: float
    """When the gateway started; a new gateway numbers requests from 1 again."""
    draining: bool
    mode: ThresholdMode | None
    threshold_tokens: int | None
    bandwidth: Bandwidth | None
    reason: str
    in_flight: int
    offloaded: int
    local: int
    failed_offloads: int
    clusters: tuple[DashboardCluster, ...]
    placed: list[PlacedRequest]
    moments: list[DashboardMoment]


def _document(
    state: GatewayState, history: RequestHistory, after_number: int, after_moment: float
) -> DashboardDocument:
    """Return the document; it has no clusters before the first routing table."""
    rule, counters, table = state.rule(), state.counters, state.table
    return DashboardDocument(
        policy=table.policy if table else "",
        model=table.model if table else "",
        now=history.now(),
        started=history.started,
        draining=state.draining,
        mode=table.threshold.mode if table else None,
        threshold_tokens=rule.threshold_tokens if rule else None,
        bandwidth=rule.bandwidth if rule else None,
        reason=state.reason,
        in_flight=state.in_flight,
        offloaded=counters.offloaded,
        local=counters.local,
        failed_offloads=counters.failed_offloads,
        clusters=_clusters(state),
        placed=history.placed_after(after_number),
        moments=history.moments_after(after_moment),
    )


def _clusters(state: GatewayState) -> tuple[DashboardCluster, ...]:
    rule, table = state.rule(), state.table
    if table is None or rule is None:
        return ()
    links = {link.cluster: link for link in state.links}
    hub = DashboardCluster(name=HUB, instances=_instances(state, HUB))
    return hub, *(
        DashboardCluster(
            name=cluster.name,
            datacenter=cluster.datacenter,
            reachable=cluster.reachable,
            in_use=cluster.name in rule.offload_clusters and cluster.datacenter not in table.forbid_datacenters,
            capacity_mbps=cluster.capacity_mbps,
            link=links.get(cluster.name),
            instances=_instances(state, cluster.name),
        )
        for cluster in table.clusters
    )


def _instances(state: GatewayState, cluster: str) -> tuple[DashboardInstance, ...]:
    now_seconds, until = state.clock(), state.ejections.until_seconds
    found = state.table.instances if state.table else ()
    return tuple(
        DashboardInstance(
            name=one.name,
            pool=one.pool,
            role=one.role,
            state=one.state,
            in_flight=state.load(one.name),
            ejected_seconds=round(max(0.0, until.get(one.name, 0.0) - now_seconds), 1),
        )
        for one in sorted(found, key=lambda one: (one.role, one.name))
        if one.cluster == cluster
    )


def _number(request: web.Request, name: str) -> float:
    """Return a number of the query, 0 if it is missing. Raises RequestError for other texts."""
    given = request.query.get(name, "0")
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not 0 <= found < 1e15:
        raise RequestError(f"{name} must be a number of zero or more, not {given[:40]!r}", param=name)
    return found


def _read(name: str) -> bytes:
    return (files("prfaas_gateway") / "static" / name).read_bytes()
