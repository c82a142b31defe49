"""The gateway process: its HTTP applications, and its life from the first socket to the drain after SIGTERM.

The public application serves the OpenAI endpoints. Another port is for those who operate the gateway, and asks for no
key: no Service has it. The control socket serves the scheduler sidecar.
"""

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Set
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, cast

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prfaas.errors import UNREADABLE, ConfigError, RequestError
from prfaas.http_server import PublicRunner, close_after, model_card
from prfaas.kube import KubeSession
from prfaas.memory import container_limit_bytes
from prfaas.telemetry.logs import line
from prfaas.telemetry.tracing import tracing_from_environment
from prfaas.util import MIB
from prfaas.wire import openapi
from prfaas.wire.control import ThresholdUpdate
from prfaas_gateway.api import API_ROUTES
from prfaas_gateway.attempts import GatewayParts
from prfaas_gateway.auth import Auth, KeyRing, UnknownKeyError
from prfaas_gateway.dashboard import Dashboard, RequestHistory
from prfaas_gateway.dispatch import Dispatcher
from prfaas_gateway.engines import Engines
from prfaas_gateway.engines.context import ModelContext
from prfaas_gateway.kv.manager import KvManager
from prfaas_gateway.metrics import GatewayMetrics
from prfaas_gateway.openai import error_response, model_not_found
from prfaas_gateway.options import GatewayOptions
from prfaas_gateway.state import GatewayState
from prfaas_gateway.table import RolePublisher, follow_configmap, follow_file, read_file
from prfaas_gateway.upstream import GatewayCredentials, Upstream

log = logging.getLogger(__name__)

KEPT_SECONDS: Final = 1.0
"""A client sends its next request on the same kept connection right after a stream."""
POLL_SECONDS: Final = 0.05
PREFLIGHT_SECONDS: Final = 600
SHOWN_HEADERS: Final = ("x-", "retry-after")
"""Beginnings of the headers of an answer that pages may read."""


class RunningGateway(NamedTuple):
    """A gateway that serves. The ports are the bound ones, if any port was allowed."""

    parts: GatewayParts
    port: int
    admin_port: int
    runner: web.AppRunner
    dispatcher: Dispatcher

    @property
    def state(self) -> GatewayState:
        return self.parts.state


