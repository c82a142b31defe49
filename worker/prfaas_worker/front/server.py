"""The front's life: start the engine, serve, drain on SIGTERM, and never outlive the engine.

Exit codes: 0 after an orderly end, 1 when the engine cannot start or dies, so that a supervisor starts the worker anew.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from prfaas.errors import ConfigError
from prfaas.telemetry.tracing import Tracing, tracing_from_environment
from prfaas.wire.engine import StartFailed
from prfaas.wire.headers import CODE_OVERLOADED
from prfaas_worker.credentials import Credentials
from prfaas_worker.front.app import build_app
from prfaas_worker.front.checks import Served
from prfaas_worker.front.engine_client import EngineClient
from prfaas_worker.front.peers import credentials_of
from prfaas_worker.front.ports import open_api_port
from prfaas_worker.front.serving import Serving
from prfaas_worker.options import Options
from prfaas_worker.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""For each of two things: that requests end by themselves, and that they end once they are cancelled."""
ENGINE_END_SECONDS = 5.0
GARBAGE_OBJECTS = 50_000
"""So many more objects than before are a reason to look for garbage that no count finds."""


def run(options: Options) -> int:
    """Serve until told to stop; returns the exit code."""
    try:
        credentials = credentials_of(options)
    except ConfigError as error:
        sys.stderr.write(f"prfaas-worker: {error}\n")
        return 1
    return uvloop.run(_run(options, credentials))


async def _run(options: Options, credentials: Credentials | None) -> int:
    stop = _stop_on_signals()
    ours, theirs = socket.socketpair()
    process = await _start_engine(options, theirs)
    theirs.close()
    client = await EngineClient.connect(ours)
    # Reading ends with the engine: after its last message, so that no reason it gave is missed.
    engine = asyncio.create_task(client.run())
    try:
        return await _serve(Serving(options, client, _tracing(options)), credentials, engine, stop)
    except ConfigError as error:
        sys.stderr.write(f"prfaas-worker: {error}\n")
        return 1
    finally:
        client.close()
        engine.cancel()
        if not client.ready.done() and process.returncode is None:
            process.kill()  # it loads, and would not see for long that its socket closed
        await _end(process)


def _tracing(options: Options) -> Tracing:
    place = {"instance": options.instance, "cluster": options.cluster, "pool": options.pool, "role": options.role}
    return tracing_from_environment("prfaas-worker", {f"prfaas.{name}": value for name, value in place.items()})


async def _start_engine(options: Options, sock: socket.socket) -> asyncio.subprocess.Process:
    arguments = ["-m", "prfaas_worker.engine", str(sock.fileno()), msgspec.json.encode(options).decode()]
    # In a session of its own: Ctrl-C is ours to handle, also while the engine only begins and would die of it.
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, pass_fds=[sock.fileno()], start_new_session=True
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """The engine ends itself when its socket closes; it is killed only if it does not."""
    try:
        await asyncio.wait_for(process.wait(), ENGINE_END_SECONDS)
    except TimeoutError:
        log.warning("the engine did not end within %s s and is killed", ENGINE_END_SECONDS)
        process.kill()
        await process.wait()


async def _serve(
    serving: Serving, credentials: Credentials | None, engine: asyncio.Task[None], stop: asyncio.Future[None]
) -> int:
    client, options = serving.engine, serving.options
    runner = web.AppRunner(
        build_app(serving, credentials), handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_SECONDS
    )
    await runner.setup()
    try:
        await open_api_port(runner, options, credentials)
        await asyncio.wait({client.ready, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        if client.ready.done():
            _load(serving, options)
            await asyncio.wait({engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not engine.done() and client.ready.done():
            await _drain(serving, engine)
    finally:
        await runner.cleanup()
    if stop.done() and not client.ready.done():
        return 0  # even if the engine is gone: Ctrl-C hits it too before it has a session of its own
    if engine.done():
        log.error("the engine process ended: this worker ends too, to be started anew")
        return 1
    return 0


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


def _load(serving: Serving, options: Options) -> None:
    """Open for requests with what the engine has loaded."""
    answer = serving.engine.ready.result()
    if isinstance(answer, StartFailed):
        raise ConfigError(answer.message)
    served = Served(
        model_name=options.model_name,
        vocab_size=answer.vocab_size,
        max_context=answer.max_context,
        max_choices=options.max_running,
    )
    serving.loaded(served, load_tokenizer(Path(answer.directory)))
    # What stands now stays, and need not be looked through again; by default a long body would be, a thousand times.
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    scheme = "https" if options.tls_dir else "http"
    log.info("serving %s on %s://%s:%d", options.model_name, scheme, options.host, options.api_port)


async def _drain(serving: Serving, engine: asyncio.Task[None]) -> None:
    """Take no new work and let what runs finish, for as long as the options allow."""
    serving.draining = True
    idle = asyncio.create_task(serving.idle())
    seconds = serving.options.drain_seconds
    done, _ = await asyncio.wait({idle, engine}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        log.warning("draining took longer than %d s: %d requests are cut off", seconds, serving.engine.open_calls)
        serving.engine.fail_calls(
            503, CODE_OVERLOADED, "this instance shut down before the answer was whole; ask again"
        )
    idle.cancel()
