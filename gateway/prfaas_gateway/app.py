"""The two HTTP applications of the gateway process: the public one, and the control socket of its scheduler sidecar."""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prfaas.errors import RequestError
from prfaas.wire import openapi
from prfaas.wire.control import ThresholdUpdate
from prfaas_gateway.dashboard.pages import Dashboard
from prfaas_gateway.dispatch import Dispatcher
from prfaas_gateway.door import Door
from prfaas_gateway.limits import Limits
from prfaas_gateway.metrics import Metrics
from prfaas_gateway.openai import UNREADABLE, error_response, model_card
from prfaas_gateway.state import GatewayState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RELAYED = ("/v1/chat/completions", "/v1/completions")


class PublicApp:
    """The OpenAI endpoints, health and metrics."""

    def __init__(self, state: GatewayState, dispatcher: Dispatcher, metrics: Metrics, door: Door, dashboard: Dashboard):
        self._state = state
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._door = door
        self._dashboard = dashboard
        metrics.show(self._threshold_tokens, lambda: state.in_flight)

    def build(self, limits: Limits) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=limits.request_bytes)
        for path in RELAYED:
            app.router.add_post(path, self._dispatcher.handle)
        app.router.add_get("/v1/models", self._for_clients(self._models))
        app.router.add_get("/v1/models/{model:(?s:.+)}", self._for_clients(self._model))
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show_metrics)
        self._dashboard.add_to(app, self._for_clients)
        app.router.add_route("*", "/{path:(?s:.*)}", self._unknown)
        app.on_response_prepare.append(self._say_goodbye)
        return app

    async def _say_goodbye(self, _request: web.Request, response: web.StreamResponse) -> None:
        """While draining, make clients connect anew, to another gateway: a kept connection would die under them."""
        if self._state.draining:
            response.headers["Connection"] = "close"
            response.force_close()

    def _threshold_tokens(self) -> float:
        rule = self._state.rule()
        return rule.threshold_tokens if rule else float("nan")

    def _for_clients(self, handler: Handler) -> Handler:
        """Return a handler that answers those alone who may come in."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                self._door.known(request)
            except RequestError as error:
                return error_response(error)
            return await handler(request)

        return guarded

    async def _models(self, _request: web.Request) -> web.Response:
        served = [model_card(self._state.table.model)] if self._state.table else []
        return _json({"object": "list", "data": served})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if self._state.table is None or name != self._state.table.model:
            message = f"the model {name!r} is not served here"
            return error_response(RequestError(message, status=404, code="model_not_found", param="model"))
        return _json(model_card(name))

    async def _openapi(self, _request: web.Request) -> web.Response:
        return _json(openapi.gateway())

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self._state.draining:
            return web.Response(status=503, text="draining\n")
        if self._state.table is None:
            return web.Response(status=503, text="no routing table yet\n")
        return web.Response(text="ok\n")

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _unknown(self, request: web.Request) -> web.Response:
        methods = {one for each in request.app.router.resources() for one in (await each.resolve(request))[1]} - {"*"}
        if methods:
            allowed = ", ".join(sorted(methods))
            error = RequestError(
                f"{request.path} takes {allowed}, not {request.method}", status=405, code="method_not_allowed"
            )
            response = error_response(error)
            response.headers["Allow"] = allowed
            return response
        served = f"POST {' and '.join(RELAYED)}, GET /v1/models"
        message = f"there is no {request.method} {request.path}; this gateway serves {served}"
        return error_response(RequestError(message, status=404, code="unknown_url"))


class ControlApp:
    """The control socket; see prfaas.wire.control. Whoever can open it is trusted: it lies in the pod's own volume."""

    def __init__(self, state: GatewayState):
        self._state = state

    def build(self) -> web.Application:
        """Return the application."""
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
