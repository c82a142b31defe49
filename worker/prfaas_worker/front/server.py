"""The front's life and its routes: start the engine, serve, drain on SIGTERM, and never outlive the engine.

Exit codes: 0 after an orderly end, 1 when the engine cannot start or dies. A supervisor then starts the worker anew.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas.errors import CapacityError, ConfigError, RequestError
from prfaas.http_server import UNREADABLE_BODY, PublicRunner, error_body, model_card, serving_probes, unreadable_body
from prfaas.memory import container_limit_bytes
from prfaas.telemetry.tracing import Tracing, tracing_from_environment
from prfaas.util import MIB
from prfaas.wire import openapi
from prfaas.wire.engine import StartFailed
from prfaas.wire.headers import CODE_OVERLOADED
from prfaas_transfer.credentials import PeerCredentials
from prfaas_worker.front import control, generate, prefills
from prfaas_worker.front.auth import credentials_of, open_api_port, require_rights, unreachable
from prfaas_worker.front.engine_client import EngineClient, EngineError
from prfaas_worker.front.openai_bodies import MAX_NAME
from prfaas_worker.front.serving import STATE, FrontState, ServedModel
from prfaas_worker.options import Options
from prfaas_worker.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


CLOSE_SECONDS = 1.0  # For each of two phases: requests end by themselves, then they end after a cancel.
ENGINE_END_SECONDS = 5.0
GARBAGE_OBJECTS = 50_000  # So many more objects than before start a collection of reference cycles.


def run(options: Options) -> int:
    """Serve until a signal; return the exit code."""
    try:
        return uvloop.run(_run(options, credentials_of(options)))
    except ConfigError as error:
        sys.stderr.write(f"prfaas-worker: {error}\n")
        return 1


async def _run(options: Options, credentials: PeerCredentials | None) -> int:
    stop = _stop_on_signals()
    ours, theirs = socket.socketpair()
    process = await _start_engine(options, theirs)
    theirs.close()
    client = await EngineClient.connect(ours)
    # Reading ends with the engine: after its last message, so that no reason it gave is missed.
    engine = asyncio.create_task(client.run())
    try:
        state = FrontState(options, client, _tracing(options), credentials, container_limit_bytes())
        log.info("bodies of requests may take %d MiB together", state.bodies.all.most_bytes // MIB)
        return await _serve(state, engine, stop)
    finally:
        client.close()
        engine.cancel()
        if not client.ready.done() and process.returncode is None:
            process.kill()  # it loads, and would not see for long that its socket closed
        await _end(process)


def _tracing(options: Options) -> Tracing:
    attributes = {"instance": options.instance, "cluster": options.cluster, "pool": options.pool, "role": options.role}
    return tracing_from_environment("prfaas-worker", {f"prfaas.{name}": value for name, value in attributes.items()})


async def _start_engine(options: Options, sock: socket.socket) -> asyncio.subprocess.Process:
    arguments = ["-m", "prfaas_worker.engine", str(sock.fileno()), msgspec.json.encode(options).decode()]
    # In its own session: Ctrl-C is ours to handle, also while the engine only begins and would die of it.
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, pass_fds=[sock.fileno()], start_new_session=True
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for the engine, which ends when its socket closes; kill it if it does not."""
    try:
        await asyncio.wait_for(process.wait(), ENGINE_END_SECONDS)
    except TimeoutError:
        log.warning("the engine did not end within %s s and is killed", ENGINE_END_SECONDS)
        process.kill()
        await process.wait()


