"""The worker's HTTP application: its routes, and every error as an OpenAI-style body."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas.errors import CapacityError, RequestError
from prfaas.wire import openapi
from prfaas.wire.headers import CODE_OVERLOADED, TRANSFER_ID
from prfaas_worker.credentials import Credentials
from prfaas_worker.front import control, event_stream, generation, prefills, profile, tokenization
from prfaas_worker.front.answers import error_body
from prfaas_worker.front.engine_client import EngineError
from prfaas_worker.front.peers import guard
from prfaas_worker.front.serving import SERVING, Serving

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(serving: Serving, credentials: Credentials | None = None) -> web.Application:
    """Return the application that serves `serving`; with `credentials`, its port must speak TLS."""
    app = web.Application(middlewares=[_departures, guard(credentials), _errors])
    app[SERVING] = serving
    serving.metrics.credentials = credentials
    app.add_routes(
        [
            web.post("/v1/completions", generation.completions),
            web.post("/v1/chat/completions", generation.chat_completions),
            web.get("/v1/models", _models),
            web.post("/tokenize", tokenization.tokenize),
            web.post("/detokenize", tokenization.detokenize),
            web.post("/v1/prefills", prefills.create),
            web.post("/v1/prefixes", prefills.create_prefix),
            web.get("/v1/prefills/{id}", prefills.read),
            web.delete("/v1/prefills/{id}", prefills.delete),
            web.get("/v1/kv-events", event_stream.stream),
            web.get("/v1/profile", profile.read),
            web.get("/v1/role", control.read_role),
            web.put("/v1/role", control.set_role),
            web.get("/v1/egress", control.read_egress),
            web.put("/v1/egress", control.set_egress),
            web.post("/v1/cache/reset", control.reset_cache),
            web.post("/reset_prefix_cache", control.reset_prefix_cache),
            web.get("/openapi.json", _openapi),
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz),
            web.get("/metrics", _metrics),
        ]
    )
    app.cleanup_ctx.append(_event_sockets)
    app.on_shutdown.append(_end_streams)
    app.on_cleanup.append(_end_reading)
    app.on_cleanup.append(_end_tracing)
    return app


@web.middleware
async def _departures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let clients leave in silence: aiohttp would log the error of writing to one that is gone as a handler's."""
    try:
        return await handler(request)
    except ConnectionError:
        return web.Response(status=499)  # nobody reads it


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into answers; a bug becomes a 500 without details, and a log entry with them."""
    try:
        return await handler(request)
    except (RequestError, EngineError) as error:
        answer = _error(str(error), status=error.status, code=error.code, param=error.param)
        if isinstance(error, EngineError) and error.transfer_id:
            answer.headers[TRANSFER_ID] = error.transfer_id
        return answer
    except CapacityError as error:
        return _error(str(error), status=503, code=CODE_OVERLOADED)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        text = f"{request.method} {request.path}: {error.reason}"
        answer = _error(text, status=error.status, code="invalid_request")
        if allowed := error.headers.get("Allow"):
            answer.headers["Allow"] = allowed
        return answer
    except RecursionError:  # nothing of ours nests deeply, only what callers send does
        return _error("the body is nested too deeply", status=400, code="invalid_json")
    except ConnectionError:
        raise  # the client left: there is nobody to answer
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return _error("an error of this worker's own; its log has the details", status=500, code="internal_error")


def _error(message: str, *, status: int, code: str, param: str | None = None) -> web.Response:
    body = error_body(message, status=status, code=code, param=param)
    return web.json_response(body=msgspec.json.encode(body), status=status)


async def _models(request: web.Request) -> web.Response:
    served = request.app[SERVING].served
    model = {"id": served.model_name, "object": "model", "created": 0, "owned_by": "prfaas"}
    return web.json_response({"object": "list", "data": [model | {"max_model_len": served.max_context}]})


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _openapi(_request: web.Request) -> web.Response:
    return web.json_response(openapi.prefill())


async def _readyz(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    if serving.ready:
        return web.Response(text="ok\n")
    return web.Response(status=503, text="draining\n" if serving.draining else "loading the model\n")


async def _metrics(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    stats = await serving.engine.stats() if serving.engine.ready.done() else None
    return web.Response(body=serving.metrics.render(stats), headers={"content-type": CONTENT_TYPE_LATEST})


async def _event_sockets(app: web.Application) -> AsyncIterator[None]:
    """Keep the sockets of cache events open while the application runs, if they are wanted."""
    serving = app[SERVING]
    options = serving.options
    if not options.kv_events_port:
        yield
        return
    from prfaas_worker.front.event_sockets import EventSockets

    sockets = EventSockets(serving.events, options.host, options.kv_events_port)
    yield
    await sockets.close()


async def _end_streams(app: web.Application) -> None:
    app[SERVING].events.close()


async def _end_tracing(app: web.Application) -> None:
    await asyncio.to_thread(app[SERVING].tracing.close)


async def _end_reading(app: web.Application) -> None:
    app[SERVING].close()