async def run(config: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    Raises ConfigError for an unusable address, socket or file.
    """
    config = config._replace(limits=config.limits.within(container_limit_bytes()))
    log.info("bodies of requests may take %d MiB together", config.limits.all_requests_bytes // MIB)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Requests that outlast the drain are cut off.
    async with serving(config._replace(drain_seconds=POLL_SECONDS)) as running:
        gc.freeze()  # present objects stay: a search for garbage among them would hold up all streams for 20 ms
        await stop.wait()
        log.info("draining: %d requests in flight", running.state.in_flight)
        await _drain(running, config)


async def _drain(running: RunningGateway, config: GatewayOptions) -> None:
    """Serve new connections until peers know of the drain; then serve the open ones until traffic stops."""
    running.state.draining = True
    now = asyncio.get_running_loop().time
    began = now()
    public = cast(web.Server, running.runner.server)
    await _until_no_request_comes(public, config.limits.drain_lead_seconds, config.drain_seconds / 2)
    # The listening sockets alone: the runner's `cleanup` would end the open connections, too.
    for site in running.runner.sites:
        await site.stop()
    quiet_since = now()
    while now() - quiet_since < KEPT_SECONDS and now() - began < config.drain_seconds:
        await asyncio.sleep(POLL_SECONDS)
        if running.dispatcher.open_requests:
            quiet_since = now()


async def _until_no_request_comes(server: web.Server, quiet_seconds: float, most_seconds: float) -> None:
    """Wait until no request has come for `quiet_seconds`, or for `most_seconds` if that is longer.

    Who still sends requests has not heard of the drain: a kube-proxy on a busy node is many seconds late.
    """
    came = server.requests_count
    await asyncio.sleep(quiet_seconds)
    last = asyncio.get_running_loop().time() + most_seconds - quiet_seconds
    while server.requests_count != came and asyncio.get_running_loop().time() < last:
        came = server.requests_count
        await asyncio.sleep(quiet_seconds)


@asynccontextmanager
async def serving(config: GatewayOptions) -> AsyncIterator[RunningGateway]:
    """Serve while the block runs; at its end wait up to `drain_seconds` for requests in flight."""
    state, metrics, history = GatewayState(config.limits), GatewayMetrics(), RequestHistory()
    tracing = tracing_from_environment("prfaas-gateway", {"prfaas.policy": config.policy})
    auth = Auth(KeyRing(config.keys_dir) if config.keys_dir else None, shared_cache=config.shared_cache)
    credentials = GatewayCredentials(config.tls_dir) if config.tls_dir else None
    if credentials is not None:
        state.is_alone = lambda: credentials.ran_out
    async with Upstream(config.limits, credentials) as upstream:
        context = ModelContext(state, upstream)
        parts = GatewayParts(
            limits=config.limits,
            state=state,
            metrics=metrics,
            engines=Engines(upstream),
            kv=KvManager(state, upstream, metrics, config.limits.index_blocks),
            auth=auth,
            history=history,
            tracing=tracing,
        )
        async with (
            _following(config, state),
            _background(RolePublisher(state, upstream).run()),
            _background(parts.kv.run()),
            _background(history.watch(state)),
        ):
            try:
                async with _listening(config, parts, context) as running:
                    yield running
            finally:
                context.close()
                await asyncio.to_thread(tracing.close)


@asynccontextmanager
async def _listening(
    config: GatewayOptions, parts: GatewayParts, context: ModelContext
) -> AsyncIterator[RunningGateway]:
    dispatcher = Dispatcher(parts)
    app = PublicApp(parts, dispatcher, context).build()
    if config.origins:
        Cors(config.origins).add_to(app)
    public = PublicRunner(
        app, shutdown_timeout=config.drain_seconds, unserved=_answer_unserved, bounds=config.limits.connections
    )
    admin = PublicRunner(AdminApp(parts).build(), shutdown_timeout=1.0, bounds=config.limits.admin_connections)
    control = web.AppRunner(ControlApp(parts.state).build(), access_log=None, shutdown_timeout=1.0)
    try:
        await _listen(public, admin, control, config)
        port, admin_port = public.addresses[0][1], admin.addresses[0][1]
        log.info("probes, metrics and the live page: %s:%d", config.host, admin_port)
        log.info("listening on %s:%d", config.host, port)
        yield RunningGateway(parts, port, admin_port, public, dispatcher)
    finally:
        await public.cleanup()
        await admin.cleanup()
        await control.cleanup()


async def _listen(public: web.AppRunner, admin: web.AppRunner, control: web.AppRunner, config: GatewayOptions) -> None:
    try:
        for runner, port in ((public, config.port), (admin, config.admin_port)):
            await runner.setup()
            await web.TCPSite(runner, config.host, port, backlog=1024).start()
        if config.control_socket is not None:
            await control.setup()
            await web.UnixSite(control, str(config.control_socket)).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}, :{config.admin_port} or {config.control_socket}: {error}"
        ) from error


@asynccontextmanager
async def _following(config: GatewayOptions, state: GatewayState) -> AsyncIterator[None]:
    if config.routes_file is not None:
        state.set_table(read_file(config.routes_file))  # an unreadable file is a mistake on the command line
        async with _background(follow_file(config.routes_file, state.set_table)):
            yield
        return
    async with (
        KubeSession.in_cluster() as session,
        _background(follow_configmap(session, config.namespace, config.policy, state.set_table)),
    ):
        yield


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run an endless task beside the block. The task's failure ends the block, and so the process."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        yield
        task.cancel()


class PublicApp:
    def __init__(self, parts: GatewayParts, dispatcher: Dispatcher, context: ModelContext):
        self._parts = parts
        self._state = parts.state
        self._context = context
        self._dispatcher = dispatcher

    def build(self) -> web.Application:
        app = web.Application(client_max_size=self._parts.limits.request_bytes)
        for path in API_ROUTES:
            app.router.add_post(path, self._dispatcher.handle)
        app.router.add_get("/v1/models", self._for_clients(self._models))
        # Names of models have slashes; and without `s` an encoded line feed would be no part of a path.
        app.router.add_get("/v1/models/{model:(?s:.+)}", self._for_clients(self._model))
        app.router.add_get("/openapi.json", self._openapi)
        _Probes(self._state).add_to(app)
        app.on_response_prepare.append(self._close_while_draining)
        return app

    async def _close_while_draining(self, _request: web.Request, response: web.StreamResponse) -> None:
        """Close connections while draining, so that clients reconnect to another gateway."""
        if self._state.draining:
            close_after(response)

    def _for_clients(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                self._parts.auth.client(request)
            except RequestError as error:
                key_digest = error.key_digest if isinstance(error, UnknownKeyError) else ""
                log.warning(line("a look at the models is refused", peer=request.remote, key_digest=key_digest))
                return error_response(error)
            return await handler(request)

        return guarded

    async def _models(self, _request: web.Request) -> web.Response:
        served = [await self._card(self._state.table.model)] if self._state.table else []
        return _json({"object": "list", "data": served})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if self._state.table is None or name != self._state.table.model:
            return error_response(model_not_found(name))
        return _json(await self._card(name))

    async def _card(self, model: str) -> dict[str, Any]:
        return model_card(model, await self._context.tokens(model))

    async def _openapi(self, _request: web.Request) -> web.Response:
        return _json(openapi.gateway())


class AdminApp:
    """What those who operate the gateway read, without a key: probes, metrics and the live page."""

    def __init__(self, parts: GatewayParts):
        self._parts = parts
        self._state = parts.state
        parts.metrics.threshold_tokens.set_function(self._threshold_tokens)
        parts.metrics.in_flight.set_function(lambda: parts.state.in_flight)

    def build(self) -> web.Application:
        app = web.Application()
        _Probes(self._state).add_to(app)
        app.router.add_get("/metrics", self._show_metrics)
        Dashboard(self._state, self._parts.history).add_to(app)
        return app

    def _threshold_tokens(self) -> float:
        rule = self._state.rule()
        return rule.threshold_tokens if rule else float("nan")

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._parts.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


class _Probes:
    """Whether the gateway lives, and can serve: for the kubelet at one port, for proxies of clients at the other."""

    def __init__(self, state: GatewayState):
        self._state = state

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/health", self._readyz)  # vLLM's name, which clients and routers ask for

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self._state.draining:
            return web.Response(status=503, text="draining\n")
        if self._state.table is None:
            return web.Response(status=503, text="no routing table yet\n")
        return web.Response(text="ok\n")


def _answer_unserved(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """Answer what no route serves, also if it has no path, as `CONNECT` and `OPTIONS *`."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}"
        response = error_response(RequestError(message, status=405, code="method_not_allowed"), request.path)
        response.headers["Allow"] = allowed
        return response
    served = f"POST {', '.join(API_ROUTES)} and GET /v1/models"
    message = f"there is no {request.method} {request.path}; this gateway serves {served}"
    return error_response(RequestError(message, status=404, code="unknown_url"), request.path)


class Cors:
    """Lets pages of some origins call the API from a browser, without credentials: a key is a header of the page."""

    def __init__(self, origins: Set[str]):
        self._origins = origins

    def add_to(self, app: web.Application) -> None:
        app.middlewares.append(self._preflight)
        app.on_response_prepare.append(self._allow)

    def _allowed(self, request: web.Request) -> str:
        """Return the origin whose pages may read the answer; empty if none may."""
        if request.path not in API_ROUTES and not request.path.startswith("/v1/models"):
            return ""
        if "*" in self._origins:
            return "*"  # also without an origin: a cache may give the answer to a page
        origin = request.headers.get("Origin", "")
        return origin if origin in self._origins else ""

    @web.middleware
    async def _preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer the question that a browser asks before a call, which has no key."""
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not (asks and self._allowed(request)):
            return await handler(request)
        allowed = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }
        return web.Response(status=204, headers=allowed)

    async def _allow(self, request: web.Request, response: web.StreamResponse) -> None:
        if "*" not in self._origins:
            # Also without an origin: a cache must not give the answer to a page of another one.
            response.headers.add("Vary", "Origin")
        if origin := self._allowed(request):
            shown = ", ".join(name for name in response.headers if name.lower().startswith(SHOWN_HEADERS))
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = shown


class ControlApp:
    """The control socket; see prfaas.wire.control. It is in the pod's own volume, so its users are trusted."""

    def __init__(self, state: GatewayState):
        self._state = state

    def build(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024)
        app.router.add_get("/table", self._table)
        app.router.add_put("/threshold", self._threshold)
        app.router.add_get("/counters", self._counters)
        return app

    async def _table(self, _request: web.Request) -> web.Response:
        if self._state.table is None:
            return web.Response(status=503, text="no routing table yet\n")
        return _json(self._state.table)

    async def _threshold(self, request: web.Request) -> web.Response:
        try:
            update = msgspec.json.decode(await request.read(), type=ThresholdUpdate)
        except UNREADABLE as error:
            return web.Response(status=400, text=f"not a ThresholdUpdate: {error}\n")
        self._state.push(update)
        return web.Response(status=204)

    async def _counters(self, _request: web.Request) -> web.Response:
        return _json(self._state.counters)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