async def _serve(state: FrontState, engine: asyncio.Task[None], stop: asyncio.Future[None]) -> int:
    client, options = state.engine, state.options
    async with serving_ports(state):
        await asyncio.wait({client.ready, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        if client.ready.done():
            _load(state, options)
            await asyncio.wait({engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not engine.done() and client.ready.done():
            await _drain(state, engine)
    if stop.done() and not client.ready.done():
        return 0  # even if the engine is gone: Ctrl-C hits it too before it has its own session
    if engine.done():
        log.error("the engine process ended: this worker ends too, for a restart")
        return 1
    return 0


@asynccontextmanager
async def serving_ports(state: FrontState) -> AsyncGenerator[None]:
    """Serve the API while the block runs, and probes and metrics at a port of their own: callers of the API take no
    connection from them. Raises ConfigError if a port is not available."""
    runner = PublicRunner(build_app(state), shutdown_timeout=CLOSE_SECONDS, bounds=state.connections)
    await runner.setup()
    try:
        await open_api_port(runner, state.options, state.credentials)
        probed = web.Application(middlewares=[_departures, _errors])
        probed[STATE] = state
        probed.add_routes(_probes())
        async with serving_probes(probed, state.options.host, state.options.admin_port):
            yield
    finally:
        await runner.cleanup()


def _stop_on_signals() -> asyncio.Future[None]:
    """Return a future that SIGTERM or SIGINT completes; a second SIGINT ends the process in the usual way."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: draining", number.name)
        loop.remove_signal_handler(signal.SIGINT)
        if not stop.done():
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _load(state: FrontState, options: Options) -> None:
    answer = state.engine.ready.result()
    if isinstance(answer, StartFailed):
        raise ConfigError(answer.message)
    served = ServedModel(
        model_name=options.model_name,
        fingerprint=answer.fingerprint,
        vocab_size=answer.vocab_size,
        max_context=answer.max_context,
        max_choices=options.max_running,
    )
    state.loaded(served, load_tokenizer(Path(answer.directory)))
    # Present objects stay, and need no search; by default one long body would cause a thousand searches.
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    scheme = "https" if options.tls_dir else "http"
    log.info("serving %s on %s://%s:%d", options.model_name, scheme, options.host, options.api_port)


async def _drain(state: FrontState, engine: asyncio.Task[None]) -> None:
    """Refuse new work and let requests finish, for as long as the options allow."""
    state.draining = True
    idle = asyncio.create_task(state.idle())
    seconds = state.options.drain_seconds
    done, _ = await asyncio.wait({idle, engine}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        log.warning("draining took longer than %d s: %d requests are cancelled", seconds, state.engine.open_calls)
        state.engine.fail_calls(503, CODE_OVERLOADED, "this instance shut down before the answer was whole; ask again")
    idle.cancel()


def build_app(state: FrontState) -> web.Application:
    """Return the application; with credentials, its port must use TLS."""
    app = web.Application(middlewares=[_departures, require_rights(state.credentials), _errors])
    app[STATE] = state
    app.add_routes(
        [
            web.post("/v1/completions", generate.completions),
            web.post("/v1/chat/completions", generate.chat_completions),
            web.get("/v1/models", _models),
            web.post("/tokenize", generate.tokenize),
            web.post("/detokenize", generate.detokenize),
            web.post("/v1/prefills", prefills.create),
            web.get("/v1/profile", control.read_profile),
            web.get("/v1/role", control.read_role),
            web.put("/v1/role", control.set_role),
            web.get("/v1/egress", control.read_egress),
            web.put("/v1/egress", control.set_egress),
            web.post("/v1/cache/reset", control.reset_cache),
            web.get("/openapi.json", _openapi),
            # Here, too: for load generators, `prfaas profile measure`, and the kubelet of a pod from an older operator.
            *_probes(),
            web.get("/health", _readyz),  # vLLM's name
        ]
    )
    app.cleanup_ctx.append(_resources)
    return app


@web.middleware
async def _departures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ignore disconnected clients: aiohttp would log a handler's error."""
    try:
        return await handler(request)
    except ConnectionError:
        return web.Response(status=499)  # no client reads it


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into answers; a bug becomes a 500 without details, and a log entry with them."""
    try:
        return await handler(request)
    except (RequestError, EngineError, *UNREADABLE_BODY) as caught:
        error = caught if isinstance(caught, (RequestError, EngineError)) else unreadable_body(caught)
        return _error(str(error), status=error.status, code=error.code, param=error.param)
    except CapacityError as error:
        return _error(str(error), status=503, code=CODE_OVERLOADED)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        text = f"{request.method} {request.path[:MAX_NAME]}: {error.reason}"
        answer = _error(text, status=error.status, code="invalid_request")
        if allowed := error.headers.get("Allow"):
            answer.headers["Allow"] = allowed
        return answer
    except RecursionError:  # nothing of ours nests deeply, only what callers send does
        return _error("the body is nested too deeply", status=400, code="invalid_json")
    except ConnectionError:
        raise  # the client left: nothing can be answered
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return _error("an internal error; the worker's log has the details", status=500, code="internal_error")


def _error(message: str, *, status: int, code: str, param: str | None = None) -> web.Response:
    body = error_body(message, status=status, code=code, param=param)
    return web.json_response(body=msgspec.json.encode(body), status=status)


async def _models(request: web.Request) -> web.Response:
    served = request.app[STATE].served
    return web.json_response({"object": "list", "data": [model_card(served.model_name, served.max_context)]})


def _probes() -> list[web.RouteDef]:
    return [web.get("/healthz", _healthz), web.get("/readyz", _readyz), web.get("/metrics", _metrics)]


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _openapi(_request: web.Request) -> web.Response:
    return web.json_response(openapi.prefill())


async def _readyz(request: web.Request) -> web.Response:
    state = request.app[STATE]
    if not state.ready:
        return web.Response(status=503, text="draining\n" if state.draining else "loading the model\n")
    if reason := unreachable(state.credentials):
        return web.Response(status=503, text=f"{reason}\n")
    return web.Response(text="ok\n")


async def _metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    stats = await state.engine.stats() if state.engine.ready.done() else None
    return web.Response(body=state.metrics.render(stats), headers={"content-type": CONTENT_TYPE_LATEST})


async def _resources(app: web.Application) -> AsyncIterator[None]:
    """Close what the application holds at its end."""
    state = app[STATE]
    yield
    state.close()
    await asyncio.to_thread(state.tracing.close)
